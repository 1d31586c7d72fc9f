"""How weights lie where the CPU multiplies by them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax.ops import Kernels, Turned, native
from dflash_jax.params import Params

# Axes that a product sums over, of the weights that the steps multiply a few rows by.
SUMMED = {"qkv": 1, "o": 2, "gate_up": 1, "down": 1, "fc": 1, "kernel": 1, "hidden": 1}


def lay_out(params: Params, mesh: Mesh, dtype: Any) -> Params:
    """`params` as `mesh` multiplies by them fastest: turned for float32 on one CPU, which alone was measured."""
    one_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    return turn(params) if one_cpu and dtype == jnp.float32 else params


def served_by(tree: Any, kernels: Kernels) -> Any:
    """The same weights; turned ones as the backend multiplies by them."""

    def served(leaf: Any) -> Any:
        return dataclasses.replace(leaf, native=kernels.backend == native.NAME) if isinstance(leaf, Turned) else leaf

    return jax.tree.map(served, tree, is_leaf=lambda leaf: isinstance(leaf, Turned))


def turn(params: Params) -> Params:
    """`params` of a target or draft, changed in place one weight at a time: their products turned, the rest as it is.

    A target's head [V, H] lies right already; the embedding table serves as it without a copy where they are tied.
    """
    if isinstance(params, tuple):
        return tuple(turn(child) for child in params)
    for name, value in params.items():
        if name in SUMMED:
            params[name] = _turned(value, SUMMED[name])
        elif isinstance(value, dict | tuple):
            params[name] = turn(value)
    if "embed" in params:
        params["head"] = Turned(params.get("head", params["embed"]))
    return params


def _turned(weight: jax.Array, axes: int) -> Turned:
    outputs = weight.shape[axes:]
    flat = weight.reshape(math.prod(weight.shape[:axes]), -1)
    return Turned(jax.block_until_ready(jnp.asarray(flat.T)).reshape(*outputs, -1))
