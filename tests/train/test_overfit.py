"""A draft that has learnt a few texts by heart drafts whole blocks of them, as decoding counts it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from models import goldens
from steps.lab import Lab, Request, Run, drafter_of

from dflash_jax.config import read_draft
from dflash_jax.drafters import DFlashDrafter, Weights
from dflash_jax.models.dflash import with_injection
from dflash_jax.train.blocks import Batch
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.export import draft_json, export_draft
from dflash_jax.train.init import init_draft
from dflash_jax.train.loss import LossConfig
from dflash_jax.train.step import data_mesh, init_state
from train.lab import trainer_of

NAME, PROMPT, NEW, BLOCK = "x-v2-one-layer", 6, 48, 8
V2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 4}


def new_draft(version: int) -> dict[str, Any]:
    """config.json of a draft of one layer for the pair's target."""
    target = goldens.pair(NAME).target
    return draft_json(
        target, version=version, layers=1, block_size=BLOCK, mask_token_id=target.vocab_size - 1, taps=[1, 4],
        heads=4, kv_heads=2, head_dim=16, intermediate_size=64, **(V2 if version == 2 else {}),
    )  # fmt: skip


def lab_of(config: Any, weights: Weights) -> Lab:
    return Lab(config, weights, bucket=4, chunk=16, slots=4, width=5, light=True)


def decoded(lab: Lab, prompts: np.ndarray) -> list[Request]:
    return Run(lab, [Request(i, p.tolist(), PROMPT + NEW) for i, p in enumerate(prompts)]).prefill().decode().requests


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_a_tiny_pair_overfits_to_whole_blocks(version: int, tmp_path):
    pair, (steps, weights) = goldens.pair(NAME), drafter_of(NAME)
    prompts = np.random.default_rng(3).integers(0, pair.target.vocab_size, (4, PROMPT))
    texts = [r.tokens for r in decoded(lab_of(steps, weights), prompts)]
    raw = new_draft(version)
    draft = read_draft("config.json", raw, pair.target)
    config = TrainConfig(
        pair.target, draft, 150, LossConfig(slice_rows=512), anchors=16, learning_rate=1e-2, dtype="float32"
    )
    mesh = data_mesh(jax.devices()[:1])
    trainer = trainer_of(config, pair.target_params, mesh)
    state, measured = init_state(config, init_draft(draft, jax.random.key(0)), mesh), {}
    tokens = np.concatenate([prompts, texts], axis=1).astype(np.int32)[None]
    batch = Batch(tokens, np.full((1, 4), PROMPT, np.int32), np.full((1, 4), PROMPT + NEW, np.int32))
    for _ in range(config.steps):
        state, measured = trainer.step(state, batch)
    params = jax.device_get(state.params)
    export_draft(tmp_path / "draft", raw, pair.target, params, "float32")
    own = dataclasses.replace(steps, drafter=DFlashDrafter(draft))
    again = decoded(lab_of(own, Weights(weights.target, with_injection(jax.device_put(params), draft))), prompts)
    assert [r.tokens for r in again] == texts
    whole = np.concatenate([r.accepted[:-1] for r in again])  # the last round is cut by the limit
    assert whole.mean() > 0.9 * BLOCK
    assert measured["loss"] < 0.3 and measured["accept_length"] > 0.9 * BLOCK
