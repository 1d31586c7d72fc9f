"""The configuration of a target out of a GGUF header, through the same reader as Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.config import Reader, TargetConfig, read_target
from dflash_jax.config.gguf_header import Unread
from dflash_jax.errors import UserError
from dflash_jax.models import FAMILIES, Family
from dflash_jax.weights.gguf_source import GgufSource
from dflash_jax.weights.tables import GGUF_TARGET

_ROPE_FREQS = "rope_freqs.weight"
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Keys that change what the model computes and that this version does not follow, with their neutral value.
_NEUTRAL = {
    "expert_count": 0, "attention.sliding_window": 0, "attention.causal": True, "logit_scale": 1.0,
    "residual_scale": 1.0, "embedding_scale": 1.0, "attention.scale": 0.0, "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}  # fmt: skip


def gguf_target(source: GgufSource) -> tuple[TargetConfig, Family]:
    """Configuration and family of a GGUF target.  Errors name the file, the GGUF key and the value."""
    family = _family(source)
    parts = source.header.pairs.get("split.count", 1)
    if parts != 1:
        raise UserError(f"{source.where} is one of {parts} parts of a split GGUF file; merge them first")
    keys = _Keys(source.where, source.header.pairs, family.gguf_architecture)
    keys.refuse_variants()
    config = read_target(source.where, _hugging_face(keys, family, source))
    return dataclasses.replace(config, rope=_with_divisors(config, source)), family


def _family(source: GgufSource) -> Family:
    name = source.header.pairs.get("general.architecture")
    for family in FAMILIES.values():
        if family.gguf_architecture == name:
            return family
    known = ", ".join(family.gguf_architecture for family in FAMILIES.values())
    raise UserError(f"{source.where}: GGUF architecture {name!r} is not supported (supported: {known})")


class _Keys:
    """Typed access to the keys below an architecture's name; errors name the whole key."""

    def __init__(self, where: str, pairs: Mapping[str, Any], architecture: str):
        self._reader = Reader(where, pairs)
        self._architecture = architecture

    def get(self, key: str) -> Any:
        return self._reader.get(f"{self._architecture}.{key}", None)

    def integer(self, key: str, *default: int) -> int:
        return self._reader.integer(f"{self._architecture}.{key}", *default)

    def number(self, key: str, *default: float) -> float:
        return self._reader.number(f"{self._architecture}.{key}", *default)

    def refuse_variants(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self.get(key)
            if value is not None and value != neutral:
                raise UserError(f"{self._reader.where}: {self._architecture}.{key} {value!r} is not supported")


def _hugging_face(keys: _Keys, family: Family, source: GgufSource) -> dict[str, Any]:
    """The config.json that this file would have had."""
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    value_dim = keys.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UserError(f"{source.where}: keys of width {head_dim} and values of width {value_dim} are not supported")
    return {
        "model_type": family.name,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocab_size(keys, source),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys),
        "partial_rotary_factor": keys.integer("rope.dimension_count", head_dim) / head_dim,
        "tie_word_embeddings": GGUF_TARGET.head not in source.tensors,
        "attention_bias": GGUF_TARGET.part(0, "q", "bias") in source.tensors,
        "mlp_bias": GGUF_TARGET.part(0, "up", "bias") in source.tensors,
        **_special_ids(source.header.pairs),
    }


def _vocab_size(keys: _Keys, source: GgufSource) -> int:
    """Rows of the embedding table; the tokenizer may list fewer tokens than the table has rows."""
    if GGUF_TARGET.embed in source.tensors:
        return keys.integer("vocab_size", source.tensors[GGUF_TARGET.embed].shape[0])
    tokens = source.header.pairs.get("tokenizer.ggml.tokens")
    return keys.integer("vocab_size", tokens.count if isinstance(tokens, Unread) else 1)


def _special_ids(pairs: Mapping[str, Any]) -> dict[str, Any]:
    stops = [pairs[key] for key in (f"tokenizer.ggml.{name}" for name in _STOP_KEYS) if key in pairs]
    found: dict[str, Any] = {"eos_token_id": stops} if stops else {}
    bos = pairs.get("tokenizer.ggml.bos_token_id")
    return found if bos is None else {**found, "bos_token_id": bos}


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`, or None.  Llama-3 scaling is a tensor, see `_with_divisors`."""
    kind = keys.get("rope.scaling.type")
    if kind is None and keys.get("rope.scale_linear") is not None:  # the older key
        return {"rope_type": "linear", "factor": keys.number("rope.scale_linear")}
    if kind in (None, "none"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    original = keys.get("rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling | _yarn_extras(keys, scaling["factor"]) if kind == "yarn" else scaling


def _yarn_extras(keys: _Keys, factor: float) -> dict[str, float]:
    """YaRN's further settings.  GGUF gives the attention factor relative to YaRN's own."""
    extras = {}
    for name in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{name}") is not None:
            extras[name] = keys.number(f"rope.scaling.yarn_{name}")
    relative = keys.number("rope.scaling.yarn_attn_factor", keys.number("rope.scaling.attn_factor", 1.0))
    if relative != 1.0 and factor > 1.0:
        extras["attention_factor"] = relative * (0.1 * math.log(factor) + 1.0)
    return extras


def _with_divisors(config: TargetConfig, source: GgufSource) -> Any:
    """The rotary settings with the divisors of `rope_freqs.weight` in them, when the file has that tensor."""
    info = source.tensors.get(_ROPE_FREQS)
    if info is None:
        return config.rope
    if info.problem or info.shape != (config.head_dim // 2,):
        found = info.problem or f"has shape {list(info.shape)}, expected [{config.head_dim // 2}]"
        raise UserError(f"{source.where}: {_ROPE_FREQS} {found}")
    if config.rope.kind != "default":
        raise UserError(f"{source.where}: {_ROPE_FREQS} beside rope scaling {config.rope.kind} is not supported")
    divisors = source.read(_ROPE_FREQS, 0, info.shape[0])
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise UserError(f"{source.where}: {_ROPE_FREQS} holds values that are not above 0")
    return dataclasses.replace(config.rope, freq_divisors=tuple(divisors.astype(float).tolist()))
