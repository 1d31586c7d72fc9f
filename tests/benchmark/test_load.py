"""When requests are sent, and what becomes of those that are left when one fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dflash_jax.benchmark.contender import ContenderError
from dflash_jax.benchmark.load import Level, Sampling, arrivals, run_level
from dflash_jax.benchmark.play import Outcome, Plan, play
from dflash_jax.benchmark.workloads import Item, Workload

from .fakes import FakeContender

ITEMS = tuple(Item(f"item-{i}", [{"role": "user", "content": str(i)}], 4, number=i) for i in range(6))


def plan(*levels: Level, **more: object) -> Plan:
    return Plan(Workload("six", ITEMS), levels, 6, **more)  # pyright: ignore[reportArgumentType]


def run(contender: FakeContender, level: Level, items: tuple[Item, ...] = ITEMS) -> list[str]:
    found = asyncio.run(run_level(contender, items, level, Sampling(temperature=0.5, seed=40)))
    return [one.key for one in found]


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_never_more_at_once_and_answers_in_order(at_once):
    contender = FakeContender(seconds=0.002)
    assert run(contender, Level(concurrency=at_once)) == [item.key for item in ITEMS]
    assert contender.most_at_once == at_once


def test_each_prompt_has_its_own_seed():
    contender = FakeContender()
    run(contender, Level(concurrency=1))
    assert [ask.seed for ask in contender.asked] == [40, 41, 42, 43, 44, 45]


def test_poisson_arrivals():
    times = arrivals(20_000, 50.0, seed=1)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.05)  # as in an exponential distribution
    assert arrivals(3, None, seed=1) == [0.0] * 3


def test_a_rate_does_not_wait_for_answers():
    contender = FakeContender(seconds=0.3)
    run(contender, Level(request_rate=1000.0))
    assert contender.most_at_once == 6


def test_turns_follow_the_contenders_own_answers():
    contender = FakeContender()
    item = Item("talk", [{"role": "user", "content": "first"}], 4, more=("second", "third"))
    assert run(contender, Level(concurrency=1), (item,)) == ["talk", "talk#1", "talk#2"]
    last: Any = contender.asked[2].prompt
    assert [message["content"] for message in last] == [
        "first", "answer 1", "second", "answer 2", "third",
    ]  # fmt: skip


def test_the_first_error_is_raised_as_it_is():
    with pytest.raises(ContenderError, match="fake is tired"):
        run(FakeContender(seconds=0.01, fails_at=2), Level(concurrency=3))


# -- a contender's turn ------------------------------------------------------------------------------------------------


def played(contender: FakeContender, its_plan: Plan) -> Outcome:
    outcome = Outcome(contender.name)
    asyncio.run(play([contender], its_plan, [outcome]))
    return outcome


def test_levels_that_were_measured_are_kept_when_a_later_one_fails():
    contender = FakeContender(fails_at=8)
    outcome = played(contender, plan(Level(concurrency=1), Level(concurrency=2)))
    assert outcome.error == "fake is tired"
    assert [one.level.label for one in outcome.levels] == ["1"]
    assert outcome.facts == {"kind": "fake"}
    assert contender.log == ["open", "warm 6", "close"]


def test_one_that_serves_one_at_a_time_sits_out():
    outcome = played(FakeContender(max_concurrency=1), plan(Level(concurrency=1), Level(concurrency=4)))
    assert [one.level.label for one in outcome.levels] == ["1"]
    assert outcome.notes == ["not at 4: it serves 1 request at a time"] and outcome.error is None


def test_repeats():
    contender = FakeContender()
    outcome = played(contender, plan(Level(concurrency=2), repeats=3))
    assert len(contender.asked) == 18 and len(outcome.levels[0].figures["output_throughput_runs"]) == 3


def test_those_that_alternate_take_turns_at_each_repeat_and_one_that_fails_stops_nobody():
    turns: list[str] = []

    class Turned(FakeContender):
        async def counters(self) -> None:
            turns.append(self.name)  # before and after each run

    first, tired, last = Turned("first"), Turned("tired", fails_at=8), Turned("last", max_concurrency=1)
    outcomes = [Outcome(one.name) for one in (first, tired, last)]
    its_plan = plan(Level(concurrency=1), Level(concurrency=2), repeats=2)
    asyncio.run(play([first, tired, last], its_plan, outcomes))
    both_times, then = ["first"] * 2, ["last"] * 2
    assert turns == [*both_times, *["tired"] * 2, *then, *both_times, "tired", *then, *both_times, *both_times]
    assert [outcome.error for outcome in outcomes] == [None, "tired is tired", None]
    assert [[one.level.label for one in outcome.levels] for outcome in outcomes] == [["1", "2"], [], ["1"]]
    assert all(len(level.figures["output_throughput_runs"]) == 2 for level in outcomes[0].levels)
    assert outcomes[2].notes == ["not at 2: it serves 1 request at a time"]
    assert [one.log for one in (first, tired, last)] == [["open", "warm 6", "close"]] * 3


@pytest.mark.parametrize("part", ["open", "warm_up", "facts"])
def test_one_that_fails_in_any_part_is_closed_at_once_and_stops_nobody(part: str):
    def fail(*_: Any) -> Any:
        raise ContenderError(f"no {part}")

    bad, good = FakeContender("bad"), FakeContender("good")
    setattr(bad, part, fail)
    outcomes = [Outcome("bad"), Outcome("good")]
    seen: list[bool] = []
    good.facts = lambda: seen.append("close" in bad.log) or {"kind": "fake"}  # type: ignore[method-assign]
    asyncio.run(play([bad, good], plan(Level(concurrency=1)), outcomes))
    assert outcomes[0].error == f"no {part}" and bad.log.count("close") == 1 and all(seen)
    assert outcomes[1].error is None and len(outcomes[1].levels) == 1 and good.log[-1] == "close"


def test_an_interrupt_keeps_the_repeats_that_all_have_done_and_closes_everybody():
    class Interrupted(FakeContender):
        async def generate(self, ask: Any) -> Any:
            if len(self.asked) == 15:  # in the third of its repeats
                raise KeyboardInterrupt
            return await super().generate(ask)

    class Stuck(FakeContender):
        async def close(self) -> None:
            await super().close()
            raise RuntimeError("does not close")

    first, last = Interrupted("first"), Stuck("last")
    outcomes = [Outcome("first"), Outcome("last")]
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        asyncio.run(play([first, last], plan(Level(concurrency=1), repeats=4), outcomes))
    assert [len(one.levels[0].figures["output_throughput_runs"]) for one in outcomes] == [2, 2]
    assert first.log[-1] == last.log[-1] == "close"


def test_peaks_of_those_that_are_open_together_are_called_so():
    outcomes = [Outcome("one"), Outcome("other")]
    fakes = [FakeContender("one"), FakeContender("other")]
    for fake in fakes:
        fake.facts = lambda: {"peak_memory_of": "the process"}  # type: ignore[method-assign]
    asyncio.run(play(fakes, plan(Level(concurrency=1)), outcomes))
    assert {one.facts["peak_memory_of"] for one in outcomes} == {"the process, with all contenders"}
    alone = Outcome("one")
    asyncio.run(play(fakes[:1], plan(Level(concurrency=1)), [alone]))
    assert alone.facts["peak_memory_of"] == "the process"


def test_a_run_in_which_something_was_compiled_is_run_again():
    contender = FakeContender(compiles=2)
    outcome = played(contender, plan(Level(concurrency=2)))
    assert len(contender.asked) == 12
    assert len(outcome.levels[0].responses) == 6


def test_a_run_in_which_that_took_no_time_to_speak_of_counts():
    contender = FakeContender(compiles=2, seconds=0.01, each_s=1e-6)
    played(contender, plan(Level(concurrency=2)))
    assert len(contender.asked) == 6
