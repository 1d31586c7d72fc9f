"""Sampling by Gumbel-argmax: the noise of a token depends only on (seed, absolute position, token id).

So the sample at a position is the same whatever was drafted, in whichever block, batch or bucket it is computed
(DESIGN 3.5).  Filters follow vLLM's order: temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

GREEDY, SAMPLE, FILTER = "greedy", "sample", "filter"  # what of sampling is in use; each serves those before it
GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """What each request asks for; arrays with a leading axis S.

    temperature, min_p, top_p float32 (temperature 0 = greedy, top_p 1 and min_p 0 = off); top_k int32 (0 = off);
    seed uint32 [S, 2].
    """

    temperature: Array
    min_p: Array
    top_k: Array
    top_p: Array
    seed: Array


def gumbel(seed: Array, positions: Array, tokens: Array) -> Array:
    """Standard Gumbel noise float32 [S, B, V] of seed uint32 [S, 2], positions int32 [S, B], tokens int32 [S, B, V]
    (or axes of size 1 where they do not vary).

    A counter-based generator: two rounds of an integer mixer over (token, position, seed), with no state to carry and
    nothing that depends on how the vocabulary or the batch is laid out.
    """
    row = _mix(positions.astype(jnp.uint32) * np.uint32(0x9E3779B9) ^ seed[:, :1])
    row = _mix(row + seed[:, 1:])[..., None]
    bits = _mix(_mix(tokens.astype(jnp.uint32) * np.uint32(0x85EBCA6B) + row) ^ row)
    # Uniform in (0, 1); small values keep their relative precision, and they are what a maximum is made of.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))


def _mix(x: Array) -> Array:
    """A bijection of uint32 with good avalanche (multiply and xor-shift, constants found by search: Wellons 2018)."""
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def processed_logits(logits: Array, rows: SamplingRows, filters: bool = True) -> Array:
    """float32 [S, B, V]: logits over temperature, −inf where min-p, top-k or top-p exclude a token.

    Greedy rows are returned as they are.  `filters` False leaves the filters out (for when nobody uses them).
    """
    greedy = (rows.temperature < GREEDY_BELOW)[:, None, None]
    z = logits / jnp.where(greedy, 1.0, rows.temperature[:, None, None])
    if not filters:
        return jnp.where(greedy, logits, z)
    return jnp.where(greedy, logits, _top_p(_top_k(_min_p(z, rows.min_p), rows.top_k), rows.top_p))


def _min_p(z: Array, min_p: Array) -> Array:
    """Keep tokens at least `min_p` times as likely as the likeliest."""
    least = z.max(axis=-1, keepdims=True) + jnp.log(min_p)[:, None, None]
    return jnp.where(z < least, -jnp.inf, z)  # this way round a NaN stays and is noticed


def _top_k(z: Array, top_k: Array) -> Array:
    """Keep the k largest, and what ties with the smallest of them."""
    key, k = _ordered(z), top_k[:, None]
    least = _largest(lambda t: (key >= t[..., None]).sum(axis=-1, dtype=jnp.int32) >= k, z.shape[:-1])
    return jnp.where((k == 0)[..., None] | (key >= least[..., None]), z, -jnp.inf)


def _top_p(z: Array, top_p: Array) -> Array:
    """Keep the likeliest tokens that together reach p: those with less than p above them (ties stay together)."""
    key, p = _ordered(z), top_p[:, None]
    mass = jax.nn.softmax(z, axis=-1)
    least = _largest(lambda t: jnp.where(key >= t[..., None], mass, 0).sum(axis=-1) >= p, z.shape[:-1])
    return jnp.where((p >= 1)[..., None] | (key >= least[..., None]), z, -jnp.inf)


def _ordered(x: Array) -> Array:
    """uint32 in the order of the floats x (NaN above all), so that a threshold can be built bit by bit."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    key = bits ^ jnp.where(bits >> 31 == 1, np.uint32(0xFFFFFFFF), np.uint32(0x80000000))
    return jnp.where(jnp.isnan(x), np.uint32(0xFFFFFFFF), key)


def _largest(holds: Callable[[Array], Array], shape: tuple[int, ...]) -> Array:
    """The largest uint32 t [shape] for which `holds(t)`, which must turn from true to false once; 0 if none."""

    def step(i: Array, t: Array) -> Array:
        higher = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(higher), higher, t)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros(shape, jnp.uint32))


def sample_tokens(
    logits: Array, rows: SamplingRows, positions: Array, filters: bool = True, ids: Array | None = None
) -> Array:
    """The sample int32 [S, B] at each position: argmax of processed logits plus noise (greedy rows: no noise).

    logits float32 [S, B, V]; positions int32 [S, B] of the tokens to be emitted; ids int32 [S, B, V] names the tokens
    when they are not 0 … V − 1 (then the result indexes the last axis, as it does without).
    """
    z = processed_logits(logits, rows, filters)
    if ids is None:
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
    noise = gumbel(rows.seed, positions, ids)
    noisy = jnp.where((rows.temperature < GREEDY_BELOW)[:, None, None], z, z + noise)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)
