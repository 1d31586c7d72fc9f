"""The asyncio wrapper over the fake device: streams, cancellation, errors, shutdown."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

from dflash_jax import AsyncEngine, EngineStopped, UserError
from dflash_jax.engine.loop import Update

from .fake_engine import make_engine, params, truth
from .fake_runner import assert_nothing_leaks
from .test_engine import Broken, raising, tokens_of

both = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


async def collect(stream: Any) -> list[Update]:
    return [update async for update in stream]


def run_async(main: Any, **options: Any) -> AsyncEngine:
    """`await main(engine)` in a loop of its own, then the books."""
    made = make_engine(**options)

    async def whole() -> AsyncEngine:
        async with AsyncEngine(made) as engine:
            await asyncio.wait_for(main(engine), 60)
        return engine

    engine = asyncio.run(whole())
    assert not engine._thread.is_alive() and not made._clients
    assert_nothing_leaks(made._loop)
    return engine


@both
def test_many_tasks_get_their_own_tokens(overlap):
    async def client(engine: AsyncEngine, number: int) -> None:
        for turn in range(3):
            prompt = [number, turn]
            updates = await collect(engine.generate(prompt, params(prompt, 5 + number)))
            assert tokens_of(updates) == truth(prompt, 5 + number)
            assert [update.finish_reason for update in updates[:-1]] == [None] * (len(updates) - 1)
            assert updates[-1].finish_reason == "length"

    async def main(engine: AsyncEngine) -> None:
        await asyncio.gather(*(client(engine, number) for number in range(12)))
        assert engine.metrics().request_success["length"] == 36

    run_async(main, overlap=overlap, num_slots=3)


def test_a_cancelled_task_aborts_its_request_and_no_other():
    async def main(engine: AsyncEngine) -> None:
        hold_back(engine)
        first, second = (asyncio.create_task(collect(engine.generate([i], params([i], 40)))) for i in (1, 2))
        while engine.metrics().generation_tokens < 10:
            await asyncio.sleep(0.001)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert tokens_of(await second) == truth([2], 40)
        assert engine.metrics().request_success == {"stop": 0, "length": 1, "abort": 1, "error": 0}

    run_async(main)


def hold_back(engine: AsyncEngine) -> None:
    """Rounds take a while, so that there is time for what is to come in the middle."""
    decode = engine.engine.runner.decode

    def slow(slots, block_size):
        time.sleep(0.005)
        return decode(slots, block_size)

    engine.engine.runner.decode = slow  # type: ignore[method-assign]


def test_leaving_the_loop_aborts():
    async def main(engine: AsyncEngine) -> None:
        hold_back(engine)
        async for update in engine.generate([1], params([1], 40)):
            assert update.tokens
            break
        gc.collect()
        while not engine.metrics().request_success["abort"]:
            await asyncio.sleep(0.001)

    run_async(main)


def test_a_slow_reader_does_not_abort_who_has_its_id_by_then():
    async def main(engine: AsyncEngine) -> None:
        slow = engine.generate([1], params([1], 9), request_id="x")
        await anext(slow)
        while engine.engine._clients:
            await asyncio.sleep(0.001)
        hold_back(engine)
        fast = engine.generate([2], params([2], 9), request_id="x")
        await anext(fast)
        await slow.aclose()
        assert (await collect(fast))[-1].finish_reason == "length"

    run_async(main)


def test_abort_by_id_ends_the_stream():
    async def main(engine: AsyncEngine) -> None:
        hold_back(engine)
        updates = []
        async for update in engine.generate([1], params([1], 40), request_id="x"):
            updates.append(update)
            if len(updates) == 2:
                assert engine.abort("x")
        assert updates[-1].finish_reason == "abort" and not engine.abort("x")

    run_async(main)


def test_a_bad_request_raises_in_its_task_only():
    async def main(engine: AsyncEngine) -> None:
        good = asyncio.create_task(collect(engine.generate([2], params([2]))))
        with pytest.raises(UserError, match="is empty"):
            await collect(engine.generate([], params([])))
        with pytest.raises(KeyError, match="text"):
            await collect(engine.generate([1], params([1]), on_tokens=raising(KeyError("text"))))
        assert tokens_of(await good) == truth([2])

    run_async(main)


def test_a_device_error_reaches_every_waiter(caplog):
    async def main(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(engine.generate([i], params([i], 40)))) for i in range(6)]
        engine.engine.runner.decode = raising(Broken("no memory"))  # type: ignore[method-assign]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineStopped) and isinstance(result.__cause__, Broken)
        with pytest.raises(EngineStopped, match="no memory"):
            await collect(engine.generate([1], params([1])))

    made = make_engine(num_slots=2)

    async def whole() -> None:
        async with AsyncEngine(made) as engine:
            await asyncio.wait_for(main(engine), 60)

    asyncio.run(whole())
    assert "no memory" in caplog.text


def test_closing_aborts_what_runs_and_refuses_what_comes():
    async def main(engine: AsyncEngine) -> None:
        hold_back(engine)
        tasks = [asyncio.create_task(collect(engine.generate([i], params([i], 60)))) for i in range(6)]
        while engine.metrics().generation_tokens < 10:
            await asyncio.sleep(0.001)
        await engine.aclose()
        assert {(await task)[-1].finish_reason for task in tasks} == {"abort"}
        with pytest.raises(EngineStopped, match="closed"):
            await collect(engine.generate([1], params([1])))
        await engine.aclose()

    run_async(main, num_slots=2)


def test_close_without_a_loop():
    made = make_engine()
    before = threading.active_count()
    engine = AsyncEngine(made)
    assert threading.active_count() == before + 1
    engine.close()
    assert threading.active_count() == before
    with pytest.raises(EngineStopped, match="it was closed"):
        made.add_request([1], params([1]))


def test_a_loop_that_has_gone_does_not_harm_the_next():
    """asyncio.run may end while requests run; another loop uses the engine afterwards."""
    made = make_engine()
    engine = AsyncEngine(made)
    hold_back(engine)

    async def leave() -> None:
        asyncio.get_running_loop().call_later(0.02, lambda: None)
        made.add_request([3], params([3], 40), on_update=lambda update: posts.post(asyncio.Queue(), update))
        engine._wanted.set()

    async def stay() -> list[Update]:
        return await collect(engine.generate([1], params([1], 40)))

    loop = asyncio.new_event_loop()
    posts = engine._posts_to(loop)
    loop.run_until_complete(leave())
    loop.close()
    assert tokens_of(asyncio.run(stay())) == truth([1], 40)
    engine.close()
    assert_nothing_leaks(made._loop)


def test_one_wake_up_for_all_updates_of_a_step():
    """32 requests a round must not wake the event loop 32 times."""
    made = make_engine(num_slots=32, num_pages=400, max_prefill_rows=32)
    engine = AsyncEngine(made)
    calls = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        original = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), original(*args))[1]  # type: ignore[method-assign]
        tasks = [asyncio.create_task(collect(engine.generate([i], params([i], 20, [0])))) for i in range(32)]
        await asyncio.gather(*tasks)
        await engine.aclose()

    asyncio.run(main())
    assert len(calls) < 32 * 20 / 2
