"""The selector's codebooks: scores and gradients by their definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models import dflash
from dflash_jax.train.tables import pair_scores

V, R, K, N = 19, 5, 4, 12


def inputs(seed: int = 0):
    a, s, w, c = jax.random.split(jax.random.key(seed), 4)
    table = {"predecessor": jax.random.normal(a, (V, R)), "successor": jax.random.normal(s, (V, R))}
    rng = np.random.default_rng(seed)
    candidates = np.stack([rng.permutation(V)[:K] for _ in range(N)]).reshape(3, 4, K)
    previous = rng.integers(0, 3, (3, 4))  # few, so that rows meet
    projected = jax.random.normal(w, (3, 4, R))
    ids = jnp.array(previous, jnp.int32), jnp.array(candidates, jnp.int32)
    return table, projected, *ids, jax.random.normal(c, (3, 4, K))


@pytest.mark.parametrize("slices", [1, 3, 12])
def test_scores_and_gradients_are_those_of_plain_lookups(slices):
    table, projected, previous, candidates, weights = inputs()

    def plain(table, projected):
        return (weights * dflash.pair_scores(table, projected, previous, candidates)).sum()

    def ours(table, projected):
        tables = table["predecessor"], table["successor"]
        return (weights * pair_scores(slices, *tables, projected, previous, candidates)).sum()

    found, wanted = (jax.value_and_grad(f, (0, 1))(table, projected) for f in (ours, plain))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, wanted)
    assert np.abs(found[1][0]["successor"]).max() > 0.1 and np.abs(found[1][0]["predecessor"]).max() > 0.1


def test_the_compiled_gradient_adds_nothing_row_by_row():
    """A scatter that adds is what the products stand for; of the two codebooks one needs none at all."""
    table, projected, previous, candidates, weights = inputs()

    def loss(table, projected):
        tables = table["predecessor"], table["successor"]
        return (weights * pair_scores(1, *tables, projected, previous, candidates)).sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(table, projected).as_text()
    assert text.count('"stablehlo.scatter"(') == text.count("unique_indices = true") == 1
