"""Timing rounds of a live request on the runner, beneath the engine."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax.numpy as jnp

from dflash_jax import LLM
from dflash_jax.cache import make_pool
from dflash_jax.config import TargetConfig
from dflash_jax.drafters import Drafter
from dflash_jax.engine.protocol import PrefillRow
from dflash_jax.sharding import make_mesh
from dflash_jax.state import DecodeState, init_state


def live_state(
    target: TargetConfig, drafter: Drafter, requests: int, committed: int, width: int, page_size: int, dtype: Any
) -> DecodeState:
    """`requests` live slots with `committed` tokens each (zeros in the pools), in tables of `width` pages."""
    mesh, pages = make_mesh(), requests * width + 1
    kv = make_pool(target, pages, page_size, dtype, mesh)
    state = init_state(requests, width, kv, drafter.init_cache(pages, page_size, dtype, mesh))
    table = jnp.arange(1, pages, dtype=jnp.int32).reshape(requests, width)
    slots = jnp.arange(requests)
    return dataclasses.replace(
        state,
        seq_len=state.seq_len.at[slots].set(committed),
        limit=state.limit.at[slots].set(10**6),
        finished=state.finished.at[slots].set(False),
        page_table=state.page_table.at[slots].set(table),
    )


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
