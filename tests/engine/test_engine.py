"""The public engine over the fake device: submitting, stepping and aborting from any thread, and how it ends."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import signal
import threading
from typing import Any

import pytest

from dflash_jax import EngineStopped, UserError
from dflash_jax.engine import engine as engine_module
from dflash_jax.engine.engine import Client, Engine, GeneratedTokens
from dflash_jax.engine.loop import Update
from dflash_jax.engine.turn import Turn

from .fake_engine import make_engine, params, truth
from .fake_runner import assert_nothing_leaks

both = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


def settle(engine: Engine) -> list[Update]:
    """Step to the end and check the books."""
    updates: list[Update] = []
    while engine.has_work:
        updates += engine.step()
    assert_nothing_leaks(engine._loop)
    assert not engine._clients and not engine._inbox
    return updates


def tokens_of(updates: Any) -> list[int]:
    return [token for update in updates for token in update.tokens]


# -- one thread ----------------------------------------------------------------------------------------------------


@both
def test_add_step_and_read(overlap):
    engine = make_engine(overlap=overlap)
    requests = [engine.add_request([i, 2, 3], params([i, 2, 3], new=9)) for i in range(6)]
    assert engine.has_work and engine.metrics().num_requests_waiting == 6
    updates = settle(engine)
    for i, request in enumerate(requests):
        mine = [update for update in updates if update.request is request]
        assert tokens_of(mine) == request.output_ids == truth([i, 2, 3], 9)
        assert [update.finish_reason for update in mine] == [None] * (len(mine) - 1) + ["length"]


@both
def test_generate_yields_each_request_its_own_while_all_advance(overlap):
    engine = make_engine(overlap=overlap)
    streams = [engine.generate([i, 1], params([i, 1], 20)) for i in range(3)]
    first = list(streams[0])
    assert tokens_of(first) == truth([0, 1], 20) and first[-1].finish_reason == "length"
    assert all(len(stream.request.output_ids) > 15 for stream in streams[1:]), "they ran along"
    for i, stream in enumerate(streams[1:], 1):
        assert tokens_of(stream) == truth([i, 1], 20)
    assert list(streams[0]) == []
    settle(engine)


def test_priority_goes_before_arrival():
    engine = make_engine(num_slots=1)
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", -1)]:
        engine.add_request([1], params([1], 2), request_id=name, priority=priority)
    order = [update.request.request_id for update in settle(engine) if update.finish_reason]
    assert order == ["d", "a", "c", "b"]


@both
def test_a_stop_from_on_tokens_ends_the_request_and_no_other(overlap):
    engine = make_engine(overlap=overlap)
    stopped = engine.add_request([1], params([1], 30), on_tokens=lambda request, _: len(request.output_ids) >= 3)
    other = engine.add_request([2], params([2], 30))
    settle(engine)
    assert stopped.finish_reason == "stop" and other.output_ids == truth([2], 30)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt of request 'x' is empty"),
        ([40], {}, "prompt holds 40, which is not a token id from 0 to 39"),
        ([True], {}, "prompt holds True"),
        ([1] * 64, {}, "has 64 tokens, which leaves no room"),
        ([1], {"eos_token_ids": range(17)}, "17 stop tokens are more than the 16"),
    ],
)
def test_a_bad_request_is_refused_when_it_is_made(prompt, options, message):
    engine = make_engine()
    good = engine.add_request([3], params([3]))
    bad = dataclasses.replace(params(prompt), ignore_eos=False)
    with pytest.raises(UserError, match=message):
        engine.add_request(prompt, bad, request_id="x", **options)
    assert good.output_ids == [] and len(engine._clients) == 1
    settle(engine)
    assert good.output_ids == truth([3])


def test_an_id_is_free_again_when_its_request_has_ended():
    engine = make_engine()
    engine.add_request([1], params([1]), request_id="x")
    for step in (lambda: None, engine.step):
        step()
        with pytest.raises(UserError, match="request id 'x' is in use"):
            engine.add_request([2], params([2]), request_id="x")
    settle(engine)
    again = engine.add_request([2], params([2]), request_id="x")
    settle(engine)
    assert again.output_ids == truth([2])


# -- abort -----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("steps", range(8))
def test_abort_at_any_time_is_told_once_and_harms_nobody(overlap, steps):
    engine = make_engine(overlap=overlap, num_slots=2)
    heard: list[Update] = []
    others = [engine.add_request([i, 5], params([i, 5], 12)) for i in range(2)]
    engine.add_request([7] * 30, params([7] * 30, 12), request_id="x", on_update=heard.append)
    updates = list(itertools.chain.from_iterable(engine.step() for _ in range(steps)))
    assert engine.abort("x") and engine.abort("x")
    updates += settle(engine)
    assert [update.finish_reason for update in heard if update.finish_reason] == ["abort"]
    assert [update for update in updates if update.request.request_id == "x"] == heard
    assert not engine.abort("x")
    assert [request.output_ids for request in others] == [truth([i, 5], 12) for i in range(2)]


def test_leaving_a_stream_aborts_its_request():
    engine = make_engine()
    kept, closed = engine.generate([1], params([1], 30)), engine.generate([2], params([2], 30))
    next(closed)
    closed.close()
    dropped = [engine.generate([i], params([i], 30)) for i in (3, 4)]
    next(dropped[0])
    requests = [closed.request, *(stream.request for stream in dropped)]
    dropped.clear()
    gc.collect()
    assert tokens_of(kept) == truth([1], 30) and list(closed) == []
    settle(engine)
    assert [request.finish_reason for request in requests] == ["abort"] * 3


def test_leaving_a_stream_that_has_ended_does_not_abort_who_has_its_id_now():
    engine = make_engine()
    stream = engine.generate([1], params([1], 3), request_id="x")
    settle(engine)  # its last update is not read yet
    next_one = engine.add_request([2], params([2], 9), request_id="x")
    engine.step()
    stream.close()
    settle(engine)
    assert next_one.output_ids == truth([2], 9) and next_one.finish_reason == "length"


def test_a_stream_that_the_garbage_collector_ends_may_step_in_the_middle_of_a_submission(monkeypatch):
    """As that of `LLM.stream` does, wherever a collection happens to come."""
    engine, steps = make_engine(overlap=False), []

    class Stream:
        def __del__(self) -> None:
            engine.advance()
            steps.append(engine.metrics().num_requests_running)

    def collected(*fields: Any) -> Client:
        stream = Stream()
        stream.itself = stream  # type: ignore[attr-defined]
        del stream
        gc.collect()
        return Client(*fields)

    running = engine.add_request([1], params([1], 30))
    engine.step()
    monkeypatch.setattr(engine_module, "Client", collected)
    submitter = threading.Thread(target=engine.add_request, args=([2], params([2], 5)), daemon=True)
    submitter.start()
    submitter.join(20)
    assert not submitter.is_alive() and steps == [1]
    settle(engine)
    assert running.output_ids == truth([1], 30)


# -- errors ------------------------------------------------------------------------------------------------------------


def raising(error: BaseException):
    def fail(*args: object):
        raise error

    return fail


@both
def test_step_raises_what_a_callback_raised_and_goes_on(overlap):
    engine = make_engine(overlap=overlap)
    other = engine.add_request([2], params([2]))
    bad = engine.add_request([1], params([1]), on_tokens=raising(KeyError("text")))
    with pytest.raises(KeyError, match="text"):
        settle(engine)
    settle(engine)
    assert bad.finish_reason == "error" and other.output_ids == truth([2])


def test_a_callback_that_raises_ends_its_own_stream_only():
    engine = make_engine()
    bad = engine.generate([1], params([1]), on_tokens=raising(KeyError("text")))
    good = engine.generate([2], params([2]))
    assert tokens_of(good) == truth([2])
    with pytest.raises(KeyError, match="text"):
        list(bad)
    settle(engine)


class Broken(Exception):
    """The device's."""


@pytest.mark.parametrize("method", ["prefill", "decode"])
def test_a_device_error_is_the_end_and_everybody_hears(monkeypatch, method):
    engine = make_engine()
    first, second = (engine.generate([i], params([i], 30)) for i in (1, 2))
    third = engine.add_request([3], params([3], 30))
    monkeypatch.setattr(engine.runner, method, raising(Broken("no memory")))
    with pytest.raises(Broken):
        list(first)
    with pytest.raises(EngineStopped, match="no memory") as caught:
        list(second)
    assert isinstance(caught.value.__cause__, Broken)
    assert isinstance(third.error, EngineStopped) and third.finish_reason == "error"
    assert not engine.has_work and list(second) == []
    for call in (engine.step, lambda: engine.add_request([1], params([1])), engine.warmup):
        with pytest.raises(EngineStopped, match="no memory"):
            call()
    assert not engine.abort("request-0")


def test_a_callback_that_steps_the_engine_is_refused():
    engine = make_engine()
    request = engine.add_request([1], params([1]), on_tokens=lambda request, tokens: bool(engine.step()))
    with pytest.raises(RuntimeError, match="a callback of the engine's step asks the engine for another step"):
        settle(engine)
    settle(engine)
    assert request.finish_reason == "error"


def test_a_signal_waits_for_the_end_of_the_step():
    """It comes while the device works; the engine is whole afterwards."""
    engine = make_engine()
    stream = engine.generate([1], params([1], 30))
    decode, seen = engine.runner.decode, []

    def interrupted(slots, block_size):
        pending = decode(slots, block_size)
        if len(seen) < 3:
            os.kill(os.getpid(), signal.SIGINT)
        seen.append(slots)
        return pending

    engine.runner.decode = interrupted  # type: ignore[method-assign]
    got, interrupts = [], 0
    while not got or got[-1].finish_reason is None:
        try:
            got.append(next(stream))
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 3 and tokens_of(got) == truth([1], 30)
    settle(engine)


# -- several threads ---------------------------------------------------------------------------------------------------


def in_threads(*functions: Any) -> None:
    """Run them at once; raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[function], daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]


@both
def test_threads_generate_at_once(overlap):
    """Each steps when nobody else does; all get what they would get alone."""
    engine = make_engine(overlap=overlap, num_slots=3)

    def client(number: int):
        def run() -> None:
            for turn in range(5):
                prompt = [number, turn, 3]
                assert tokens_of(engine.generate(prompt, params(prompt, 10 + number))) == truth(prompt, 10 + number)

        return run

    in_threads(*(client(i) for i in range(8)))
    settle(engine)
    assert engine.metrics().request_success["length"] == 40


@both
def test_threads_submit_and_abort_while_one_steps(overlap):
    engine = make_engine(overlap=overlap, num_slots=3)
    left = threading.Semaphore(0)
    outcomes: list[tuple[list[int], Update]] = []

    def client(number: int):
        def run() -> None:
            for turn in range(30):
                prompt = [number, turn, 3]
                ended: list[Update] = []
                done = threading.Event()

                def on_update(update: Update, ended=ended, done=done) -> None:
                    if update.finish_reason:
                        ended.append(update)
                        done.set()

                request = engine.add_request(prompt, params(prompt, 12), on_update=on_update)
                if turn % 3 == 0:
                    engine.abort(request.request_id)
                assert done.wait(60)
                outcomes.append((prompt, ended[0]))
            left.release()

        return run

    def stepper() -> None:
        done = 0
        while done < 4:
            engine.step()
            done += left.acquire(blocking=False)

    in_threads(stepper, *(client(i) for i in range(4)))
    settle(engine)
    assert len(outcomes) == 120
    for prompt, update in outcomes:
        if update.finish_reason == "length":
            assert update.request.output_ids == truth(prompt, 12)
        else:
            assert update.finish_reason == "abort" and prompt[1] % 3 == 0


def test_a_thread_that_waits_is_served_by_the_one_that_steps():
    """The second thread never gets the turn: a step of the first delivers to it."""
    engine = make_engine()
    stream = engine.generate([1], params([1], 4))
    stepping, go = threading.Event(), threading.Event()
    prefill = engine.runner.prefill

    def slow(rows):
        stepping.set()
        assert go.wait(60)
        return prefill(rows)

    engine.runner.prefill = slow  # type: ignore[method-assign]

    def waiter() -> None:
        assert stepping.wait(60)
        threading.Timer(0.05, go.set).start()
        assert tokens_of(stream) == truth([1], 4)

    def stepper() -> None:
        while not stream.request.finished:
            engine.step()

    in_threads(stepper, waiter)


def test_submitting_does_not_wait_for_a_step():
    engine = make_engine()
    engine.add_request([1], params([1], 4))
    prefill = engine.runner.prefill

    def submits(rows):
        in_threads(lambda: engine.add_request([2], params([2], 4)), lambda: engine.abort("request-0"), engine.metrics)
        return prefill(rows)

    engine.runner.prefill = submits  # type: ignore[method-assign]
    engine.step()
    engine.runner.prefill = prefill  # type: ignore[method-assign]
    ended = [update.finish_reason for update in settle(engine) if update.finish_reason]
    assert ended == ["abort", "length"]


def test_a_turn_that_somebody_has_is_waited_for():
    turn, order = Turn(), []

    def second() -> None:
        with turn.taken() as mine:
            order.append(("second", mine))

    with turn.taken() as mine:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.05)
        order.append(("first", mine))
    thread.join(60)
    assert order == [("first", True), ("second", True)]
    with turn.taken(unless=lambda: True) as mine:
        assert not mine


def test_a_stream_that_was_refused_leaves_nothing_behind():
    engine = make_engine()
    with pytest.raises(UserError):
        engine.generate([], params([]))
    gc.collect()
    assert not engine._clients and isinstance(engine.generate([1], params([1])), GeneratedTokens)
    settle(engine)
