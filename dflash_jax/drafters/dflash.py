"""The DFlash drafts, v1 and DFlash 2."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array
from jax.sharding import Mesh

from dflash_jax.cache import make_pool, page_bytes
from dflash_jax.config import DraftConfig
from dflash_jax.drafters.protocol import Capabilities, Weights
from dflash_jax.drafters.token_map import chosen_head, named
from dflash_jax.models import Rows, embed
from dflash_jax.models.dflash import draft_rows, inject_context, select_candidates


@dataclasses.dataclass(frozen=True)
class DFlashDrafter:
    """A DFlash draft, v1 or DFlash 2 by its configuration.  Its cache is a KV pool of the draft's layers."""

    config: DraftConfig
    capabilities = Capabilities(needs_hidden=True)

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
        hidden = draft_rows(weights.draft, config, embedded, rows, cache)
        weight, ids = chosen_head(weights, rows.takes_likeliest)
        head = weight, config.output_multiplier, config.logit_softcap
        if config.selector:  # of all rows, as XLA cuts no slice out of a CUDA graph for a kernel
            logits = rows.edited(rows.kernels.head_logits(hidden, *head), rows.positions)
            unary, candidates = rows.kernels.top_tokens(logits, config.selector.top_k)
            likeliest = unary[:, 1:], named(ids, candidates)[:, 1:]
            return select_candidates(weights.draft, hidden[:, 1:], likeliest, rows.ids[:, 0], rows)
        if rows.takes_likeliest:
            return named(ids, rows.kernels.argmax_head(hidden[:, 1:], *head))
        logits = rows.kernels.head_logits(hidden[:, 1:], *head)
        return rows.choose(rows.edited(logits, rows.positions[:, 1:]), rows.positions[:, 1:])

    def absorb(self, weights: Weights, cache: Any, taps: Array, rows: Rows) -> Any:
        return inject_context(weights.draft, self.config, taps, rows.positions, rows.locations, cache, rows.kernels)
