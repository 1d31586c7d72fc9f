"""The ops of a round, by their reference meaning, behind one dispatcher.

Steps call ops through a `Kernels` value (`kernels.block_attention(…)`); the plain-XLA reference in
`ops/reference` defines what each computes.
"""

from dflash_jax.ops.dispatch import XLA, Kernels, select, tile_rules
from dflash_jax.ops.reference import (
    FILTER,
    GREEDY,
    GREEDY_BELOW,
    SAMPLE,
    EditRows,
    SamplingRows,
    edited_logits,
    first_largest,
    is_broken,
    masked_logits,
    norm_rope,
    packed_logprobs,
    processed_logits,
    token_locations,
    token_logprobs,
    top_tokens,
)
from dflash_jax.ops.reference.accept import BROKEN, LENGTH, RUNNING, STOP, Accepted
from dflash_jax.ops.reference.numerics import Turned, align, apply_rope, dot, flat_inputs, gated, rms_norm

__all__ = [
    "BROKEN", "FILTER", "GREEDY", "GREEDY_BELOW", "LENGTH", "RUNNING", "SAMPLE", "STOP", "XLA", "Accepted",
    "EditRows", "Kernels", "SamplingRows", "Turned", "align", "apply_rope", "dot", "edited_logits", "first_largest",
    "flat_inputs", "gated", "is_broken", "masked_logits", "norm_rope", "packed_logprobs", "processed_logits",
    "rms_norm", "select", "tile_rules", "token_locations", "token_logprobs", "top_tokens",
]  # fmt: skip
