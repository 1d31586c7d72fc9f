"""Decode the reference pairs on this machine's device and compare tokens and acceptance.

    python benchmarks/check_pairs.py --name pairs-h200 [--platform gpu] [--kernels xla] PAIR …

A pair is a folder with target/, draft/ and expected.json (see tests/data).  float32, highest-precision products.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from record import record

from dflash_jax import LLM, SamplingParams


def check(pair: pathlib.Path, args: argparse.Namespace) -> dict[str, object]:
    """How many cases of a pair have equal tokens, equal plain-decoding tokens and equal acceptance."""
    cases = json.loads((pair / "expected.json").read_text())
    equal = plain = accepted = 0
    for width in sorted({case["block_size"] for case in cases}):
        llm = LLM(str(pair / "target"), str(pair / "draft"), platform=args.platform, dtype="float32",
                  kernels=args.kernels, block_size=width, max_model_len=256,
                  tensor_parallel_size=args.tensor_parallel_size)  # fmt: skip
        for case in (c for c in cases if c["block_size"] == width):
            params = SamplingParams(max_new_tokens=case["max_new_tokens"], ignore_eos=True)
            out = llm.generate([case["prompt_ids"]], params)[0]
            n = case["comparable_rounds"]
            equal += out.token_ids == case["token_ids"]
            plain += out.token_ids == case["greedy_token_ids"]
            accepted += out.accept_lengths[:n] == case["accept_lengths"][:n]
    return {"cases": len(cases), "tokens_equal": equal, "plain_equal": plain, "acceptance_equal": accepted}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", type=pathlib.Path)
    parser.add_argument("--name", required=True, help="of the result file")
    parser.add_argument("--platform", default=None)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    results = {}
    for pair in args.pairs:
        results[pair.name] = check(pair, args)
        print(pair.name, json.dumps(results[pair.name]), flush=True)
    print("written:", record(args.name, {"pairs": results}))
    return 0 if all(r["cases"] == r["tokens_equal"] == r["acceptance_equal"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
