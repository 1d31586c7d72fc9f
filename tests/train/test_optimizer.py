"""What the optimisers do to a draft's parameters."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dflash_jax.errors import UserError
from dflash_jax.train.init import init_draft
from dflash_jax.train.optimizer import make_optimizer
from train.lab import train_config

V2 = "llama-v2-window"


def updates(optimizer: str):
    """The second step's updates by path, at a constant learning rate of 1e-3."""
    config = train_config(V2, optimizer=optimizer, warmup=0.0, weight_decay=0.0, steps=10**6, learning_rate=1e-3)
    params = init_draft(config.draft, jax.random.key(0))
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
    chain = make_optimizer(config)
    with jax.numpy_dtype_promotion("standard"):
        state = chain.init(params)
        for _ in range(2):
            found, state = jax.jit(chain.update)(gradients, state, params)
    return dict(walk_arrays(found))


def walk_arrays(tree, prefix=""):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in items:
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(child, dict | tuple | list):
            yield from walk_arrays(child, path)
        else:
            yield path, np.asarray(child)


def test_muon_orthogonalises_the_matrices_and_leaves_the_rest_to_adam():
    muon, adam = updates("muon"), updates("adamw")
    assert muon.keys() == adam.keys()
    sizes = {path: np.abs(update) for path, update in muon.items()}  # Adam's are all alike for gradients that repeat
    uneven = {path.rsplit(".", 1)[-1] for path, size in sizes.items() if size.max() > 1.5 * size.min()}
    assert uneven == {"qkv", "o", "gate_up", "down", "fc", "hidden"}
    singular = np.linalg.svd(muon["layers.0.mlp.down"] / 1e-3, compute_uv=False)
    assert singular.min() > 0.3 * singular.max()  # far from it for random gradients themselves


def test_muon_moves_as_far_as_adam_would():
    muon = updates("muon")
    for path in ("layers.0.attn.qkv", "layers.0.attn.o", "layers.0.mlp.gate_up", "fc"):
        assert 0.1e-3 < np.sqrt((muon[path] ** 2).mean()) < 0.3e-3, path


def test_an_unknown_optimizer():
    with pytest.raises(UserError, match="optimizer 'sgd' is not one of adamw, muon"):
        train_config(V2, optimizer="sgd")
