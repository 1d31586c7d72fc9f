"""The likeliest tokens, found by groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import Kernels, top_tokens
from dflash_jax.ops.reference.head import GROUP

rng = np.random.default_rng(0)
SIZE = 40 * GROUP + 13
CASES = {
    "plain": rng.standard_normal((2, 3, SIZE)),
    "many equal": rng.integers(0, 4, (3, SIZE)),
    "all equal": np.zeros((1, SIZE)),
    "few finite": np.where(np.arange(SIZE) == SIZE - 1, 1.0, -np.inf)[None],
    "nothing finite": np.full((2, SIZE), -np.inf),
    "a NaN": np.where(np.arange(SIZE) == 777, np.nan, rng.standard_normal((1, SIZE))),
    "few tokens": rng.standard_normal((2, 97)),
}


@pytest.mark.parametrize("k", [1, 2, 8, 30])
@pytest.mark.parametrize("name", CASES)
def test_as_a_sort_would_find_them(kernels: Kernels, name, k):
    x = jnp.asarray(CASES[name], jnp.float32)
    order = np.argsort(-np.where(np.isnan(x), np.inf, x), axis=-1, kind="stable")[..., :k]  # XLA's own differs by chip
    values, ids = jax.jit(kernels.top_tokens, static_argnums=1)(x, k)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(x), order, axis=-1))


def test_no_whole_vocabulary_is_sorted():
    """`lax.top_k` alone sorts all of it where the logits come from a product."""

    def best(x, w):
        return top_tokens(x @ w, 8)

    text = jax.jit(best).lower(jnp.zeros((7, 16)), jnp.zeros((16, SIZE))).compile().as_text() or ""
    sorted_shapes = [line for line in text.splitlines() if " sort(" in line or "TopK" in line]
    assert not [line for line in sorted_shapes if f",{SIZE}]" in line]


def test_no_row_of_maxima_is_so_short_that_a_gpu_would_sort_it():
    """XLA for GPU takes the 16 largest of a row without sorting it from 1024 on."""
    found = jax.make_jaxpr(lambda x: top_tokens(x, 16))(jnp.zeros((7, SIZE)))
    rows = [eqn.invars[0].aval.shape[-1] for eqn in found.eqns if eqn.primitive.name == "top_k"]
    assert len(rows) == 2 and min(rows) >= 1024


@pytest.mark.xfail(jax.default_backend() == "gpu", reason="XLA for GPU sorts rows as short as these", strict=True)
def test_groups_are_not_sorted_where_each_row_is_used_on_its_own():
    """As a selector walks from row to row."""

    def walk(x, table):
        (best, at), score = top_tokens(x, 8), 0.0
        for k in range(x.shape[1]):
            score = (best[:, k] + table[at[:, k]] * score).max()
        return score

    text = jax.jit(walk).lower(jnp.zeros((1, 7, SIZE)), jnp.zeros(SIZE)).compile().as_text() or ""
    assert not [line for line in text.splitlines() if " sort(" in line and f",{8 * GROUP}]" in line]
