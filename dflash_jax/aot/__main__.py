"""Compile prefill and the decode round for a TPU, on any machine, and tell what came of it.

    python -m dflash_jax.aot --tpu v6e:2x2 --preset qwen3-8b --requests 8 --committed 1024
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax.errors import UserError

EXIT_USER_ERROR = 2


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tpu", required=True, help="a topology (v5e:2x2, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1) or a chip")
    parser.add_argument("--preset", required=True, help="a model pair of configs/models")
    parser.add_argument("--devices", type=int, help="use only so many of them (default: all, heads split over them)")
    parser.add_argument("--requests", type=int, default=8, help="requests of a round (default: %(default)s)")
    parser.add_argument("--committed", type=int, default=1024, help="tokens of each (default: %(default)s)")
    parser.add_argument("--block-size", type=int, help="default: the draft's")
    parser.add_argument("--page-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a prefill chunk (default: %(default)s)")
    parser.add_argument("--prefill-rows", type=int, default=1, help="chunks of a launch (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kernels", choices=("auto", "xla", "pallas"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    args = parser.parse_args(argv)
    for name in ("requests", "committed", "page_size", "prefill", "prefill_rows"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def run(args: argparse.Namespace) -> int:
    from dflash_jax.aot.topology import check_libtpu

    check_libtpu()
    bench = make_bench(args)
    say(bench.heading())
    report = {"date": datetime.date.today().isoformat(), **bench.facts(), "steps": {}}
    for step in bench.run():
        say(step.text())
        report["steps"][step.name] = step.as_json()
    if args.json:
        write(args.json, report)
    return 0


def make_bench(args: argparse.Namespace) -> Any:
    import jax.numpy as jnp

    from dflash_jax.aot.bench import Bench
    from dflash_jax.aot.shapes import Pair, Work
    from dflash_jax.aot.topology import open_tpu
    from dflash_jax.ops.dispatch import select

    pair, tpu = Pair.of(args.preset), open_tpu(args.tpu, args.devices)
    block = args.block_size or pair.draft.block_size
    if not 1 < block <= pair.draft.block_size:
        raise UserError(f"block size {block} is not between 2 and the draft's {pair.draft.block_size}")
    work = Work(
        args.requests, args.committed, block, args.prefill, args.prefill_rows, args.page_size, jnp.dtype(args.dtype)
    )
    return Bench(args.preset, pair, work, tpu, select(args.kernels, "tpu", tpu.mesh))


def write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"the report cannot be written to {path}: {error.strerror}") from error


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        return run(parse_arguments(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
