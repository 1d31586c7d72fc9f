"""What sampling adds to a round: the choice of a token for each row, greedy, sampled and filtered, in turn.

    python benchmarks/sampling_cost.py --requests 32 --block 16 --vocab 151936 --name sampling-cost-h200

The logits are random with the spread that a language model's have; the ceiling is one read of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from record import record

from dflash_jax.models import Rows
from dflash_jax.ops import FILTER, GREEDY, SAMPLE, SamplingRows

REPEATS, LAUNCHES = 15, 20
CASES = {
    "greedy": (GREEDY, {}),
    "temperature 0.8": (SAMPLE, {"temperature": 0.8}),
    "temperature 0.6, top_k 20, top_p 0.95": (FILTER, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    "temperature 1, top_p 0.9": (FILTER, {"temperature": 1.0, "top_p": 0.9}),
    "temperature 1, min_p 0.05": (FILTER, {"temperature": 1.0, "min_p": 0.05}),
}


def sampling(requests: int, temperature: float = 0.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> Any:
    full = {"temperature": temperature, "min_p": min_p, "top_p": top_p}
    columns: Any = {name: jnp.full(requests, value, jnp.float32) for name, value in full.items()}
    seed = jnp.arange(2 * requests, dtype=jnp.uint32).reshape(requests, 2)
    return SamplingRows(**columns, top_k=jnp.full(requests, top_k, jnp.int32), seed=seed)


def make_logits(requests: int, block: int, vocab: int) -> jax.Array:
    """float32 [S, B, V]: a few likely tokens over a wide floor."""
    rng = np.random.default_rng(0)
    floor = rng.standard_normal((1, block, vocab), np.float32) * 2
    floor[:, :, :50] += np.linspace(16, 6, 50, dtype=np.float32)
    return jnp.asarray(floor) + jax.random.normal(jax.random.key(0), (requests, 1, vocab))


def choose(mode: str) -> Any:
    def chosen(logits: jax.Array, positions: jax.Array, rows: SamplingRows) -> jax.Array:
        empty = jnp.zeros((1, 1), jnp.int32)
        return Rows(positions, positions, positions, empty, empty, sampling=rows, mode=mode).choose(logits, positions)

    return jax.jit(chosen)


def time_in_turn(calls: dict[str, Any], launches: int) -> dict[str, list[float]]:
    """Seconds of each call, several launched at a time, all in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            start_s = time.perf_counter()
            jax.block_until_ready([call() for _ in range(launches)])
            times[name].append((time.perf_counter() - start_s) / launches)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--bytes-per-s", type=float, help="memory bandwidth of the device, for the ceiling")
    parser.add_argument("--name", default="sampling-cost-cpu")
    args = parser.parse_args()
    logits = make_logits(args.requests, args.block, args.vocab)
    positions = jnp.broadcast_to(jnp.arange(args.block, dtype=jnp.int32), (args.requests, args.block))
    calls = {}
    for name, (mode, options) in CASES.items():
        step, rows = choose(mode), sampling(args.requests, **options)
        jax.block_until_ready(step(logits, positions, rows))
        calls[name] = lambda step=step, rows=rows: step(logits, positions, rows)
    launches = 1 if jax.default_backend() == "cpu" else LAUNCHES
    found = {name: statistics.median(times) * 1e3 for name, times in time_in_turn(calls, launches).items()}
    values: dict[str, Any] = {"shape": [args.requests, args.block, args.vocab], "ms": found}
    values["added_ms"] = {name: ms - found["greedy"] for name, ms in found.items()}
    if args.bytes_per_s:
        values["one_read_ms"] = logits.nbytes / args.bytes_per_s * 1e3
    for name, ms in found.items():
        print(f"{name:40} {ms:8.3f} ms  adds {ms - found['greedy']:7.3f} ms")
    print("written:", record(args.name, values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
