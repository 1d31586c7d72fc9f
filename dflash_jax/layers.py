"""Layers shared by targets and drafts: plain functions over parameter dicts, and their declarations."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dflash_jax import axes
from dflash_jax.config import AttentionShape, RopeConfig, inverse_frequencies
from dflash_jax.ops import XLA, Kernels, Turned, align, dot, flat_inputs, gated, rms_norm
from dflash_jax.params import Params, ParamSpec

__all__ = [
    "Following", "attention_specs", "dot", "followers", "layer_specs", "mlp_specs", "norm_spec", "project_out",
    "project_out_norm", "project_qkv", "rms_norm", "rope_tables", "swiglu", "swiglu_norm",
]  # fmt: skip


def rope_tables(rope: RopeConfig, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """cos and sin, float32 [..., D/2], of integer `positions` [...]; computed, so no table can run out."""
    position = positions.astype(jnp.float32)[..., None]
    angle = position * align(inverse_frequencies(rope, head_dim), position)
    cos, sin = jax.lax.platform_dependent(angle, cpu=_cos_sin_once, default=_cos_sin)
    scale = np.float32(rope.attention_scale)
    return (cos, sin) if scale == 1 else (cos * scale, sin * scale)


def _cos_sin(angle: Array) -> tuple[Array, Array]:
    return jnp.cos(angle), jnp.sin(angle)


def _cos_sin_once(angle: Array) -> tuple[Array, Array]:
    """XLA on CPU would compute both again in every layer, for every head (3 ms of a round of SmolLM2's 8 rows).

    It fuses nothing through a conditional; a barrier is gone by then.  Angles are never negative.
    """
    return jax.lax.cond((angle >= 0).all(), _cos_sin, lambda x: (x, x), angle)


def norm_spec(width: int, axis: str | None = axes.EMBED) -> ParamSpec:
    return ParamSpec((width,), (axis,), "ones")


def attention_specs(config: AttentionShape) -> dict[str, ParamSpec]:
    """Declarations of one attention layer.

    `qkv` [H, G, R+2, D] holds, for each key/value head, its R query heads, then key, then value: one
    product for all three, and splitting G over devices splits them together.
    """
    hidden, kv, group, dim = config.hidden_size, config.num_kv_heads, config.group, config.head_dim
    specs = {
        "qkv": ParamSpec((hidden, kv, group + 2, dim), (axes.EMBED, axes.KV_HEADS, None, axes.HEAD_DIM)),
        "o": ParamSpec((config.num_heads, dim, hidden), (axes.HEADS, axes.HEAD_DIM, axes.EMBED)),
    }
    if config.attention_bias:
        specs["qkv_bias"] = ParamSpec((kv, group + 2, dim), (axes.KV_HEADS, None, axes.HEAD_DIM), "zeros")
        specs["o_bias"] = ParamSpec((hidden,), (axes.EMBED,), "zeros")
    if config.qk_norm:
        specs["q_norm"] = norm_spec(dim, axes.HEAD_DIM)
        specs["k_norm"] = norm_spec(dim, axes.HEAD_DIM)
    return specs


def mlp_specs(config: AttentionShape, bias: bool = False) -> dict[str, ParamSpec]:
    """Declarations of one SwiGLU layer; `gate_up` [H, 2, F] is one product for both."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    specs = {
        "gate_up": ParamSpec((hidden, 2, ffn), (axes.EMBED, None, axes.FFN)),
        "down": ParamSpec((ffn, hidden), (axes.FFN, axes.EMBED)),
    }
    if bias:
        specs["gate_up_bias"] = ParamSpec((2, ffn), (None, axes.FFN), "zeros")
        specs["down_bias"] = ParamSpec((hidden,), (axes.EMBED,), "zeros")
    return specs


def layer_specs(config: AttentionShape, mlp_bias: bool = False) -> dict[str, Any]:
    """Declarations of one decoder layer."""
    return {
        "input_norm": norm_spec(config.hidden_size),
        "attn": attention_specs(config),
        "post_norm": norm_spec(config.hidden_size),
        "mlp": mlp_specs(config, mlp_bias),
    }


class Following(NamedTuple):
    """What comes after a sum: the norm [H] of it, and the weight that the norm is multiplied by."""

    norm: Array
    weight: Array | Turned | None = None


def followers(params: Params) -> list[Following]:
    """What comes after each layer.  After the last nobody knows: the first's projection stands there, so that equal
    layers are called alike and traced once."""
    layers = params["layers"]
    norms = *(layer["input_norm"] for layer in layers[1:]), params["norm"]
    return [Following(norm, layer["attn"]["qkv"]) for norm, layer in zip(norms, (*layers[1:], layers[0]), strict=True)]


def project_qkv(p: Params, x: Array, kernels: Kernels = XLA) -> Array:
    """The fused projection of x [S, B, H]: [S, B, G, R+2, D], before norms and rotation."""
    y = kernels.project(x, p["qkv"])
    return y + align(p["qkv_bias"], y) if "qkv_bias" in p else y


def project_out(p: Params, attended: Array) -> Array:
    """attended [S, B, N, D] -> [S, B, H]."""
    y = dot(_flat_heads(attended), flat_inputs(p["o"], 2))
    return y + align(p["o_bias"], y) if "o_bias" in p else y


def project_out_norm(
    p: Params, attended: Array, x: Array, then: Following, eps: float, kernels: Kernels
) -> tuple[Array, Array]:
    """x [S, B, H] + `project_out`, and the norm of it."""
    if "o_bias" in p:
        return kernels.add_norm(x, project_out(p, attended), then.norm, eps)
    return kernels.project_add_norm(x, _flat_heads(attended), flat_inputs(p["o"], 2), then.norm, eps, then.weight)


def _flat_heads(attended: Array) -> Array:
    return attended.reshape(*attended.shape[:-2], -1)


def swiglu(p: Params, y: Array, kernels: Kernels = XLA) -> Array:
    """down(silu(gate·y) ⊙ up·y)."""
    y = dot(_gated(p, y, kernels), p["down"])
    return y + align(p["down_bias"], y) if "down_bias" in p else y


def swiglu_norm(
    p: Params, y: Array, x: Array, then: Following, eps: float, kernels: Kernels
) -> tuple[Array, Array]:
    """x [S, B, H] + `swiglu` of y, and the norm of it."""
    if "down_bias" in p:
        return kernels.add_norm(x, swiglu(p, y, kernels), then.norm, eps)
    return kernels.project_add_norm(x, _gated(p, y, kernels), p["down"], then.norm, eps, then.weight)


def _gated(p: Params, y: Array, kernels: Kernels) -> Array:
    if "gate_up_bias" not in p:
        return kernels.gated_product(y, p["gate_up"])
    both = dot(y, p["gate_up"])  # [..., 2, F]
    return gated(both + align(p["gate_up_bias"], both))
