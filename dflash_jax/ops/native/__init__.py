"""The product of a few rows for CPUs: C++ that the machine's own compiler makes once, called by XLA.

XLA's matrix products pack a weight before they multiply by it, which for a few rows takes longer than the product.
"""

from __future__ import annotations

import ctypes
import functools

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.ops.native.build import CannotBuild, built_library

NAME = "native"  # of the backend
TARGET = "dflash_jax_product"
MOST_ROWS = 16  # of more, XLA's product is as fast (8 of SmolLM2's layers, 2 cores)


@functools.cache
def refusal() -> str | None:
    """Why there is no such product here; None: there is, from now on.  Compiles it, the first time on a machine."""
    try:
        library = ctypes.CDLL(str(built_library()))
    except CannotBuild as error:
        return str(error)
    except OSError as error:
        return f"what the compiler made cannot be loaded: {error}"
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(getattr(library, TARGET)), platform="cpu")
    return None


def product(y: Array, w: Array) -> Array:
    """float32 [M, N] = y [M, K] · w [N, K]ᵀ, both float32, where `refusal` has said None."""
    shape = jax.ShapeDtypeStruct((y.shape[0], w.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(TARGET, shape)(y, w)
