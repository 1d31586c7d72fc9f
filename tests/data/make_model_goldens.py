"""Write models/<case>/{config.json, model.safetensors, golden.npz}: tiny random targets and what transformers computes.

    python tests/data/make_model_goldens.py

Needs torch and transformers (5.15.0 was used); the project itself needs neither.  All arrays of golden.npz are float32
except `input_ids`; B=2 rows of T=24 tokens, H width, V vocabulary, L layers:
`input_ids` [B,T] int32; `hidden_0` (embeddings), `hidden_1` .. `hidden_L` [B,T,H] as Hugging Face returns them, so
`hidden_L` is after the final norm and `last_layer` is the same before it; `layer0_input_layernorm`, `layer0_self_attn`,
`layer0_post_attention_layernorm`, `layer0_mlp` [B,T,H]: outputs of the parts of layer 0; `logits` [B,T,V];
`logits_bfloat16` [B,T,V], in some cases: the same model with weights and arithmetic in bfloat16.
"""

import json
import pathlib
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

Config = dict[str, Any]
FOLDER = pathlib.Path(__file__).with_name("models")
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}


def shape(hidden: int, heads: int, kv_heads: int, head_dim: int | None, ffn: int, tied: bool, **rest: Any) -> Config:
    """The keys every case has; `head_dim` None leaves the key out."""
    explicit = {} if head_dim is None else {"head_dim": head_dim}
    return {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **explicit,
            "intermediate_size": ffn, "tie_word_embeddings": tied, "num_hidden_layers": 3, "vocab_size": 61,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 1,
            "eos_token_id": 2, **rest}


def cases() -> dict[str, Config]:
    """Name -> config.json."""
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    return {
        # hidden and ffn are multiples of 32: also the model that tiny GGUF files are made from
        "llama-tied": llama | shape(64, 4, 2, None, 128, True, rope_theta=1e4, vocab_size=64),
        "llama-llama3": llama | shape(32, 4, 2, None, 48, False, rope_theta=1e3, rope_scaling=LLAMA3),
        "llama-linear-bias": llama | shape(32, 4, 1, 8, 48, False, attention_bias=True, rope_theta=1e4,
                                           rope_scaling={"type": "linear", "factor": 2.5}),
        "llama-yarn-dim32": llama | shape(32, 2, 2, 32, 48, True, rope_parameters={
            **yarn, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8.0, "beta_slow": 2.0}),
        "qwen3-yarn-tied": qwen3 | shape(64, 4, 2, 32, 64, True, rope_parameters=yarn),
        "qwen3-dim80": qwen3 | shape(64, 2, 1, 80, 64, False, rope_theta=1e6, rope_scaling=None),
        "qwen3-bias": qwen3 | shape(32, 4, 1, 16, 48, True, attention_bias=True,
                                    rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "qwen3-llama3": qwen3 | shape(32, 2, 2, 16, 48, False, rope_parameters={**LLAMA3, "rope_theta": 1e3}),
    }


def build(config: Config, seed: int) -> torch.nn.Module:
    """A model with random weights large enough that every part matters, norm weights away from 1, biases from 0."""
    torch.manual_seed(seed)
    kind = transformers.AutoConfig.for_model(config["model_type"]).__class__
    model = transformers.AutoModelForCausalLM.from_config(kind.from_dict(json.loads(json.dumps(config))))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.6, 1.4)
            else:
                bias_or_matrix = 0.3 if name.endswith("bias") else weight.shape[-1] ** -0.5
                weight.normal_(0, 1.0 if "embed" in name else bias_or_matrix)
    return model.float().eval()


@torch.no_grad()
def measure(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """All the arrays of one case."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: object, __: object, out: Any) -> None:
            seen[name] = out[0] if isinstance(out, tuple) else out
        return hook

    first, last = model.model.layers[0], model.model.layers[-1]
    hooks = [getattr(first, part).register_forward_hook(keep(f"layer0_{part}")) for part in PARTS]
    hooks.append(last.register_forward_hook(keep("last_layer")))
    out = model(ids, output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    seen |= {f"hidden_{i}": h for i, h in enumerate(out.hidden_states)} | {"logits": out.logits}
    return {"input_ids": ids.numpy().astype(np.int32), **{k: v.float().numpy() for k, v in seen.items()}}


def write(name: str, config: Config, seed: int) -> None:
    """One case."""
    model = build(config, seed)
    golden = measure(model, torch.randint(0, config["vocab_size"], (2, 24)))
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.clone().contiguous() for k, v in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if name in ("llama-tied", "qwen3-yarn-tied"):
        low = measure(model.bfloat16(), torch.from_numpy(golden["input_ids"]).long())
        golden["logits_bfloat16"] = low["logits"]
    np.savez_compressed(folder / "golden.npz", **golden)


def main() -> None:
    """Write every case."""
    for seed, (name, config) in enumerate(cases().items()):
        write(name, config, seed)


if __name__ == "__main__":
    main()
