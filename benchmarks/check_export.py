"""Check that the draft that ships with the package is what the authors' torch reference takes it for.

    REFERENCE_PYTHON benchmarks/check_export.py reference FOLDER --target FILE.gguf
    python benchmarks/check_export.py compare FOLDER [--name export-reference-cpu]

REFERENCE_PYTHON is an interpreter with torch, dflash (0.1.0 was used), transformers, accelerate and gguf; `python -m
dflash_jax.demo` prints the target's file.  The first command has transformers turn the file into a float32 folder and
make token ids of the prompts, loads the draft into the reference's own class, decodes greedily, and leaves all of it
in FOLDER (about 700 MB).  The second loads and decodes the same with dflash_jax and compares weights bit by bit, prompt
ids, tokens, and accept lengths.  Both are float32, on CPU, and ignore stop tokens.

Near the token limit the reference drafts shorter blocks.  That may change what is accepted, so the accept lengths of
whole blocks must be equal, and the others are counted by themselves.  And dflash 0.1.0 cannot draft a block that is
more than one row shorter than a DFlash 2 draft's convolution (the shipped one's has 4 rows: a last block of 2 ends in
an error about tensor sizes).  A prompt that meets this is asked for one token more, on both sides, until it does not;
`reference_failed_at` lists the numbers of tokens at which it did.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
DRAFT = ROOT / "dflash_jax" / "demo_draft"
PROMPTS = ROOT / "configs" / "train" / "eval_prompts.jsonl"
EVERY = 10  # of the 60 prompts, which lie by category: all categories are asked
NEW_TOKENS = 64


# -- the reference's half: imports nothing of dflash_jax ---------------------------------------------------------------


def reference(folder: pathlib.Path, file: pathlib.Path, draft_folder: pathlib.Path) -> None:
    """Write folder/target, folder/draft and folder/expected.json."""
    import torch
    import transformers

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    dequantised = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    dequantised.save_pretrained(folder / "target")
    target = transformers.AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    draft, loading = load_reference_draft(draft_folder)
    save_draft(draft, draft_folder, folder / "draft")
    cases = [decode(target, draft, tokenizer, line) for line in prompts()]
    packages = {name: importlib.metadata.version(name) for name in ("dflash", "torch", "transformers")}
    found = {"class": type(draft).__name__, "packages": packages, "loading": loading, "cases": cases}
    (folder / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


def prompts() -> list[dict[str, str]]:
    """`prompt` and `category` of those that are asked."""
    return [json.loads(line) for line in PROMPTS.read_text().splitlines()][::EVERY]


def load_reference_draft(folder: pathlib.Path) -> tuple[Any, dict[str, list[str]]]:
    """The draft in the class that its config.json names, and what was wrong with its tensors, by kind."""
    import dflash.model as authors
    import torch

    authors._cuda_time = time.perf_counter  # its clock waits for a GPU
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    draft, info = getattr(authors, name).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return draft.eval(), {kind: sorted(map(str, tensors)) for kind, tensors in info.items()}


def save_draft(draft: Any, config_of: pathlib.Path, folder: pathlib.Path) -> None:
    """The tensors as the reference holds them, in float32, under the names of released drafts."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {name.replace("codebook.weight", "codebook"): x.contiguous() for name, x in draft.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((config_of / "config.json").read_bytes())


def decode(target: Any, draft: Any, tokenizer: Any, line: dict[str, str]) -> dict[str, Any]:
    """What the reference makes of a prompt; `gap` is the least by which a chosen token's logit beat the next one's."""
    import dflash.model as authors
    import torch

    messages = [{"role": "user", "content": line["prompt"]}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    failed: list[int] = []
    while True:
        new = NEW_TOKENS + len(failed)
        try:
            out = authors.dflash_generate(draft, target, torch.tensor([ids]), new, None, return_stats=True)
            break
        except RuntimeError as error:
            if "The size of tensor" not in str(error) or len(failed) == draft.block_size:
                raise
            failed.append(new)
    with torch.inference_mode():
        best = target(out.output_ids[:, :-1]).logits[0, len(ids) - 1 :].topk(2).values
    print(line["prompt"], failed, out.acceptance_lengths, flush=True)
    return {**line, "prompt_ids": ids, "block_size": draft.block_size, "new_tokens": new, "failed_at": failed,
            "token_ids": out.output_ids[0, len(ids) :].tolist(), "accept_lengths": out.acceptance_lengths,
            "gap": (best[:, 0] - best[:, 1]).min().item()}  # fmt: skip


# -- this project's half -----------------------------------------------------------------------------------------------


def compare(folder: pathlib.Path, file: pathlib.Path | None, draft_folder: pathlib.Path) -> dict[str, Any]:
    """The values that are recorded."""
    from dflash_jax import LLM
    from dflash_jax.demo import demo_target_path

    file = file or demo_target_path()
    expected = json.loads((folder / "expected.json").read_text())
    weights = {"target": unequal_target(file, folder / "target"),
               "draft": unequal_draft(file, draft_folder, folder / "draft")}  # fmt: skip
    block = expected["cases"][0]["block_size"]
    llm = LLM(
        str(file), str(draft_folder), platform="cpu", dtype="float32", block_size=block, max_model_len=256,
        speculative_token_map="none",  # the reference proposes all tokens
    )  # fmt: skip
    cases = [compare_case(llm, case) for case in expected.pop("cases")]
    whole, all_rounds = (sum(case[name] for case in cases) for name in ("whole_rounds", "rounds"))
    return {"target": file.name, "dtype": "float32", "block_size": block,
            "reference": expected, "weights": weights, "cases": cases,
            "prompt_ids_equal": sum(case["prompt_ids_equal"] for case in cases),
            "tokens_equal": sum(case["tokens_equal"] for case in cases),
            "whole_rounds": whole, "whole_rounds_equal": sum(case["whole_rounds_equal"] for case in cases),
            "rounds": all_rounds, "rounds_equal": sum(case["rounds_equal"] for case in cases)}  # fmt: skip


def unequal_target(file: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Parameters of the file against those of the folder that transformers made of it, both loaded by dflash_jax."""
    from dflash_jax.sharding import make_mesh
    from dflash_jax.weights import load_target, open_target

    return unequal(*(load_target(open_target(path), "float32", make_mesh()) for path in (file, folder)))


def unequal_draft(file: pathlib.Path, *folders: pathlib.Path) -> dict[str, Any]:
    """Parameters of the shipped draft, joined key/value projections included, against those that the reference held."""
    from dflash_jax.sharding import make_mesh
    from dflash_jax.weights import load_draft, open_draft, open_target

    config = open_target(file).config
    return unequal(*(load_draft(open_draft(folder, config), "float32", make_mesh()) for folder in folders))


def unequal(ours: Any, theirs: Any) -> dict[str, Any]:
    """How many numbers were compared, and the parameters in which any differs."""
    import jax
    import numpy as np

    mine, other = (jax.tree_util.tree_leaves_with_path(tree) for tree in (ours, theirs))
    different = [jax.tree_util.keystr(path) for (path, x), (_, y) in zip(mine, other, strict=True)
                 if not np.array_equal(x, y)]  # fmt: skip
    return {"parameters": len(mine), "numbers": sum(x.size for _, x in mine), "different": different}


def compare_case(llm: Any, case: dict[str, Any]) -> dict[str, Any]:
    """One prompt: counts of what is equal, and both sides' accept lengths."""
    from dflash_jax import SamplingParams

    out = llm.generate([case["prompt_ids"]], SamplingParams(max_new_tokens=case["new_tokens"], ignore_eos=True))[0]
    ours, theirs = out.accept_lengths, case["accept_lengths"]
    whole = whole_blocks(theirs, case["block_size"], case["new_tokens"])
    agree = list(same(ours, theirs))
    print(case["prompt"], ours, "equal" if ours == theirs else f"the reference: {theirs}", flush=True)
    return {"prompt": case["prompt"], "category": case["category"],
            "new_tokens": case["new_tokens"], "reference_failed_at": case["failed_at"],
            "prompt_ids_equal": llm.encode([{"role": "user", "content": case["prompt"]}]) == case["prompt_ids"],
            "tokens_equal": out.token_ids == case["token_ids"],
            "first_difference": next((i for i, equal in enumerate(same(out.token_ids, case["token_ids"])) if not equal),
                                     None),
            "whole_rounds": whole, "whole_rounds_equal": sum(agree[:whole]), "rounds": len(agree),
            "rounds_equal": sum(agree), "accept_lengths": ours, "reference_accept_lengths": theirs,
            "smallest_logit_gap": case["gap"]}  # fmt: skip


def same(ours: list[int], theirs: list[int]) -> Iterator[bool]:
    """Place by place, as far as the longer of the two goes."""
    for i in range(max(len(ours), len(theirs))):
        yield ours[i : i + 1] == theirs[i : i + 1]


def whole_blocks(accept_lengths: list[int], block: int, new: int) -> int:
    """How many of the reference's rounds had room for a whole block; the first token is the prefill's."""
    done, count = 1, 0
    for length in accept_lengths:
        if done + block - 1 > new:
            break
        done, count = done + length, count + 1
    return count


def passed(values: dict[str, Any]) -> bool:
    """Everything that must be equal is."""
    asked = len(values["cases"])
    return (
        not any(values["reference"]["loading"].values())
        and not any(weights["different"] for weights in values["weights"].values())
        and values["prompt_ids_equal"] == values["tokens_equal"] == asked
        and values["whole_rounds"] == values["whole_rounds_equal"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=("reference", "compare"))
    parser.add_argument("folder", type=pathlib.Path, help="where the reference's half leaves what it found")
    parser.add_argument("--target", type=pathlib.Path, help="the demo target's file; compare: default the cached one")
    parser.add_argument("--draft", type=pathlib.Path, default=DRAFT, help="default: the one of the package")
    parser.add_argument("--name", default="export-reference-cpu", help="of the result file")
    args = parser.parse_args()
    if args.half == "reference":
        if args.target is None:
            parser.error("the reference's half needs --target FILE.gguf")
        reference(args.folder, args.target, args.draft)
        return 0
    from record import record

    values = compare(args.folder, args.target, args.draft)
    print(json.dumps({key: value for key, value in values.items() if key not in ("cases", "reference")}))
    print("written:", record(args.name, values))
    return 0 if passed(values) else 1


if __name__ == "__main__":
    sys.exit(main())
