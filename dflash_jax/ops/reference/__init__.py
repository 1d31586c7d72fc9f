"""The meaning of each op in plain JAX.  A kernel agrees with these or declines with a reason."""

from dflash_jax.ops.reference.accept import accept_bonus
from dflash_jax.ops.reference.attention import paged_attention
from dflash_jax.ops.reference.block import prepare_block, token_locations
from dflash_jax.ops.reference.head import greedy_tokens, head_logits, is_broken
from dflash_jax.ops.reference.sample import SamplingRows, sample_tokens
from dflash_jax.ops.reference.write import cache_write, kv_inject, norm_rope, write_rows

__all__ = [
    "SamplingRows", "accept_bonus", "cache_write", "greedy_tokens", "head_logits", "is_broken", "kv_inject",
    "norm_rope", "paged_attention", "prepare_block", "sample_tokens", "token_locations", "write_rows",
]  # fmt: skip
