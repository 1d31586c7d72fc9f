"""A contender whose every answer is known, and responses by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from dflash_jax.benchmark.contender import Ask, ContenderError, Counters, Response


def response(key: str = "a", sent_s: float = 0.0, pieces: Sequence[float] = (1.0,), tokens: int = 1,
             accept_lengths: list[int] | None = None, **more: Any) -> Response:  # fmt: skip
    return Response(key, 10, tokens, sent_s, list(pieces), accept_lengths=accept_lengths, **more)


class FakeContender:
    """Answers after `seconds`; fails at the request number `fails_at`; compiles in its first run if told to."""

    def __init__(self, name: str = "fake", seconds: float = 0.0, fails_at: int | None = None, compiles: int = 0,
                 max_concurrency: int | None = None, each_s: float = 1.0):  # fmt: skip
        self.name = name
        self.seconds = seconds
        self.fails_at = fails_at
        self.compiles, self.each_s, self.compiled_s = compiles, each_s, 0.0
        self.max_concurrency = max_concurrency
        self.asked: list[Ask] = []
        self.at_once = 0
        self.most_at_once = 0
        self.log: list[str] = []

    async def open(self) -> None:
        self.log.append("open")

    async def warm_up(self, asks: Sequence[Ask], concurrency: int) -> None:
        self.log.append(f"warm {len(asks)}")

    async def generate(self, ask: Ask) -> Response:
        self.asked.append(ask)
        if self.fails_at is not None and len(self.asked) > self.fails_at:
            raise ContenderError(f"{self.name} is tired")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        sent_s = time.perf_counter()
        await asyncio.sleep(self.seconds)
        self.at_once -= 1
        return Response(ask.key, 3, 2, sent_s, [sent_s + 0.1, time.perf_counter()], [7, 8], f"answer {len(self.asked)}")

    def compile_s(self) -> float:
        """Grows during the first runs."""
        self.compiled_s += self.each_s * (self.compiles > 0)
        self.compiles -= 1
        return self.compiled_s

    async def counters(self) -> Counters | None:
        return None

    def facts(self) -> dict[str, Any]:
        return {"kind": "fake"}

    async def close(self) -> None:
        self.log.append("close")
