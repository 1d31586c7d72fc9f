"""What the rest of the package needs to know of a target family; each family's file makes one record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.models.decoder import Hidden


@dataclasses.dataclass(frozen=True)
class Family:
    """A target family: its parameter declarations and forward pass.

    `gguf_permuted`: GGUF files of this family store q and k rows in the interleaved rotary order.
    """

    name: str
    specs: Callable[[TargetConfig], dict[str, Any]]
    forward: Callable[..., Hidden]
    gguf_architecture: str
    gguf_permuted: bool
