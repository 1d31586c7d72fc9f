"""Configuration of a target: the dense Llama and Qwen3 families."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_jax.config.reading import Reader
from dflash_jax.config.rope import RopeConfig, read_rope
from dflash_jax.errors import UserError

FAMILIES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
Window = int | None


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Shape and constants of a target.  Hashable: it is a static argument of compiled steps."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tied: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[Window, ...] = ()  # sliding window of each layer; empty = all full
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def group(self) -> int:
        """R: query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    def window(self, layer: int) -> Window:
        return self.windows[layer] if self.windows else None


def read_target(where: str, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> TargetConfig:
    """A target's configuration from Hugging Face `config.json` (and `generation_config.json`) contents."""
    reader = Reader(where, config)
    family = _family(reader)
    _refuse_variants(where, config)
    heads = reader.integer("num_attention_heads")
    hidden = reader.integer("hidden_size")
    layers = reader.integer("num_hidden_layers")
    max_position = reader.integer("max_position_embeddings")
    return check_heads(
        where,
        TargetConfig(
            family=family,
            vocab_size=reader.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=reader.integer("num_key_value_heads", heads),
            # Hugging Face's own defaults where the key is absent: Qwen3 says 128, Llama divides.
            head_dim=reader.integer("head_dim", 128 if family == "qwen3" else max(1, hidden // heads)),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6, low=0),
            rope=read_rope(where, config, max_position),
            max_position=max_position,
            tied=reader.flag("tie_word_embeddings", False),
            attention_bias=reader.flag("attention_bias", False),
            mlp_bias=reader.flag("mlp_bias", False) if family == "llama" else False,
            windows=layer_windows(reader, config, layers) if family == "qwen3" else (),
            eos_token_ids=eos_ids(where, generation, config),
            bos_token_id=reader.integer("bos_token_id", low=0) if config.get("bos_token_id") is not None else None,
        ),
    )


def _family(reader: Reader) -> str:
    names, model_type = reader.strings("architectures"), reader.get("model_type", None)
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    if not names and model_type in FAMILIES.values():
        return model_type
    found = ", ".join(names) or f"model_type {model_type!r}"
    known = ", ".join(FAMILIES)
    raise UserError(f"{reader.where}: architecture {found} is not supported as a target (supported: {known})")


def _refuse_variants(where: str, config: Mapping[str, Any]) -> None:
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UserError(f"{where}: hidden_act {act!r} is not supported (supported: silu)")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UserError(f"{where}: quantization_config ({method}) is not supported; use the unquantised or a GGUF file")


def check_heads(where: str, config: Any) -> Any:
    """`config` itself when its attention heads fit together."""
    if config.num_heads % config.num_kv_heads:
        raise UserError(
            f"{where}: num_attention_heads {config.num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise UserError(f"{where}: head_dim {config.head_dim} is odd, which rotary embedding cannot use")
    return config


def layer_types(reader: Reader, config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """`full_attention` or `sliding_attention` for each layer, by Qwen3's rules where the list is absent."""
    types = config.get("layer_types")
    if types is None:
        first = reader.integer("max_window_layers", 28, low=0)
        sliding = sliding_window(reader) is not None
        return tuple("sliding_attention" if sliding and i >= first else "full_attention" for i in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise UserError(f"{reader.where}: layer_types must list {layers} layers, not {types!r}")
    unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(f"{reader.where}: layer_types {', '.join(unknown)} are not supported")
    return tuple(types)


def sliding_window(reader: Reader) -> Window:
    """The window W in tokens, or None: Qwen3 counts `sliding_window` only under `use_sliding_window`."""
    if not reader.flag("use_sliding_window", False) or reader.get("sliding_window", None) is None:
        return None
    return reader.integer("sliding_window")


def layer_windows(reader: Reader, config: Mapping[str, Any], layers: int) -> tuple[Window, ...]:
    window = sliding_window(reader)
    types = layer_types(reader, config, layers)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def eos_ids(where: str, *sources: Mapping[str, Any] | None) -> tuple[int, ...]:
    """End-of-text ids of the first source that names any (one id or a list)."""
    for source in sources:
        value = (source or {}).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise UserError(f"{where}: eos_token_id must be a token id or a list of them, not {value!r}")
        return tuple(dict.fromkeys(ids))
    return ()
