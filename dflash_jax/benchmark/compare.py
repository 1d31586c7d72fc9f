"""`benchmark compare A.json B.json`: two runs beside each other."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from dflash_jax.benchmark import record
from dflash_jax.benchmark.options import Parser
from dflash_jax.benchmark.report import make_console
from dflash_jax.errors import UserError

Json = Mapping[str, Any]
FIGURES = {
    "output_throughput": "tok/s", "speedup_over_plain": "speed-up", "accept_length": "tokens a round",
    "median_ttft_ms": "TTFT p50 ms", "mean_tpot_ms": "TPOT mean ms", "p99_tpot_ms": "TPOT p99 ms",
    "round_ms": "round ms", "op_us": "op µs", "share_of_ceiling": "share of ceiling",
}  # fmt: skip
MUST_MATCH = ("target", "synthetic_acceptance")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    p = Parser(prog="python -m dflash_jax.benchmark compare", description=__doc__)
    p.add_argument("before", metavar="A.json")
    p.add_argument("after", metavar="B.json")
    return p.parse_args(list(argv))


def compare(argv: Sequence[str]) -> int:
    args = parse(argv)
    before, after = record.read(args.before), record.read(args.after)
    rows = list(pairs(before, after))
    if not rows:
        raise UserError(f"{args.before} and {args.after} have no contender and level in common")
    console = make_console()
    console.print(make_table(rows))
    for line in unlike(before, after):
        console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
    return 0


def pairs(before: Json, after: Json) -> Iterator[tuple[str, str, Json, Json]]:
    """(contender, level, its figures before, and after) of what is in both."""
    earlier = dict(by_level(before))
    for key, level in by_level(after):
        if key in earlier:
            yield *key, earlier[key], level


def by_level(document: Json) -> Iterator[tuple[tuple[str, str], Json]]:
    for result in document["results"]:
        for level in result.get("levels", ()):
            yield (result["name"], level["level"]), level


def make_table(rows: Sequence[tuple[str, str, Json, Json]]) -> Table:
    table = Table(title="A → B (ratio)", title_justify="left", pad_edge=False)
    table.add_column("contender", overflow="fold")
    table.add_column("at once", justify="right")
    there = [key for key in FIGURES if any(key in figures for row in rows for figures in row[2:])]
    for key in there:
        table.add_column(FIGURES[key], justify="right", no_wrap=True)
    for name, level, a, b in rows:
        table.add_row(name, level, *(change(a.get(key), b.get(key)) for key in there))
    return table


def change(a: float | None, b: float | None) -> str:
    if a is None or b is None:
        return "–"
    ratio = f"\n(×{b / a:.2f})" if a else ""
    return f"{a:.4g} → {b:.4g}{ratio}"


def unlike(before: Json, after: Json) -> Iterator[str]:
    """In what else the runs differ, so that nobody takes it for the change of interest."""
    for name in MUST_MATCH:
        if before.get(name) != after.get(name):
            yield f"{name} differs: {before.get(name)} and {after.get(name)}"
    for name in ("sha256", "prompts", "repeats", "sampling"):
        a, b = (one.get("workload", {}).get(name) for one in (before, after))
        if a != b:
            yield f"the workload's {name} differs: {a} and {b}"
    for name in ("device", "cpu", "usable_cores", "python", "packages", "environment"):
        a, b = (one["machine"].get(name) for one in (before, after))
        if a != b:
            yield f"{name} differs: {a} and {b}"
    if before.get("revision") != after.get("revision"):
        yield f"revisions: {before.get('revision')} and {after.get('revision')}"
