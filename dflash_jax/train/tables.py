"""DFlash 2's codebooks [V, rank] under training: their gradients as products.

Left to itself XLA adds the gradients of looked-up rows one by one into the table, and waits wherever two rows of a step
name the same token: on an H200 that was two thirds of a step.
"""

from __future__ import annotations

import functools

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
    ones = jnp.ones((*ids.shape, 1), gradient.dtype)
    return _table_gradient(slices, table, ids[..., None], ones, gradient), _no_gradient(ids)


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
    return _table_gradient(slices, table, candidates, gradient, left), to_left, _no_gradient(candidates)


_pairs.defvjp(_pairs_forward, _pairs_backward)


def _table_gradient(slices: int, table: Array, ids: Array, weights: Array, vectors: Array) -> Array:
    """Σ over rows n and k of weights[n, k] · vectors[n], into row ids[n, k] of a gradient shaped as `table`.

    The weights of a slice of rows are spread over the vocabulary, where no two of a row meet; then it is one product.
    """

    def add(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        ids, weights, vectors = part
        spread = jnp.zeros((len(ids), len(table)), vectors.dtype)
        at = jnp.arange(len(ids), dtype=ids.dtype)[:, None]
        spread = spread.at[at, ids].set(weights.astype(vectors.dtype), unique_indices=True)
        exact = precision(vectors.dtype)
        found = jnp.einsum("nv,nr->vr", spread, vectors, precision=exact, preferred_element_type=jnp.float32)
        return total + found, None

    ids, weights, vectors = (x.reshape(slices, -1, x.shape[-1]) for x in (ids, weights, vectors))
    return jax.lax.scan(add, jnp.zeros(table.shape, jnp.float32), (ids, weights, vectors))[0].astype(table.dtype)


def _no_gradient(ids: Array) -> np.ndarray:
    return np.zeros(ids.shape, jax.dtypes.float0)
