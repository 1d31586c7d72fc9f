"""What this device could do at best: bytes and operations of a step, over rates measured in the same run.

A step reads every weight once, and the keys and values of what is committed; it multiplies each matrix by its rows.
The ceiling is the longer of the two times: no step can be faster, whatever the kernels.  Attention's own operations,
normalisation and everything on the host count as nothing.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.cache import page_bytes
from dflash_jax.drafters.token_map import chosen_head
from dflash_jax.engine.build import Loaded, draft_bytes_of_a_page
from dflash_jax.engine.engine import Engine
from dflash_jax.models import head_weight
from dflash_jax.params import Params, device_bytes, normal

REPEATS, IN_A_ROW = 8, 10
COPY_BYTES = {"cpu": 1 << 27}
MATRIX = {"cpu": 1024}


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes a second of a copy (read and written), operations a second of a square matrix product in `dtype`."""

    bytes_per_s: float
    flops_per_s: float
    dtype: str


def measure_rates(dtype: Any) -> Rates:
    """The device's best of a few copies and matrix products."""
    platform = jax.default_backend()
    count = COPY_BYTES.get(platform, 1 << 30) // 4
    side = MATRIX.get(platform, 8192)
    in_a_row = 1 if platform == "cpu" else IN_A_ROW
    # In place, since fresh memory costs a CPU more than the copy does; negated, since a plain copy would be left out.
    copy_s = _best_s(lambda x: -x, jnp.ones(count, jnp.float32), in_a_row)
    # Of random numbers, which stay about as large: a GPU multiplies zeros at a higher clock.
    square = normal(jax.random.key(0), (side, side), dtype) / side**0.5
    product_s = _best_s(lambda pair: (pair[0], pair[0] @ pair[1]), (square, square + 0), in_a_row)
    return Rates(2 * 4 * count / copy_s, 2 * side**3 / product_s, str(jnp.dtype(dtype)))


def _best_s(function: Any, x: Any, in_a_row: int) -> float:
    """Seconds of x ← function(x), in place; as one program of several in a row, whose launch counts once."""
    compiled = jax.jit(lambda x: jax.lax.fori_loop(0, in_a_row, lambda _, x: function(x), x), donate_argnums=0)
    x = jax.block_until_ready(compiled(x))
    times = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        x = jax.block_until_ready(compiled(x))
        times.append((time.perf_counter() - start_s) / in_a_row)
    return min(times)


def better(one: Rates | None, other: Rates) -> Rates:
    """The best seen of each: whatever else the machine does only slows it down."""
    if one is None:
        return other
    best = max(one.bytes_per_s, other.bytes_per_s), max(one.flops_per_s, other.flops_per_s)
    return Rates(*best, other.dtype)


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """Bytes read and operations made by the steps of a pair.

    target_bytes, draft_bytes: weights that a pass reads (an embedding table only where it is the head too).  The
    draft's logits read draft_head_bytes: the head once more, or the rows of it in its token map.  *_params: those
    multiplied with every row.  *_kv_bytes: of a token.
    """

    target_bytes: int
    target_params: int
    target_kv_bytes: float
    head_params: int
    draft_head_bytes: int = 0
    draft_head_params: int = 0
    draft_bytes: int = 0
    draft_params: int = 0
    draft_kv_bytes: float = 0.0

    def round(self, requests: int, context: float, rows: int) -> tuple[float, float]:
        """(bytes, operations) of a round of `rows` rows for each request with `context` committed tokens."""
        size = self.target_bytes + requests * context * self.target_kv_bytes
        work = 2.0 * requests * rows * self.target_params
        if rows > 1 and self.draft_params:
            size += self.draft_bytes + self.draft_head_bytes + requests * context * self.draft_kv_bytes
            work += 2.0 * requests * (rows * self.draft_params + (rows - 1) * self.draft_head_params)
        return size, work

    def round_s(self, rates: Rates, requests: int, context: float, rows: int) -> float:
        """Seconds that such a round takes at least."""
        size, work = self.round(requests, context, rows)
        return max(size / rates.bytes_per_s, work / rates.flops_per_s)

    def prefill_s(self, rates: Rates, tokens: float) -> float:
        """Seconds that reading a prompt takes at least; the head is needed for its last token only."""
        work = 2.0 * tokens * (self.target_params - self.head_params)
        return max(self.target_bytes / rates.bytes_per_s, work / rates.flops_per_s)


def engine_cost(engine: Engine) -> ModelCost:
    """Of the pair that an engine has loaded."""
    return loaded_cost(engine.loaded, engine.settings.page_size)


def loaded_cost(loaded: Loaded, page: int) -> ModelCost:
    """Of a pair with pages of `page` tokens: of several devices, the part of each."""
    target, dtype = loaded.weights.target, loaded.dtype
    draft, (draft_head, few) = loaded.weights.draft, chosen_head(loaded.weights, likeliest=True)
    unread = 0 if loaded.config.tied else device_bytes(target["embed"])
    return ModelCost(
        target_bytes=device_bytes(target) - unread,
        target_params=_multiplied(target) - unread // dtype.itemsize,
        target_kv_bytes=page_bytes(loaded.config, page, dtype) / page / loaded.mesh.size,
        head_params=device_bytes(head_weight(target)) // dtype.itemsize,
        draft_head_bytes=device_bytes(draft_head),
        draft_head_params=device_bytes(draft_head) // dtype.itemsize,
        draft_bytes=device_bytes(draft) - (0 if few is None else device_bytes(draft_head)),
        draft_params=_multiplied(draft) - (0 if few is None else device_bytes(draft_head) // dtype.itemsize),
        draft_kv_bytes=draft_bytes_of_a_page(loaded, page) / page,
    )


def _multiplied(params: Params) -> int:
    """Numbers in matrices on each device; of one that stands in two places (a tied head) once."""
    matrices = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
    return device_bytes(matrices) // matrices[0].dtype.itemsize if matrices else 0


def level_ceiling(
    cost: ModelCost, rates: Rates, requests: int, figures: Mapping[str, Any], default_rows: int
) -> dict[str, float]:
    """Ceilings of a level's figures, with the acceptance and the widths of rounds that it had.

    Throughput and TPOT are those of decoding alone: a real run reads its prompts too.
    """
    context = figures["mean_input_len"] + figures["mean_output_len"] / 2
    widths = figures.get("rounds_by_width") or {default_rows: 1}
    rounds = sum(widths.values())
    round_s = sum(n * cost.round_s(rates, requests, context, width) for width, n in widths.items()) / rounds
    tokens = figures["accept_length"] or 1.0
    return {
        "output_throughput": requests * tokens / round_s,
        "tpot_ms": round_s / tokens * 1e3,
        "ttft_ms": cost.prefill_s(rates, figures["mean_input_len"]) * 1e3,
        "round_ms": round_s * 1e3,
    }


def share(part: float | None, whole: float | None) -> float | None:
    """part / whole where both are there."""
    return None if part is None or not whole or math.isnan(whole) else part / whole
