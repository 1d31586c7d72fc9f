"""Timing rounds of a live request on the runner, beneath the engine."""

from __future__ import annotations

import time

from dflash_jax import LLM
from dflash_jax.engine.protocol import PrefillRow


def time_rounds(llm: LLM, prompt_tokens: int, block: int, repeats: int) -> list[float]:
    """Seconds of each of `repeats` rounds of one request that starts with `prompt_tokens` committed.

    Takes slot 0 and its pages from whoever had them: use an engine without prefix caching, and nothing in flight.
    """
    runner = llm.engine.runner
    longest = runner.pages_per_slot * runner.page_size
    pages = range(1, runner.pages_per_slot + 1)
    runner.admit(0, prompt_ids=(), output_ids=(), limit_tokens=longest, pages=pages, stop_ids=(), sampling=None)
    for start in range(0, prompt_tokens, runner.prefill_chunk):
        size = min(runner.prefill_chunk, prompt_tokens - start)
        tokens = [100 + i % 1000 for i in range(start, start + size)]
        runner.prefill([PrefillRow(0, tokens, start, last=start + size == prompt_tokens)]).result()
    runner.decode([0], block).result()  # compiles
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        runner.decode([0], block).packed.block_until_ready()
        times.append(time.perf_counter() - begin)
    return times
