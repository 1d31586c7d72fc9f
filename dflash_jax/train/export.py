"""A draft as a folder in z-lab layout: config.json and model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from dflash_jax.config import DraftConfig, TargetConfig, read_draft
from dflash_jax.params import Params
from dflash_jax.weights.sources import SINGLE
from dflash_jax.weights.tables import Piece, draft_table


def export_draft(
    folder: Path, raw: Mapping[str, Any], target: TargetConfig, params: Params, dtype: Any = "bfloat16"
) -> None:
    """Write the draft `params` with the configuration `raw` (as in config.json), weights rounded to `dtype`.

    UserError where `raw` is not a configuration of a draft for `target`.
    """
    config = read_draft(str(folder / "config.json"), raw, target)
    tensors = draft_tensors(config, params, np.dtype(dtype))
    folder.mkdir(parents=True, exist_ok=True)
    # transformers refuses a file that does not say "pt"; `save_file` would let nobody else read it
    (folder / SINGLE).write_bytes(save(tensors, metadata={"format": "pt"}))
    text = json.dumps({**raw, "dtype": np.dtype(dtype).name}, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def draft_tensors(config: DraftConfig, params: Params, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Tensors by the names of the checkpoint: the name table read backwards."""
    found = {}
    for path, pieces in draft_table(config).pieces.items():
        value = np.asarray(_at(params, path)).astype(dtype)
        found.update({piece.names[0]: _stored(value, piece) for piece in pieces})
    return found


def _at(params: Params, path: str) -> Any:
    for key in path.split("."):
        params = params[int(key)] if isinstance(params, tuple | list) else params[key]
    return params


def _stored(value: np.ndarray, piece: Piece) -> np.ndarray:
    """The tensor that fills `value[piece.index]`."""
    part = value[piece.index].reshape(piece.filled)
    return np.ascontiguousarray(part.transpose(np.argsort(piece.order)).reshape(piece.shape))


def draft_json(
    target: TargetConfig, *, version: int, layers: int, block_size: int, mask_token_id: int, taps: list[int],
    heads: int, kv_heads: int, head_dim: int, intermediate_size: int, max_position: int | None = None,
    rope_theta: float | None = None, **dflash: Any,
) -> dict[str, Any]:  # fmt: skip
    """config.json of a new draft for `target`, full attention throughout; `dflash` goes to dflash_config, too."""
    positions = max_position or target.max_position
    return {
        "architectures": ["DFlashDraftModel" if version == 1 else "DFlash2DraftModel"], "model_type": "qwen3",
        "hidden_size": target.hidden_size, "intermediate_size": intermediate_size, "vocab_size": target.vocab_size,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "rope_theta": target.rope.theta if rope_theta is None else rope_theta, "max_position_embeddings": positions,
        "num_target_layers": target.num_layers, "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": False, "block_size": block_size,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": taps, **dflash},
    }  # fmt: skip
