"""A draft to begin with."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftConfig
from dflash_jax.models.dflash import draft_specs
from dflash_jax.params import Params, ParamSpec, build, walk

_FAN_IN_AXES = {"attn.o": 2}  # of [N, D, H] both N and D are summed over; of all other matrices the first axis


def init_draft(config: DraftConfig, key: jax.Array) -> Params:
    """Random float32 parameters: matrices scaled by their fan-in, norms 1, convolutions and selector without effect.

    DFlash 2's convolutions begin as the identity and its successor codebook as zero, so that it begins as a v1 draft.
    """
    specs = draft_specs(config)
    keys = iter(jax.random.split(key, len(list(walk(specs)))))
    return build(specs, lambda path, spec: _first_value(path, spec, next(keys)))


def _first_value(path: str, spec: ParamSpec, key: jax.Array) -> jax.Array:
    if path.endswith("conv.base"):  # [2 sides, taps, H]: tap 0 passes its row on
        return jnp.zeros(spec.shape, jnp.float32).at[:, 0].set(1.0)
    if path.endswith("conv.kernel") or path == "selector.successor" or spec.init == "zeros":
        return jnp.zeros(spec.shape, jnp.float32)
    if spec.init == "ones":
        return jnp.ones(spec.shape, jnp.float32)
    if path == "selector.predecessor":
        return jax.random.normal(key, spec.shape, jnp.float32) / math.sqrt(spec.shape[1])
    axes = next((n for end, n in _FAN_IN_AXES.items() if path.endswith(end)), 1)
    return jax.random.normal(key, spec.shape, jnp.float32) / math.sqrt(math.prod(spec.shape[:axes]))
