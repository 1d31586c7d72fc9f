"""Kernels of a few rows for CPUs: C++ that the machine's own compiler makes once, called by XLA.

XLA's matrix products pack a weight before they multiply by it, which for a few rows takes longer than the product; of
attention over pages it makes many small programs.
"""

from __future__ import annotations

import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dflash_jax.ops.native.build import CannotBuild, built_library

NAME = "native"  # of the backend
TARGETS = PRODUCT, ADD_NORM, ATTENTION = "dflash_jax_product", "dflash_jax_add_norm", "dflash_jax_attention"
OPS = ("block_attention", "prefill_attention", "add_norm")  # its kernels; the product is `dot`'s, by weight
MOST_ROWS = 16  # of more, XLA's product is as fast (8 of SmolLM2's layers, 2 cores)


@functools.cache
def refusal() -> str | None:
    """Why there are none here; None: there are, from now on.  Compiles them, the first time on a machine."""
    try:
        library = ctypes.CDLL(str(built_library()))
    except CannotBuild as error:
        return str(error)
    except OSError as error:
        return f"what the compiler made cannot be loaded: {error}"
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return None


def product(y: Array, w: Array) -> Array:
    """float32 [M, N] = y [M, K] · w [N, K]ᵀ, both float32, where `refusal` has said None."""
    shape = jax.ShapeDtypeStruct((y.shape[0], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(PRODUCT, shape)(y, w)


def add_norm(x: Array, delta: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """As the reference op, all float32."""
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    total, normed = jax.ffi.ffi_call(ADD_NORM, (shape, shape))(x, delta, weight, eps=np.float32(eps))
    return total, normed


def block_attention(
    q: Array, kv: Array, pool: Array, page_table: Array, lengths: Array, *, causal: bool, window: int | None = None
) -> Array:
    """As the reference op, all float32."""
    call = jax.ffi.ffi_call(ATTENTION, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(q, kv, pool, page_table, lengths, causal=bool(causal), window=np.int64(window or 0))


prefill_attention = block_attention  # of a chunk of rows as of a block's
