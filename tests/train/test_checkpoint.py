"""A run that stops and goes on is the run that did not stop."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from models import goldens

from dflash_jax.errors import UserError
from dflash_jax.train.checkpoint import Checkpoints
from dflash_jax.train.init import init_draft
from dflash_jax.train.step import data_mesh, init_state
from train.lab import batches, train_config, trainer_of

NAME = "qwen3-v1"


@pytest.fixture(scope="module")
def trained():
    """Trainer, a maker of first states, and six batches."""
    config = train_config(NAME)
    mesh = data_mesh(jax.devices()[:1])
    trainer = trainer_of(config, goldens.pair(NAME).target_params, mesh)

    def begin(seed: int = 1):
        return init_state(config, init_draft(config.draft, jax.random.key(seed)), mesh)

    return trainer, begin, batches(config.target.vocab_size)


def go_on(trainer, state, data):
    losses = []
    for batch in data:
        state, measured = trainer.step(state, batch)
        losses.append(float(measured["loss"]))
    return state, losses


def test_resumed_is_uninterrupted_to_the_bit(trained, tmp_path):
    trainer, begin, data = trained
    whole, losses = go_on(trainer, begin(), data)
    half, first = go_on(trainer, begin(), data[:3])
    with Checkpoints(tmp_path, {"seed": 0}) as kept:
        assert kept.newest is None
        kept.save(half)
    del half
    with Checkpoints(tmp_path, {"seed": 0}) as kept:
        assert kept.newest == 3
        resumed = kept.restore(begin(seed=9))
    resumed, second = go_on(trainer, resumed, data[3:])
    assert first + second == losses
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(whole), jax.device_get(resumed))


def test_only_the_newest_are_kept(trained, tmp_path):
    trainer, state, data = trained[0], trained[1](), trained[2]
    with Checkpoints(tmp_path, {}, keep=2) as kept:
        for batch in data[:3]:
            state, _ = go_on(trainer, state, [batch])
            kept.save(state)
        assert kept.newest == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_mistakes(trained, tmp_path):
    _, begin, _ = trained
    with Checkpoints(tmp_path, {"seed": 0}) as kept:
        with pytest.raises(UserError, match="has no checkpoint to go on from"):
            kept.restore(begin())
        kept.save(begin())
    with Checkpoints(tmp_path, {"seed": 1}) as kept:
        with pytest.raises(UserError, match="belongs to another run: seed 0, now 1"):
            kept.restore(begin())
