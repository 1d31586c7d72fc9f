"""What a reader sees: the table on stdout, and where the files are."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_jax.benchmark import record

log = logging.getLogger("dflash_jax")
NARROWEST = 110  # columns, where stdout is no terminal
NOTHING = "–"
Json = Mapping[str, Any]
Columns = dict[str, Callable[[Json, Json], str]]
"""Heading → what stands in a cell, of a result and one of its levels."""


def publish(document: dict[str, Any], folder: Path, with_charts: bool) -> None:
    """Write the JSON file, then the charts, and print the table."""
    record.write(document, folder / "results.json")
    console = make_console()
    print_results(console, document)
    written = [folder / "results.json", *(charts(document, folder) if with_charts else ())]
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True, highlight=False)


def charts(document: Json, folder: Path) -> list[Path]:
    """None without matplotlib, which is said."""
    try:
        from dflash_jax.benchmark.charts import draw_all
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        log.warning("no charts, because matplotlib is missing: pip install 'dflash-jax[benchmark]'")
        return []
    return draw_all(document, folder)


def make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else NARROWEST)


def print_results(console: Console, document: Json) -> None:
    console.print(title(document), style="bold", markup=False, highlight=False, soft_wrap=True)
    for columns in (THROUGHPUT, LATENCIES):
        console.print(make_table(document, columns))
    for line in footnotes(document):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def make_table(document: Json, columns: Columns) -> Table:
    """A row for each contender and level."""
    table = Table(pad_edge=False)
    table.add_column("contender", overflow="fold")
    table.add_column("at\nonce", justify="right")
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in document["results"]:
        for level in result["levels"]:
            table.add_row(result["name"], level["level"], *(cell(result, level) for cell in columns.values()))
        table.add_section()
    return table


def _ceiling(level: Json, name: str) -> str:
    return _number((level["ceiling"] or {}).get(name), 1)


def _memory(result: Json) -> str:
    found = result["facts"].get("peak_memory_bytes")
    return _number(found and found / 1e9, 2)


def _equal(level: Json) -> str:
    exact = level["exact_match"]
    return _percent(exact["rate"]) + (" (text)" if exact["of"] == "text" else "") if exact else NOTHING


THROUGHPUT: Columns = {
    "tok/s": lambda result, level: _number(level["output_throughput"], 1),
    "ceiling": lambda result, level: _ceiling(level, "output_throughput"),
    "of it": lambda result, level: _percent(level["share_of_ceiling"]),
    "speed-up\nover plain": lambda result, level: _number(level["speedup_over_plain"], 2),
    "tokens\na round": lambda result, level: _number(level["accept_length"], 2),
    "peak\nGB": lambda result, level: _memory(result),
    "equal to\nplain": lambda result, level: _equal(level),
}
LATENCIES: Columns = {
    "TTFT ms\np50": lambda result, level: _number(level["median_ttft_ms"], 1),
    "\np99": lambda result, level: _number(level["p99_ttft_ms"], 1),
    "\nceiling": lambda result, level: _ceiling(level, "ttft_ms"),
    "TPOT ms\nmean": lambda result, level: _number(level["mean_tpot_ms"], 1),
    "\np50": lambda result, level: _number(level["median_tpot_ms"], 1),
    " \np99": lambda result, level: _number(level["p99_tpot_ms"], 1),
    " \nceiling": lambda result, level: _ceiling(level, "tpot_ms"),
    "ITL ms\np50": lambda result, level: _number(level["median_itl_ms"], 1),
    "  \np99": lambda result, level: _number(level["p99_itl_ms"], 1),
}


def title(document: Json) -> str:
    parts = [document["target"], document["workload"]["name"], f"{document['workload']['prompts']} prompts"]
    if document.get("synthetic_acceptance") is not None:
        parts.insert(0, f"SYNTHETIC: random weights, acceptance forced to {document['synthetic_acceptance']:g}")
    machine = document["machine"]
    return " · ".join([*parts, machine.get("device") or machine["cpu"]])


def footnotes(document: Json) -> list[str]:
    """Errors, what was left out, and what the ceiling is made of."""
    lines = []
    for result in document["results"]:
        if result["error"]:
            lines.append(f"FAILED {result['name']}: {result['error']}")
        lines += [f"{result['name']}: {note}" for note in result["notes"]]
        lines += [_gaps(result["name"], level) for level in result["levels"] if _differences(level)]
    if rates := document.get("rates"):
        lines.append(
            f"ceiling: bytes of weights and committed keys and values at {rates['bytes_per_s'] / 1e9:.4g} GB/s (copy),"
            f" or {rates['dtype']} matrix products at {rates['flops_per_s'] / 1e12:.3g} TFLOP/s, whichever is longer;"
            " both measured in this run; decoding alone, with each contender's own tokens a round"
        )
    return lines


def _differences(level: Json) -> list[Json]:
    return level["exact_match"]["differences"] if level["exact_match"] else []


def _gaps(name: str, level: Json) -> str:
    found = _differences(level)
    gaps = [one["logit_gap"] for one in found if one["logit_gap"] is not None]
    told = f"; logit gap there at most {max(map(abs, gaps)):.3g}" if gaps else ""
    return f"{name} at {level['level']}: {len(found)} answers leave plain decoding's, first at {found[0]['key']}{told}"


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value * 100:.0f} %" if value in (0, 1) else f"{value * 100:.1f} %"
