"""Write rope.json: what transformers makes of rotary settings in both config forms.

    python tests/data/make_rope_goldens.py

Needs torch and transformers (5.15.0 was used); the project itself needs neither.
A case: `name`, `config` (the keys of a config.json that matter), `inv_freq` [D/2], `attention_factor`, `positions` [5]
and `cos`, `sin` [5, D/2], which contain the attention factor already (transformers multiplies it in).
"""

import json
import pathlib
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

Config = dict[str, Any]
POSITIONS = [0, 1, 7, 100, 5000]
CLASSES = {"qwen3": (Qwen3Config, Qwen3RotaryEmbedding), "llama": (LlamaConfig, LlamaRotaryEmbedding)}

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}


def old(theta: float | None, scaling: Config | None = None, **top: Any) -> Config:
    """The form with `rope_theta` and `rope_scaling` at the top level."""
    form: Config = {} if theta is None else {"rope_theta": theta}
    return {**form, "rope_scaling": scaling, **top}


def new(theta: float | None, rope_type: str = "default", **rest: Any) -> Config:
    """The form with everything in `rope_parameters`."""
    form: Config = {} if theta is None else {"rope_theta": theta}
    return {"rope_parameters": {"rope_type": rope_type, **form, **rest}}


def cases() -> dict[str, tuple[str, int, Config]]:
    """Name -> model type, head dim, the rotary part of the config."""
    return {
        "default-1e4": ("llama", 64, new(1e4)),
        "default-1e5-old": ("llama", 64, old(1e5)),
        "default-5e5": ("llama", 128, new(5e5)),
        "default-1e6": ("qwen3", 128, new(1e6)),
        "default-1e6-old": ("qwen3", 128, old(1e6)),
        "default-1e7-dim80": ("qwen3", 80, new(1e7)),
        "default-1e7-dim80-old": ("qwen3", 80, old(10_000_000)),
        "default-dim16": ("qwen3", 16, new(1e4)),
        "theta-missing-llama": ("llama", 32, old(None)),
        "theta-missing-qwen3": ("qwen3", 32, old(None)),
        "theta-inside-wins-over-top": ("qwen3", 32, {**new(1e6), "rope_theta": 5e5}),
        "theta-top-fills-parameters": ("qwen3", 32, {**new(None), "rope_theta": 5e5}),
        "theta-inside-scaling": ("llama", 32, {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 3e5}}),
        "linear": ("llama", 32, new(1e4, "linear", factor=2.5)),
        "linear-old-type": ("llama", 32, old(1e4, {"type": "linear", "factor": 2.5})),
        "linear-old-rope-type": ("qwen3", 32, old(1e4, {"rope_type": "linear", "factor": 4})),
        "llama3": ("llama", 64, new(5e5, "llama3", **LLAMA3)),
        "llama3-old": ("llama", 64, old(5e5, {"rope_type": "llama3", **LLAMA3})),
        "llama3-factor32": ("llama", 64, new(5e5, "llama3", **{**LLAMA3, "factor": 32.0})),
        "llama3-on-qwen3": ("qwen3", 32, old(1e6, {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 8})),
        "llama3-original-at-top": ("llama", 32, old(5e5, {"rope_type": "llama3", **LLAMA3},
                                                    original_max_position_embeddings=512)),
        "yarn": ("qwen3", 64, new(1e6, "yarn", **YARN)),
        "yarn-old-type": ("qwen3", 64, old(1e6, {"type": "yarn", **YARN})),
        "yarn-old-rope-type": ("qwen3", 64, old(1e6, {"rope_type": "yarn", **YARN})),
        "yarn-dim128-32k": ("qwen3", 128, old(1e6, {"rope_type": "yarn", "factor": 4.0,
                                                    "original_max_position_embeddings": 32768})),
        "yarn-original-missing": ("qwen3", 64, new(1e6, "yarn", factor=4.0)),
        "yarn-original-missing-old": ("llama", 64, old(1e4, {"type": "yarn", "factor": 2.0})),
        "yarn-no-truncate": ("llama", 64, new(1.5e5, "yarn", **YARN, truncate=False, beta_fast=32.0, beta_slow=1.0)),
        "yarn-betas": ("llama", 64, new(1e4, "yarn", **YARN, beta_fast=16.0, beta_slow=2.0)),
        "yarn-betas-close": ("llama", 16, new(1e4, "yarn", factor=40.0, original_max_position_embeddings=64,
                                              beta_fast=4.0, beta_slow=3.9)),
        "yarn-attention-factor": ("llama", 64, new(1e4, "yarn", **YARN, attention_factor=0.75)),
        "yarn-mscales": ("llama", 64, new(1e4, "yarn", **YARN, mscale=1.0, mscale_all_dim=0.5)),
        "yarn-mscales-equal": ("llama", 64, new(1e4, "yarn", **YARN, mscale=0.707, mscale_all_dim=0.707)),
        "yarn-mscale-alone": ("llama", 64, new(1e4, "yarn", **YARN, mscale=0.5)),
        "yarn-singular-ramp": ("llama", 32, new(1e4, "yarn", factor=4.0, original_max_position_embeddings=4)),
        "yarn-factor-1": ("llama", 32, new(1e4, "yarn", factor=1.0, original_max_position_embeddings=4096)),
    }


def measure(kind: str, head_dim: int, rope: Config) -> Config:
    """One case: the config as a file would hold it, and what the model's own rotary module computes from it."""
    shape = {"model_type": kind, "hidden_size": 4 * head_dim, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": head_dim, "max_position_embeddings": 8192}
    config_class, rotary_class = CLASSES[kind]
    config = config_class.from_dict(json.loads(json.dumps({**shape, **rope})))
    rotary = rotary_class(config)
    cos, sin = rotary(torch.zeros(1, 1, 1), torch.tensor([POSITIONS]))
    half = head_dim // 2
    return {"config": {**shape, **rope}, "inv_freq": rotary.inv_freq.tolist(),
            "attention_factor": float(rotary.attention_scaling), "positions": POSITIONS,
            "cos": cos[0, :, :half].tolist(), "sin": sin[0, :, :half].tolist()}


def shorten(value: Any) -> Any:
    """Nine significant digits, which name a float32 exactly."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, list):
        return [shorten(v) for v in value]
    return {k: shorten(v) for k, v in value.items()} if isinstance(value, dict) else value


def main() -> None:
    """Write one case a line."""
    lines = [json.dumps({"name": name, **shorten(measure(*case))}) for name, case in cases().items()]
    pathlib.Path(__file__).with_name("rope.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
