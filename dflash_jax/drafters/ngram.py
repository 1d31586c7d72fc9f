"""Prompt look-up: a draft without weights that copies from the request's own text.

Where the newest tokens have occurred before, what followed them then is proposed now.  Good at summaries, edits, code
and anything that repeats itself; costs next to nothing where it fails.

It runs on the device.  A search on the host would need the newest tokens before each round, and with overlap they are
on the host only after the next round has been launched: the host version costs a wait per round, and the transfer of
what it proposes.  On the device it is a few comparisons over the tokens that a request's pages can hold, without a loop
(which on a GPU would ask the host whether to go on).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from dflash_jax.drafters.protocol import Capabilities, Weights
from dflash_jax.models import Rows
from dflash_jax.sharding import sharding

NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Proposes what followed the most recent earlier occurrence of the longest matching suffix.

    The suffix has prompt_lookup_max tokens, or fewer down to prompt_lookup_min where no longer one occurs (vLLM's
    names); an occurrence may overlap it.  Past the newest token the proposal goes on as if the text repeated itself
    from there.  Without any occurrence the bonus is proposed again and again.

    The cache is int32 [P, C], the token ids of all pages: the text of a shared prefix comes with its pages.
    """

    max_block: int = 8
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    capabilities = Capabilities()
    mask_id = 0
    taps = ()

    def page_bytes(self, page_size: int, dtype: Any) -> int:
        return page_size * jnp.dtype(jnp.int32).itemsize

    def init_cache(self, num_pages: int, page_size: int, dtype: Any, mesh: Mesh) -> Array:
        shape = (num_pages, page_size)
        return jnp.zeros(shape, jnp.int32, device=sharding(mesh, (None, None), shape))

    def draft(self, weights: Weights, cache: Any, rows: Rows) -> Array:
        text = known_text(cache, rows.page_table, rows.ids[:, 0], rows.lengths)
        found = find_suffix(text, rows.lengths, self.prompt_lookup_max, self.prompt_lookup_min)
        return continue_text(text, rows.lengths, found, rows.ids.shape[1] - 1)

    def absorb(self, weights: Weights, cache: Any, taps: Array, rows: Rows) -> Any:
        size = cache.shape[1]
        return cache.at[rows.locations // size, rows.locations % size].set(rows.ids, mode="promise_in_bounds")


def known_text(pool: Array, page_table: Array, bonus: Array, lengths: Array) -> Array:
    """int32 [S, W·C]: a request's tokens by position, the bonus int32 [S] at position `lengths`, then NO_TOKEN."""
    text = pool[page_table].reshape(page_table.shape[0], -1)
    at = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    end = lengths[:, None]
    return jnp.where(at < end, text, jnp.where(at == end, bonus[:, None], NO_TOKEN))


def find_suffix(text: Array, last: Array, longest: int, shortest: int) -> Array:
    """int32 [S]: where the best earlier occurrence of the suffix ends, `last` − 1 if there is none.

    text int32 [S, T] ends at position `last` int32 [S].  Best is the longest, of equals the most recent.
    """
    at = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    matching = at < last[:, None]  # positions where all of the suffix's last tokens so far agree
    matched = jnp.zeros(text.shape, jnp.int32)
    for back in range(longest):
        place = last[:, None] - back
        token = jnp.take_along_axis(text, jnp.maximum(place, 0), axis=1)
        earlier = jnp.pad(text, ((0, 0), (back, 0)), constant_values=NO_TOKEN)[:, : text.shape[1]]
        matching &= (earlier == token) & (place >= 0)
        matched += matching.astype(jnp.int32)
    best = matched.max(axis=1, keepdims=True)
    end = jnp.where(matched == best, at, NO_TOKEN).max(axis=1)
    return jnp.where(best[:, 0] >= shortest, end, last - 1)


def continue_text(text: Array, last: Array, found: Array, count: int) -> Array:
    """int32 [S, count]: the tokens after position `found` of text [S, T], repeated once position `last` is reached."""
    period = jnp.maximum(last - found, 1)[:, None]
    place = found[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)[None] % period
    return jnp.take_along_axis(text, jnp.clip(place, 0, text.shape[1] - 1), axis=1)
