"""Acceptance at temperatures above 0 by how drafts are drawn: coupled to the target's noise, or the likeliest token.

    python benchmarks/draft_sampling.py --name draft-sampling-pairs PAIR …
    python benchmarks/draft_sampling.py --name draft-sampling-demo demo

Mean over responses of each response's mean accept length, whole blocks, 64 new tokens.  A pair gets 24 prompts of one
to eight random tokens; the demo pair every third prompt of configs/train/eval_prompts.jsonl.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import sys
from typing import Any

from record import record

from dflash_jax import LLM, SamplingParams

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEMPERATURES = (0.0, 0.5, 0.8, 1.0)


def prompts_of(pair: str) -> list[Any]:
    if pair == "demo":
        lines = (ROOT / "configs/train/eval_prompts.jsonl").read_text(encoding="utf-8").splitlines()[::3]
        return [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    rng = random.Random(5)
    return [[rng.randrange(3, 90) for _ in range(rng.randint(1, 8))] for _ in range(24)]


def acceptance(llm: LLM, prompts: list[Any], temperature: float, ignore_eos: bool) -> float:
    params = [
        SamplingParams(max_new_tokens=64, temperature=temperature, seed=i, ignore_eos=ignore_eos)
        for i in range(len(prompts))
    ]
    found = [out.mean_accept_length for out in llm.generate(prompts, params)]
    return statistics.mean(mean for mean in found if mean is not None)


def opened(pair: str, how: str) -> LLM:
    names = (None, None) if pair == "demo" else (f"{pair}/target", f"{pair}/draft")
    return LLM(*names, platform="cpu", dtype="float32", draft_sampling=how, speculation="always",
               chunked_prefill_size=512 if pair == "demo" else 16, max_running_requests=8)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", help="folders with target/ and draft/, or demo")
    parser.add_argument("--name", required=True, help="of the result file")
    args = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for pair in args.pairs:
        for how in ("coupled", "argmax"):
            llm, prompts = opened(pair, how), prompts_of(pair)
            temperatures = TEMPERATURES[pair == "demo" :]  # greedily both are the same
            found = {f"T={t:g}": round(acceptance(llm, prompts, t, pair != "demo"), 3) for t in temperatures}
            results.setdefault(pathlib.Path(pair).name, {})[how] = found
            print(pair, how, json.dumps(found), flush=True)
    print("written:", record(args.name, {"mean_accept_length": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
