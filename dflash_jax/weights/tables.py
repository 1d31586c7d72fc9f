"""Name tables: which checkpoint tensors make up each declared parameter, and where they go in it.

A table is declared once per naming scheme; validation, loading and the cache key derive from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from dflash_jax.config import ConvConfig, DraftConfig, TargetConfig
from dflash_jax.layers import AttentionShape

Index = tuple[int | slice, ...]
Pieces = dict[str, tuple["Piece", ...]]
_ALL = slice(None)


@dataclasses.dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and its place in a parameter.

    `names` are the accepted spellings, the usual one first; `shape` is the tensor's shape in the checkpoint.
    With its axes taken apart into `split` and reordered by `order`, the tensor fills `parameter[index]`.
    The first axis of `split` is whole units of the tensor's own first axis, so that it can be read in parts.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    index: Index = ()
    note: str = ""  # where the expected shape comes from, when that is not obvious

    @property
    def filled(self) -> tuple[int, ...]:
        """Shape of the reordered tensor: that of `parameter[index]`, with axes possibly taken apart."""
        return tuple(self.split[axis] for axis in self.order)


@dataclasses.dataclass(frozen=True)
class Table:
    """Pieces by parameter path, and names (with `*`) of further tensors that a checkpoint may hold unused."""

    pieces: Pieces
    tolerated: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Names:
    """A naming scheme: `layer` is the prefix of layer {}; `parts` name the tensors of a layer by role."""

    layer: str
    parts: Mapping[str, str]
    embed: str = ""
    norm: str = "norm.weight"
    head: str = ""

    def part(self, layer: int, role: str, suffix: str = "weight") -> str:
        return f"{self.layer.format(layer)}{self.parts[role]}.{suffix}"


_HF_PARTS = {
    "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "q": "self_attn.q_proj",
    "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_GGUF_PARTS = {
    "input_norm": "attn_norm", "post_norm": "ffn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v",
    "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down",
}  # fmt: skip
HF_TARGET = Names("model.layers.{}.", _HF_PARTS, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
GGUF_TARGET = Names("blk.{}.", _GGUF_PARTS, "token_embd.weight", "output_norm.weight", "output.weight")
DRAFT = Names("layers.{}.", _HF_PARTS)

_INV_FREQ = "*rotary_emb.inv_freq"  # a computed buffer that old checkpoints carry
_ROPE_FREQS = "rope_freqs.weight"  # GGUF: part of the configuration, not a parameter


def hf_target_table(config: TargetConfig) -> Table:
    """Hugging Face names of a Llama or Qwen3 target.  A tied one may carry its head again; it is not used."""
    return Table(_target_pieces(config, HF_TARGET), (_INV_FREQ, *((HF_TARGET.head,) if config.tied else ())))


def gguf_target_table(config: TargetConfig, permuted: bool) -> Table:
    """GGUF names; `permuted` says that q and k rows are stored in the interleaved rotary order."""
    return Table(_target_pieces(config, GGUF_TARGET, permuted), (_ROPE_FREQS,))


def draft_table(config: DraftConfig) -> Table:
    """Names of a DFlash draft in z-lab layout, v1 or DFlash 2."""
    hidden, taps = config.hidden_size, len(config.taps)
    note = f"{taps} target_layer_ids × hidden_size {hidden}"
    pieces: Pieces = {
        "fc": (linear("fc.weight", (taps * hidden,), (hidden,), note=note),),
        "hidden_norm": (same("hidden_norm.weight", hidden),),
        "norm": (same(DRAFT.norm, hidden),),
    }
    for i in range(config.num_layers):
        pieces |= _layer_pieces(config, DRAFT, i)
        if config.conv:
            pieces |= _conv_pieces(hidden, config.conv, i)
    return Table(pieces | _selector_pieces(config), (_INV_FREQ,))


def same(name: str, *shape: int, also: tuple[str, ...] = ()) -> Piece:
    """A tensor stored as the parameter is."""
    return Piece((name, *also), shape, shape, tuple(range(len(shape))))


def linear(
    name: str, ins: tuple[int, ...], outs: tuple[int, ...], index: Index = (), *, interleaved: bool = False,
    note: str = "",
) -> Piece:  # fmt: skip
    """A projection stored [out, in] for a parameter [*ins, *outs]; without `ins`, its bias [out].

    `interleaved`: the last of `outs`, a head dimension, is stored as neighbouring pairs (i, i + D/2).
    """
    shape = (math.prod(outs), math.prod(ins)) if ins else (math.prod(outs),)
    apart = (*outs[:-1], outs[-1] // 2, 2) if interleaved else outs
    axes = list(range(len(apart)))
    if interleaved:
        axes[-2:] = reversed(axes[-2:])
    order = (*range(len(apart), len(apart) + len(ins)), *axes)
    return Piece((name,), shape, (*apart, *ins), order, index, note)


def _target_pieces(config: TargetConfig, names: Names, permuted: bool = False) -> Pieces:
    hidden, vocab = config.hidden_size, config.vocab_size
    pieces: Pieces = {"embed": (same(names.embed, vocab, hidden),), "norm": (same(names.norm, hidden),)}
    for i in range(config.num_layers):
        pieces |= _layer_pieces(config, names, i, permuted, config.mlp_bias)
    if not config.tied:
        pieces["head"] = (same(names.head, vocab, hidden),)
    return pieces


def _layer_pieces(
    config: AttentionShape, names: Names, i: int, permuted: bool = False, mlp_bias: bool = False
) -> Pieces:
    pieces = {
        "input_norm": (same(names.part(i, "input_norm"), config.hidden_size),),
        "post_norm": (same(names.part(i, "post_norm"), config.hidden_size),),
        **_attention_pieces(config, names, i, permuted),
        **_mlp_pieces(config, names, i, mlp_bias),
    }
    return {f"layers.{i}.{path}": found for path, found in pieces.items()}


def _attention_pieces(config: AttentionShape, names: Names, i: int, permuted: bool) -> Pieces:
    hidden, dim = config.hidden_size, config.head_dim
    output = names.part(i, "o")
    pieces: Pieces = {
        "attn.qkv": _qkv_pieces(config, names, i, "weight", (hidden,), permuted),
        "attn.o": (linear(output, (config.num_heads, dim), (hidden,)),),
    }
    if config.attention_bias:
        pieces["attn.qkv_bias"] = _qkv_pieces(config, names, i, "bias", (), permuted)
        pieces["attn.o_bias"] = (same(names.part(i, "o", "bias"), hidden),)
    if config.qk_norm:
        pieces["attn.q_norm"] = (same(names.part(i, "q_norm"), dim),)
        pieces["attn.k_norm"] = (same(names.part(i, "k_norm"), dim),)
    return pieces


def _qkv_pieces(
    config: AttentionShape, names: Names, i: int, suffix: str, ins: tuple[int, ...], permuted: bool
) -> tuple[Piece, ...]:
    """The parts of [*ins, G, R+2, D]: for each key/value head its R query heads, then key, then value."""
    kv, group, dim = config.num_kv_heads, config.group, config.head_dim
    lead = (_ALL,) * len(ins) + (_ALL,)
    query, key, value = (names.part(i, role, suffix) for role in "qkv")
    return (
        linear(query, ins, (kv, group, dim), (*lead, slice(0, group)), interleaved=permuted),
        linear(key, ins, (kv, dim), (*lead, group), interleaved=permuted),
        linear(value, ins, (kv, dim), (*lead, group + 1)),
    )


def _mlp_pieces(config: AttentionShape, names: Names, i: int, bias: bool) -> Pieces:
    hidden, ffn = config.hidden_size, config.intermediate_size
    both = [(role, (_ALL, half)) for half, role in enumerate(("gate", "up"))]
    pieces: Pieces = {
        "mlp.gate_up": tuple(linear(names.part(i, role), (hidden,), (ffn,), index) for role, index in both),
        "mlp.down": (linear(names.part(i, "down"), (ffn,), (hidden,)),),
    }
    if bias:
        pieces["mlp.gate_up_bias"] = tuple(
            linear(names.part(i, role, "bias"), (), (ffn,), index[1:]) for role, index in both
        )
        pieces["mlp.down_bias"] = (same(names.part(i, "down", "bias"), hidden),)
    return pieces


def _conv_pieces(hidden: int, conv: ConvConfig, i: int) -> Pieces:
    """`base_kernel` [2, taps, H] as it is; `kernel_projection` [2·taps·groups, H] turned."""
    outs = (2, conv.kernel_size, hidden // conv.group_size)
    pieces: Pieces = {}
    for path, name in (("attn_conv", "attention_conv"), ("mlp_conv", "mlp_conv")):
        where = DRAFT.layer.format(i) + name
        base = f"{where}.base_kernel"
        pieces[f"layers.{i}.{path}.base"] = (same(base, 2, conv.kernel_size, hidden, also=(f"{base}.weight",)),)
        pieces[f"layers.{i}.{path}.kernel"] = (linear(f"{where}.kernel_projection.weight", (hidden,), outs),)
    return pieces


def _selector_pieces(config: DraftConfig) -> Pieces:
    """Codebooks [V, rank] as they are, with or without the `.weight` suffix; the projection turned."""
    if not config.selector:
        return {}
    rank = config.selector.rank
    pieces: Pieces = {}
    for side in ("predecessor", "successor"):
        name = f"candidate_selector.{side}_codebook"
        pieces[f"selector.{side}"] = (same(name, config.vocab_size, rank, also=(f"{name}.weight",)),)
    name = "candidate_selector.hidden_projection.weight"
    return pieces | {"selector.hidden": (linear(name, (config.hidden_size,), (rank,)),)}
