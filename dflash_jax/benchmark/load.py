"""Requests in time: a fixed number at once, or arrivals of a Poisson process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.benchmark.contender import Ask, Contender, Response, together
from dflash_jax.benchmark.workloads import Item


@dataclass(frozen=True)
class Level:
    """How requests come: so many at once, or so many a second on average (Poisson); one of the two is None."""

    concurrency: int | None = None
    request_rate: float | None = None

    @property
    def label(self) -> str:
        return f"{self.concurrency}" if self.request_rate is None else f"{self.request_rate:g}/s"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; prompt i of a run has the seed `seed` + i."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


async def run_level(contender: Contender, items: Sequence[Item], level: Level, sampling: Sampling) -> list[Response]:
    """Responses in the order of the items, one for each turn.  The first error cancels what is left and is raised."""
    gate = asyncio.Semaphore(level.concurrency or len(items))
    starts = arrivals(len(items), level.request_rate, sampling.seed)

    async def one(index: int, item: Item) -> list[Response]:
        await asyncio.sleep(starts[index])
        async with gate:
            return await converse(contender, item, sampling)

    found = await together(one(i, item) for i, item in enumerate(items))
    return [response for responses in found for response in responses]


def arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds from the start at which requests come: all at once without a rate."""
    if rate is None:
        return [0.0] * count
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


async def converse(contender: Contender, item: Item, sampling: Sampling) -> list[Response]:
    """The turns of an item one after another, each with the contender's own answers before it."""
    responses: list[Response] = []
    prompt: Any = item.prompt
    for turn in range(len(item.more) + 1):
        if turn:
            answer = {"role": "assistant", "content": responses[-1].text or ""}
            prompt = [*prompt, answer, {"role": "user", "content": item.more[turn - 1]}]
        responses.append(await contender.generate(make_ask(item, turn, prompt, sampling)))
    return responses


def make_ask(item: Item, turn: int, prompt: Any, sampling: Sampling) -> Ask:
    return Ask(
        f"{item.key}#{turn}" if turn else item.key, prompt, item.output_len, item.ignore_eos,
        sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed + item.number,
    )  # fmt: skip
