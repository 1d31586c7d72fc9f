"""What publishing a round's tokens before the draft's KV is written could gain: a round with and without the commit.

    python benchmarks/engine_commit.py --name engine-commit-cpu

SmolLM2's shape with a draft of five layers, five taps and blocks of 16; random weights, since only time counts.  The
drafter without commit absorbs nothing; rounds of the two take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from record import record
from rounds import live_state

from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig
from dflash_jax.drafters import DFlashDrafter, Weights
from dflash_jax.models import FAMILIES
from dflash_jax.models.dflash import draft_specs, with_injection
from dflash_jax.params import random_params
from dflash_jax.steps import StepConfig, Steps

PAGE, COMMITTED = 16, 256
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64,
         "rms_norm_eps": 1e-5, "rope": RopeConfig(theta=1e5)}  # fmt: skip
TARGET = TargetConfig(family="llama", vocab_size=49152, num_layers=30, max_position=8192, tied=True, **SHAPE)
DRAFT = DraftConfig(
    version=1, vocab_size=49152, num_layers=5, taps=(1, 8, 14, 21, 27), block_size=16, mask_token_id=5,
    windows=(None,) * 5, causal=(False,) * 5, **SHAPE,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Forgetful(DFlashDrafter):
    """Writes nothing down."""

    def absorb(self, weights: Weights, cache: Any, taps: Any, rows: Any) -> Any:
        return cache


class Rounds:
    """One drafter's rounds over its own state."""

    def __init__(self, drafter: DFlashDrafter, weights: Weights, requests: int, dtype: Any):
        self.steps = Steps(StepConfig(TARGET, drafter, PAGE))
        self.weights = weights
        self.state = live_state(TARGET, drafter, requests, COMMITTED, 2 * COMMITTED // PAGE, PAGE, dtype)
        self.slots = jnp.arange(requests, dtype=jnp.int32)

    def time(self) -> float:
        start_s = time.perf_counter()
        block = DRAFT.block_size
        self.state, packed = self.steps.decode_round(block, self.weights, self.state, self.slots)
        packed.block_until_ready()
        return time.perf_counter() - start_s


def measure(weights: Weights, requests: int, dtype: Any, repeats: int) -> dict[str, float]:
    whole, without = (Rounds(kind(DRAFT), weights, requests, dtype) for kind in (DFlashDrafter, Forgetful))
    pairs = [(whole.time(), without.time()) for _ in range(repeats + 1)][1:]
    round_s, bare_s = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    share = statistics.median((a - b) / a for a, b in pairs)
    return {"round_ms": round_s * 1e3, "without_commit_ms": bare_s * 1e3, "commit_share_median": share}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    dtype = jnp.dtype(args.dtype)
    target = random_params(FAMILIES["llama"].specs(TARGET), jax.random.key(0), dtype)
    draft = with_injection(random_params(draft_specs(DRAFT), jax.random.key(1), dtype), DRAFT)
    values = {str(n): measure(Weights(target, draft), n, dtype, args.repeats) for n in (1, 8)}
    print(json.dumps(values, indent=1))
    print("written:", record(args.name, {"dtype": args.dtype, "by_requests": values}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
