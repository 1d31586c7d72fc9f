"""Write tiny GGUF files from Hugging Face tensors, as llama.cpp's converter lays them out.

    python tests/data/make_tiny_gguf.py OUT_FOLDER        # models/llama-tied in every kind its widths allow

Needs numpy, safetensors and `gguf` only.  Tests import `write_tiny_gguf`, which makes what they need on the fly.
"""

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

Config = Mapping[str, Any]
Tensors = Mapping[str, np.ndarray]
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    stem, suffix = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{suffix}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{suffix}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Move each head's rows from halves (i, i + D/2) to neighbours (2i, 2i + 1), which ggml rotates for llama."""
    split = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def head_dim(config: Config) -> int:
    """The explicit head width, or the derived one."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


ROPE_KEYS = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
             "high_freq_factor"}


def rope(config: Config) -> dict[str, Any]:
    """The rotary settings of either config form as one dict with `rope_type` and `rope_theta`.

    Raises ValueError for a setting that this writer would lose.
    """
    settings = {"rope_theta": config.get("rope_theta", 10000.0)}
    settings |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    if lost := settings.keys() - ROPE_KEYS:
        raise ValueError(f"write_tiny_gguf has no place for the rotary settings {sorted(lost)}")
    settings["rope_type"] = settings.get("rope_type", settings.get("type", "default"))
    return settings


def llama3_factors(settings: Mapping[str, Any], dim: int) -> np.ndarray:
    """[D/2] divisors of the frequencies: GGUF keeps Llama-3 scaling as a tensor, `rope_freqs.weight`."""
    wave = 2 * np.pi * settings["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high, factor = settings["low_freq_factor"], settings["high_freq_factor"], settings["factor"]
    blend = np.clip((settings["original_max_position_embeddings"] / wave - low) / (high - low), 0, 1)
    return (1 / ((1 - blend) / factor + blend)).astype(np.float32)


def _write_rope(writer: gguf.GGUFWriter, config: Config) -> None:
    settings, dim = rope(config), head_dim(config)
    writer.add_rope_freq_base(settings["rope_theta"])
    if config["model_type"] == "llama":
        writer.add_rope_dimension_count(dim)
    if settings["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(settings, dim))
    elif settings["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(settings["rope_type"]))
        writer.add_rope_scaling_factor(settings["factor"])
        if "original_max_position_embeddings" in settings:
            writer.add_rope_scaling_orig_ctx_len(settings["original_max_position_embeddings"])


def _write_shape(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any]) -> None:
    """Keys as in `tokenizer.ggml.*`: model, pre, tokens, token_type, merges, bos_token_id, eos_token_id."""
    writer.add_tokenizer_model(tokenizer.get("model", "gpt2"))
    writer.add_tokenizer_pre(tokenizer.get("pre", "default"))
    writer.add_token_list(tokenizer["tokens"])
    writer.add_token_types(tokenizer.get("token_type", [int(gguf.TokenType.NORMAL)] * len(tokenizer["tokens"])))
    writer.add_token_merges(tokenizer.get("merges", []))
    if "bos_token_id" in tokenizer:
        writer.add_bos_token_id(tokenizer["bos_token_id"])
    if "eos_token_id" in tokenizer:
        writer.add_eos_token_id(tokenizer["eos_token_id"])
    if "chat_template" in tokenizer:
        writer.add_chat_template(tokenizer["chat_template"])


def write_tiny_gguf(
    path: str | pathlib.Path,
    config: Config,
    tensors: Tensors,
    quant: str = "F32",
    tokenizer: Mapping[str, Any] | None = None,
) -> None:
    """Write `tensors` (Hugging Face names, float32) as GGUF: matrices in `quant` (one of KINDS), vectors in F32.

    `config` is a config.json of model_type llama or qwen3.  Raises ValueError when a row is no whole number of blocks.
    """
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_name("tiny")
    _write_shape(writer, config)
    _write_rope(writer, config)
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer)
    for name, value in tensors.items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads and config["model_type"] == "llama":
            value = permute(value, config[heads])
        kind = Kind[quant] if value.ndim > 1 else Kind.F32
        writer.add_tensor(gguf_name(name), encode(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encode(value: np.ndarray, kind: Kind) -> np.ndarray:
    """float32 [..., n] -> what GGUF stores: numbers for F32 and F16, otherwise bytes [..., n / block * block bytes]."""
    value = np.ascontiguousarray(value, np.float32)
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if value.shape[-1] % block:
        raise ValueError(f"{kind.name} needs rows of a multiple of {block}, got {value.shape[-1]}")
    if kind in (Kind.F32, Kind.F16):
        return value.astype(np.float32 if kind == Kind.F32 else np.float16)
    encoders = {Kind.Q4_K: _q4_k, Kind.Q5_K: _q5_k, Kind.Q6_K: _q6_k}
    if kind not in encoders:
        return gguf.quants.quantize(value, kind)
    return encoders[kind](value.reshape(-1, block)).reshape(*value.shape[:-1], -1)


def _half(value: np.ndarray) -> np.ndarray:
    """[n] numbers -> [n, 2] bytes of float16."""
    return value.astype("<f2")[:, None].view(np.uint8)


def _safe_ratio(value: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """value / unit, and 0 where the unit is 0."""
    zero = np.zeros(np.broadcast_shapes(value.shape, unit.shape), np.float32)
    return np.divide(value, unit, out=zero, where=unit > 0)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """[n, 256] -> [n, 210]: 6-bit numbers, 16 signed scales of 16 numbers each, one float16 scale."""
    groups = blocks.reshape(-1, 16, 16)
    peak = np.abs(groups).max(-1) / 31
    unit = (peak.max(-1) / 127).astype(np.float16).astype(np.float32)
    scale = np.clip(np.rint(_safe_ratio(peak, unit[:, None])), 0, 127)
    code = np.rint(_safe_ratio(groups, (scale * unit[:, None])[..., None])).clip(-32, 31) + 32
    quarter = code.astype(np.uint8).reshape(-1, 2, 4, 32)  # [n, half, quarter, 32]
    low = quarter[:, :, :2] & 15 | (quarter[:, :, 2:] & 15) << 4
    high = sum((quarter[:, :, i] >> 4) << 2 * i for i in range(4))
    n = len(blocks)
    parts = [low.reshape(n, 128), high.reshape(n, 64), scale.astype(np.int8).view(np.uint8), _half(unit)]
    return np.concatenate(parts, 1).astype(np.uint8)


def _affine(blocks: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """[n, 256] -> the 16 header bytes of Q4_K and Q5_K, and the codes 0..top [n, 8, 32].

    A number is d * scale * code - dmin * minimum, with d, dmin for the block and 6-bit scale, minimum for 32 numbers.
    """
    groups = blocks.reshape(-1, 8, 32)
    least = np.maximum(-groups.min(-1), 0)
    width = (groups.max(-1) + least).clip(0) / top
    units = [(x.max(-1) / 63).astype(np.float16).astype(np.float32) for x in (width, least)]
    scale = np.rint(_safe_ratio(width, units[0][:, None])).clip(0, 63)
    minimum = np.rint(_safe_ratio(least, units[1][:, None])).clip(0, 63)
    shifted = groups + (minimum * units[1][:, None])[..., None]
    code = np.rint(_safe_ratio(shifted, (scale * units[0][:, None])[..., None])).clip(0, top).astype(np.uint8)
    s, m = scale.astype(np.uint8), minimum.astype(np.uint8)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    return np.concatenate([_half(units[0]), _half(units[1]), *packed], 1), code


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """[n, 256] -> [n, 144]: 4-bit codes, two groups of 32 a row of bytes."""
    header, code = _affine(blocks, 15)
    low = code[:, ::2] | code[:, 1::2] << 4
    return np.concatenate([header, low.reshape(len(blocks), 128)], 1)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    """[n, 256] -> [n, 176]: as Q4_K, with the fifth bits of group g in bit g of 32 bytes."""
    header, code = _affine(blocks, 31)
    fifth = np.bitwise_or.reduce((code >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    low = code[:, ::2] & 15 | (code[:, 1::2] & 15) << 4
    return np.concatenate([header, fifth, low.reshape(len(blocks), 128)], 1)


def random_tensors(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights with the names and shapes that a config of model_type llama or qwen3 asks for."""
    rng, width, dim = np.random.default_rng(seed), config["hidden_size"], head_dim(config)
    q, kv, ffn = (config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim, config["intermediate_size"])
    shapes = {"self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
              "self_attn.o_proj": (width, q), "mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width),
              "mlp.down_proj": (width, ffn), "input_layernorm": (width,), "post_attention_layernorm": (width,)}
    if config["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    layers = range(config["num_hidden_layers"])
    names = {f"model.layers.{i}.{name}": shape for i in layers for name, shape in shapes.items()}
    names |= {"model.embed_tokens": (config["vocab_size"], width), "model.norm": (width,)}
    if not config.get("tie_word_embeddings"):
        names["lm_head"] = (config["vocab_size"], width)
    return {f"{name}.weight": _random(rng, shape) for name, shape in names.items()}


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return rng.uniform(0.7, 1.3, shape).astype(np.float32)
    return (rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)


def main() -> None:
    """Write one file a kind; Q4_K and the like need rows of 256 and are left out here."""
    from safetensors.numpy import load_file

    source = pathlib.Path(__file__).with_name("models") / "llama-tied"
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for quant in KINDS:
        if not quant.endswith("_K"):
            write_tiny_gguf(out / f"llama-tied-{quant}.gguf", config, tensors, quant)


if __name__ == "__main__":
    main()
