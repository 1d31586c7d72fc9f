"""Arithmetic that every op shares: where float32 is kept and how products are taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dflash_jax.ops import native


def precision(dtype: Any) -> jax.lax.Precision | None:
    """Float32 products keep all their bits; on GPU and TPU the default would round the inputs."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turned:
    """A weight that lies output first: array [N…, K], where it is declared [K, N…] (K: what a product sums over).

    XLA's CPU matrix product of a few rows with it takes half the time: 49 against 88 ms for 8 rows through SmolLM2's
    matrices, and as long for one row (2 cores, jax 0.10.2).  CPU's compiler copies any other order of memory first.
    native: a few rows are multiplied by `ops.native`, which is faster still.
    """

    array: Array
    native: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def size(self) -> int:
        return self.array.size


def dot(x: Array, w: Array | Turned, contract: Sequence[int] = (0,), out: Any = None) -> Array:
    """x [..., H] · w over x's last axis and w's `contract` axis; the result has type `out` (default x.dtype)."""
    dtype = x.dtype if out is None else out
    if isinstance(w, Turned):
        few = w.native and dtype == x.dtype == jnp.float32 and x.size <= native.MOST_ROWS * x.shape[-1]
        return _native_dot(x, w.array) if few else _turned_dot(x, w.array, dtype)
    dims = (((x.ndim - 1,), tuple(contract)), ((), ()))
    return jax.lax.dot_general(x, w, dims, precision=precision(x.dtype), preferred_element_type=dtype)


def _native_dot(x: Array, w: Array) -> Array:
    y = native.product(x.reshape(-1, x.shape[-1]), w.reshape(-1, w.shape[-1]))
    return y.reshape(*x.shape[:-1], *w.shape[:-1])


def _turned_dot(x: Array, w: Array, dtype: Any) -> Array:
    """w [N…, K] · xᵀ, turned back.  Without the barrier XLA would make the ordinary product of it again."""
    rows, dims = x.reshape(-1, x.shape[-1]), (((1,), (1,)), ((), ()))
    filled = jnp.pad(rows, ((0, _fast_rows(len(rows)) - len(rows)), (0, 0)))
    y = jax.lax.dot_general(
        w.reshape(-1, w.shape[-1]), filled, dims, precision=precision(x.dtype), preferred_element_type=dtype
    )
    return jax.lax.optimization_barrier(y)[:, : len(rows)].T.reshape(*x.shape[:-1], *w.shape[:-1])


def _fast_rows(rows: int) -> int:
    """As how many rows a turned product takes `rows` fastest: 8 for 5, 6 and 7, 16 for 9 … 15.

    12 against 14 ms and 14 against 19 for 8 of SmolLM2's layers (2 cores, jax 0.10.2).
    """
    return rows if rows <= 4 or rows > 16 else -(-rows // 8) * 8


def flat_inputs(w: Array | Turned, axes: int) -> Array | Turned:
    """w [K₁, …, N] with its first `axes` axes as one; a turned weight has them so already."""
    return w if isinstance(w, Turned) else w.reshape(-1, *w.shape[axes:])


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis: float32 inside, rounded to x.dtype before the weight."""
    f = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + eps)
    return (f * scale).astype(x.dtype) * align(weight, x)


def add_norm(x: Array, delta: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """(x + delta, its `rms_norm`), each [..., H]: the sum is rounded to x.dtype before it is normed."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def project(y: Array, w: Array | Turned) -> Array:
    """y·w, [..., N…] of y [..., K] and w [K, N…]."""
    return dot(y, w)


def gated_product(y: Array, gate_up: Array | Turned) -> Array:
    """silu(gate·y) ⊙ (up·y), [..., F] of y [..., H] and gate_up [H, 2, F]: both products are rounded to y.dtype."""
    return gated(dot(y, gate_up))


def gated(both: Array) -> Array:
    """silu(gate) ⊙ up, [..., F] of both [..., 2, F]."""
    return jax.nn.silu(both[..., 0, :]) * both[..., 1, :]


def align(w: Array | np.ndarray, x: Array) -> Any:
    """w [trailing axes of x] with leading axes of size 1: broadcasting over x on purpose (JAX can refuse the rest)."""
    return w.reshape((1,) * (x.ndim - w.ndim) + w.shape)


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the two halves of the last axis of x [..., heads, D] by float32 tables [..., D/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
