"""Sampling by Gumbel-argmax: the noise of a token depends only on (seed, absolute position, token id).

So the sample at a position is the same whatever was drafted, in whichever block, batch or bucket it is computed
(DESIGN 3.5).  Filters follow vLLM's order: temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dflash_jax.ops.reference.head import GROUP, by_groups, first_largest

GREEDY, SAMPLE, FILTER = "greedy", "sample", "filter"  # what of sampling is in use; each serves those before it
GROUPS = 64  # groups of neighbouring tokens that a filter looks at first
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
    z = _scaled(logits, rows)
    return _filtered(z, _smallest_kept(z, rows), rows) if filters else z


def _is_greedy(rows: SamplingRows) -> Array:
    return (rows.temperature < GREEDY_BELOW)[:, None]


def _scaled(logits: Array, rows: SamplingRows) -> Array:
    return logits / jnp.where(_is_greedy(rows), 1.0, rows.temperature[:, None])[..., None]


def _filtered(z: Array, smallest: Array, rows: SamplingRows) -> Array:
    """z [S, B, N], −inf below smallest [S, B]; this way round a NaN stays and is noticed."""
    return jnp.where(~_is_greedy(rows)[..., None] & (z < smallest[..., None]), -jnp.inf, z)


def _smallest_kept(z: Array, rows: SamplingRows) -> Array:
    """float32 [S, B]: the smallest of z [S, B, V] that min-p, top-k and top-p, in this order, keep (−inf: all of it).

    Looks among the likeliest tokens first, and at the whole vocabulary only if some row keeps more than those.
    """
    if z.shape[-1] <= GROUPS * GROUP:
        return _search(z, z, rows).smallest
    likeliest, found, known = _search_likeliest(z, rows)
    known &= (rows.top_p >= 1)[:, None] | (found.smallest > likeliest.floor)
    return jax.lax.cond(
        (known | _is_greedy(rows)).all(), lambda: found.smallest, lambda: _search(z, z, rows).smallest
    )


class _Likeliest(NamedTuple):
    """values float32 [S, B, N] of tokens ids int32 [S, B, N]; every value above floor [S, B] is among them.

    A floor is NaN where a value is.
    """

    values: Array
    ids: Array
    floor: Array


def _likeliest(z: Array) -> _Likeliest:
    """Of z [S, B, V], the groups of neighbouring tokens with the largest maxima: those left out have nothing larger."""
    grouped, maxima = by_groups(z)
    best, which = jax.lax.top_k(maxima, GROUPS)
    floor = jnp.where(best[..., 0] == jnp.inf, jnp.nan, best[..., -1])
    values = jnp.take_along_axis(grouped, which[..., None], axis=2)
    ids = which[..., None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)[None, None, None]
    return _Likeliest(values.reshape(*z.shape[:2], -1), ids.reshape(*z.shape[:2], -1), floor)


class _Found(NamedTuple):
    """float32 [S, B] each: the smallest value that min-p and top-k keep, and that top-p keeps of those."""

    after_k: Array
    smallest: Array


def _search_likeliest(z: Array, rows: SamplingRows) -> tuple[_Likeliest, _Found, Array]:
    """The likeliest of z [S, B, V], what a search among them finds, and bool [S, B]: is that right for top-k?

    For top-p it then is where `smallest` is above the floor.
    """
    likeliest = _likeliest(z)
    found = _search(likeliest.values, z, rows, likeliest.floor)
    return likeliest, found, (rows.top_k == 0)[:, None] | (found.after_k > likeliest.floor)


def _search(candidates: Array, z: Array, rows: SamplingRows, floor: Array | None = None) -> _Found:
    """Each right if `candidates` [S, B, N] hold all of z [S, B, V] that are as large, as for values above `floor`.

    min-p keeps what is at least so many times as likely as the likeliest; top-k the k largest and what ties with the
    smallest of them; top-p the likeliest of what is left that together reach p: those with less than p above them (ties
    stay together).
    """
    top_k, top_p = rows.top_k[:, None], rows.top_p[:, None]
    key, shape = _ordered(candidates)[..., None, :], candidates.shape[:-1]
    highest = candidates.max(axis=-1)
    least = highest + jnp.log(rows.min_p)[:, None]

    def kth() -> Array:
        return _largest(lambda t: (key >= t[..., None]).sum(axis=-1, dtype=jnp.int32) >= top_k[..., None], shape)

    if floor is None:  # over a whole vocabulary the search is worth a question
        largest = jax.lax.cond((top_k > 0).any(), kth, lambda: jnp.zeros(shape, jnp.uint32))
    else:
        largest = kth()
    least = jnp.where(top_k > 0, jnp.maximum(least, _unordered(largest)), least)
    mass = _mass(candidates, least, highest)
    enough = _enough(top_p, _total(mass, z, least, highest, floor, rows))[..., None]
    mass = mass[..., None, :]
    nucleus = _largest(lambda t: jnp.where(key >= t[..., None], mass, 0).sum(axis=-1) >= enough, shape)
    return _Found(least, jnp.where(top_p < 1, jnp.maximum(least, _unordered(nucleus)), least))


def _mass(z: Array, least: Array, highest: Array) -> Array:
    return jnp.where(z < least[..., None], 0, jnp.exp(z - highest[..., None]))


def _enough(top_p: Array, total: Array) -> Array:
    """The mass that top-p asks for: never none, however small p is."""
    return jnp.maximum(top_p * total, jnp.finfo(jnp.float32).tiny)


def _total(mass: Array, z: Array, least: Array, highest: Array, floor: Array | None, rows: SamplingRows) -> Array:
    """[S, B]: the mass of all that is at least `least`; of the candidates alone where no row needs more."""
    here = mass.sum(axis=-1)
    if floor is None:
        return here
    enough = (least > floor) | (rows.top_p >= 1)[:, None] | _is_greedy(rows)
    return jax.lax.cond(enough.all(), lambda: here, lambda: _mass(z, least, highest).sum(axis=-1))


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
    """The largest uint32 t [shape] for which `holds(t)`, which must turn from true to false once; 0 if none.

    `holds` takes several t at a time, uint32 [shape, N], and gives bool [shape, N].
    """
    # A pass costs a CPU its comparisons, and an accelerator little but its launch: there, four bits in each.
    one, four = (lambda bits=bits: _digits(holds, shape, bits) for bits in (1, 4))
    return jax.lax.platform_dependent(cpu=one, default=four)


def _digits(holds: Callable[[Array], Array], shape: tuple[int, ...], bits: int) -> Array:
    """`_largest`, found `bits` bits at a time from the highest on."""
    steps = jnp.arange(1, 2**bits, dtype=jnp.uint32).reshape(*(1 for _ in shape), -1)

    def step(i: Array, t: Array) -> Array:
        shift = jnp.uint32(32 - bits) - jnp.uint32(bits) * jnp.asarray(i, jnp.uint32)
        digit = holds(t[..., None] | (steps << shift)).sum(axis=-1, dtype=jnp.uint32)
        return t | (digit << shift)

    return jax.lax.fori_loop(0, 32 // bits, step, jnp.zeros(shape, jnp.uint32), unroll=bits > 1)


def sample_tokens(
    logits: Array, rows: SamplingRows, positions: Array, filters: bool = True, ids: Array | None = None
) -> Array:
    """The sample int32 [S, B] at each position: argmax of processed logits plus noise (greedy rows: no noise).

    logits float32 [S, B, V]; positions int32 [S, B] of the tokens to be emitted; ids int32 [S, B, V] names the tokens
    when they are not 0 … V − 1 (then the result indexes the last axis, as it does without).
    """
    z = _scaled(logits, rows)
    tokens = jnp.arange(z.shape[-1], dtype=jnp.int32)[None, None] if ids is None else ids
    if not filters:
        return first_largest(_with_noise(z, rows, positions, tokens))
    if z.shape[-1] <= GROUPS * GROUP or ids is not None:
        return first_largest(_with_noise(_filtered(z, _smallest_kept(z, rows), rows), rows, positions, tokens))
    likeliest, found, known = _search_likeliest(z, rows)
    inside = known & (found.smallest > likeliest.floor)

    def among_likeliest() -> Array:
        noisy = _with_noise(_filtered(likeliest.values, found.smallest, rows), rows, positions, likeliest.ids)
        return jnp.where(noisy == noisy.max(axis=-1, keepdims=True), likeliest.ids, z.shape[-1]).min(axis=-1)

    among_all = functools.partial(_first_kept, z, rows, positions, tokens)
    suffices = (inside | _is_greedy(rows)) & ~jnp.isnan(likeliest.floor)
    return jax.lax.cond(suffices.all(), among_likeliest, among_all)


def _first_kept(z: Array, rows: SamplingRows, positions: Array, tokens: Array) -> Array:
    """The index int32 [S, B] of the largest of z [S, B, V] plus noise that the filters keep, without their threshold.

    The largest of all is the answer if it is kept; else nothing is kept that is no likelier, and so on: a few passes.
    """
    highest = z.max(axis=-1)
    least, greedy = highest + jnp.log(rows.min_p)[:, None], _is_greedy(rows)
    top_k, top_p = rows.top_k[:, None], rows.top_p[:, None]
    both = (top_k > 0) & (top_p < 1)  # top-p is then of what top-k keeps
    least = jax.lax.cond(both.any(), lambda: jnp.where(both, _search(z, z, rows).after_k, least), lambda: least)
    mass = _mass(z, least, highest)
    enough = _enough(top_p, mass.sum(axis=-1))

    def is_kept(at: Array) -> tuple[Array, Array]:
        value = jnp.take_along_axis(z, at[..., None], axis=-1)[..., 0]
        above = z > value[..., None]
        fewer = (top_k == 0) | (above.sum(axis=-1, dtype=jnp.int32) < top_k)
        lighter = (top_p >= 1) | (jnp.where(above, mass, 0).sum(axis=-1) < enough)
        always = greedy | jnp.isnan(value) | (value == highest)  # where logits are infinite, masses are not numbers
        return value, always | (fewer & lighter)

    def look(noisy: Array) -> tuple[Array, Array, Array]:
        at = first_largest(noisy)
        value, kept = is_kept(at)
        return at, kept, jnp.where(kept[..., None] | (z > value[..., None]), noisy, -jnp.inf)

    noisy = _with_noise(_filtered(z, least, rows), rows, positions, tokens)
    found = jax.lax.while_loop(lambda found: ~found[1].all(), lambda found: look(found[2]), look(noisy))
    return found[0]


def _with_noise(z: Array, rows: SamplingRows, positions: Array, ids: Array) -> Array:
    return jnp.where(_is_greedy(rows)[..., None], z, z + gumbel(rows.seed, positions, ids))
