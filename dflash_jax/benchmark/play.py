"""The contenders' turns, and what is worked out of them afterwards: speed-ups, ceilings, equality."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dflash_jax.benchmark.ceiling import ModelCost, Rates, level_ceiling, share
from dflash_jax.benchmark.contender import Ask, Contender, Counters, Response
from dflash_jax.benchmark.engine_contender import EngineContender
from dflash_jax.benchmark.exactness import Difference, exact_match
from dflash_jax.benchmark.load import Level, Sampling, make_ask, run_level
from dflash_jax.benchmark.memory import THE_PROCESS
from dflash_jax.benchmark.metrics import level_figures
from dflash_jax.benchmark.record import without_folder
from dflash_jax.benchmark.workloads import Workload
from dflash_jax.errors import UserError

log = logging.getLogger("dflash_jax")
MOST_BY_RATE = 64
UNFELT = 0.005  # share of a run


@dataclasses.dataclass(frozen=True)
class Plan:
    """The same for all contenders."""

    workload: Workload
    levels: tuple[Level, ...]
    num_prompts: int
    repeats: int = 1
    sampling: Sampling = Sampling()
    split: bool = True

    @property
    def most_at_once(self) -> int:
        """Requests that are decoded together; of those that come by themselves, more wait."""
        return max(level.concurrency or min(self.num_prompts, MOST_BY_RATE) for level in self.levels)


@dataclasses.dataclass
class LevelResult:
    """What a contender did at one level; responses are of all repeats."""

    level: Level
    figures: dict[str, Any]
    responses: list[Response]
    ceiling: dict[str, float] | None = None
    speedup: float | None = None
    exact: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        speed = self.figures["output_throughput"]
        limit = self.ceiling["output_throughput"] if self.ceiling else None
        return {
            "level": self.level.label,
            **dataclasses.asdict(self.level),
            **self.figures,
            "ceiling": self.ceiling,
            "share_of_ceiling": share(speed, limit),
            "speedup_over_plain": self.speedup,
            "exact_match": self.exact and {**self.exact, "differences": [*map(dataclasses.asdict, self.differences)]},
        }

    @property
    def differences(self) -> list[Difference]:
        return self.exact["differences"] if self.exact else []


@dataclasses.dataclass
class Outcome:
    """A contender's part of the results.  error: what ended it; notes: what was left out and why."""

    name: str
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    levels: list[LevelResult] = dataclasses.field(default_factory=list)
    cost: ModelCost | None = None
    round_split: dict[str, float] | None = None
    error: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        return self.facts.get("kind") == "dflash_jax" and self.facts.get("draft") == "none"

    def at(self, level: Level) -> LevelResult | None:
        return next((one for one in self.levels if one.level == level), None)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "facts": {key: without_folder(value) for key, value in self.facts.items()},
            "levels": [one.as_json() for one in self.levels],
            "round_split_s": self.round_split,
            "error": self.error,
            "notes": self.notes,
        }


async def play(contenders: Sequence[Contender], plan: Plan, outcomes: Sequence[Outcome]) -> None:
    """Open, warm up, measure every level, close.  What fails ends that contender's part and leaves what it has.

    Several are open at once and take turns at each repeat: what a machine does meanwhile meets all of them alike.
    """
    alone = len(contenders) == 1
    players = [Player(one, plan, outcome, alone) for one, outcome in zip(contenders, outcomes, strict=True)]
    async with contextlib.AsyncExitStack() as stack:
        for player in players:
            stack.push_async_callback(player.close)
            await player.attempt(player.contender.open)
        for level in plan.levels:
            await _play_level(players, level, plan.repeats)
        for player in players:
            await player.attempt(player.finish)


async def _play_level(players: Sequence[Player], level: Level, repeats: int) -> None:
    """When it is interrupted, the repeats that all have done are kept."""
    done = 0
    try:
        for repeat in range(repeats):
            for player in players:
                await player.attempt(player.run, level, repeat)
            done += 1
    finally:
        for player in players:
            await player.attempt(player.conclude, level, done)


class Player:
    """A contender and what became of it so far."""

    def __init__(self, contender: Contender, plan: Plan, outcome: Outcome, alone: bool):
        self.contender, self.plan, self.outcome, self.alone = contender, plan, outcome, alone
        self._closed = False
        self._runs: list[Run] = []  # of the present level

    async def attempt(self, part: Callable[..., Awaitable[None]], *args: Any) -> None:
        """A part of its turn.  One that fails is the last, and gives back what the contender holds."""
        if self.outcome.error is not None:
            return
        try:
            await part(*args)
        except UserError as error:
            self.outcome.error = str(error)
            log.error("%s", error)
            await self.close()

    async def run(self, level: Level, repeat: int) -> None:
        contender, plan = self.contender, self.plan
        at_once, most = level.concurrency or plan.num_prompts, contender.max_concurrency
        if most is not None and at_once > most:
            if repeat == 0:
                self.outcome.notes.append(f"not at {level.label}: it serves {most} request at a time")
            return
        if not self._runs and not self.outcome.levels:
            log.info("%s: warming up", contender.name)
            await contender.warm_up(warm_asks(plan), plan.most_at_once)
        self._runs.append(await _play_run(contender, plan, level, repeat))

    async def conclude(self, level: Level, done: int) -> None:
        """Figures of so many repeats of a level."""
        runs, self._runs = self._runs[:done], []
        if not runs:
            return
        every = [response for run in runs for response in run.responses]
        figures = level_figures([(run.responses, run.took_s) for run in runs], [run.counted for run in runs])
        self.outcome.levels.append(LevelResult(level, figures, every))
        self._take_facts()  # as they are should the next level fail

    def _take_facts(self) -> None:
        facts = self.contender.facts()
        if not self.alone and facts.get("peak_memory_of") == THE_PROCESS:
            facts["peak_memory_of"] = f"{THE_PROCESS}, with all contenders"
        self.outcome.facts = facts

    async def finish(self) -> None:
        self._take_facts()
        if isinstance(self.contender, EngineContender):
            _look_inside(self.contender, self.plan, self.outcome)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self.contender.close()


@dataclasses.dataclass
class Run:
    """One repeat."""

    responses: list[Response]
    took_s: float
    counted: Counters | None


async def _play_run(contender: Contender, plan: Plan, level: Level, repeat: int) -> Run:
    """A run in which nothing is compiled: one in which something was, for a time that can be felt, is done again."""
    items = plan.workload.take(plan.num_prompts)
    while True:
        before, compiled_s = await contender.counters(), contender.compile_s()
        start_s = time.perf_counter()
        responses = await run_level(contender, items, level, plan.sampling)
        took_s = time.perf_counter() - start_s
        if contender.compile_s() - compiled_s <= UNFELT * took_s:
            break
        log.info("%s: concurrency %s: something was compiled, once more", contender.name, level.label)
    after = await contender.counters()
    log.info("%s: concurrency %s, run %d of %d: %.1f s", contender.name, level.label, repeat + 1, plan.repeats, took_s)
    return Run(responses, took_s, after.since(before) if after and before else None)


def warm_asks(plan: Plan) -> list[Ask]:
    """All prompts, or as many as are ever asked at once."""
    count = max(plan.num_prompts, plan.most_at_once)
    return [make_ask(item, 0, item.prompt, plan.sampling) for item in plan.workload.take(count)]


def _look_inside(contender: EngineContender, plan: Plan, outcome: Outcome) -> None:
    outcome.cost = contender.cost()
    if plan.split and outcome.levels and outcome.facts["block_size"] > 1:
        first = outcome.levels[0]
        context = int(first.figures["mean_input_len"] + first.figures["mean_output_len"] / 2)
        outcome.round_split = contender.split(first.level.concurrency or 1, context)


# -- afterwards --------------------------------------------------------------------------------------------------------


def plain_of(outcomes: Sequence[Outcome], other: Outcome | None = None) -> Outcome | None:
    """Plain decoding of this run: over the same kernels if there are several, otherwise the first."""
    plain = [one for one in outcomes if one.is_plain and one.levels]
    same = [one for one in plain if other and one.facts.get("kernels") == other.facts.get("kernels")]
    return next(iter([*same, *plain]), None)


def plain_answers(outcome: Outcome | None) -> dict[str, Response]:
    """The first answer to each prompt."""
    answers: dict[str, Response] = {}
    for level in outcome.levels if outcome else ():
        for response in level.responses:
            answers.setdefault(response.key, response)
    return answers


def compare_with_plain(outcomes: Sequence[Outcome], synthetic: bool) -> None:
    """Fill in speed-ups and, unless weights are random, whether answers are equal."""
    for outcome in outcomes:
        plain = plain_of(outcomes, outcome)
        answers = plain_answers(plain)
        for result in outcome.levels:
            base = plain.at(result.level) if plain else None
            if base is not None:
                result.speedup = result.figures["output_throughput"] / base.figures["output_throughput"]
            if plain is not None and not synthetic:
                result.exact = exact_match(answers, result.responses)


def add_ceilings(outcomes: Sequence[Outcome], rates: Rates | None) -> None:
    """For everybody who ran on this device.  The reference costs what our engine with its draft does."""
    for outcome in outcomes:
        cost = outcome.cost or _same_models(outcomes, outcome)
        rows = int(outcome.facts.get("block_size") or 1)
        for result in outcome.levels if cost and rates else ():
            assert cost and rates
            at_once = result.level.concurrency
            if at_once is not None:
                result.ceiling = level_ceiling(cost, rates, at_once, result.figures, rows)


def _same_models(outcomes: Sequence[Outcome], outcome: Outcome) -> ModelCost | None:
    if outcome.facts.get("kind") != "reference":
        return None
    costs = {one.facts["draft"].removeprefix("dflash:"): one.cost for one in outcomes if one.cost}
    return costs.get(outcome.facts["draft"])
