"""Make the small target/draft pairs of pairs/x-* and what the method's own reference decodes with them.

    python tests/data/make_pairs.py [NAME ...]

Needs torch, transformers (5.15.0 was used) and `dflash` 0.1.0; the project itself needs none of them.  Each pair has
features that the other folders of pairs/ lack; CASES names them.  The target is random, the draft is trained for a
few seconds on the target's own greedy output, so that acceptance is neither 1 nor total.

expected.json is a list of cases: `prompt_ids`, `max_new_tokens`, `block_size`, `greedy_token_ids` (no draft),
`token_ids` (with draft), `accept_lengths` (bonus included) and `comparable_rounds`: the first so many accept lengths
belong to whole blocks, after them the reference drafts shorter blocks than a fixed-shape implementation does.
Stop tokens play no part.
"""

import dataclasses
import json
import pathlib
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import dflash.model as reference
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional as F

Config = dict[str, Any]
FOLDER = pathlib.Path(__file__).with_name("pairs")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
PLAN = [(1, 24, None), (2, 40, None), (17, 48, None), (40, 64, None), (5, 5, None), (4, 1, None), (12, 32, 3),
        (12, 32, 2)]


@dataclasses.dataclass(frozen=True)
class Case:
    """A pair: the two config.json, how the target is drawn and how long the draft learns."""

    target: Config
    draft: Config
    seed: int = 0
    scale: float = 0.1
    steps: int = 300
    dtype: torch.dtype = torch.float32
    shards: int = 1


def target(kind: str, layers: int, heads: int, kv_heads: int, dim: int, **rest: Any) -> Config:
    """config.json of a target of width 32."""
    name = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    return {"architectures": [name], "model_type": kind, "hidden_size": 32, "intermediate_size": 40,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": dim, "vocab_size": 71, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, **rest}


def draft(version: int, of: Config, layers: int, heads: int, kv_heads: int, dim: int, **rest: Any) -> Config:
    """config.json of a draft for the target config `of`."""
    name = {1: "DFlashDraftModel", 2: "DFlash2DraftModel"}[version]
    shared = {k: of[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")}
    return {"architectures": [name], "model_type": "qwen3", **shared, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim, "rms_norm_eps": 1e-6,
            "num_target_layers": of["num_hidden_layers"], "layer_types": ["full_attention"] * layers, **rest}


def sliding(window: int, *layer_types: str) -> Config:
    """The keys that turn windows on."""
    return {"layer_types": [f"{kind}_attention" for kind in layer_types], "sliding_window": window,
            "use_sliding_window": True}


def cases() -> dict[str, Case]:
    """Name -> pair."""
    one = target("qwen3", 5, 4, 1, 16, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    two = target("llama", 5, 2, 1, 32, rope_theta=1e4, rope_scaling=LLAMA3)
    three = target("qwen3", 5, 2, 2, 16, rope_theta=1e4, tie_word_embeddings=True)
    four = target("llama", 7, 4, 4, 8, rope_theta=1e4, attention_bias=True)
    five = target("llama", 5, 4, 2, 8, rope_theta=1e4, rope_scaling={"type": "yarn", **YARN})
    return {
        "x-noncausal-window": Case(one, draft(
            1, one, 3, 4, 2, 8, **sliding(5, "sliding", "full", "sliding"), is_causal=False, rope_theta=1e6,
            dflash_config={"block_size": 6, "mask_token_id": 5, "target_layer_ids": [0, 3, 2]}),
            scale=0.08, steps=500),
        "x-causal-yarn": Case(two, draft(
            1, two, 2, 2, 1, 32, is_causal=True, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **YARN},
            block_size=8, dflash_config={"mask_token_id": 70, "target_layer_ids": [4, 0, 4]}),
            seed=2, scale=0.09, steps=500),
        "x-v2-scaled": Case(three, draft(
            2, three, 2, 4, 4, 16, **sliding(4, "full", "sliding"), rope_theta=1e4, input_embedding_scale=0.5,
            dflash_config={"block_size": 5, "mask_token_id": 0, "target_layer_ids": [1, 3], "conv_kernel_size": 3,
                           "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5, "output_multiplier": 1.7,
                           "final_logit_softcapping": 12.0}),
            scale=0.28, steps=900),
        "x-default-taps": Case(four, draft(
            1, four, 3, 4, 1, 16, rope_theta=5e5, rope_scaling=None, block_size=4, mask_token_id=69),
            seed=1, steps=500, dtype=torch.bfloat16, shards=3),
        "x-v2-one-layer": Case(five, draft(
            2, five, 1, 2, 1, 64, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0}, block_size=12,
            mask_token_id=70, conv_kernel_size=3, conv_group_size=32, selector_rank=3, selector_top_k=16),
            seed=2, scale=0.09, steps=400, dtype=torch.float16),
    }


def plain(config: Config) -> Config:
    """As it comes back from a file."""
    return json.loads(json.dumps(config))


def build(case: Case) -> tuple[Any, Any]:
    """Target and draft with random weights."""
    torch.manual_seed(case.seed)
    random.seed(case.seed)
    target_class = getattr(transformers, case.target["architectures"][0])
    model = target_class(target_class.config_class.from_dict(plain(case.target))).float().eval()
    spread(model, case.scale)
    draft_class = getattr(reference, case.draft["architectures"][0])
    helper = draft_class(transformers.Qwen3Config.from_dict(plain(case.draft))).float()
    spread(helper, 0.12)
    return model, helper


@torch.no_grad()
def spread(model: torch.nn.Module, scale: float) -> None:
    """Matrices get `scale`, embeddings and heads 1, norms are near 1, and kernels near the identity."""
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.uniform_(0.7, 1.3)
        elif name.endswith("base_kernel"):
            weight.normal_(0, 0.1)[:, 0].add_(1)
        else:
            weight.normal_(0, 1.0 if "embed_tokens" in name or "lm_head" in name else scale)


@torch.no_grad()
def greedy_texts(model: Any, rows: int, length: int) -> tuple[torch.Tensor, Any]:
    """[rows, length] ids, the target's own continuations of random starts of 6, and its hidden states."""
    ids = torch.randint(0, model.config.vocab_size, (rows, 6))
    ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_length=length, do_sample=False, pad_token_id=0,
                         eos_token_id=None)
    return ids, model(ids, output_hidden_states=True).hidden_states


def losses(model: Any, helper: Any, steps: int) -> Iterator[torch.Tensor]:
    """One block anywhere in 32 texts a step."""
    block = helper.block_size
    ids, hidden = greedy_texts(model, 96, 56)
    taps = reference.extract_context_feature(hidden, helper.target_layer_ids)
    scale = float(reference._draft_value(helper.config, "input_embedding_scale", 1.0))
    for _ in range(steps):
        at = random.randint(1, ids.shape[1] - block)
        rows = torch.randperm(len(ids))[:32]
        truth = ids[rows, at : at + block]
        masked = truth.clone()
        masked[:, 1:] = helper.mask_token_id
        out = helper(position_ids=torch.arange(at + block)[None], target_hidden=taps[rows, :at],
                     noise_embedding=F.embedding(masked, model.get_input_embeddings().weight) * scale)[:, 1:]
        scores = helper.compute_logits(out, model.lm_head)
        loss = F.cross_entropy(scores.flatten(0, 1), truth[:, 1:].flatten())
        if hasattr(helper, "candidate_selector"):
            walk = helper.candidate_selector
            left = walk.predecessor_codebook(truth[:, :-1]) * walk.hidden_projection(out)
            scores = scores + left @ walk.successor_codebook.weight.T
            loss = loss + F.cross_entropy(scores.flatten(0, 1), truth[:, 1:].flatten())
        yield loss


def train(model: Any, helper: Any, steps: int) -> float:
    """Teach the draft; the last loss."""
    model.requires_grad_(False)
    optimizer = torch.optim.AdamW(helper.parameters(), lr=4e-3)
    loss = torch.zeros(())
    for loss in losses(model, helper, steps):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def save(model: torch.nn.Module, config: Config, folder: pathlib.Path, dtype: torch.dtype, shards: int) -> None:
    """A Hugging Face folder: config.json and one or several safetensors files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    state = {k.replace("codebook.weight", "codebook"): v.detach().to(dtype).contiguous().clone()
             for k, v in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    if shards == 1:
        return save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(state)}
    for file in set(where.values()):
        save_file({k: v for k, v in state.items() if where[k] == file}, folder / file, metadata={"format": "pt"})
    total = sum(v.nbytes for v in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def load(folder: pathlib.Path) -> tuple[Any, Any]:
    """Target and draft of a pair in float32, from its files."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    name = json.loads((folder / "draft" / "config.json").read_text())["architectures"][0]
    return model, getattr(reference, name).from_pretrained(folder / "draft", dtype=torch.float32).eval()


def decode(model: Any, helper: Any, prompt: list[int], new: int, block: int) -> tuple[list[int], list[int]]:
    """The reference's greedy tokens and accept lengths; block 1 is plain decoding."""
    reference._cuda_time = time.perf_counter  # it times with CUDA events otherwise
    ids = torch.tensor([prompt])
    out = reference.dflash_generate(helper, model, ids, new, None, block_size=block, return_stats=True)
    return out.output_ids[0, len(prompt):].tolist(), out.acceptance_lengths


def whole_blocks(accept_lengths: list[int], block: int, new: int) -> int:
    """How many rounds start with room for a whole block."""
    done, count = 1, 0
    for length in accept_lengths:
        if done + block - 1 > new:
            return count
        done, count = done + length, count + 1
    return count


def expected(folder: pathlib.Path, seed: int) -> list[Config]:
    """The cases of PLAN."""
    model, helper = load(folder)
    rng = random.Random(seed)
    found = []
    for length, new, short in PLAN:
        prompt = [rng.randrange(model.config.vocab_size) for _ in range(length)]
        block = short or helper.block_size
        tokens, accepted = decode(model, helper, prompt, new, block)
        found.append({"prompt_ids": prompt, "max_new_tokens": new, "block_size": block,
                      "greedy_token_ids": decode(model, helper, prompt, new, 1)[0], "token_ids": tokens,
                      "accept_lengths": accepted, "comparable_rounds": whole_blocks(accepted, block, new)})
    return found


def make(name: str, case: Case, folder: pathlib.Path = FOLDER) -> None:
    """Write one pair."""
    model, helper = build(case)
    loss = train(model, helper, case.steps)
    save(model, case.target, folder / name / "target", case.dtype, case.shards)
    save(helper, case.draft, folder / name / "draft", case.dtype, 1)
    found = expected(folder / name, case.seed)
    (folder / name / "expected.json").write_text(json.dumps(found) + "\n")
    means = [round(sum(c["accept_lengths"]) / max(1, len(c["accept_lengths"])), 2) for c in found]
    kinds = [len(set(c["token_ids"])) for c in found]
    same = all(c["token_ids"] == c["greedy_token_ids"] for c in found)
    print(f"{name}: loss {loss:.2f}, mean accept {means}, distinct tokens {kinds}, equal to greedy: {same}")


def main() -> None:
    """Write the named pairs, or all."""
    torch.set_num_threads(1)
    for name, case in cases().items():
        if name in sys.argv[1:] or len(sys.argv) == 1:
            make(name, case)


if __name__ == "__main__":
    main()
