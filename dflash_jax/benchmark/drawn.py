"""Random arrays for timed steps, which on zeros, or over pages one after another, would be faster than served ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.params import normal


def shuffled_pages(requests: int, width: int) -> Array:
    """A page table int32 [requests, width] of pages 1 … requests · width in no order, as serving leaves them."""
    pages = jax.random.permutation(jax.random.key(4), requests * width)
    return (pages + 1).astype(jnp.int32).reshape(requests, width)


def _normal(key: Array, old: Array) -> Array:
    return normal(key, old.shape, old.dtype)


def _normal_in_place(key: Array, old: Array) -> Array:
    """Zeros take less power, and a GPU at its limit is faster on them."""
    return jax.jit(_normal, out_shardings=old.sharding, donate_argnums=1, keep_unused=True)(key, old)


def redrawn(arrays: Any, draw: Callable[[Array, Array], Array] = _normal_in_place) -> Any:
    """A tree of arrays with draw(key, array) in the place of each; whole numbers stay as they are."""
    leaves, tree = jax.tree.flatten(arrays)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    drawn = [draw(key, x) if jnp.issubdtype(x.dtype, jnp.floating) else x
             for key, x in zip(keys, leaves, strict=True)]  # fmt: skip
    return jax.tree.unflatten(tree, drawn)
