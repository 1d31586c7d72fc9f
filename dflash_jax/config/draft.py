"""Configuration of a DFlash draft (v1) or a DFlash 2 draft, in z-lab layout, read strictly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_jax.config.reading import Reader
from dflash_jax.config.rope import RopeConfig, read_rope
from dflash_jax.config.target import TargetConfig, Window, check_heads, layer_types, sliding_window
from dflash_jax.errors import UserError

ARCHITECTURES = {"DFlashDraftModel": 1, "DFlash2DraftModel": 2}
MAX_BLOCK_SIZE = 256  # rows; a round's work and memory grow with them, and published drafts have 8 to 16
# Every key this reader gives a meaning; anything else inside `dflash_config` would be silently dropped.
DFLASH_KEYS = frozenset({
    "block_size", "target_layer_ids", "mask_token_id", "num_target_layers", "is_causal", "input_embedding_scale",
    "output_multiplier", "final_logit_softcapping", "conv_kernel_size", "conv_group_size", "selector_rank",
    "selector_top_k",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ConvConfig:
    """DFlash 2's grouped dynamic causal convolution: taps per side, channels per group."""

    kernel_size: int
    group_size: int


@dataclasses.dataclass(frozen=True)
class SelectorConfig:
    """DFlash 2's candidate selector: codebook width, candidates per position."""

    rank: int
    top_k: int


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """Shape and constants of a draft.  Hashable: it is a static argument of compiled steps."""

    version: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    windows: tuple[Window, ...]
    causal: tuple[bool, ...]
    attention_bias: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float | None = None
    conv: ConvConfig | None = None
    selector: SelectorConfig | None = None

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def candidates(self) -> int:
        """Tokens that each row's draft is chosen among, after the head: the selector's, or the likeliest alone."""
        return self.selector.top_k if self.selector else 1

    @property
    def qk_norm(self) -> bool:
        return True


def _inner(where: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`dflash_config`, whose keys are all known: a misspelt one must not count as left out."""
    inner = config.get("dflash_config") or {}
    if not isinstance(inner, Mapping):
        raise UserError(f"{where}: dflash_config must be an object, not {inner!r}")
    unknown = sorted(set(inner) - DFLASH_KEYS)
    if unknown:
        known = ", ".join(sorted(DFLASH_KEYS))
        raise UserError(f"{where}: dflash_config has unknown keys {', '.join(unknown)} (known: {known})")
    return inner


def read_draft(where: str, config: Mapping[str, Any], target: TargetConfig) -> DraftConfig:
    """A draft's configuration, checked against the `target` it will serve.

    Keys are looked up in `dflash_config` first, then at the top level; given in both places they must agree.
    """
    reader = Reader(where, _inner(where, config), config)
    version = _version(reader)
    layers = reader.integer("num_hidden_layers")
    types = layer_types(reader, config, layers)
    window = sliding_window(reader)
    heads = reader.integer("num_attention_heads")
    cap = reader.optional_number("final_logit_softcapping")
    draft = DraftConfig(
        version=version,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=reader.integer("head_dim", 128),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6, low=0),
        rope=read_rope(where, config, reader.integer("max_position_embeddings", 32768)),
        taps=_taps(reader, target, layers),
        block_size=_block_size(reader),
        mask_token_id=_mask_id(reader, target),
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        causal=_causal(reader, types),
        attention_bias=reader.flag("attention_bias", False),
        input_embedding_scale=reader.number("input_embedding_scale", 1.0),
        output_multiplier=reader.number("output_multiplier", 1.0),
        logit_softcap=cap if cap and cap > 0 else None,
        conv=_conv(reader) if version == 2 else None,
        selector=_selector(reader) if version == 2 else None,
    )
    _check(reader, config, check_heads(where, draft), target)
    return draft


def _version(reader: Reader) -> int:
    names = reader.strings("architectures")
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found, known = ", ".join(names) or "(none)", ", ".join(ARCHITECTURES)
    raise UserError(f"{reader.where}: architecture {found} is not a draft that this version knows (known: {known})")


def _block_size(reader: Reader) -> int:
    size = reader.integer("block_size", 16, low=2)
    if size > MAX_BLOCK_SIZE:
        raise UserError(f"{reader.where}: block_size {size} is more than the {MAX_BLOCK_SIZE} rows a block may have")
    return size


def default_taps(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Where a config lists no taps: the middle layer for one draft layer, else evenly from 1 to N-3."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def _conv(reader: Reader) -> ConvConfig:
    return ConvConfig(reader.integer("conv_kernel_size"), reader.integer("conv_group_size"))


def _selector(reader: Reader) -> SelectorConfig:
    return SelectorConfig(reader.integer("selector_rank"), reader.integer("selector_top_k"))


def _taps(reader: Reader, target: TargetConfig, layers: int) -> tuple[int, ...]:
    taps = reader.integers("target_layer_ids", default_taps(target.num_layers, layers))
    bad = [tap for tap in taps if not 0 <= tap < target.num_layers]
    if bad or not taps:
        raise UserError(
            f"{reader.where}: target_layer_ids {list(taps)} must name layers 0 to {target.num_layers - 1} of the target"
        )
    return taps


def _mask_id(reader: Reader, target: TargetConfig) -> int:
    mask = reader.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < target.vocab_size:
        raise UserError(
            f"{reader.where}: mask_token_id {mask!r} is outside the target's vocabulary of {target.vocab_size}"
        )
    return mask


def _causal(reader: Reader, types: tuple[str, ...]) -> tuple[bool, ...]:
    """Sliding layers look back only, full layers both ways, unless `is_causal` says one thing for all."""
    override = reader.get("is_causal", None)
    if override is None:
        return tuple(kind == "sliding_attention" for kind in types)
    return (reader.flag("is_causal"),) * len(types)


def _check(reader: Reader, config: Mapping[str, Any], draft: DraftConfig, target: TargetConfig) -> None:
    where = reader.where
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UserError(f"{where}: hidden_act {config['hidden_act']!r} is not supported (supported: silu)")
    pairs = [
        ("hidden_size", draft.hidden_size, target.hidden_size),
        ("num_target_layers", reader.get("num_target_layers", target.num_layers), target.num_layers),
    ]
    if draft.selector:  # v1 has nothing of its own over the vocabulary; DFlash 2 has its codebooks
        pairs.append(("vocab_size", draft.vocab_size, target.vocab_size))
    for key, mine, theirs in pairs:
        if mine != theirs:
            raise UserError(f"{where}: {key} is {mine} but the target has {theirs}; this draft is for another target")
    if draft.conv and draft.hidden_size % draft.conv.group_size:
        raise UserError(
            f"{where}: hidden_size {draft.hidden_size} is not a multiple of conv_group_size {draft.conv.group_size}"
        )
    if draft.selector and draft.selector.top_k > draft.vocab_size:
        raise UserError(
            f"{where}: selector_top_k {draft.selector.top_k} is larger than the vocabulary of {draft.vocab_size}"
        )
