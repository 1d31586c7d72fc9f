"""Learning rate and optimiser of a run."""

from __future__ import annotations

from typing import Any

import jax
import optax
from optax import contrib

from dflash_jax.params import Params
from dflash_jax.train.config import TrainConfig

_LIKE_ADAM = 0.2  # root mean square of Muon's updates, so that AdamW's learning rates serve (arXiv:2502.16982)
# Axes that a product sums over and that it gives, by the names of `draft_specs`; others are separate matrices.
_MATRICES = {
    "qkv": ((0,), (1, 2, 3)), "o": ((0, 1), (2,)), "gate_up": ((0,), (2,)), "down": ((0,), (1,)), "fc": ((0,), (1,)),
    "hidden": ((0,), (1,)),
}  # fmt: skip


def schedule(config: TrainConfig) -> optax.Schedule:
    """Learning rate by step."""
    rise = max(1, round(config.warmup * config.steps))
    return optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, rise, max(config.steps, rise + 1))


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping, then AdamW, or Muon for the layers' matrices and AdamW for the rest; decay of matrices only."""
    (b1, b2), rate, decay = config.betas, schedule(config), config.weight_decay
    if config.optimizer == "muon":
        own = contrib.muon(
            rate, weight_decay=decay, adam_b1=b1, adam_b2=b2, adam_weight_decay=0.0, consistent_rms=_LIKE_ADAM,
            muon_weight_dimension_numbers=_muon_axes,
        )  # fmt: skip
    else:
        own = optax.adamw(rate, b1, b2, weight_decay=decay, mask=_is_matrix)
    return optax.chain(optax.clip_by_global_norm(config.clip), own)


def _is_matrix(params: Params) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _muon_axes(params: Params) -> Any:
    """Muon's dimension numbers of the matrices; None for what AdamW is to update."""

    def one(path: tuple[Any, ...], _: Any) -> contrib.MuonDimensionNumbers | None:
        axes = _MATRICES.get(str(getattr(path[-1], "key", "")))
        return contrib.MuonDimensionNumbers(*axes) if axes else None

    return jax.tree_util.tree_map_with_path(one, params)
