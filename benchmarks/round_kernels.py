"""A whole decode round by kernel backend: random weights at a real shape, since only time counts.

    python benchmarks/round_kernels.py --shape qwen3-8b --requests 1 8 32 --committed 2048 --name round-qwen3-8b-h200

Backends take turns.  Times are of rounds launched one after another, the last one waited for; the ceiling is one read
of all weights and of the committed keys and values at --bytes-per-s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from record import record
from rounds import live_state

from dflash_jax.cache import page_bytes
from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig
from dflash_jax.drafters import DFlashDrafter, Weights
from dflash_jax.models import FAMILIES
from dflash_jax.models.dflash import draft_specs, with_injection
from dflash_jax.ops.dispatch import Kernels, backends
from dflash_jax.params import random_params, tree_bytes
from dflash_jax.steps import StepConfig, Steps

PAGE, LAUNCHES, REPEATS = 16, 10, 7
SMOL = {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64,
        "rms_norm_eps": 1e-5, "rope": RopeConfig(theta=1e5)}  # fmt: skip
QWEN = {"hidden_size": 4096, "intermediate_size": 12288, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope": RopeConfig(theta=1e6)}  # fmt: skip
SHAPES = {
    "smollm2": (
        TargetConfig(family="llama", vocab_size=49152, num_layers=30, max_position=8192, tied=True, **SMOL),
        DraftConfig(version=1, vocab_size=49152, num_layers=3, taps=(1, 14, 27), block_size=16, mask_token_id=5,
                    windows=(None,) * 3, causal=(False,) * 3, **SMOL),
    ),
    "qwen3-8b": (
        TargetConfig(family="qwen3", vocab_size=151936, num_layers=36, max_position=40960, tied=False, **QWEN),
        DraftConfig(version=1, vocab_size=151936, num_layers=5, taps=(1, 9, 17, 25, 33), block_size=16,
                    mask_token_id=5, windows=(None,) * 5, causal=(False,) * 5, **QWEN),
    ),
}  # fmt: skip


class Rounds:
    """`requests` live slots with `committed` tokens each, over one backend."""

    def __init__(self, shape: str, backend: str, weights: Weights, requests: int, committed: int, dtype: Any):
        target, draft = SHAPES[shape]
        drafter, self.block = DFlashDrafter(draft), draft.block_size
        self.steps = Steps(StepConfig(target, drafter, PAGE, Kernels(backend)))
        self.weights, self.slots = weights, jnp.arange(requests, dtype=jnp.int32)
        width = -(-(committed + self.block * (LAUNCHES * REPEATS + 4)) // PAGE)
        self.state = live_state(target, drafter, requests, committed, width, PAGE, dtype)

    def run(self, count: int) -> tuple[float, float]:
        """Seconds of a round, and of the host's part in launching it."""
        start_s = time.perf_counter()
        for _ in range(count):
            self.state, packed = self.steps.decode_round(self.block, self.weights, self.state, self.slots)
        launched_s = time.perf_counter()
        jax.block_until_ready(packed)
        return (time.perf_counter() - start_s) / count, (launched_s - start_s) / count


def make_weights(shape: str, dtype: Any) -> Weights:
    target, draft = SHAPES[shape]
    made = random_params(FAMILIES[target.family].specs(target), jax.random.key(0), dtype)
    return Weights(made, with_injection(random_params(draft_specs(draft), jax.random.key(1), dtype), draft))


def measure(shape: str, names: list[str], weights: Weights, requests: int, committed: int, dtype: Any) -> Any:
    found: dict[str, Any] = {}
    for name in names:
        start_s = time.perf_counter()
        rounds = Rounds(shape, name, weights, requests, committed, dtype)
        rounds.run(2)
        compile_s = time.perf_counter() - start_s
        times = [rounds.run(LAUNCHES) for _ in range(REPEATS)]
        found[name] = {"round_ms": statistics.median(t for t, _ in times) * 1e3,
                       "launch_ms": statistics.median(t for _, t in times) * 1e3, "compile_s": compile_s}  # fmt: skip
        del rounds
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--requests", type=int, nargs="+", default=[1])
    parser.add_argument("--committed", type=int, default=512)
    parser.add_argument("--backends", nargs="+")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bytes-per-s", type=float, default=4.8e12, help="memory bandwidth, for the ceiling")
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    dtype, names = jnp.dtype(args.dtype), args.backends or list(backends(jax.default_backend()))
    weights = make_weights(args.shape, dtype)
    values: dict[str, Any] = {"shape": args.shape, "committed": args.committed, "dtype": args.dtype, "requests": {}}
    for requests in args.requests:
        found = measure(args.shape, names, weights, requests, args.committed, dtype)
        per_token = sum(page_bytes(config, PAGE, dtype) / PAGE for config in SHAPES[args.shape])
        read = tree_bytes(weights) + requests * args.committed * per_token
        found["ceiling_ms"] = read / args.bytes_per_s * 1e3
        values["requests"][requests] = found
        print(requests, found, flush=True)
    print("written:", record(args.name, values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
