"""This engine as a contender, with a draft or without, over one kernel backend."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from dflash_jax.benchmark.ceiling import ModelCost, engine_cost
from dflash_jax.benchmark.contender import Ask, ContenderError, Counters, Response, together
from dflash_jax.benchmark.encoding import Codec
from dflash_jax.benchmark.memory import peak_bytes, reset_peak
from dflash_jax.benchmark.split import split_round
from dflash_jax.engine.async_engine import AsyncEngine
from dflash_jax.engine.engine import Engine, EngineStopped
from dflash_jax.llm import LLM
from dflash_jax.sampling import SamplingParams

WARM_TOKENS = 24  # of an answer


@dataclasses.dataclass(frozen=True)
class Served:
    """An engine, what makes token ids of prompts and text of answers, and what ends an answer."""

    engine: Engine
    codec: Codec = Codec()
    eos_token_ids: tuple[int, ...] = ()


def serve_llm(target: str | None, draft: str | None, platform: str | None, **options: Any) -> Served:
    llm = LLM(target, draft, platform=platform, **options)
    return Served(llm.engine, Codec(llm.tokenizer), llm.eos_token_ids)


class EngineContender:
    """`make` opens the engine, which is let go of with `close`.  `synthetic` is the forced acceptance, if it is."""

    max_concurrency = None

    def __init__(self, name: str, make: Callable[[], Served], synthetic: float | None = None):
        self.name = name
        self.synthetic = synthetic
        self._make = make
        self._served: Served | None = None
        self._async: AsyncEngine | None = None

    @property
    def served(self) -> Served:
        assert self._served is not None, "opened first"
        return self._served

    async def open(self) -> None:
        reset_peak()
        with self._told():
            self._served = self._make()
        self._async = AsyncEngine(self.served.engine)

    async def warm_up(self, asks: Sequence[Ask], concurrency: int) -> None:
        """Compile and time every round; then some answers, which compile the prefills that prompts need."""
        with self._told():
            warm_rounds(self.served.engine, sampled=asks[0].temperature > 0)
        short = [dataclasses.replace(ask, max_tokens=min(ask.max_tokens, WARM_TOKENS)) for ask in asks]
        await together(map(self.generate, short[:concurrency]))
        for ask in self._of_all_lengths(short):
            await self.generate(ask)

    def _of_all_lengths(self, asks: Sequence[Ask]) -> list[Ask]:
        """One for each width of prefill; these answers come one by one, after some together."""
        served, found = self.served, {}
        for ask in asks:
            found.setdefault(served.engine.runner.prefill_width(len(served.codec.encode(ask.prompt))), ask)
        return list(found.values())

    def compile_s(self) -> float:
        """Seconds spent on compiling so far."""
        return self.served.engine.compile_s

    async def generate(self, ask: Ask) -> Response:
        assert self._async is not None, "opened first"
        served = self.served
        ids = served.codec.encode(ask.prompt)
        response = Response(ask.key, len(ids), 0, time.perf_counter(), [], token_ids=[])
        try:
            async for update in self._async.generate(ids, sampling_params(ask), eos_token_ids=served.eos_token_ids):
                _take(response, update)
        except EngineStopped as error:
            raise ContenderError(f"{self.name}: {error}") from error
        if response.finish_reason not in ("stop", "length") or not response.piece_s:
            raise ContenderError(f"{self.name}: the answer to {ask.key} ended with {response.finish_reason!r}")
        response.text = served.codec.decode(response.token_ids or [])
        return response

    async def counters(self) -> Counters | None:
        found = self.served.engine.metrics()
        widths = {width: sum(counts) for width, counts in found.acceptance_by_width.items()}
        return Counters(
            found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens, found.num_drafts_per_pos,
            found.num_accepted_tokens_per_pos, found.acceptance_histogram, widths,
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        engine, loaded = self.served.engine, self.served.engine.loaded
        return {
            "kind": "dflash_jax",
            "draft": engine.settings.draft,
            "kernels": engine.runner.steps.config.kernels.backend,
            "dtype": str(loaded.dtype),
            "platform": loaded.platform,
            "block_size": engine.runner.block_size,
            "speculation": engine.settings.speculation,
            "synthetic_acceptance": self.synthetic,
            "memory": dataclasses.asdict(engine.memory),
            **peak_bytes(loaded.mesh.devices.flat[0], engine.memory),
        }

    def cost(self) -> ModelCost:
        """Bytes and operations of its steps, for ceilings."""
        return engine_cost(self.served.engine)

    def split(self, concurrency: int, context: int) -> dict[str, float]:
        """Seconds of the parts of a round; the engine serves nothing afterwards."""
        return split_round(self.served.engine, concurrency, context)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What the device refuses, which is memory for the most part, ends this contender and not the run."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            raise ContenderError(f"{self.name}: {str(error).splitlines()[0]}") from error

    async def close(self) -> None:
        if self._async is not None:
            await self._async.aclose()
        self._async = self._served = None
        gc.collect()  # its pools are needed by the next one


def warm_rounds(engine: Engine, sampled: bool) -> None:
    """What `Engine.warmup` does for rounds, without the many buckets of prefill of which a run uses few."""
    if sampled:
        engine.warmup(progress=False, sampling=True)
        return
    runner, speculation = engine.runner, engine.speculation
    runner.warm_updates()
    for slots in runner.spare_batches():
        for width in speculation.widths if speculation else [runner.block_size]:
            runner.decode(slots, width).result()
    if speculation:
        speculation.measure(runner.decode, runner.spare_batches())


def sampling_params(ask: Ask) -> SamplingParams:
    if ask.temperature == 0:
        return SamplingParams(max_new_tokens=ask.max_tokens, ignore_eos=ask.ignore_eos)
    return SamplingParams(
        max_new_tokens=ask.max_tokens, ignore_eos=ask.ignore_eos, temperature=ask.temperature, top_p=ask.top_p,
        top_k=ask.top_k, seed=ask.seed,
    )  # fmt: skip


def _take(response: Response, update: Any) -> None:
    """Note a step's tokens and when they came."""
    if update.tokens:
        response.piece_s.append(time.perf_counter())
    if update.finish_reason is None:
        return
    request = update.request
    response.token_ids = list(request.output_ids)
    response.output_tokens = len(request.output_ids)
    response.finish_reason = update.finish_reason
    response.accept_lengths = list(request.accept_lengths)
