"""All that is static in a training step."""

from __future__ import annotations

import dataclasses

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import UserError
from dflash_jax.train.loss import LossConfig

OPTIMIZERS = ("adamw", "muon")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All that is static in a step.

    anchors: blocks of each sequence in each step; steps: optimiser steps in all, over which the learning rate rises
    for the share `warmup` and falls to 0 along a cosine; clip: of the global gradient norm; dtype: of all products
    (masters and optimiser are float32); seed: of the anchors.
    """

    target: TargetConfig
    draft: DraftConfig
    steps: int
    loss: LossConfig = LossConfig()
    anchors: int = 64
    learning_rate: float = 6e-4
    warmup: float = 0.04
    clip: float = 1.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    dtype: str = "bfloat16"
    seed: int = 0
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"optimizer {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
