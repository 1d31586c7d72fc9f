"""Attention over dense contexts, forth and back, by its definition."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.train.dense import dense_attention

S, A, B, G, R, D, T = 2, 3, 4, 2, 3, 8, 6


def normal(key: int, *shape: int, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(key), shape).astype(dtype)


def inputs(dtype=jnp.float32):
    """q, kv and context of S·A blocks, and how many context rows each sees: from none to all."""
    lengths = jnp.asarray([0, 3, 6, 1, 5, 2], jnp.int32)
    shapes = (S * A, B, G * R, D), (S * A, B, 2, G, D), (S, T, 2, G, D)
    return tuple(normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)), lengths


def seen_of(lengths, causal: bool, window: int | None) -> np.ndarray:
    """bool [S·A, B, T + B]: what row i of a block sees of the context and of the block."""
    i, j, t = np.arange(B)[:, None], np.arange(B)[None], np.arange(T)
    far = window or T + B
    own = (np.abs(i - j) < far) & ((j <= i) | (not causal))
    at = np.asarray(lengths)[:, None, None]
    before = (t < at) & (at + i - t < far)
    return np.concatenate([before, np.broadcast_to(own, (S * A, B, B))], axis=-1)


def by_definition(seen, q, kv, context=None):
    """One softmax over all that a row sees."""
    rows = kv if context is None else jnp.concatenate([jnp.repeat(context, A, axis=0), kv], axis=1)
    keys, values = jnp.moveaxis(jnp.repeat(rows, R, axis=3), 2, 0)  # [S·A, T + B, N, D] each
    scores = jnp.einsum("xind,xjnd->xnij", q, keys) * D**-0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None, :, -rows.shape[1] :], scores, -jnp.inf), axis=-1)
    return jnp.einsum("xnij,xjnd->xind", weights, values)


@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, 3), (False, 2)])
@pytest.mark.parametrize("with_context", [True, False])
def test_values_and_gradients(with_context, causal, window):
    (q, kv, context), lengths = inputs()
    arrays = (q, kv, context) if with_context else (q, kv)
    push = normal(9, *q.shape)

    def of(function):
        return jax.jit(jax.value_and_grad(lambda *x: (push * function(*x)).sum(), tuple(range(len(arrays)))))(*arrays)

    found = of(lambda q, kv, context=None: dense_attention(q, kv, context, lengths, causal, window))
    wanted = of(functools.partial(by_definition, seen_of(lengths, causal, window)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, wanted)


def test_products_in_bfloat16_are_so_for_gradients_too():
    """On a GPU float32 products of what bfloat16 ones gave take twice the memory and half the speed."""
    arrays, lengths = inputs(jnp.bfloat16)

    def loss(*arrays):
        return dense_attention(*arrays, lengths, False, None).astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) >= 10
    assert all("f32" not in line.split(" : ")[-1].split("->")[0] for line in products)
