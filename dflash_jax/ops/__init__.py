"""The ops of a round, by their reference meaning, behind one dispatcher.

Steps call ops through a `Kernels` value (`kernels.block_attention(…)`); the plain-XLA reference in
`ops/reference` defines what each computes.
"""

from dflash_jax.ops.dispatch import XLA, Kernels, select
from dflash_jax.ops.reference import SamplingRows, greedy_tokens, is_broken, norm_rope, token_locations
from dflash_jax.ops.reference.accept import BROKEN, LENGTH, RUNNING, STOP, Accepted
from dflash_jax.ops.reference.numerics import align, apply_rope, dot, rms_norm

__all__ = [
    "BROKEN", "LENGTH", "RUNNING", "STOP", "XLA", "Accepted", "Kernels", "SamplingRows", "align", "apply_rope", "dot",
    "greedy_tokens", "is_broken", "norm_rope", "rms_norm", "select", "token_locations",
]  # fmt: skip
