"""`benchmark tune`: how Triton's attention is best cut on the GPU at hand; it wrote `triton_kernels/tuned.json`.

    python -m dflash_jax.benchmark tune --shape qwen3-8b --shape smollm2-135m --write
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from rich.table import Table
from tqdm import tqdm

from dflash_jax.benchmark import record
from dflash_jax.benchmark.kernels import named
from dflash_jax.benchmark.op_cases import OpCase, op_cases
from dflash_jax.benchmark.options import Parser
from dflash_jax.benchmark.report import make_console
from dflash_jax.benchmark.split import median_s
from dflash_jax.engine.build import choose_dtype
from dflash_jax.errors import UserError
from dflash_jax.llm import use_platform
from dflash_jax.ops import Kernels, select, tile_rules
from dflash_jax.ops.shapes import PREFILL, Shape

DEFAULT = ("qwen3-8b", "smollm2-135m")
DESCRIPTION = "How Triton's attention is best cut on this GPU, at named shapes."
TUNED = {"verify": "verify_attention", "draft": "draft_attention"}
WORTH = 0.97  # of the rule of thumb's time: less is noise
AHEAD = 64  # tokens
PASSES = 3
THREADS = 8  # Triton compiles outside Python for the most part


def parse(argv: Sequence[str]) -> argparse.Namespace:
    p = Parser(prog="python -m dflash_jax.benchmark tune", description=DESCRIPTION, allow_abbrev=False)
    p.add_argument("--shape", action="append", metavar="S", help="a shape's name, or a model's for all its rounds;"
                   f" may be repeated (default: {' and '.join(DEFAULT)})")  # fmt: skip
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    p.add_argument("--write", action="store_true", help="keep what is better in triton_kernels/tuned.json")
    p.add_argument("--output", metavar="FILE", help="write all times to this JSON file")
    return p.parse_args(list(argv))


def tune(argv: Sequence[str]) -> int:
    args = parse(argv)
    shapes = [shape for name in args.shape or DEFAULT for shape in named(name) if shape.role != PREFILL]
    if not shapes:
        raise UserError("tune is for verify and draft shapes: prefill has the tiles that long queries ask for")
    use_platform(None)
    kernels, dtype = select("triton", jax.default_backend()), choose_dtype(args.dtype, jax.default_backend())
    tiles = tile_rules("triton")
    chip, console = jax.devices()[0].compute_capability, make_console()
    console.print(f"{jax.devices()[0].device_kind}, compute capability {chip}")
    results = []
    for shape in tqdm(shapes, desc="tuning", unit="shape", disable=None):
        results.append(measure(shape, kernels, dtype, tiles))
        console.print(make_table(results[-1]))
        if args.write:
            keep(results[-1:], chip, tiles.TUNED)
    if args.output:
        record.write({**record.head(["tune", *argv]), "chip": chip, "results": results}, Path(args.output))
    return 0


def measure(shape: Shape, kernels: Kernels, dtype: Any, tiles: Any) -> dict[str, Any]:
    """Microseconds of the op of a round's layer under the rule of thumb and each of its neighbours."""
    [case] = [one for one in op_cases(shape, dtype) if one.op == TUNED[shape.role]]
    model = shape.model
    width = shape.pages_per_slot * shape.page_size
    load = tiles.Load.of(
        shape.requests, shape.rows, model.kv_heads, model.group, model.head_dim, width, dtype == "float32"
    )
    cuts = list(neighbours(tiles.rule_of_thumb(load), load))
    with ThreadPoolExecutor(THREADS) as pool:
        launchers = list(pool.map(lambda cut: compiled(case, kernels, cut, tiles), cuts))
    found = fastest([launch for launch in launchers if callable(launch)])
    tried = [
        {"cut": cut._asdict(), "us": next(found) / case.times * 1e6 if callable(launch) else None,
         "error": None if callable(launch) else launch}
        for cut, launch in zip(cuts, launchers, strict=True)
    ]  # fmt: skip
    return {"name": shape.name, "load": load._asdict(), "bytes": case.moved_bytes, "tried": tried}


def fastest(launchers: Sequence[Callable[[], Any]]) -> Iterator[float]:
    """Seconds of each in the pass over all of them in which it was fastest.

    In passes, since a chip that was idle begins slowly: one kernel was seen to take 75 µs as the first and 49 later.
    """
    return map(min, zip(*([median_s(launch) for launch in launchers] for _ in range(PASSES)), strict=True))


def neighbours(cut: Any, load: Any) -> Iterator[Any]:
    """The rule of thumb, then others: how deep and in what steps pages are read, by how many programs, of what size.

    Page ids are read ahead of pages: stages 3 and 4 hold two steps of pages, 5 and 6 three.
    """
    yield cut
    steps = [(64, 3), (64, 5), (32, 3), (32, 5)] if not load.float32 else [(32, 2), (32, 3), (64, 2)]
    for programs, ahead, step in itertools.product((cut.programs, 2 * cut.programs), (0, AHEAD), steps):
        other = cut._replace(tokens=step[0], stages=step[1], programs=programs, ahead=ahead)
        if other != cut:
            yield other
    yield cut._replace(programs=cut.programs // 2)
    yield cut._replace(stages=steps[1][1], programs=cut.programs // 2, ahead=AHEAD)
    small = cut._replace(tokens=steps[-1][0], stages=steps[-1][1])  # of which three may share a multiprocessor
    for programs in (cut.programs // 2, 3 * cut.programs // 2):
        yield small._replace(programs=programs, ahead=AHEAD)
    yield cut._replace(tokens=2 * cut.tokens, warps=8)
    yield cut._replace(warps=8, ahead=AHEAD)
    yield small._replace(ahead=4 * AHEAD)
    for lanes in sorted({16, 32, 64, 128} - {cut.lanes}):
        if lanes <= max(16, 4 * load.lanes):
            yield cut._replace(lanes=lanes, warps=8 if lanes == 128 else 4)


def compiled(case: OpCase, kernels: Kernels, cut: Any, tiles: Any) -> Callable[[], Any] | str:
    """A launcher that has run once, or why this chip cannot do it so."""
    with tiles.forced(cut):
        launch = case.launcher(kernels, case.times)
        try:
            jax.block_until_ready(launch())
        except Exception as error:  # too much shared memory, too many registers: whatever the compiler says
            return f"{type(error).__name__}: {str(error)[:200]}"
    return launch


def best_of(result: dict[str, Any]) -> dict[str, Any]:
    return min((one for one in result["tried"] if one["us"] is not None), key=lambda one: one["us"])


def keep(results: Sequence[dict[str, Any]], chip: str, path: Path) -> None:
    """The table with these results in it: a load's best cut where it is worth it, no row where it is not."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    for result in results:
        rows = [row for row in rows if (row["chip"], row["load"]) != (chip, result["load"])]
        best, rule = best_of(result), result["tried"][0]
        if rule["us"] is None or best["us"] < WORTH * rule["us"]:
            rows.append({"chip": chip, "load": result["load"], "cut": best["cut"], "shape": result["name"],
                         "us": round(best["us"], 2), "rule_us": rule["us"] and round(rule["us"], 2)})  # fmt: skip
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


def make_table(result: dict[str, Any]) -> Table:
    table = Table(title=result["name"], title_justify="left", pad_edge=False)
    for heading in ("lanes", "tokens", "warps", "stages", "programs", "ahead", "µs", "GB/s"):
        table.add_column(heading, justify="right")
    rule, *others = result["tried"]
    for one in (rule, *sorted(others, key=lambda one: one["us"] or 1e9)[:4]):
        us = one["us"]
        found = (one["error"], "") if us is None else (f"{us:.1f}", f"{result['bytes'] / us / 1e3:,.0f}")
        table.add_row(*map(str, one["cut"].values()), *found)
    return table
