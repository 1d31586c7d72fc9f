"""The demo target on this machine's device: answers in text, and times of a plain step and of a 16-row step.

    python benchmarks/demo_device.py --name demo-h200 [--platform gpu] [--dtype bfloat16] [--gguf FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys

import jax
from record import record
from rounds import time_rounds

from dflash_jax import LLM, SamplingParams

QUESTIONS = (
    "Why is the sky blue?", "Write a short poem about the sea.", "List three uses of copper.", "What is 12 times 7?",
)  # fmt: skip


def step_ms(llm: LLM, block: int) -> float:
    """Median milliseconds of a round of one request and `block` rows with 256 tokens committed (no draft)."""
    return statistics.median(time_rounds(llm, 256, block, repeats=50)) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--platform", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--gguf", default=None, help="the demo target's file, when it is not in the cache")
    args = parser.parse_args()
    llm = LLM(args.gguf, "none", platform=args.platform, dtype=args.dtype, enable_prefix_caching=False)
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = []
    for prompt in messages:
        out = llm.generate([prompt], SamplingParams(max_new_tokens=96))[0]
        outputs.append({"question": prompt[0]["content"], "text": out.text, "tokens": len(out.token_ids),
                        "tokens_per_s": out.tokens_per_s})  # fmt: skip
        speed = f"{len(out.token_ids)} tokens, {out.tokens_per_s:.0f} tok/s"
        print(f"--- {prompt[0]['content']} ({speed})\n{out.text}", flush=True)
    together = llm.generate(messages, SamplingParams(max_new_tokens=96))
    same = [a["text"] == b.text for a, b in zip(outputs, together, strict=True)]
    ceiling_ms = sum(x.nbytes for x in jax.tree.leaves(llm.engine.runner.weights.target)) / 4.3e12 * 1e3
    times = {f"round_{block}_ms": step_ms(llm, block) for block in (1, 16)}
    print("batch equals solo:", same, times, f"(reading the weights at 4.3 TB/s: {ceiling_ms:.3f} ms)")
    values = {"dtype": llm.dtype, "outputs": outputs, "batch_equals_solo": same, **times}
    print("written:", record(args.name, values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
