"""`benchmark kernels`: every op of a round at named shapes, beside its ceiling and plain XLA.

    python -m dflash_jax.benchmark kernels --shape smollm2-135m
    python -m dflash_jax.benchmark kernels --shape "qwen3-8b verify 8x16 over 2048" --dtype bfloat16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from dflash_jax.benchmark import record
from dflash_jax.benchmark.ceiling import Rates, better, measure_rates
from dflash_jax.benchmark.op_cases import OpCase, op_cases
from dflash_jax.benchmark.options import Parser, split_names
from dflash_jax.benchmark.report import make_console
from dflash_jax.benchmark.split import median_s
from dflash_jax.engine.build import choose_dtype
from dflash_jax.errors import UserError
from dflash_jax.llm import use_platform
from dflash_jax.ops import Kernels, select
from dflash_jax.ops.dispatch import backends
from dflash_jax.ops.shapes import REAL, Shape, find

DEFAULT = "smollm2-135m"
DESCRIPTION = "Every op of a round at named shapes, beside its ceiling and plain XLA."


def parse(argv: Sequence[str]) -> argparse.Namespace:
    p = Parser(prog="python -m dflash_jax.benchmark kernels", description=DESCRIPTION, allow_abbrev=False)
    p.add_argument("--shape", action="append", metavar="S", help="a shape's name, or a model's for all its shapes;"
                   f" may be repeated (default: {DEFAULT})")  # fmt: skip
    p.add_argument("--kernels", metavar="K,K", help="backends (default: all that can be used here)")
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    p.add_argument("--platform", choices=("cpu", "gpu", "tpu"))
    p.add_argument("--output", metavar="FILE", help="write the figures to this JSON file")
    return p.parse_args(list(argv))


def kernels(argv: Sequence[str]) -> int:
    args = parse(argv)
    shapes = [shape for name in args.shape or [DEFAULT] for shape in named(name)]
    use_platform(args.platform)
    platform = jax.default_backend()
    chosen = [select(name, platform) for name in split_names("--kernels", args.kernels or ",".join(backends(platform)))]
    dtype = choose_dtype(args.dtype, platform)
    rates = better(measure_rates(dtype), measure_rates(dtype))
    results = [measure(shape, chosen, rates, dtype) for shape in shapes]
    console = make_console()
    for result in results:
        console.print(make_table(result))
    document = {**record.head(["kernels", *argv]), "rates": vars(rates), "results": results}
    if args.output:
        record.write(document, Path(args.output))
    return 0


def named(name: str) -> list[Shape]:
    """The shape of that name, or all real ones of the model of that name."""
    models = {shape.model.name for shape in REAL}
    if name in models:
        return [shape for shape in REAL if shape.model.name == name]
    try:
        return [find(name)]
    except UserError as error:
        raise UserError(f"{error}; or a model's name: {', '.join(sorted(models))}") from error


def measure(shape: Shape, chosen: Sequence[Kernels], rates: Rates, dtype: Any) -> dict[str, Any]:
    """A level for each op and backend, in the form that `compare` reads."""
    levels = [level for case in op_cases(shape, dtype) for level in measure_op(case, chosen, rates)]
    return {"name": shape.name, "dtype": str(dtype), "levels": levels}


def measure_op(case: OpCase, chosen: Sequence[Kernels], rates: Rates) -> list[dict[str, Any]]:
    """The op under each backend; one whose op is XLA's own is measured once, as XLA's."""
    ceiling_s = max(case.moved_bytes / rates.bytes_per_s, case.flops / rates.flops_per_s)
    many = 1 if jax.default_backend() == "cpu" else case.times  # a CPU has no launch to hide
    times: dict[str, float] = {}
    for kernel in chosen:
        if kernel.backend == "xla" or getattr(kernel, case.op) is not getattr(Kernels("xla"), case.op):
            times[kernel.backend] = median_s(case.launcher(kernel, many)) / many
    xla_s = times.get("xla")
    return [
        {
            "level": f"{case.op} {backend}", "op": case.op, "backend": backend, "op_us": seconds * 1e6,
            "bytes": case.moved_bytes, "flops": case.flops, "ceiling_us": ceiling_s * 1e6,
            "share_of_ceiling": ceiling_s / seconds, "speedup_over_xla": xla_s and xla_s / seconds,
        }
        for backend, seconds in times.items()
    ]  # fmt: skip


def make_table(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['name']} · {result['dtype']}", title_justify="left", pad_edge=False)
    for heading in ("op", "kernels"):
        table.add_column(heading)
    for heading in ("MB", "MFLOP", "ceiling µs", "µs", "of ceiling", "against XLA"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in result["levels"]:
        ratio = one["speedup_over_xla"]
        table.add_row(
            one["op"], one["backend"], f"{one['bytes'] / 1e6:,.3f}", f"{one['flops'] / 1e6:,.1f}",
            f"{one['ceiling_us']:,.1f}", f"{one['op_us']:,.1f}", f"{one['share_of_ceiling'] * 100:.1f} %",
            "–" if ratio is None else f"{ratio:.2f}",
        )  # fmt: skip
    return table
