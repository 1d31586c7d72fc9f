"""No draft: plain decoding through the same steps."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array
from jax.sharding import Mesh

from dflash_jax.drafters.protocol import Capabilities, Weights
from dflash_jax.models import Rows


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """Blocks of one row."""

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
