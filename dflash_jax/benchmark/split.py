"""Where the time of a round goes: its three programs, timed one by one beside the whole."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.benchmark.drawn import shuffled_pages
from dflash_jax.engine.engine import Engine
from dflash_jax.state import DecodeState
from dflash_jax.steps import Steps, Verified

REPEATS = 5
LAUNCHES = 4, 16  # in a row, before the last is waited for: on CPU, and elsewhere, where a wait costs a launch
MOST_ROUNDS = max(LAUNCHES) + 2  # that a timer commits before it rewinds
PARTS = ("draft", "verify", "accept and commit")


def split_round(engine: Engine, requests: int, context: int) -> dict[str, float]:
    """Seconds of a round of `requests` with `context` committed tokens each, and of its parts.

    The engine's state is filled with requests that never were (as much of them as its tables hold), so it can serve
    nothing afterwards.
    """
    runner = engine.runner
    requests = min(requests, runner.num_slots, runner.num_pages - 1)
    width = min(runner.pages_per_slot, (runner.num_pages - 1) // requests)
    room = width * runner.page_size - runner.block_size * MOST_ROUNDS
    runner.state = filled(runner.state, requests, max(1, min(context, room)), width)
    timer = RoundTimer(runner.steps, runner.weights, runner.state, requests, runner.block_size)
    found = timer.split()
    runner.state = timer.state
    return found


def filled(state: DecodeState, requests: int, context: int, width: int) -> DecodeState:
    """`requests` live slots with `context` tokens each, in tables of `width` pages of their own."""
    slots = jnp.arange(requests)
    table = shuffled_pages(requests, width)
    return dataclasses.replace(
        state,
        seq_len=state.seq_len.at[slots].set(context),
        limit=state.limit.at[slots].set(10**6),
        finished=state.finished.at[slots].set(False),
        stop_ids=state.stop_ids.at[slots].set(-1),
        page_table=state.page_table.at[slots, :width].set(table),
    )


@dataclasses.dataclass
class RoundTimer:
    """Rounds of slots 0 … requests − 1 of a state, which has room for them."""

    steps: Steps
    weights: Any
    state: DecodeState
    requests: int
    block: int

    def __post_init__(self) -> None:
        self.slots = jnp.arange(self.requests, dtype=jnp.int32)
        self._committed = jnp.copy(self.state.seq_len)  # the state's own is donated

    def rewind(self) -> None:
        """Gives all requests as many committed tokens as they began with."""
        self.state = dataclasses.replace(self.state, seq_len=jnp.copy(self._committed))

    def whole(self) -> Any:
        self.state, packed = self.steps.decode_round(self.block, self.weights, self.state, self.slots)
        return packed

    def propose(self) -> Any:
        return self.steps.propose(self.block, self.weights, self.state, self.slots)

    def split(self) -> dict[str, float]:
        """Medians in seconds.  The parts are launched alone, so their sum is more than the whole round."""
        whole_s = median_s(self.whole, self.rewind)
        if self.block == 1:
            return {"whole": whole_s}
        draft_s = median_s(self.propose, self.rewind)
        return {"whole": whole_s, "draft": draft_s, **self._after(self.propose())}

    def launch_s(self) -> float:
        """Seconds that the host takes to launch a round; the device waits for it only where that is the longer."""
        times = []
        self.rewind()
        for _ in range(min(LAUNCHES)):
            start_s = time.perf_counter()
            packed = self.whole()
            times.append(time.perf_counter() - start_s)
            jax.block_until_ready(packed)
        return statistics.median(times)

    def _after(self, ids: Any) -> dict[str, float]:
        logits: Any = None
        taps: Any = None

        def verify() -> Any:
            nonlocal logits, taps
            self.state, logits, taps = self.steps.verify_block(self.weights, self.state, self.slots, ids)
            return logits

        def accept() -> Any:
            verified = Verified(ids, logits, taps)
            self.state, packed = self.steps.accept_block(self.weights, self.state, self.slots, verified, None)
            return packed

        return {"verify": median_s(verify, self.rewind), "accept and commit": median_s(accept, self.rewind)}


def median_s(launch: Callable[[], Any], begin: Callable[[], None] = lambda: None) -> float:
    """Seconds of one of several launches in a row, of which the last is waited for; the first compiles.

    `begin` comes before each such row.
    """
    jax.block_until_ready(launch())
    launches = LAUNCHES[jax.default_backend() != "cpu"]
    times = []
    for _ in range(REPEATS):
        begin()
        start_s = time.perf_counter()
        for _ in range(launches):
            last = launch()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start_s) / launches)
    return statistics.median(times)
