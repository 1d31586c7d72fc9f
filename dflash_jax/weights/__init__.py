"""Checkpoints: opening, checking and streaming them into placed parameters."""

from dflash_jax.weights.checkpoint import (
    DraftCheckpoint,
    TargetCheckpoint,
    load_draft,
    load_target,
    open_draft,
    open_target,
)
from dflash_jax.weights.loader import load_params

__all__ = [
    "DraftCheckpoint", "TargetCheckpoint", "load_draft", "load_params", "load_target", "open_draft", "open_target",
]  # fmt: skip
