"""Where a kernel's arrays lie, and how much VMEM it asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from . import Declined
from .tiles import LANES, round_up, sublanes

LEAST_BYTES, MOST_BYTES = 16 << 20, 60 << 20  # XLA's default for a kernel; of the 64 MiB of the smallest chip (7x)
SCALAR_BYTES = 960 << 10  # of the 1 MiB of SMEM: the rest is the compiler's
DTYPES = ("bfloat16", "float32")


def check(pool: Array, scalars: int, interpret: Any) -> None:
    """Declined where the chip cannot hold `scalars` numbers of page tables beside its scalar unit, or not the pool's
    type."""
    if pool.dtype.name not in DTYPES:
        raise Declined(f"keys and values are {pool.dtype.name}, and there are kernels for {' and '.join(DTYPES)}")
    check_scalars(scalars, interpret)


def check_scalars(scalars: int, interpret: Any) -> None:
    """Declined where `scalars` numbers of page tables do not fit beside the scalar unit."""
    if not interpret and 4 * scalars > SCALAR_BYTES:
        raise Declined(
            f"page tables of {4 * scalars} bytes exceed the {SCALAR_BYTES} that fit beside the scalar unit: fewer"
            " requests, a smaller max_model_len or larger pages make them smaller"
        )


def in_hbm(pool: Array, interpret: Any) -> Array:
    """`pool`, to be read and written where it lies: XLA copies whole pools into VMEM, where they fit, for a few pages.

    Results that take over its memory stay there with it.
    """
    return pool if interpret else pltpu.with_memory_space_constraint(pool, pltpu.HBM)


def vmem_limit_bytes(buffers: Sequence[Any], blocks: Sequence[tuple[int, ...]], dtype: Any, beside: int = 0) -> int:
    """What a kernel needs: its buffers, two of each block of its operands (of type `dtype`), `beside`, and some more.

    XLA keeps the rest of VMEM for the weights that come next, so it is not simply all.
    """
    needed = sum(_padded(buffer.shape, buffer.dtype) for buffer in buffers)
    needed += 2 * sum(_padded(block, dtype) for block in blocks) + beside
    if needed > MOST_BYTES:
        raise Declined(f"its buffers need {needed} bytes of the {MOST_BYTES} of VMEM: smaller chunks need less")
    return min(max(needed * 5 // 4 + (2 << 20), LEAST_BYTES), MOST_BYTES)


def _padded(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array in whole tiles."""
    size = jnp.dtype(dtype).itemsize
    return math.prod(shape[:-2]) * round_up(shape[-2], sublanes(size)) * round_up(shape[-1], LANES) * size
