"""What a request's options add to a round: greedy against sampled, filtered, penalised, with log-probabilities.

    python benchmarks/sampled_round.py --target MODEL.gguf --draft DRAFT --block-size 16 --name sampled-round-cpu

One request at a time, each option in a slot of its own, rounds in turn.  Drafts are chosen as the request's tokens are.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from record import record

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.protocol import PrefillRow

REPEATS, PROMPT = 25, 64
CASES = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.6, top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "temperature 1, top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "greedy, repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "greedy, logprobs 5": {"logprobs": 5},
}


def open_slots(llm: LLM, block: int) -> None:
    """A slot with a prompt for each case, and its round compiled."""
    runner = llm.engine.runner
    for slot, options in enumerate(CASES.values()):
        first = 1 + slot * runner.pages_per_slot
        prompt = [100 + i for i in range(PROMPT)]
        runner.admit(slot, prompt_ids=prompt, output_ids=(), limit_tokens=runner.pages_per_slot * runner.page_size,
                     pages=range(first, first + runner.pages_per_slot), stop_ids=(),
                     sampling=SamplingParams(seed=slot, **options))  # fmt: skip
        runner.prefill([PrefillRow(slot, prompt, 0, last=True)]).result()
        runner.decode([slot], block).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--name", default="sampled-round-cpu")
    args = parser.parse_args()
    llm = LLM(args.target, args.draft, block_size=args.block_size, max_running_requests=len(CASES),
              max_model_len=PROMPT + (REPEATS + 3) * args.block_size, enable_prefix_caching=False)  # fmt: skip
    open_slots(llm, args.block_size)
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(REPEATS):
        for slot, name in enumerate(CASES):
            start_s = time.perf_counter()
            llm.engine.runner.decode([slot], args.block_size).result()
            times[name].append(time.perf_counter() - start_s)
    median = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    ratios = {name: ms / median["greedy"] for name, ms in median.items()}
    for name in CASES:
        print(f"{name:40} {median[name]:8.2f} ms  × {ratios[name]:.3f}")
    values: dict[str, Any] = {"draft": args.draft, "block_size": args.block_size, "ms": median, "ratio": ratios}
    print("written:", record(args.name, values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
