"""A tiny pair to train, and sequences for it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from models import goldens

from dflash_jax.train.blocks import Batch
from dflash_jax.train.loss import LossConfig
from dflash_jax.train.step import TrainConfig


def train_config(name: str, **changes: Any) -> TrainConfig:
    """Float32, few anchors, small slices."""
    pair = goldens.pair(name)
    base: dict[str, Any] = {
        "steps": 20, "anchors": 4, "dtype": "float32", "loss": LossConfig(slice_rows=1), "learning_rate": 3e-3,
    }  # fmt: skip
    return TrainConfig(pair.target, pair.draft, **{**base, **changes})


@functools.cache
def batches(vocab: int, parts: int = 1, sequences: int = 4, steps: int = 6, length: int = 24) -> list[Batch]:
    """Random sequences [M, S, T], different ones every step, with answers of different lengths."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(steps):
        tokens = rng.integers(0, vocab, (parts, sequences, length)).astype(np.int32)
        start = rng.integers(3, 8, (parts, sequences)).astype(np.int32)
        found.append(Batch(tokens, start, rng.integers(14, length + 1, (parts, sequences)).astype(np.int32)))
    return found
