"""Rotary position settings in both Hugging Face forms, and the frequencies they mean.

Old form: `rope_theta` and `rope_scaling {type | rope_type, factor, …}` at the top level.
New form: `rope_parameters {rope_theta, rope_type, factor, …}`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.config.reading import Reader
from dflash_jax.errors import UserError

KINDS = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding settings; fields other than `theta` and `kind` count for their kind only."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_scale: float = 1.0
    truncate: bool = True
    freq_divisors: tuple[float, ...] = ()  # GGUF's precomputed per-frequency divisors (`rope_freqs.weight`)


def read_rope(where: str, config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """The rotary settings of a Hugging Face `config`, whichever form it uses.

    When both forms are present they must agree on every key they share.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"{where}: {name} must be an object, not {value!r}")
    _refuse_per_layer(where, new)
    scopes = [spelt for scope in (new, old) if scope for spelt in _spellings(scope)]
    top = {k: config[k] for k in ("rope_theta", "original_max_position_embeddings") if k in config}
    reader = Reader(f"{where}: rope", *scopes, top)
    kind = reader.get("rope_type", "default")
    if kind not in KINDS:
        raise UserError(f"{where}: rope type {kind!r} is not supported (supported: {', '.join(KINDS)})")
    partial = Reader(where, *scopes, config).number("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise UserError(f"{where}: partial_rotary_factor {partial!r} is not supported")
    theta = _above_zero(reader, "rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    original = reader.integer("original_max_position_embeddings", max_position)
    return _SCALED[kind](reader, RopeConfig(theta=theta, kind=kind, original_max_position=original), max_position)


def _spellings(scope: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The oldest configs say `type` for `rope_type`: a scope of its own, so that the two must agree."""
    return scope, {"rope_type": scope.get("type")}


def _refuse_per_layer(where: str, new: Mapping[str, Any] | None) -> None:
    if new and any(isinstance(value, Mapping) for value in new.values()):
        raise UserError(f"{where}: rope_parameters per layer type ({', '.join(new)}) are not supported")


def _factor(reader: Reader) -> float:
    factor = reader.number("factor")
    if not factor >= 1.0:
        raise UserError(f"{reader.where}: factor must be at least 1, not {factor!r}")
    return factor


def _above_zero(reader: Reader, key: str, default: float) -> float:
    value = reader.number(key, default)
    if not value > 0:
        raise UserError(f"{reader.where}: {key} must be above 0, not {value!r}")
    return value


def _linear(reader: Reader, rope: RopeConfig, max_position: int) -> RopeConfig:
    return dataclasses.replace(rope, factor=_factor(reader))


def _llama3(reader: Reader, rope: RopeConfig, max_position: int) -> RopeConfig:
    low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
    if not low < high:
        raise UserError(f"{reader.where}: low_freq_factor {low} must be below high_freq_factor {high}")
    return dataclasses.replace(rope, factor=_factor(reader), low_freq_factor=low, high_freq_factor=high)


def _yarn(reader: Reader, rope: RopeConfig, max_position: int) -> RopeConfig:
    factor = _factor(reader) if reader.get("factor", None) is not None else max_position / rope.original_max_position
    if rope.theta <= 1:
        raise UserError(f"{reader.where}: rope_theta must be above 1 for yarn, not {rope.theta!r}")
    scale = reader.optional_number("attention_factor")
    if scale is None:
        scale = _yarn_scale(factor, reader.number("mscale", 0.0), reader.number("mscale_all_dim", 0.0))
    return dataclasses.replace(
        rope,
        factor=factor,
        beta_fast=_above_zero(reader, "beta_fast", 32.0),
        beta_slow=_above_zero(reader, "beta_slow", 1.0),
        attention_scale=scale,
        truncate=reader.flag("truncate", True),
    )


_SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def _yarn_scale(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """The factor YaRN puts on cos and sin (arXiv 2309.00071, section 3.4; `mscale` keys as in DeepSeek)."""

    def scale(m: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * m * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each rotated pair, float32 [D/2]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (np.float32(1.0) / np.power(np.float32(rope.theta), exponent, dtype=np.float32)).astype(np.float32)
    if rope.freq_divisors:
        return (base / np.asarray(rope.freq_divisors, np.float32)).astype(np.float32)
    if rope.kind == "linear":
        return (base / np.float32(rope.factor)).astype(np.float32)
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, base)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, head_dim, base)
    return base


def _llama3_frequencies(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1 release)."""
    wavelength = 2 * np.pi / base.astype(np.float64)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = np.clip((rope.original_max_position / wavelength - low) / (high - low), 0.0, 1.0)
    return ((1 - blend) * base / rope.factor + blend * base).astype(np.float32)


def _yarn_frequencies(rope: RopeConfig, head_dim: int, base: np.ndarray) -> np.ndarray:
    """Interpolate the slow dimensions, keep the fast ones, ramp between (arXiv 2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)  # both ends may fall on one dimension
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / span, 0.0, 1.0)
    return (base / rope.factor * ramp + base * (1 - ramp)).astype(np.float32)
