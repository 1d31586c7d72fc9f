"""The meaning of each op in plain JAX.  A kernel agrees with these or declines with a reason."""

from dflash_jax.ops.reference.accept import accept_bonus
from dflash_jax.ops.reference.attention import paged_attention
from dflash_jax.ops.reference.block import prepare_block, token_locations
from dflash_jax.ops.reference.edit import EditRows, edited_logits, masked_logits
from dflash_jax.ops.reference.head import argmax_head, first_largest, head_logits, is_broken, top_tokens
from dflash_jax.ops.reference.logprob import Logprobs, packed_logprobs, token_logprobs
from dflash_jax.ops.reference.numerics import add_norm, gated_product, project
from dflash_jax.ops.reference.sample import (
    FILTER,
    GREEDY,
    GREEDY_BELOW,
    SAMPLE,
    SamplingRows,
    processed_logits,
    sample_tokens,
)
from dflash_jax.ops.reference.write import cache_write, kv_inject, norm_rope, write_rows

__all__ = [
    "FILTER", "GREEDY", "GREEDY_BELOW", "SAMPLE", "EditRows", "Logprobs", "SamplingRows", "accept_bonus", "add_norm",
    "argmax_head", "cache_write", "edited_logits", "first_largest", "gated_product", "head_logits", "is_broken",
    "kv_inject", "masked_logits", "norm_rope", "packed_logprobs", "paged_attention", "prepare_block",
    "processed_logits", "project", "sample_tokens", "token_locations", "token_logprobs", "top_tokens", "write_rows",
]  # fmt: skip
