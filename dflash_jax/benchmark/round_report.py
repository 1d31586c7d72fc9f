"""`benchmark round`: a whole round at a preset's shape with random weights, its parts, and its ceiling.

    python -m dflash_jax.benchmark round --preset smollm2-135m --requests 1,8 --context 512
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from dflash_jax.benchmark import record
from dflash_jax.benchmark.ceiling import ModelCost, Rates, better, loaded_cost, measure_rates
from dflash_jax.benchmark.drawn import redrawn
from dflash_jax.benchmark.options import Parser, numbers, split_names
from dflash_jax.benchmark.report import make_console
from dflash_jax.benchmark.split import PARTS, RoundTimer, filled
from dflash_jax.benchmark.synthetic import random_pair
from dflash_jax.cache import make_pool
from dflash_jax.drafters import NoDrafter, Weights
from dflash_jax.engine.build import Loaded, choose_dtype, on_mesh, rounds_in_place
from dflash_jax.errors import UserError
from dflash_jax.llm import use_platform
from dflash_jax.ops import Kernels, select
from dflash_jax.ops.dispatch import backends
from dflash_jax.state import init_state
from dflash_jax.steps import StepConfig, Steps
from dflash_jax.weights.turned import served_by

PAGE = 16
ROOM_ROUNDS = 246  # of a request's table: attention is cut by the room, of which a served one has more than tokens
DESCRIPTION = "A whole round at a preset's shape with random weights, its parts, and its ceiling."


def parse(argv: Sequence[str]) -> argparse.Namespace:
    p = Parser(prog="python -m dflash_jax.benchmark round", description=DESCRIPTION, allow_abbrev=False)
    p.add_argument("--preset", default="smollm2-135m", help="shape of target and draft (default: %(default)s)")
    p.add_argument("--requests", default="1", metavar="N,N", help="requests in a round (default: 1)")
    p.add_argument("--context", type=int, default=512, metavar="N", help="committed tokens of each (default: 512)")
    p.add_argument("--block-size", type=int, metavar="N", help="rows of a block (default: the draft's own)")
    p.add_argument("--kernels", metavar="K,K", help="backends (default: all that can be used here)")
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    p.add_argument("--platform", choices=("cpu", "gpu", "tpu"))
    p.add_argument("--output", metavar="FILE", help="write the figures to this JSON file")
    args = p.parse_args(list(argv))
    if args.context < 1:
        raise UserError(f"--context must be at least 1, not {args.context}")
    return args


def report_round(argv: Sequence[str]) -> int:
    args = parse(argv)
    requests = numbers("--requests", args.requests, int)
    use_platform(args.platform)
    platform = jax.default_backend()
    chosen = [select(name, platform) for name in split_names("--kernels", args.kernels or ",".join(backends(platform)))]
    dtype = choose_dtype(args.dtype, platform)
    rates = better(measure_rates(dtype), measure_rates(dtype))
    pair = random_pair(args.preset, args.dtype, True, args.block_size)
    results = [
        measure(name, loaded, kernels, rates, requests, args)
        for name, loaded in (("plain", without_draft(pair)), ("DFlash", pair))
        for kernels in chosen
    ]
    title = f"a round of {args.preset}'s shape, random weights, {args.context} tokens committed, {pair.dtype}"
    make_console().print(make_table(title, results))
    head = record.head(["round", *argv])
    if args.output:
        target = f"random weights of shape {args.preset}"
        record.write({**head, "target": target, "rates": vars(rates), "results": results}, Path(args.output))
    return 0


def without_draft(pair: Loaded) -> Loaded:
    return dataclasses.replace(pair, drafter=NoDrafter(), weights=Weights(pair.weights.target, None))


def measure(
    name: str, loaded: Loaded, kernels: Kernels, rates: Rates, requests: Sequence[int], args: argparse.Namespace
) -> dict[str, Any]:
    """A level for each number of requests, in the form that `compare` reads."""
    block = min(args.block_size or loaded.drafter.max_block, loaded.drafter.max_block)
    cost = loaded_cost(loaded, PAGE)
    levels = [level(make_timer(loaded, kernels, n, args.context, block), cost, rates, args.context) for n in requests]
    return {"name": f"{name} ({kernels.backend})", "block_size": block, "levels": levels}


def make_timer(loaded: Loaded, kernels: Kernels, requests: int, context: int, block: int) -> RoundTimer:
    width = -(-(context + block * ROOM_ROUNDS) // PAGE)
    pages = requests * width + 1
    kv = make_pool(loaded.config, pages, PAGE, loaded.dtype, loaded.mesh)
    draft = loaded.drafter.init_cache(pages, PAGE, loaded.dtype, loaded.mesh)
    state = init_state(requests, width, *redrawn((kv, draft)))
    bonus = jax.random.randint(jax.random.key(3), state.bonus.shape, 0, loaded.config.vocab_size)
    state = on_mesh(dataclasses.replace(state, bonus=bonus), loaded.mesh)
    steps = Steps(StepConfig(loaded.config, loaded.drafter, PAGE, kernels), rounds_in_place(loaded))
    weights = served_by(loaded.weights, kernels)
    return RoundTimer(steps, weights, filled(state, requests, context, width), requests, block)


def level(timer: RoundTimer, cost: ModelCost, rates: Rates, context: int) -> dict[str, Any]:
    found = timer.split()
    size, work = cost.round(timer.requests, context, timer.block)
    ceiling_s = cost.round_s(rates, timer.requests, context, timer.block)
    return {
        "level": str(timer.requests),
        "round_ms": found["whole"] * 1e3,
        "launch_ms": timer.launch_s() * 1e3,
        "ceiling_ms": ceiling_s * 1e3,
        "share_of_ceiling": ceiling_s / found["whole"],
        "bytes": size,
        "flops": work,
        "parts_ms": {part: found[part] * 1e3 for part in PARTS if part in found},
    }


def make_table(title: str, results: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("step")
    for heading in ("requests", "rows", "ms", "ceiling ms", "of it", *(f"{part} ms" for part in PARTS), "launch ms"):
        table.add_column(heading, justify="right")
    for result in results:
        for one in result["levels"]:
            parts = (one["parts_ms"].get(part) for part in PARTS)
            table.add_row(
                result["name"], one["level"], str(result["block_size"]), f"{one['round_ms']:.2f}",
                f"{one['ceiling_ms']:.2f}", f"{one['share_of_ceiling'] * 100:.1f} %",
                *("–" if part is None else f"{part:.2f}" for part in parts), f"{one['launch_ms']:.2f}",
            )  # fmt: skip
    return table
