"""Drafters: who proposes the tokens of a block, declared by capability and never by name.

A drafter is a hashable description; its arrays live in `Weights.draft` and `DecodeState.draft`.  The engine
asks only for its `capabilities`; `register_drafter` adds one from outside the package.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from dflash_jax.cache import make_pool, page_bytes
from dflash_jax.config import DraftConfig
from dflash_jax.models import Rows, embed, head_weight
from dflash_jax.models.dflash import draft_rows, inject_context, select_candidates
from dflash_jax.params import Params


class Weights(NamedTuple):
    """Everything read-only that a step needs: the target's parameters and the drafter's (or None)."""

    target: Params
    draft: Params


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a drafter needs of the engine.

    needs_draft_kv: pages hold KV of the draft too (a prefix hit must carry both); needs_hidden: taps of the
    target are captured and absorbed; needs_cpu_lengths: the host must know exact lengths before each round.
    """

    needs_draft_kv: bool = False
    needs_hidden: bool = False
    needs_cpu_lengths: bool = False


@runtime_checkable
class Drafter(Protocol):
    """Proposes blocks and absorbs what was committed."""

    capabilities: Capabilities

    @property
    def max_block(self) -> int:
        """Largest block size; 1 means that nothing is drafted."""
        ...

    @property
    def mask_id(self) -> int:
        """Filler token of the rows after the bonus."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose hidden states `absorb` wants."""
        ...

    def page_bytes(self, page_size: int, dtype: Any) -> int:
        """Bytes this drafter adds to one page."""
        ...

    def init_cache(self, num_pages: int, page_size: int, dtype: Any, mesh: Mesh) -> Any:
        """Its device state, a pytree."""
        ...

    def draft(self, weights: Weights, cache: Any, rows: Rows) -> Array:
        """int32 [S, B−1]: tokens proposed after the bonus `rows.ids[:, 0]`."""
        ...

    def absorb(self, weights: Weights, cache: Any, taps: Array, rows: Rows) -> Any:
        """The cache with the committed rows in it; taps [S, T, K·H]; other rows point at the padding page."""
        ...


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """Plain decoding through the same steps: blocks of one row."""

    capabilities = Capabilities()
    max_block = 1
    mask_id = 0
    taps = ()

    def page_bytes(self, page_size: int, dtype: Any) -> int:
        return 0

    def init_cache(self, num_pages: int, page_size: int, dtype: Any, mesh: Mesh) -> tuple[()]:
        return ()

    def draft(self, weights: Weights, cache: Any, rows: Rows) -> Array:
        return rows.ids[:, 1:]

    def absorb(self, weights: Weights, cache: Any, taps: Array, rows: Rows) -> Any:
        return cache


@dataclasses.dataclass(frozen=True)
class DFlashDrafter:
    """A DFlash draft, v1 or DFlash 2 by its configuration."""

    config: DraftConfig
    capabilities = Capabilities(needs_draft_kv=True, needs_hidden=True)

    @property
    def max_block(self) -> int:
        return self.config.block_size

    @property
    def mask_id(self) -> int:
        return self.config.mask_token_id

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def page_bytes(self, page_size: int, dtype: Any) -> int:
        return page_bytes(self.config, page_size, dtype)

    def init_cache(self, num_pages: int, page_size: int, dtype: Any, mesh: Mesh) -> Any:
        return make_pool(self.config, num_pages, page_size, dtype, mesh)

    def draft(self, weights: Weights, cache: Any, rows: Rows) -> Array:
        """One pass over [bonus, MASK × (B−1)]; row k predicts the token at its own position (no shift)."""
        config = self.config
        embedded = embed(weights.target, rows.ids, config.input_embedding_scale)
        hidden = draft_rows(weights.draft, config, embedded, rows, cache)[:, 1:]
        logits = rows.kernels.head_logits(
            hidden, head_weight(weights.target), config.output_multiplier, config.logit_softcap
        )
        if config.selector:
            return select_candidates(weights.draft, config, hidden, logits, rows.ids[:, 0])
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def absorb(self, weights: Weights, cache: Any, taps: Array, rows: Rows) -> Any:
        return inject_context(
            weights.draft, self.config, taps, rows.positions, rows.locations, cache, rows.kernels
        )
