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
GROUP, GROUPS = 64, 64  # tokens of a group, groups that a filter looks at first
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
    kept = jnp.where(z < _smallest_kept(z, rows)[..., None], -jnp.inf, z)  # this way round a NaN stays and is noticed
    return jnp.where(greedy, logits, kept)


def _smallest_kept(z: Array, rows: SamplingRows) -> Array:
    """float32 [S, B]: the smallest of z [S, B, V] that min-p, top-k and top-p, in this order, keep.

    Looks among the likeliest tokens first, and at the whole vocabulary only if some row keeps more than those.
    """
    least = z.max(axis=-1) + jnp.log(rows.min_p)[:, None]  # min-p: so many times as likely as the likeliest
    if z.shape[-1] <= GROUPS * GROUP:
        return _search(z, z, least, rows)[1]
    candidates, floor = _likeliest(z)
    after_k, found = _search(candidates, z, least, rows)
    greedy, top_k, top_p = ((x[:, None]) for x in (rows.temperature < GREEDY_BELOW, rows.top_k, rows.top_p))
    fits = ((top_k == 0) | (after_k > floor)) & ((top_p >= 1) | (found > floor))
    return jax.lax.cond((greedy | fits).all(), lambda: found, lambda: _search(z, z, least, rows)[1])


def _likeliest(z: Array) -> tuple[Array, Array]:
    """(candidates [S, B, GROUPS · GROUP], floor [S, B]) of z [S, B, V]: every value above the floor is among them.

    The groups of neighbouring tokens with the largest maxima; a group left out has no value above theirs.
    """
    s, b, v = z.shape
    padded = jnp.pad(z, ((0, 0), (0, 0), (0, -v % GROUP)), constant_values=-jnp.inf)
    grouped = padded.reshape(s, b, -1, GROUP)
    best, which = jax.lax.top_k(grouped.max(axis=-1), GROUPS)
    candidates = jnp.take_along_axis(grouped, which[..., None], axis=2)
    return candidates.reshape(s, b, GROUPS * GROUP), best[..., -1]


def _search(candidates: Array, z: Array, least: Array, rows: SamplingRows) -> tuple[Array, Array]:
    """The smallest that min-p and top-k keep, and `_smallest_kept`; each if `candidates` [S, B, C] hold all of z [S, B,
    V] that are as large.  least [S, B]: what min-p alone keeps.

    top-k keeps the k largest and what ties with the smallest of them; top-p the likeliest of what is left that together
    reach p: those with less than p above them (ties stay together).
    """
    key, top_k, top_p = _ordered(candidates), rows.top_k[:, None], rows.top_p[:, None]
    kth = _largest(lambda t: (key >= t[..., None]).sum(axis=-1, dtype=jnp.int32) >= top_k, key.shape[:-1])
    least = jnp.where(top_k > 0, jnp.maximum(least, _unordered(kth)), least)
    highest = z.max(axis=-1, keepdims=True)
    total = jnp.where(z < least[..., None], 0, jnp.exp(z - highest)).sum(axis=-1)
    mass = jnp.where(candidates < least[..., None], 0, jnp.exp(candidates - highest))
    enough = top_p * total
    nucleus = _largest(lambda t: jnp.where(key >= t[..., None], mass, 0).sum(axis=-1) >= enough, key.shape[:-1])
    return least, jnp.where(top_p < 1, jnp.maximum(least, _unordered(nucleus)), least)


def _ordered(x: Array) -> Array:
    """uint32 in the order of the floats x (NaN above all), so that a threshold can be built bit by bit."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    key = bits ^ jnp.where(bits >> 31 == 1, np.uint32(0xFFFFFFFF), np.uint32(0x80000000))
    return jnp.where(jnp.isnan(x), np.uint32(0xFFFFFFFF), key)


def _unordered(key: Array) -> Array:
    """The float32 that `_ordered` maps to `key` (−inf for keys below every number's)."""
    bits = key ^ jnp.where(key >> 31 == 1, np.uint32(0x80000000), np.uint32(0xFFFFFFFF))
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isnan(x), -jnp.inf, x)


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
    return _first_largest(jnp.where((rows.temperature < GREEDY_BELOW)[:, None, None], z, z + noise))


def _first_largest(x: Array) -> Array:
    """argmax [...] of x [..., V], or where a NaN is.

    In two plain reductions: on CPU, one over pairs is not vectorised, nor is what x is computed from, which then takes
    eight times as long.
    """
    at = jnp.arange(x.shape[-1], dtype=jnp.int32)
    found = (x == x.max(axis=-1, keepdims=True)) | jnp.isnan(x)
    return jnp.where(found, at, x.shape[-1]).min(axis=-1).astype(jnp.int32)
