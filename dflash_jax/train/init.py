"""A draft to begin with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import UserError
from dflash_jax.models.dflash import draft_specs
from dflash_jax.params import Params, ParamSpec, build, walk
from dflash_jax.sharding import make_mesh
from dflash_jax.weights import load_params, open_draft

_FAN_IN_AXES = {"attn.o": 2}  # of [N, D, H] both N and D are summed over; of all other matrices the first axis


def init_draft(config: DraftConfig, key: jax.Array) -> Params:
    """Random float32 parameters: matrices scaled by their fan-in, norms 1, convolutions and selector without effect.

    DFlash 2's convolutions begin as the identity and its successor codebook as zero, so that it begins as a v1 draft.
    """
    specs = draft_specs(config)
    keys = iter(jax.random.split(key, len(list(walk(specs)))))
    return build(specs, lambda path, spec: _first_value(path, spec, next(keys)))


def like_target(config: DraftConfig, target: Params, params: Params) -> Params:
    """`params` with the target's last layers, final norm and last tap where the shapes are equal.

    A draft's layers then begin as ones that already turn hidden states into the target's next tokens, and its context
    as the target's own last tap: in a short run the draft is better for it than from random values alone.
    """
    width, layers = config.hidden_size, params["layers"]
    last = target["layers"][-len(layers) :]
    fc = (0.02 * params["fc"]).at[-width:].add(jnp.eye(width, dtype=jnp.float32))
    same = {"norm": _copied(params["norm"], target["norm"]), "fc": fc}
    if len(last) < len(layers):
        return {**params, **same}
    return {**params, **same, "layers": tuple(map(_copied, layers, last))}


def read_params(folder: Path, config: DraftConfig, target: TargetConfig) -> Params:
    """The float32 parameters of the draft in `folder`.  UserError where those of `config` have other shapes.

    What shapes nothing may differ: the block, the number of candidates, which layers are tapped.
    """
    opened = open_draft(folder, target)
    own, wanted = ({path: spec.shape for path, spec in walk(draft_specs(c))} for c in (opened.config, config))
    others = [f"{path} {own.get(path)} instead of {wanted.get(path)}" for path in {**wanted, **own}
              if own.get(path) != wanted.get(path)]  # fmt: skip
    if others:
        raise UserError(f"the draft in {folder} is not of the recipe's shape: {'; '.join(others[:3])}"
                        + f" and {len(others) - 3} more" * (len(others) > 3))  # fmt: skip
    return load_params(draft_specs(config), opened.table, opened.source, jnp.float32, make_mesh())


def _copied(own: Any, other: Any) -> Any:
    """`own` with the arrays of `other` that stand at the same place and have the same shape, in float32."""
    if isinstance(own, dict):
        return {key: _copied(value, other[key]) if key in other else value for key, value in own.items()}
    return other.astype(jnp.float32) if own.shape == other.shape else own


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
