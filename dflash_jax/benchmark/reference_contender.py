"""The authors' torch reference as a contender: one request at a time, in a process of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax.benchmark.contender import Ask, ContenderError, Counters, Response
from dflash_jax.benchmark.encoding import Codec
from dflash_jax.text.prompts import shortened

WORKER = Path(__file__).parent / "reference_side" / "worker.py"  # alone there: a script imports what lies beside it
WARM_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class ReferenceOptions:
    """python: an interpreter that has the `dflash` package.  block_size: 1 is its plain decoding, None its own."""

    target: str
    draft: str
    python: str = sys.executable
    dtype: str = "auto"
    platform: str | None = None
    block_size: int | None = None
    timeout_s: float = 600.0


class ReferenceContender:
    """Streams nothing, so that a response has two pieces: its first token and its end."""

    max_concurrency = 1

    def __init__(self, name: str, options: ReferenceOptions, codec: Codec, stop_ids: Sequence[int]):
        self.name = name
        self.options = options
        self._codec = codec
        self._stop_ids = list(stop_ids)
        self._process: asyncio.subprocess.Process | None = None
        self._facts: dict[str, Any] = {}

    async def open(self) -> None:
        options = self.options
        try:
            self._process = await asyncio.create_subprocess_exec(
                options.python, str(WORKER), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, limit=1 << 24,
            )  # fmt: skip
        except OSError as error:
            raise ContenderError(f"{self.name}: {options.python} cannot be started: {error.strerror}") from error
        self._errors = asyncio.create_task(_read_tail(self._process.stderr))
        told = {key: getattr(options, key) for key in ("target", "draft", "dtype", "platform")}
        self._facts = await self._talk({**told, "threads": len(os.sched_getaffinity(0))})

    async def warm_up(self, asks: Sequence[Ask], concurrency: int) -> None:
        for ask in asks[:2]:
            await self.generate(dataclasses.replace(ask, max_tokens=min(ask.max_tokens, WARM_TOKENS)))

    async def generate(self, ask: Ask) -> Response:
        ids = self._codec.encode(ask.prompt)
        sent_s = time.perf_counter()
        found = await self._talk({
            "ids": ids, "max_tokens": ask.max_tokens, "stop_ids": [] if ask.ignore_eos else self._stop_ids,
            "temperature": ask.temperature, "top_p": ask.top_p, "top_k": ask.top_k,
            "block_size": self.options.block_size,
        })  # fmt: skip
        self._facts["peak_memory_bytes"] = found["peak_memory_bytes"]
        tokens = found["token_ids"]
        return Response(
            ask.key, len(ids), len(tokens), sent_s, [sent_s + found["ttft_s"], sent_s + found["e2e_s"]], tokens,
            self._codec.decode(tokens), accept_lengths=found["accept_lengths"], streamed=False,
        )  # fmt: skip

    async def _talk(self, message: dict[str, Any]) -> dict[str, Any]:
        """A line there, a line back."""
        assert self._process and self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
            line = await asyncio.wait_for(self._process.stdout.readline(), self.options.timeout_s)
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        except TimeoutError as error:
            raise ContenderError(f"{self.name}: no answer within {self.options.timeout_s:g} s") from error
        if not line:
            raise ContenderError(f"{self.name} has ended: {shortened(await self._errors, 200)}")
        return json.loads(line)

    def compile_s(self) -> float:
        return 0.0

    async def counters(self) -> Counters | None:
        return None

    def facts(self) -> dict[str, Any]:
        return {"kind": "reference", "draft": self.options.draft,
                "peak_memory_of": "torch" if self._facts.get("device") == "cuda" else "the process",
                **self._facts, "block_size": self.options.block_size or self._facts.get("block_size")}  # fmt: skip

    async def close(self) -> None:
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def _read_tail(stream: asyncio.StreamReader | None) -> str:
    """The last line of what the process said on stderr."""
    last = "without a word"
    while stream is not None and (line := await stream.readline()):
        last = line.decode("utf-8", "replace").strip() or last
    return last
