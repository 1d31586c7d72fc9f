"""Faults that others met, one by one, over real models.  Numbers are those of the list of cases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax import AsyncEngine, Engine, SamplingParams, UserError
from dflash_jax.drafters import Weights
from dflash_jax.engine.request import Request

from .bank import sure_prompts
from .device import SMALL, V1, V2, Device, greedy, open_device, outcome, random_prompt, serve, serve_prompts, solo
from .test_async_engine import collect

both = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
each_pair = pytest.mark.parametrize("pair", [V1, V2])
CAPACITY = SMALL["max_model_len"]


# -- pages -------------------------------------------------------------------------------------------------------------


class PageWatch:
    """Pages that requests got to write, and those that they share with the prefix cache."""

    def __init__(self, engine: Engine):
        self.owned: set[int] = set()
        self.shared: set[int] = set()
        self._pool = engine._loop.scheduler.pool
        self._runner = engine.runner
        self._admit, self._extend = engine.runner.admit, engine.runner.extend

    def admit(self, slot: int, *, pages: Sequence[int], **options: Any) -> None:
        for page in pages:
            (self.shared if self._pool.is_marked(page) else self.owned).add(page)
        self._admit(slot, pages=pages, **options)

    def extend(self, updates: Sequence[tuple[int, int, int]]) -> None:
        self.owned |= {page for _, _, page in updates}
        self._extend(updates)


def pools(device: Device) -> list[np.ndarray]:
    """Every layer of target and draft [P, …], copied."""
    return [np.array(pool) for pool in jax.tree.leaves((device.runner.state.kv, device.runner.state.draft))]


@contextmanager
def only_own_pages_written(device: Device, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageWatch]:
    """Fails unless every page that no request of the block owned, page 0 aside, is the same bit for bit."""
    before, watch = pools(device), PageWatch(engine)
    with monkeypatch.context() as patch:
        patch.setattr(device.runner, "admit", watch.admit)
        patch.setattr(device.runner, "extend", watch.extend)
        yield watch
    others = [page for page in range(1, device.sizes.num_pages) if page not in watch.owned]
    assert watch.owned and len(others) > 10
    for old, new in zip(before, pools(device), strict=True):
        assert np.array_equal(old[others], new[others], equal_nan=True)
        assert not np.array_equal(old, new, equal_nan=True)


def fill_with_garbage(device: Device) -> None:
    """Every slot and many pages have been used by somebody."""
    engine = device.engine(enable_prefix_caching=False)
    serve_prompts(engine, [random_prompt(device, 90, seed) for seed in range(device.sizes.num_slots)], greedy(30))


@both
@each_pair
def test_3_and_22_a_prefix_hit_carries_draft_kv_and_is_not_written_to(pair, overlap, monkeypatch):
    device = open_device(pair)
    [known] = sure_prompts(device, (61,))
    engine = device.engine(overlap=overlap)
    first = serve_keeping_pages(engine, known.prompt)
    with only_own_pages_written(device, engine, monkeypatch) as watch:
        second = serve_keeping_pages(engine, known.prompt)
    assert outcome(first) == outcome(second) == known.cut(40)
    assert (first.cached_tokens, second.cached_tokens) == (0, 56) and len(watch.shared) == 7
    assert engine.metrics().prefix_cache_hits == 56
    serve(engine)


def serve_keeping_pages(engine: Engine, prompt: Sequence[int]) -> Request:
    """Forty tokens, without emptying the prefix cache afterwards."""
    request = engine.add_request(prompt, greedy(40))
    while engine.has_work:
        engine.step()
    return request


@both
@each_pair
def test_9_a_short_request_after_a_long_one_in_the_same_slot(pair, overlap):
    device = open_device(pair)
    engine = device.engine(overlap=overlap, max_running_requests=1)
    known = sure_prompts(device, (300, 3, 40))
    requests = serve_prompts(engine, [one.prompt for one in known], greedy(25))
    assert [outcome(request) for request in requests] == [one.cut(25) for one in known]


@both
@pytest.mark.parametrize(("prompt", "context"), [(240, 256), (CAPACITY - 16, CAPACITY)])
def test_19_a_prompt_that_leaves_room_for_sixteen(prompt, context, overlap):
    """Of the limit that was set, and of the page table itself."""
    device = open_device(V2)
    [known] = sure_prompts(device, (prompt,), 16)
    engine = device.engine(overlap=overlap, max_model_len=context)
    [request] = serve_prompts(engine, [known.prompt], greedy(100))
    assert outcome(request) == known.cut(16) and len(request.output_ids) == 16


@both
@each_pair
@pytest.mark.parametrize("room", [1, 2, 5])
def test_20_a_block_across_the_end_of_the_table_touches_nobody(pair, room, overlap, monkeypatch):
    device = open_device(pair)
    fill_with_garbage(device)
    [full], [known] = sure_prompts(device, (CAPACITY - room,), room), sure_prompts(device, (30,))
    engine = device.engine(overlap=overlap)
    neighbour = serve_keeping_pages(engine, known.prompt)
    with only_own_pages_written(device, engine, monkeypatch):
        ended, beside = (engine.add_request(prompt, greedy(40)) for prompt in (full.prompt, known.prompt))
        while engine.has_work:
            engine.step()
    assert outcome(ended) == full.cut(room)
    assert outcome(beside) == outcome(neighbour) == known.cut(40)
    serve(engine)


@both
@each_pair
def test_21_spare_rows_of_a_bucket_write_only_padding(pair, overlap, monkeypatch):
    """Three live rows in a bucket of four; every slot has been used before."""
    three_of_four(open_device(pair), 3, overlap, monkeypatch)


@pytest.mark.soak
def test_21_as_it_was_met(monkeypatch):
    """33 live rows in a bucket of 48."""
    device = open_device(V2, max_running_requests=48, max_model_len=128, chunked_prefill_size=128)
    three_of_four(device, 33, True, monkeypatch, new=70)
    assert ("decode_round", 48, device.runner.block_size) in device.runner._seen


def three_of_four(device: Device, live: int, overlap: bool, monkeypatch: pytest.MonkeyPatch, new: int = 20) -> None:
    fill_with_garbage(device)
    known = sure_prompts(device, tuple(9 + seed % 5 for seed in range(live)), new)
    engine = device.engine(overlap=overlap)
    with only_own_pages_written(device, engine, monkeypatch):
        requests = serve_prompts(engine, [one.prompt for one in known], greedy(new))
    assert [outcome(request) for request in requests] == [one.cut(new) for one in known]


@pytest.mark.soak
@both
def test_25_pages_of_64_and_100_requests_leave_nothing(overlap):
    device = open_device(V2, page_size=64, max_model_len=256)
    engine = device.engine(overlap=overlap, num_pages=12)
    known = sure_prompts(device, tuple(1 + 17 * i % 90 for i in range(20)), 30) * 5
    requests = serve_prompts(engine, [one.prompt for one in known], greedy(30))
    assert [request.output_ids for request in requests] == [one.tokens for one in known]


# -- requests and what ends them ---------------------------------------------------------------------------------------


@both
@each_pair
def test_27_abort_in_every_phase_and_the_slot_is_used_again_at_once(pair, overlap):
    """Waiting, prefilling chunk k, in flight, preempted: whatever the request is doing after so many steps."""
    device = open_device(pair)
    known = sure_prompts(device, (20, 75, 9))
    for steps in range(0, 14, 1 if pair == V2 else 3):
        engine = device.engine(overlap=overlap, num_pages=22, max_running_requests=2)
        first, aborted, last = (engine.add_request(one.prompt, greedy(24)) for one in known)
        for _ in range(steps):
            engine.step()
        assert engine.abort(aborted.request_id)
        serve(engine)
        assert aborted.finish_reason == "abort"
        assert aborted.output_ids == known[1].tokens[: len(aborted.output_ids)]
        assert outcome(first) == known[0].cut(24) and last.output_ids == known[2].tokens[:24]


@both
def test_27_preempted_requests_end_as_if_they_had_not_been(overlap):
    """Pages for a little more than the longest of four."""
    device = open_device(V2)
    known = sure_prompts(device, (40,) * 4, 70)
    engine = device.engine(overlap=overlap, num_pages=20)
    requests = serve_prompts(engine, [one.prompt for one in known], greedy(70))
    assert sum(request.preemptions for request in requests) > 1
    for one, request in zip(known, requests, strict=True):
        assert request.output_ids == one.tokens
        assert len(request.output_ids) - sum(request.accept_lengths) <= 1 + request.preemptions


@both
def test_28_a_bad_request_is_refused_and_harms_nobody(overlap):
    device = open_device(V2)
    [known] = sure_prompts(device, (30,))
    engine = device.engine(overlap=overlap)
    good = engine.add_request(known.prompt, greedy(30))
    engine.step()
    bad: list[tuple[list[int], Any]] = [
        ([], {}), ([device.vocab_size], {}), ([-1], {}), ([1] * CAPACITY, {}), ([1], {"eos_token_ids": range(17)}),
    ]  # fmt: skip
    for ids, options in bad:
        with pytest.raises(UserError):
            engine.add_request(ids, SamplingParams(max_new_tokens=5), **options)
        engine.step()
    serve(engine)
    assert outcome(good) == known.cut(30)


@both
@pytest.mark.parametrize("at", [0, 35])
def test_28_logits_that_are_no_numbers_end_their_request_alone(overlap, at):
    """One token's embedding is damaged; whoever has it in the prompt cannot be served."""
    device = open_device(V1)
    assert not device.loaded.config.tied
    poison = 7
    prompt = [token for token in random_prompt(device, 60) if token != poison]
    params = greedy(12)
    want = solo(device, prompt, params)
    assert poison not in want.output_ids
    target = {**device.weights.target, "embed": device.weights.target["embed"].at[poison].set(np.nan)}
    with device.weighing(Weights(target, device.weights.draft)):
        engine = device.engine(overlap=overlap)
        good = engine.add_request(prompt, params)
        bad = engine.add_request([*prompt[:at], poison, *prompt[at:]], params)
        again = engine.add_request(prompt, params)
        serve(engine)
    assert (bad.output_ids, bad.finish_reason, bad.error) == ([], "error", None)
    assert outcome(good) == outcome(again) == outcome(want)


@each_pair
def test_32_rounds_are_as_wide_as_what_is_live(pair, monkeypatch):
    """Three requests in four slots, which end one after the other: no round computes more rows than its bucket has."""
    device = open_device(pair)
    known = sure_prompts(device, (5, 6, 7))
    engine, launched = device.engine(overlap=False), []
    launch = device.runner._launch
    monkeypatch.setattr(device.runner, "_launch", lambda key, *a, **k: (launched.append(key), launch(key, *a, **k))[1])
    requests = [engine.add_request(one.prompt, greedy(new)) for one, new in zip(known, (3, 10, 40), strict=True)]
    live = []
    while engine.has_work:
        engine.step()
        live.append(sum(not request.finished for request in requests))
    assert [outcome(r) for r in requests] == [one.cut(new) for one, new in zip(known, (3, 10, 40), strict=True)]
    rows = [key[1] for key in launched if key[0] == "decode_round"]
    assert rows == sorted(rows, reverse=True) and {rows[0], rows[-1]} == {4, 1}
    assert rows.count(1) >= live.count(1) - 1
    serve(engine)


# -- traces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [V2])
def test_33_nothing_is_traced_or_compiled_after_warm_up(pair, no_retrace):
    """Joining, leaving, aborts, growth, preemption and every bucket."""
    device = open_device(pair)
    compiled: list[str] = []
    device.engine().warmup(progress=False)

    def listen(event: str, duration_secs: float, **metadata: Any) -> None:
        if "backend_compile" in event:
            compiled.append(str(metadata))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with no_retrace():
            for num_pages, lengths in ((None, (1, 16, 17, 33, 90, 8, 40)), (20, (40, 41, 42, 43))):
                engine = device.engine(num_pages=num_pages)
                prompts = [random_prompt(device, length) for length in lengths]
                requests = [engine.add_request(prompt, greedy(70)) for prompt in prompts]
                for _ in range(20):
                    engine.step()
                engine.abort(requests[2].request_id)
                serve(engine)
                assert num_pages is None or engine.metrics().num_preemptions
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


# -- asyncio -----------------------------------------------------------------------------------------------------------


def test_tasks_over_a_real_model():
    device = open_device(V2)
    known = sure_prompts(device, tuple(range(5, 14)), 20)

    async def one(engine: AsyncEngine, prompt: list[int]) -> list[int]:
        return [token for update in await collect(engine.generate(prompt, greedy(20))) for token in update.tokens]

    async def main() -> list[list[int]]:
        async with AsyncEngine(device.engine()) as engine:
            tasks = [asyncio.create_task(one(engine, prompt)) for prompt in [*(k.prompt for k in known), [1, 2, 3]]]
            while engine.metrics().generation_tokens < 5:
                await asyncio.sleep(0.001)
            tasks[-1].cancel()
            return await asyncio.gather(*tasks[:-1])

    assert asyncio.run(main()) == [one.tokens for one in known]
