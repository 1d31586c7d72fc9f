"""Acceptance at temperatures above 0 by how drafts are drawn: coupled to the target's noise, or the likeliest token.

    python benchmarks/draft_sampling.py --name draft-sampling-pairs PAIR …

Mean over responses of each response's mean accept length; 24 prompts of one to eight random tokens, 64 new ones.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import sys

from record import record

from dflash_jax import LLM, SamplingParams

TEMPERATURES = (0.0, 0.5, 0.8, 1.0)


def acceptance(llm: LLM, temperature: float) -> float:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 90) for _ in range(rng.randint(1, 8))] for _ in range(24)]
    params = [SamplingParams(max_new_tokens=64, temperature=temperature, seed=i, ignore_eos=True) for i in range(24)]
    return statistics.mean(out.mean_accept_length or 0 for out in llm.generate(prompts, params))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", type=pathlib.Path)
    parser.add_argument("--name", required=True, help="of the result file")
    args = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for pair in args.pairs:
        for how in ("coupled", "argmax"):
            llm = LLM(str(pair / "target"), str(pair / "draft"), platform="cpu", dtype="float32", draft_sampling=how,
                      chunked_prefill_size=16, max_running_requests=8)  # fmt: skip
            found = {f"T={t:g}": round(acceptance(llm, t), 3) for t in TEMPERATURES}
            results.setdefault(pair.name, {})[how] = found
            print(pair.name, how, json.dumps(found), flush=True)
    print("written:", record(args.name, {"mean_accept_length": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
