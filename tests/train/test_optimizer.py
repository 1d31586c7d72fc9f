"""What the optimisers do to a draft's parameters."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from optax import contrib

from dflash_jax.errors import UserError
from dflash_jax.train.init import init_draft
from dflash_jax.train.optimizer import global_norm, make_optimizer, schedule
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


def several_layers(**changes):
    """A draft of three layers, so that there are matrices of one shape, among them tall and wide ones."""
    config = train_config(V2, **changes)
    layers = {"num_layers": 3, "windows": config.draft.windows[:1] * 3, "causal": config.draft.causal[:1] * 3}
    return dataclasses.replace(config, draft=dataclasses.replace(config.draft, **layers))


def normals(params, seed: int, size: float):
    return jax.tree.map(lambda x: size * jax.random.normal(jax.random.key(x.size + seed), x.shape), params)


def theirs(config):
    """The same optimiser, of optax's parts alone."""
    name = lambda path: path[-1].key if hasattr(path[-1], "key") else ""  # noqa: E731
    axes = {
        "qkv": ((0,), (1, 2, 3)), "o": ((0, 1), (2,)), "gate_up": ((0,), (2,)), "down": (0, 1), "fc": (0, 1),
        "hidden": (0, 1),
    }  # fmt: skip
    numbers = lambda params: jax.tree_util.tree_map_with_path(  # noqa: E731
        lambda path, _: contrib.MuonDimensionNumbers(*axes[name(path)]) if name(path) in axes else None, params
    )
    (b1, b2), decay = config.betas, config.weight_decay
    muon = contrib.muon(schedule(config), weight_decay=decay, adam_b1=b1, adam_b2=b2, adam_weight_decay=0.0,
                        consistent_rms=0.2, muon_weight_dimension_numbers=numbers)  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(config.clip), muon)


def steps_of(chain, params, sizes):
    """Parameters after a step for each of `sizes`, of gradients that large, and all that the optimiser keeps."""
    with jax.numpy_dtype_promotion("standard"):
        state = chain.init(params)
        for seed, size in enumerate(sizes):
            found, state = jax.jit(chain.update)(normals(params, seed, size), state, params)
            params = optax.apply_updates(params, found)
    return params, jax.tree.leaves(state)


def test_muon_is_optaxs():
    """Step by step, clipped and not, with equal shapes stacked; its state is kept as optax keeps it."""
    config = several_layers(optimizer="muon", weight_decay=0.1, warmup=0.0, steps=100)
    params = init_draft(config.draft, jax.random.key(0))
    own, state = steps_of(make_optimizer(config), params, (1.0, 1e-4, 1e-3))
    expected, kept = steps_of(theirs(config), params, (1.0, 1e-4, 1e-3))
    assert global_norm(normals(params, 1, 1e-4)) < config.clip < global_norm(normals(params, 0, 1.0))
    moved = dict(walk_arrays(jax.tree.map(np.subtract, expected, params)))
    for path, found in walk_arrays(jax.tree.map(np.subtract, own, params)):
        np.testing.assert_allclose(found, moved[path], rtol=1e-3, atol=1e-3 * np.abs(moved[path]).max(), err_msg=path)
    assert [x.shape for x in state] == [x.shape for x in kept]
    for a, b in zip(state, kept, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_the_global_norm():
    config = several_layers()
    tree = normals(init_draft(config.draft, jax.random.key(0)), 0, 0.1)
    np.testing.assert_allclose(global_norm(tree), optax.tree.norm(tree), rtol=1e-6)


def test_muon_takes_equal_shapes_together():
    """Three layers' Newton-Schulz iterations are as many products as one layer's."""

    def products(config) -> int:
        params, chain = init_draft(config.draft, jax.random.key(0)), make_optimizer(config)
        with jax.numpy_dtype_promotion("standard"):
            return str(jax.make_jaxpr(chain.update)(params, chain.init(params), params)).count("dot_general")

    assert products(several_layers(optimizer="muon")) == products(train_config(V2, optimizer="muon"))


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
