"""A tiny pair to train, and sequences for it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from jax.sharding import Mesh
from models import goldens
from steps.lab import light_options

from dflash_jax.params import Params
from dflash_jax.train.blocks import Batch
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.loss import LossConfig
from dflash_jax.train.step import Trainer


def train_config(name: str, **changes: Any) -> TrainConfig:
    """Float32, one draft layer, few anchors, small slices."""
    pair = goldens.pair(name)
    draft = dataclasses.replace(
        pair.draft, num_layers=1, windows=pair.draft.windows[:1], causal=pair.draft.causal[:1]
    )
    base: dict[str, Any] = {
        "steps": 20, "anchors": 4, "dtype": "float32", "loss": LossConfig(slice_rows=1), "learning_rate": 3e-3,
    }  # fmt: skip
    return TrainConfig(pair.target, draft, **{**base, **changes})


def trainer_of(config: TrainConfig, target: Params, mesh: Mesh) -> Trainer:
    """Compiling dominates these tests; on CPU it takes half as long without LLVM's optimiser."""
    return Trainer(config, target, mesh, light_options())


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
