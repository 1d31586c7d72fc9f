"""The head's product and its largest token of each row, without logits in memory.

A step takes a tile of the vocabulary and a tile of rows and keeps the (largest, where) of each row in VMEM; the head
streams through once for each tile of rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .memory import vmem_limit_bytes
from .tiles import head_tiles

LOWEST, HIGHEST = -(2**31), 2**31 - 1


def argmax_head(
    hidden: Array, head: Array, multiplier: float = 1.0, softcap: float | None = None, *, interpret: Any = False
) -> Array:
    """As the reference op: int32 [...] of hidden [..., H] and head [V, H].

    A softcap keeps the order, and so is left out: only logits that it would make equal can be told apart here.
    """
    del softcap
    v, h = head.shape
    x = hidden.reshape(-1, h)
    tiles = head_tiles(x.shape[0], v, h, x.dtype.itemsize)
    x = jnp.pad(x, ((0, tiles.rows * tiles.row_tiles - x.shape[0]), (0, 0)))
    keys, ids = _call(x, head, multiplier, tiles, interpret)
    best = ids[0] if tiles.lanes == 1 else jnp.where(keys[1] > keys[0], ids[1], ids[0])
    return best[: hidden.size // h, 0].reshape(hidden.shape[:-1])


def _call(x: Array, head: Array, multiplier: float, tiles: Any, interpret: Any) -> list[Array]:
    """(keys, ids) int32 [lanes, rows, 1]: the largest of each row in each lane's share of the vocabulary."""
    v, h = head.shape
    steps = tiles.steps
    last = -(-v // tiles.vocab) - 1  # a lane's steps past the end look at the last tile once more
    best = pl.BlockSpec((1, tiles.rows, 1), lambda lane, rows, step: (lane, rows, 0))
    shape = jax.ShapeDtypeStruct((tiles.lanes, x.shape[0], 1), jnp.int32)
    blocks = [(tiles.rows, h), (tiles.vocab, h)]
    beside = 6 * 4 * tiles.rows * tiles.vocab  # logits and what is made of them
    if x.dtype == jnp.float32:
        beside += 2 * 4 * h * (tiles.rows + tiles.vocab)  # exact products are made of pieces
    return pl.pallas_call(
        functools.partial(_step, multiplier=multiplier, vocab=v, steps=steps),
        grid=(tiles.lanes, tiles.row_tiles, steps),
        in_specs=[
            pl.BlockSpec((tiles.rows, h), lambda lane, rows, step: (rows, 0)),
            pl.BlockSpec((tiles.vocab, h), lambda lane, rows, step: (jnp.minimum(lane * steps + step, last), 0)),
        ],
        out_specs=[best, best],
        out_shape=[shape, shape],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes([], blocks, x.dtype, beside),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * x.shape[0] * v * h, transcendentals=0, bytes_accessed=tiles.row_tiles * head.nbytes + x.nbytes
        ),
        interpret=interpret,
        name="argmax_head",
    )(x, head)


def _step(x_ref, head_ref, key_ref, id_ref, *, multiplier: float, vocab: int, steps: int):
    """x [M, H], head [BV, H] → key, id [1, M, 1], over all steps of a lane."""
    step = pl.program_id(2)
    exact = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    dims = (((1,), (1,)), ((), ()))
    logits = jax.lax.dot_general(x_ref[...], head_ref[...], dims, precision=exact, preferred_element_type=jnp.float32)
    if multiplier != 1.0:
        logits = logits * multiplier
    first = (pl.program_id(0) * steps + step) * head_ref.shape[0]
    token = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    keys = jnp.where(token < vocab, _key(logits), LOWEST)
    best = jnp.max(keys, axis=1, keepdims=True)
    where = jnp.min(jnp.where(keys == best, token, HIGHEST), axis=1, keepdims=True)

    @pl.when(step == 0)
    def _():
        key_ref[0] = best
        id_ref[0] = where

    @pl.when(step > 0)
    def _():
        better = best > key_ref[0]  # of equals the first stays
        key_ref[0] = jnp.where(better, best, key_ref[0])
        id_ref[0] = jnp.where(better, where, id_ref[0])


def _key(x: Array) -> Array:
    """int32 in the order of the floats x; both zeros alike, NaN above all."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    ordered = bits ^ (jax.lax.shift_right_arithmetic(bits, 31) & HIGHEST)
    return jnp.where(x == x, ordered, HIGHEST)
