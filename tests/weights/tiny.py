"""Tiny checkpoints made on the fly: targets and drafts with random weights, in the layouts that users have."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).resolve().parents[1] / "data"


def _gguf_writer() -> Any:
    spec = importlib.util.spec_from_file_location("make_tiny_gguf", DATA / "make_tiny_gguf.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GGUF = _gguf_writer()
write_tiny_gguf = GGUF.write_tiny_gguf
random_tensors = GGUF.random_tensors

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    **LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": 6,
}  # fmt: skip
DRAFT: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": 50, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "rope_theta": 10000.0, "block_size": 4,
    "dflash_config": {"mask_token_id": 49, "target_layer_ids": [0, 1]},
}  # fmt: skip
DRAFT2: dict[str, Any] = {
    **DRAFT, "architectures": ["DFlash2DraftModel"], "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6,
    "selector_top_k": 5,
}  # fmt: skip
Tensors = dict[str, np.ndarray]


def target_tensors(config: Mapping[str, Any], biases: bool = False) -> Tensors:
    """Random weights of a target by their Hugging Face names; `biases` adds those of attention and, in Llama, MLP."""
    tensors = random_tensors(config)
    if biases:
        parts = ("q_proj", "k_proj", "v_proj", "o_proj")
        parts += ("gate_proj", "up_proj", "down_proj") if config["model_type"] == "llama" else ()
        rng = np.random.default_rng(1)
        for name in [name for name in tensors if name.split(".")[-2] in parts]:
            rows = tensors[name].shape[0]
            tensors[name.replace(".weight", ".bias")] = rng.normal(size=rows).astype(np.float32)
    return tensors


def draft_tensors(config: Mapping[str, Any]) -> Tensors:
    """Random weights of a draft by the names of z-lab's layout."""
    as_target = {**config, "model_type": "qwen3", "tie_word_embeddings": True}
    tensors = {name.removeprefix("model."): value for name, value in random_tensors(as_target).items()}
    del tensors["embed_tokens.weight"]
    width, rng = config["hidden_size"], np.random.default_rng(2)
    shapes = {"fc.weight": (width, len(config["dflash_config"]["target_layer_ids"]) * width),
              "hidden_norm.weight": (width,)}  # fmt: skip
    if "conv_kernel_size" in config:
        taps, groups, rank = config["conv_kernel_size"], width // config["conv_group_size"], config["selector_rank"]
        for i in range(config["num_hidden_layers"]):
            for conv in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
                shapes |= {f"{conv}.base_kernel": (2, taps, width),
                           f"{conv}.kernel_projection.weight": (2 * taps * groups, width)}  # fmt: skip
        for side in ("predecessor", "successor"):
            shapes[f"candidate_selector.{side}_codebook"] = (config["vocab_size"], rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, width)
    return tensors | {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """A Hugging Face folder: config.json and one safetensors file, or several and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    where = {
        name: f"model-{i * shards // len(names) + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)
    }
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder
