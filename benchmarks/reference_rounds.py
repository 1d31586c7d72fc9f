"""The authors' reference at a preset's shape beside this engine, random weights: what a round and a token cost each.

    python benchmarks/reference_rounds.py --preset qwen3-8b [--input-len 1000] [--output-len 128] [--name NAME]

The reference (package `dflash`, torch) runs first, in a process of its own that gives the GPU back; then this engine
decodes the same lengths plainly and with its acceptance forced, by `python -m dflash_jax.benchmark`.  Random weights
accept about one token a round, so the reference's tokens a second at an acceptance are worked out: acceptance over the
time of its round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPEATS = 3


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--preset", default="qwen3-8b", help="of a Qwen3 target: the reference's drafts are Qwen3's")
    p.add_argument("--input-len", type=int, default=1000)
    p.add_argument("--output-len", type=int, default=128)
    p.add_argument("--acceptance", type=float, default=6.5)
    p.add_argument("--name", help="record the figures under benchmarks/results")
    p.add_argument("--reference-only", action="store_true", help=argparse.SUPPRESS)  # the process of the reference
    args = p.parse_args()
    if args.reference_only:
        print(json.dumps(reference(args)))
        return
    theirs = json.loads(run([__file__, "--reference-only", *lengths(args)]).splitlines()[-1])
    ours = engine(args)
    theirs["tokens_per_s_at_acceptance"] = args.acceptance / theirs["round_ms"] * 1e3
    found = {"preset": args.preset, "input_len": args.input_len, "output_len": args.output_len,
             "acceptance": args.acceptance, "reference": theirs, "dflash_jax": ours}  # fmt: skip
    print(json.dumps(found, indent=1))
    if args.name:
        from record import record

        record(args.name, found)


def lengths(args: argparse.Namespace) -> list[str]:
    return ["--preset", args.preset, "--input-len", str(args.input_len), "--output-len", str(args.output_len)]


def run(words: list[str]) -> str:
    return subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def engine(args: argparse.Namespace) -> list[dict[str, Any]]:
    """tok/s of this engine, plain and with forced acceptance, one request at a time."""
    with tempfile.TemporaryDirectory() as folder:
        forced = ["--synthetic-acceptance", str(args.acceptance), "--concurrency", "1", "--num-prompts", "4"]
        run(["-m", "dflash_jax.benchmark", *lengths(args), *forced, "--no-charts", "--no-split", "--output", folder])
        document = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
    keys = "output_throughput", "accept_length", "mean_ttft_ms", "mean_tpot_ms", "median_itl_ms"
    return [{"name": one["name"], **{key: one["levels"][0][key] for key in keys}} for one in document["results"]]


def reference(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the reference's round and of its plain token, and what it accepted, medians of REPEATS."""
    import torch  # pyright: ignore[reportMissingImports]
    from dflash.model import dflash_generate  # pyright: ignore[reportMissingImports]

    target, draft = random_models(args.preset)
    ids = torch.randint(1000, 100_000, (1, args.input_len), device="cuda")
    found: dict[str, Any] = {}
    for name, block in (("round", None), ("token", 1)):
        runs = []
        for _ in range(REPEATS + 1):  # the first warms up
            stats = dflash_generate(draft, target, ids, args.output_len, None, 0.0, block_size=block, return_stats=True)
            rounds = len(stats.acceptance_lengths)
            runs.append(stats.time_per_output_token * stats.num_output_tokens / rounds * 1e3)
        found[f"{name}_ms"] = statistics.median(runs[1:])
        found[f"{name}s"] = rounds
        found[f"{name}_ttft_ms"] = stats.time_to_first_token * 1e3
    return found | {"torch": torch.__version__, "device": torch.cuda.get_device_name()}


def random_models(preset: str) -> tuple[Any, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from dflash.model import DFlashDraftModel  # pyright: ignore[reportMissingImports]

    from dflash_jax.presets import load_preset

    pair = load_preset(preset)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        configs = [transformers.Qwen3Config(**pair[name], attn_implementation="sdpa") for name in ("target", "draft")]
        target = transformers.AutoModelForCausalLM.from_config(configs[0], attn_implementation="sdpa")
        draft = DFlashDraftModel(configs[1])
    return target.eval(), draft.eval()


if __name__ == "__main__":
    main()
