"""DFlash 2's codebooks [V, rank] under training: their gradients as products.

Left to itself XLA adds the gradients of looked-up rows one by one into the table, and waits wherever two rows of a step
name the same token: on an H200 that was two thirds of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dflash_jax.ops.reference.numerics import precision


def pair_scores(
    slices: int, predecessor: Array, successor: Array, projected: Array, previous: Array, candidates: Array
) -> Array:
    """As `models.dflash.pair_scores`, float32 [..., K]; its table gradients take 1/`slices` of the rows at once."""
    looked_up: Array = _rows(slices, predecessor, previous)  # type: ignore[assignment]
    left = looked_up * projected
    return _pairs(slices, successor, left, candidates)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(slices: int, table: Array, ids: Array) -> Array:
    """table[ids] [..., rank]."""
    return table[ids]


def _rows_backward(slices: int, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, np.ndarray]:
    table, ids = kept
    return _table_gradient(slices, table, _ones, gradient, ids), _no_gradient(ids)


_rows.defvjp(lambda slices, table, ids: (table[ids], (table, ids)), _rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pairs(slices: int, table: Array, left: Array, candidates: Array) -> Array:
    """⟨left, table[b]⟩ float32 [..., K] of left [..., rank] and candidates int32 [..., K], all different in a row."""
    right = table[candidates].astype(jnp.float32)
    return (left[..., None, :].astype(jnp.float32) * right).sum(axis=-1)


def _pairs_forward(slices: int, table: Array, left: Array, candidates: Array) -> tuple[Array, tuple[Array, ...]]:
    return _pairs(slices, table, left, candidates), (table, left, candidates)


def _pairs_backward(slices: int, kept: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, np.ndarray]:
    table, left, candidates = kept
    right = table[candidates].astype(jnp.float32)
    to_left = (gradient[..., None] * right).sum(axis=-2).astype(left.dtype)
    return _table_gradient(slices, table, _spread, left, candidates, gradient), to_left, _no_gradient(candidates)


_pairs.defvjp(_pairs_forward, _pairs_backward)


def _table_gradient(
    slices: int, table: Array, over_vocabulary: Callable[..., Array], vectors: Array, *named: Array
) -> Array:
    """Σ over rows n of `over_vocabulary(V, dtype, *named)`[n, v] · vectors[n], into row v of a gradient like `table`.

    A slice of rows at a time is laid over the vocabulary, where no two of a row meet; then it is one product.
    """

    def add(total: Array, part: tuple[Array, ...]) -> tuple[Array, None]:
        vectors, *named = part
        weights, exact = over_vocabulary(len(table), vectors.dtype, *named), precision(vectors.dtype)
        found = jnp.einsum("nv,nr->vr", weights, vectors, precision=exact, preferred_element_type=jnp.float32)
        return total + found, None

    rows, last = vectors.ndim - 1, vectors.shape[-1:]
    parts = vectors.reshape(slices, -1, *last), *(x.reshape(slices, -1, *x.shape[rows:]) for x in named)
    return jax.lax.scan(add, jnp.zeros(table.shape, jnp.float32), parts)[0].astype(table.dtype)


def _ones(vocab: int, dtype: jnp.dtype, ids: Array) -> Array:
    """[N, V], 1 at ids[n].  A comparison, which XLA on a GPU can make part of the product, and then never stores."""
    return (ids[:, None] == jnp.arange(vocab, dtype=ids.dtype)[None]).astype(dtype)


def _spread(vocab: int, dtype: jnp.dtype, ids: Array, weights: Array) -> Array:
    """[N, V], weights[n, k] at ids[n, k]."""
    at = jnp.arange(len(ids), dtype=ids.dtype)[:, None]
    return jnp.zeros((len(ids), vocab), dtype).at[at, ids].set(weights.astype(dtype), unique_indices=True)


def _no_gradient(ids: Array) -> np.ndarray:
    return np.zeros(ids.shape, jax.dtypes.float0)
