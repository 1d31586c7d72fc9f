"""The output head: logits, and the largest of each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.ops.reference.numerics import Turned, dot

GROUP = 64  # neighbouring tokens that are looked at by their largest first
_UNSORTED = 1024  # shorter rows XLA for GPU sorts whole to find their largest (16 of 7168 rows: 0.25 ms on an H200)


def head_logits(hidden: Array, head: Array | Turned, multiplier: float = 1.0, softcap: float | None = None) -> Array:
    """float32 logits [..., V] of hidden [..., H] by head [V, H], × multiplier, then softly capped at ±softcap."""
    logits = dot(hidden, head, contract=(1,), out=jnp.float32)
    if multiplier != 1.0:
        logits = logits * multiplier
    return logits if softcap is None else jnp.tanh(logits / softcap) * softcap


def argmax_head(hidden: Array, head: Array | Turned, multiplier: float = 1.0, softcap: float | None = None) -> Array:
    """int32 [...]: the largest of the `head_logits` of hidden [..., H], of equals the first.

    A kernel need not write logits, and may tell apart what the softcap alone makes equal.
    """
    return first_largest(head_logits(hidden, head, multiplier, softcap))


def first_largest(x: Array) -> Array:
    """int32 [...]: where the largest of x [..., V] stands, of equals the first; where a NaN stands, if one does."""
    return jax.lax.platform_dependent(x, cpu=_by_reductions, default=_argmax)


def _argmax(x: Array) -> Array:
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def _by_reductions(x: Array) -> Array:
    """On CPU a reduction over pairs is not vectorised, nor is what x is computed from, which takes eight times as long.

    The maximum may overlook a NaN there, so a NaN's place is counted from the end of the row: negative, it comes first.
    """
    size = x.shape[-1]
    at = jnp.arange(size, dtype=jnp.int32).reshape(*(1 for _ in x.shape[1:]), -1)
    largest = x == x.max(axis=-1, keepdims=True)
    found = jnp.where(jnp.isnan(x), at - size, jnp.where(largest, at, size)).min(axis=-1)
    return jnp.where(found < 0, found + size, found)


def top_tokens(x: Array, k: int) -> tuple[Array, Array]:
    """The k largest of x [..., V], descending, and where they stand (int32); of equals the first.

    `lax.top_k`'s result, without sorting whole vocabularies as it does on CPU inside a larger program (87 ms for 7 rows
    of 49,152, here 0.4): the k groups of neighbours with the largest maxima hold them all.
    """
    if x.shape[-1] <= k * GROUP:
        return jax.lax.top_k(x, k)
    groups, maxima = by_groups(x)
    lacking = [(0, 0)] * (x.ndim - 1) + [(0, max(0, _UNSORTED - maxima.shape[-1]))]
    maxima = jnp.pad(maxima, lacking, constant_values=-jnp.inf)  # of equals the first: never one of these
    which = jnp.sort(jax.lax.top_k(maxima, k)[1], axis=-1)  # ascending, so that of equals the first stands first
    among = jnp.take_along_axis(groups, which[..., None], axis=-2).reshape(*x.shape[:-1], -1)
    # Sliced right after, XLA on CPU no longer sees that this is a top-k, and sorts instead.
    # One barrier for each: XLA's pass over top-k aborts (jax 0.10.2) where a barrier takes both out of it at once.
    best, at = map(jax.lax.optimization_barrier, jax.lax.top_k(among, k))
    return best, jnp.take_along_axis(which, at // GROUP, axis=-1) * GROUP + at % GROUP


def by_groups(x: Array) -> tuple[Array, Array]:
    """x [..., V] in groups of neighbours [..., V / GROUP, GROUP], the last filled up with −inf, and their maxima.

    Where a group holds a NaN its maximum is +inf: a reduction may overlook a NaN (XLA on CPU).
    """
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % GROUP)]
    groups = jnp.pad(x, padding, constant_values=-jnp.inf).reshape(*x.shape[:-1], -1, GROUP)
    return groups, jnp.where(jnp.isnan(groups), jnp.inf, groups).max(axis=-1)


def is_broken(logits: Array, chosen: Array) -> Array:
    """bool [...]: does a row of logits [..., V] hold a NaN?  `chosen` int32 [...] is its `first_largest`, with noise or
    without, which then points at the NaN; so one look at the chosen logit is enough."""
    return jnp.isnan(jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0])
