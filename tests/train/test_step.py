"""The optimiser step: what it sums over, what it leaves alone, and that it learns."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import goldens

from dflash_jax.errors import UserError
from dflash_jax.models.dflash import draft_specs
from dflash_jax.params import walk
from dflash_jax.train.blocks import Batch, sample_anchors
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.init import init_draft
from dflash_jax.train.loss import LossConfig
from dflash_jax.train.optimizer import make_optimizer, schedule
from dflash_jax.train.step import data_mesh, init_state, part_sums
from train.lab import batches, train_config, trainer_of

V1, V2 = "qwen3-v1", "llama-v2-window"
close = functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)


def run(config: TrainConfig, data: list[Batch], devices: int = 1, steps: int = 2):
    """Losses, and parameters after `steps` steps from the same start."""
    mesh = data_mesh(jax.devices()[:devices])
    trainer = trainer_of(config, goldens.pair(V1).target_params, mesh)
    state = init_state(config, init_draft(config.draft, jax.random.key(1)), mesh)
    found = []
    for batch in data[:steps]:
        state, measured = trainer.step(state, batch)
        found.append(jax.device_get(measured))
    return found, jax.device_get(state)


def test_devices_do_not_matter():
    config = train_config(V1)
    data = batches(config.target.vocab_size)
    (one, single), (two, split) = run(config, data), run(config, data, devices=2)
    jax.tree.map(close, one, two)
    jax.tree.map(functools.partial(close, atol=1e-4), single.params, split.params)
    assert int(single.step) == 2


@pytest.mark.parametrize("pair", [V1, V2])
def test_no_device_gathers_the_logits_of_others(pair):
    """Arrays that one device gets from the others are far smaller than logits: [.., V]."""
    config = train_config(pair)
    vocab = config.target.vocab_size
    mesh = data_mesh(jax.devices()[:2])
    trainer = trainer_of(config, goldens.pair(pair).target_params, mesh)
    state = init_state(config, init_draft(config.draft, jax.random.key(1)), mesh)
    text = trainer.compiled_text(state, batches(vocab)[0])
    gathered = re.findall(r"= \S*\[([\d,]*)\]\S* all-gather", text)
    assert "all-reduce" in text
    assert not [shape for shape in gathered if shape.endswith(f",{vocab}")]


def test_a_step_in_parts_is_one_mean_over_all_of_it():
    """Σ w·CE / Σ w of both parts together, not the mean of their means; and its gradient."""
    config = train_config(V1, warmup=0.0, clip=1e9)
    batch = batches(config.target.vocab_size, parts=2)[0]
    batch = dataclasses.replace(batch, length=np.where(np.arange(2)[:, None] == 0, batch.start + 3, batch.length))
    (found,), _ = run(config, [batch], steps=1)
    params = init_draft(config.draft, jax.random.key(1))
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    parts = [jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), batch) for i in range(2)]
    target = goldens.pair(V1).target_params

    def mean(params):
        keys = [jax.random.fold_in(key, i) for i in range(2)]
        at = [sample_anchors(key, part, config.anchors) for key, part in zip(keys, parts, strict=True)]
        each = [part_sums(config, params, target, part, anchors) for part, anchors in zip(parts, at, strict=True)]
        return sum(total for total, _ in each) / sum(sums.weight for _, sums in each)

    loss, gradient = goldens.jit(jax.value_and_grad(mean))(params)
    close(found["loss"], loss)
    close(found["gradient_norm"], np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(gradient))), rtol=1e-4)


def test_masters_stay_float32_under_bfloat16_compute():
    config = train_config(V1, dtype="bfloat16")
    target = jax.tree.map(lambda x: x.astype(jnp.bfloat16), goldens.pair(V1).target_params)
    mesh = data_mesh(jax.devices()[:1])
    state = init_state(config, init_draft(config.draft, jax.random.key(1)), mesh)
    before = jax.device_get(state.params)
    state, measured = trainer_of(config, target, mesh).step(state, batches(config.target.vocab_size)[0])
    state, measured = trainer_of(config, target, mesh).step(state, batches(config.target.vocab_size)[1])
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
    exact, _ = run(train_config(V1), batches(config.target.vocab_size))
    close(measured["loss"], exact[1]["loss"], rtol=0.05)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, jax.device_get(state.params))
    assert max(jax.tree.leaves(moved)) > 0


def test_too_few_sequences_for_the_devices():
    config = train_config(V1)
    with pytest.raises(UserError, match="3 sequences cannot be split evenly over 2 devices"):
        run(config, batches(config.target.vocab_size, sequences=3), devices=2)


def test_learning_rate_and_decay():
    config = train_config(V1, steps=100, learning_rate=1.0)
    rate = schedule(config)
    close(np.array([rate(at) for at in (0, 2, 4, 52, 100)]), [0, 0.5, 1, 0.5, 0], atol=1e-6)
    params = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    config = train_config(V1, warmup=0.0, learning_rate=1.0, weight_decay=0.5, steps=100)
    chain = make_optimizer(config)
    state, nothing = chain.init(params), jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        _, state = chain.update(nothing, state, params)
        updates: Any = chain.update(nothing, state, params)[0]
    assert np.all(np.asarray(updates["matrix"]) < -0.4) and not np.any(np.asarray(updates["norm"]))


@pytest.mark.parametrize("name", [V1, V2])
def test_a_first_draft(name: str):
    """Rows of the residual stay of order one; DFlash 2's own parts begin without effect."""
    config = goldens.pair(name).draft
    params = init_draft(config, jax.random.key(0))
    shapes = {path: spec.shape for path, spec in walk(draft_specs(config))}
    assert [x.shape for x in jax.tree.leaves(params)] == [
        x.shape for x in jax.tree.leaves(goldens.jit(lambda: init_draft(config, jax.random.key(1)))())
    ]
    assert len(shapes) == len(jax.tree.leaves(params))
    out = np.asarray(params["layers"][0]["attn"]["o"]).reshape(-1, config.hidden_size)
    close(out.std(), out.shape[0] ** -0.5, rtol=0.1)
    if config.conv:
        base = np.asarray(params["layers"][0]["attn_conv"]["base"])
        assert (base[:, 0] == 1).all() and not base[:, 1:].any()
        assert not np.any(params["selector"]["successor"])


def test_the_state_is_donated():
    config = train_config(V1)
    mesh = data_mesh(jax.devices()[:1])
    state = init_state(config, init_draft(config.draft, jax.random.key(1)), mesh)
    trainer_of(config, goldens.pair(V1).target_params, mesh).step(state, batches(config.target.vocab_size)[0])
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_dpace_is_a_weighting_of_the_same_step():
    config = train_config(V1)
    data = batches(config.target.vocab_size)
    (decay,), _ = run(config, data, steps=1)
    (dpace,), _ = run(dataclasses.replace(config, loss=LossConfig("dpace", slice_rows=1)), data, steps=1)
    close(decay["accuracy"], dpace["accuracy"])
    assert abs(decay["loss"] - dpace["loss"]) > 1e-4


def test_each_step_draws_its_own_anchors():
    """With nothing learnt between, the same sequences measure differently; answers are longer than the anchors."""
    config = train_config(V1, learning_rate=0.0)
    batch = batches(config.target.vocab_size)[0]
    (first, second), _ = run(config, [batch, batch])
    assert first["loss"] != second["loss"]
    (again, _), _ = run(config, [batch, batch])
    assert again["loss"] == first["loss"]
