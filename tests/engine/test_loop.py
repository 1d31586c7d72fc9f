"""The loops over the fake device: by hand, case by case. Random mixes are in test_loop_random.py."""

import gc
import sys
import time

import pytest

from dflash_jax.engine import scheduler as scheduler_module
from dflash_jax.engine.loop import Loop
from dflash_jax.engine.protocol import RowResult
from dflash_jax.engine.request import Phase, Request
from dflash_jax.engine.scheduler import Scheduler, SchedulerConfig

from .fake_runner import (
    FakeRunner,
    Script,
    assert_nothing_leaks,
    make_loop,
    make_request,
    run,
    solo_run,
)

both = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
ALWAYS, NEVER = [99], [0]


def outcome(request: Request) -> tuple[list[int], list[int], str | None]:
    return request.output_ids, request.accept_lengths, request.finish_reason


def expected(script: Script, new: int, **options) -> tuple[list[int], list[int], str]:
    solo = solo_run(script, new, **options)
    return solo.tokens, solo.accept_lengths, solo.finish_reason


# -- output and acceptance -------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("right", "lengths"), [(ALWAYS, [4, 4, 4]), (NEVER, [1] * 12), ([2], [3] * 4)])
def test_acceptance_by_hand(overlap, right, lengths):
    """Thirteen tokens: one from the prefill, the others in rounds of min(right + 1, 4)."""
    loop, script = make_loop(FakeRunner(), overlap=overlap), Script([5, 6, 7], right)
    request = make_request("a", script, 13)
    run(loop, request)
    assert request.accept_lengths == lengths
    assert outcome(request) == expected(script, 13, block_size=4)
    assert_nothing_leaks(loop)


@both
@pytest.mark.parametrize("new", range(1, 9))
def test_every_limit_up_to_two_blocks_with_a_draft_that_is_always_right(overlap, new):
    request = make_request("a", Script([1], ALWAYS), new)
    run(make_loop(FakeRunner(), overlap=overlap), request)
    assert (len(request.output_ids), request.finish_reason) == (new, "length")


@both
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("place", range(5))
def test_eos_anywhere_in_a_block(overlap, ignore_eos, place):
    """The text holds no token twice before `place`, so the stop id is met exactly there: 0 is the prefill's token."""
    script = Script([2], ALWAYS)
    eos = solo_run(script, 6, block_size=4).tokens[place]
    request = make_request("a", script, 6, eos_token_ids=[eos], ignore_eos=ignore_eos)
    run(make_loop(FakeRunner(), overlap=overlap), request)
    assert request.finish_reason == ("length" if ignore_eos else "stop")
    assert len(request.output_ids) == (6 if ignore_eos else place + 1)


@both
def test_prompt_240_of_256_with_a_block_of_8(overlap):
    runner = FakeRunner(page_size=16, pages_per_slot=16, num_pages=17, block_size=8, prefill_chunk=64)
    request = make_request("a", Script(range(240), [3]), 100)
    run(make_loop(runner, overlap=overlap), request)
    assert (len(request.output_ids), request.finish_reason) == (16, "length")


@both
def test_the_end_of_the_table_touches_nobody_else(overlap):
    """One request stops within a block of the model length while the other goes on; the fake checks every row."""
    runner = FakeRunner(page_size=4, pages_per_slot=8, num_pages=17, block_size=8)
    loop = make_loop(runner, overlap=overlap)
    full, other = make_request("a", Script(range(27), ALWAYS), 50), make_request("b", Script([3, 1], [1]), 30)
    run(loop, full, other)
    assert (len(full.output_ids), len(other.output_ids)) == (5, 30)
    assert other.output_ids == solo_run(Script([3, 1]), 30, block_size=8).tokens
    assert_nothing_leaks(loop)


@both
def test_a_short_request_after_a_long_one_in_the_same_slot(overlap):
    runner = FakeRunner(num_slots=1)
    loop = make_loop(runner, overlap=overlap)
    scripts = [Script(range(40), [1, 3]), Script([7, 7], [3, 0])]
    requests = [make_request(str(i), script, 12) for i, script in enumerate(scripts)]
    run(loop, *requests)
    for request, script in zip(requests, scripts, strict=True):
        assert outcome(request) == expected(script, 12, block_size=4)
    assert runner.calls("admit") == [("admit", 0), ("admit", 0)]


@both
def test_the_same_prompt_twice_hits_and_accepts_the_same(overlap):
    runner = FakeRunner()
    loop = make_loop(runner, overlap=overlap)
    first, second = (make_request(name, Script(range(21), [3, 1, 2]), 20) for name in "ab")
    run(loop, first)
    before = [list(page) for page in runner.target], [list(page) for page in runner.draft]
    known = [page for page in range(1, runner.num_pages) if loop.scheduler.pool.is_marked(page)]
    run(loop, second)
    assert outcome(first) == outcome(second)
    assert (first.cached_tokens, second.cached_tokens) == (0, 20)
    assert loop.metrics().prefix_cache_hit_rate == 20 / 42
    for page in known:
        assert (runner.target[page], runner.draft[page]) == (before[0][page], before[1][page])


@both
def test_a_hit_on_generated_tokens(overlap):
    """A conversation's next turn finds the pages of the answer, its last round's included."""
    loop = make_loop(FakeRunner(), overlap=overlap)
    first = make_request("a", Script(range(10), ALWAYS), 15)
    run(loop, first)
    turn = [*range(10), *first.output_ids, 1, 2, 3]
    second = make_request("b", Script(turn, ALWAYS), 15)
    run(loop, second)
    assert second.cached_tokens == 24  # 25 tokens, 24 committed


@both
def test_pages_of_64_and_100_requests_leave_nothing(overlap):
    runner = FakeRunner(page_size=64, pages_per_slot=4, num_pages=12, block_size=16, prefill_chunk=64, num_slots=8)
    loop = make_loop(runner, overlap=overlap)
    scripts = [Script([i % 40, 3, i // 40] * (1 + i % 30), [i % 9]) for i in range(100)]
    run(loop, *(make_request(str(i), script, 1 + i % 40) for i, script in enumerate(scripts)))
    assert_nothing_leaks(loop)


@both
def test_width_chosen_per_round_changes_acceptance_only(overlap):
    widths, seen = [4, 1, 2, 3], []

    def choose(live):
        seen.append([request.request_id for request in live])
        return widths[len(seen) % 4]

    loop = make_loop(FakeRunner(), overlap=overlap, choose_block=choose)
    request = make_request("a", Script([1, 2], ALWAYS), 30)
    run(loop, request)
    assert request.output_ids == solo_run(Script([1, 2]), 30, block_size=4).tokens
    assert set(request.accept_lengths) == {1, 2, 3, 4} and seen[0] == ["a"]


@pytest.mark.parametrize("width", [0, 5])
def test_a_width_that_was_not_compiled_is_refused(width):
    loop = make_loop(FakeRunner(), choose_block=lambda live: width)
    with pytest.raises(RuntimeError, match=f"choose_block returned {width}, not in 1 … 4"):
        run(loop, make_request("a", Script([1])))


# -- what is launched when -------------------------------------------------------------------------------------------


def test_overlap_launches_the_next_before_it_reads_the_last():
    runner = FakeRunner()
    run(make_loop(runner, overlap=True), make_request("a", Script([1], NEVER), 4))
    order = [f"{name[0]}{number}" for name, number in runner.calls("launch", "read")]
    assert order == ["l1", "l2", "r1", "l3", "r2", "l4", "r3", "r4"], "no fifth: four launches give four tokens"


def test_plain_reads_what_it_launched():
    runner = FakeRunner()
    run(make_loop(runner, overlap=False), make_request("a", Script([1], NEVER), 3))
    order = [f"{name[0]}{number}" for name, number in runner.calls("launch", "read")]
    assert order == ["l1", "r1", "l2", "r2", "l3", "r3"]


@both
def test_a_long_prompt_stalls_nobody_longer_than_a_chunk(overlap):
    runner = FakeRunner(pages_per_slot=32)
    loop = make_loop(runner, overlap=overlap)
    loop.add(make_request("a", Script([1], NEVER), 40))
    for _ in range(4):
        loop.step()
    start = len(runner.log)
    loop.add(make_request("b", Script(range(96), NEVER), 4))
    while len(runner.log) < start + 30:
        loop.step()
    kinds = [name[0] for name, _ in runner.log[start:] if name in ("prefill", "decode")]
    assert kinds.count("p") >= 3 and "pp" not in "".join(kinds)


@both
def test_short_prompts_are_prefilled_together(overlap):
    runner = FakeRunner()
    run(make_loop(runner, overlap=overlap), *(make_request(str(i), Script([i, 1, 2, 3])) for i in range(4)))
    assert [len(rows) for _, rows in runner.calls("prefill")] == [4]


@both
def test_the_remainder_of_a_chunk_may_be_one_token(overlap):
    runner, script = FakeRunner(), Script(range(33), [2])
    request = make_request("a", script, 9)
    run(make_loop(runner, overlap=overlap), request)
    chunks = [row[1:] for _, rows in runner.calls("prefill") for row in rows]
    assert chunks == [(0, 16, False), (16, 16, False), (32, 1, True)]
    assert outcome(request) == expected(script, 9, block_size=4)


# -- stops by the host -----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_string_anywhere_gives_the_same_text_at_any_width(overlap, place):
    script = Script([4, 2], [3, 0, 2, 1])
    text = solo_run(script, 20, block_size=4).tokens
    pair = (text[place - 1], text[place])
    first = next(i for i in range(1, 20) if (text[i - 1], text[i]) == pair)
    loop = make_loop(FakeRunner(), overlap=overlap, on_tokens=stop_at(pair))
    request = make_request("a", script, 20)
    run(loop, request)
    assert outcome(request) == expected(script, 20, block_size=4, stop_pair=pair)
    assert (len(request.output_ids), request.finish_reason) == (first + 1, "stop")
    assert_nothing_leaks(loop)


def stop_at(pair: tuple[int, int]):
    """Detokeniser's stand-in: stops behind the first occurrence of two tokens."""

    def on_tokens(request: Request, tokens) -> bool:
        out = request.output_ids
        for end in range(len(out) - len(tokens), len(out)):
            if end and (out[end - 1], out[end]) == pair:
                request.drop_tail(len(out) - end - 1)
                return True
        return False

    return on_tokens


def test_a_host_stop_drops_the_round_in_flight_and_keeps_its_pages_until_it_lands():
    runner = FakeRunner(num_slots=1)
    limits = {"enable_prefix_caching": False}
    loop = make_loop(runner, on_tokens=lambda request, tokens: len(request.output_ids) >= 5, limits=limits)
    first, second = make_request("a", Script([1], NEVER), 30), make_request("b", Script([2], ALWAYS), 4)
    loop.add(first)
    loop.add(second)
    while not first.finished:
        loop.step()
    assert (len(first.output_ids), first.finish_reason) == (5, "stop")
    assert loop.scheduler.pool.num_held == 3, "launched with 4 tokens committed: 12 with two blocks"
    surplus = loop.step()
    assert surplus == [] and runner.calls("finish", "admit")[1:] == [("finish", [0]), ("admit", 0)]
    run(loop)
    assert outcome(second) == expected(Script([2], ALWAYS), 4, block_size=4)
    assert len(first.output_ids) == 5
    assert_nothing_leaks(loop)


def test_a_stop_string_in_the_last_tokens_wins_over_the_limit():
    loop = make_loop(FakeRunner(), on_tokens=lambda request, tokens: len(request.output_ids) == 4)
    request = make_request("a", Script([1], ALWAYS), 4)
    run(loop, request)
    assert request.finish_reason == "stop"


@both
@pytest.mark.parametrize("at", [1, 5, 8])
def test_a_callback_that_raises_ends_its_request_alone(overlap, at):
    """At the prefill's token, in a round, and in the round that ends the request by itself."""
    trouble = KeyError("detokeniser")

    def on_tokens(request, tokens):
        if request.request_id == "a" and len(request.output_ids) >= at:
            raise trouble
        return False

    loop = make_loop(FakeRunner(), overlap=overlap, on_tokens=on_tokens)
    bad, good = make_request("a", Script([1])), make_request("b", Script([2]))
    run(loop, bad, good)
    assert (bad.finish_reason, bad.error, good.error) == ("error", trouble, None)
    assert outcome(good) == expected(Script([2]), 8, block_size=4)
    assert loop.metrics().request_success == {"stop": 0, "length": 1, "abort": 0, "error": 1}
    assert_nothing_leaks(loop)


def test_a_callback_that_aborts_its_request_and_raises():
    def on_tokens(request, tokens):
        loop.abort("a")
        raise KeyError("detokeniser")

    loop = make_loop(FakeRunner(), on_tokens=on_tokens)
    request = make_request("a", Script([1]))
    run(loop, request)
    assert request.finish_reason == "abort" and isinstance(request.error, KeyError)
    assert sum(loop.metrics().request_success.values()) == 1
    assert_nothing_leaks(loop)


@both
@pytest.mark.parametrize("breaks_at", [40, 41, 47])
def test_a_broken_request_ends_alone_and_its_pages_are_not_found(overlap, breaks_at):
    """Logits that are not finite, at the prefill's token or in a round."""
    loop = make_loop(FakeRunner(num_slots=2), overlap=overlap)
    good, bad = make_request("a", Script([3, 4], [1]), 20), make_request("b", Script(range(40), [2], breaks_at), 20)
    seen = []
    loop.add(good)
    loop.add(bad)
    while loop.has_work:
        seen += [update.tokens for update in loop.step() if update.request is bad]
        loop.scheduler.integrity()
    assert bad.finish_reason == "error" and seen[-1] == []
    assert len(bad.output_ids) == sum(map(len, seen)) < breaks_at - 39
    assert outcome(good) == expected(Script([3, 4], [1]), 20, block_size=4)
    assert loop.metrics().request_success["error"] == 1
    assert loop.scheduler.cache.lookup(range(40)) == []
    again = make_request("c", Script(range(40), [2]), 20)
    run(loop, again)
    assert outcome(again) == expected(Script(range(40), [2]), 20, block_size=4)
    assert_nothing_leaks(loop)


@both
def test_pages_of_a_broken_request_that_another_still_holds_are_not_found(overlap):
    """Both share the prompt's pages; whoever comes after the break, even while they are still in use, reads it anew."""
    loop = make_loop(FakeRunner(num_slots=3), overlap=overlap)
    good, later = make_request("a", Script(range(40), [2]), 24), make_request("c", Script(range(40), [2]), 4)
    bad = make_request("b", Script(range(40), [2], breaks_at=44), 20)
    loop.add(good)
    while len(good.output_ids) < 2:
        loop.step()
    loop.add(bad)
    while not bad.finished:
        loop.step()
    assert bad.finish_reason == "error" and bad.cached_tokens == 36 and not good.finished
    loop.add(later)
    run(loop)
    assert later.cached_tokens == 0 and outcome(later) == expected(Script(range(40), [2]), 4, block_size=4)
    assert outcome(good) == expected(Script(range(40), [2]), 24, block_size=4)
    assert_nothing_leaks(loop)


def test_a_launch_that_breaks_after_its_request_was_stopped_leaves_no_pages():
    loop = make_loop(FakeRunner())
    request = make_request("a", Script(range(20), [0], breaks_at=24), 20)
    loop.add(request)
    while len(request.output_ids) < 4:
        loop.step()
    assert loop.abort("a") and len(loop.scheduler.cache) == 5  # the round that would give token 24 is in flight
    run(loop)
    assert request.finish_reason == "abort" and len(loop.scheduler.cache) == 0


@both
@pytest.mark.parametrize("steps", range(12))
def test_abort_in_every_phase(overlap, steps):
    """Waiting, prefilling chunk k, in flight, preempted: whatever `a` is doing after `steps` steps."""
    runner = FakeRunner(num_slots=2, num_pages=23)
    loop = make_loop(runner, overlap=overlap)
    scripts = {"w": Script([9] * 30, [1]), "a": Script(range(40), [2]), "b": Script([8] * 12, [3])}
    requests = {name: make_request(name, script, 30 if name == "w" else 20) for name, script in scripts.items()}
    for request in requests.values():
        loop.add(request)
    for _ in range(steps):
        loop.step()
    assert loop.abort("a")
    assert not loop.abort("a")
    got = list(requests["a"].output_ids)
    run(loop)
    assert requests["a"].finish_reason == "abort" and requests["a"].output_ids == got
    assert got == solo_run(scripts["a"], 20, block_size=4).tokens[: len(got)]
    for name in "wb":
        assert requests[name].output_ids == solo_run(scripts[name], 30 if name == "w" else 20, block_size=4).tokens
    assert_nothing_leaks(loop)


def test_abort_of_a_preempted_request():
    loop = make_loop(FakeRunner(num_slots=2, num_pages=12))
    old, young = make_request("a", Script([1] * 8, NEVER), 30), make_request("b", Script([2] * 8, NEVER), 30)
    loop.add(old)
    loop.add(young)
    while not young.preemptions:
        loop.step()
    assert young.phase is Phase.WAITING and loop.abort("b")
    run(loop)
    assert old.output_ids == solo_run(Script([1] * 8), 30, block_size=4).tokens
    assert_nothing_leaks(loop)


@both
def test_preempted_requests_end_with_the_same_tokens(overlap):
    loop = make_loop(FakeRunner(num_slots=3, num_pages=14), overlap=overlap)
    scripts = [Script([i] * 9, [i, 3, 1]) for i in range(3)]
    requests = [make_request(str(i), script, 35) for i, script in enumerate(scripts)]
    run(loop, *requests)
    assert loop.metrics().num_preemptions > 0 and requests[0].preemptions == 0
    for request, script in zip(requests, scripts, strict=True):
        assert request.output_ids == solo_run(script, 35, block_size=4).tokens
        prefill_tokens = len(request.output_ids) - sum(request.accept_lengths)
        assert 1 <= prefill_tokens <= 1 + request.preemptions
    assert_nothing_leaks(loop)


@both
def test_twins_in_a_pool_that_holds_one(overlap):
    """Both compute the same prompt; the one that stays must not pay for the other's cached pages besides its own."""
    loop = make_loop(FakeRunner(page_size=1, pages_per_slot=64, num_pages=41), overlap=overlap)
    script = Script(range(9), [1])
    requests = [make_request(name, script, 31) for name in "ab"]
    run(loop, *requests)
    assert [request.output_ids for request in requests] == [solo_run(script, 31, block_size=4).tokens] * 2
    assert_nothing_leaks(loop)


# -- the loop's own checks, and the fake's ---------------------------------------------------------------------------


def test_a_step_without_work_does_nothing():
    loop = make_loop(FakeRunner())
    assert loop.step() == [] and not loop.has_work


class Canned:
    """Pending results that were made up."""

    def __init__(self, rows: list[RowResult]):
        self._rows = rows

    def result(self) -> list[RowResult]:
        return self._rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "returned 0 rows for a launch of 1"),
        ([RowResult([], None)], "request a: .*tokens=.*from prefill row.last=True"),
    ],
)
def test_results_that_cannot_be_are_refused(monkeypatch, rows, message):
    runner = FakeRunner()
    monkeypatch.setattr(runner, "prefill", lambda batch: Canned(rows))
    with pytest.raises(RuntimeError, match=message):
        run(make_loop(runner), make_request("a", Script([1])))


def serve_some() -> None:
    """Enough traffic for every fault below to show: stops by the host, shared prefixes, chunks, growing tables."""
    limits = {"chunked_prefill_size": 6}
    loop = make_loop(FakeRunner(num_slots=2), on_tokens=lambda request, _: len(request.output_ids) > 9, limits=limits)
    prefix = list(range(13))
    run(loop, *(make_request(str(i), Script([*prefix, i], [1, 3]), 12) for i in range(6)))


def release_early(self: Scheduler, request: Request) -> None:
    """Does not wait for the launch in flight."""
    seat = request.seat
    assert seat
    flying, seat.in_flight = seat.in_flight, 0
    LEAVE(self, request)
    seat.in_flight = flying + 1000  # so that it is not released again


def cache_too_much(self, tokens, pages, chain, committed, salt=None, leaving=False) -> None:
    INSERT(self, tokens, pages, chain, min(committed + 2, len(tokens)), salt, leaving=leaving)


LEAVE, INSERT = Scheduler._leave_seat, scheduler_module.PrefixCache.insert


@pytest.mark.parametrize(
    ("owner", "name", "fault", "message"),
    [
        (Scheduler, "_leave_seat", release_early, "write to page"),
        (scheduler_module.PrefixCache, "insert", cache_too_much, "KV of page|write to page"),
        (scheduler_module, "reserve_tokens", lambda committed, *_: committed + 1, "is committed but has no page"),
        (Scheduler, "_grow", lambda self, seat, count: [], "is committed but has no page"),
        (scheduler_module.PrefixCache, "hold", lambda self, chain: None, "seats hold 12 pages, the pool says 9"),
    ],
    ids=["released in flight", "uncommitted page cached", "too little reserved", "table not grown", "hit not held"],
)
def test_the_checks_find_a_scheduler_with_a_fault(monkeypatch, owner, name, fault, message):
    serve_some()
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        serve_some()


def test_the_fake_finds_one_wrong_row():
    runner = FakeRunner()
    loop = make_loop(runner)
    run(loop, make_request("a", Script(range(9))))
    page = loop.scheduler.cache.lookup(range(9))[0].page
    runner.draft[page][1] += 1
    with pytest.raises(AssertionError, match=f"draft KV of page {page} is not that of its tokens"):
        run(loop, make_request("b", Script(range(9))))


# -- cost ------------------------------------------------------------------------------------------------------------


class IdleRunner:
    """A device that costs nothing: every row of a round emits `block_size` tokens, no request ever ends by itself."""

    page_size, num_pages, pages_per_slot = 16, 32 * 512 + 1, 512
    block_size, prefill_chunk, max_prefill_rows = 16, 512, 8

    def __init__(self, num_slots: int = 32):
        self.num_slots = num_slots
        self._round = [RowResult([7] * 8, None)] * num_slots

    def admit(self, slot, **_) -> None: ...

    def extend(self, updates) -> None: ...

    def finish(self, slots) -> None: ...

    def prefill(self, rows) -> Canned:
        return Canned([RowResult([7] if row.last else [], None) for row in rows])

    def decode(self, slots, block_size) -> Canned:
        return Canned(self._round[: len(slots)])


def test_host_work_per_round_at_32_running_requests(capsys):
    runner = IdleRunner()
    loop = Loop(runner, SchedulerConfig.of(runner), on_tokens=lambda request, tokens: False)
    for index in range(64):  # half of them wait
        loop.add(Request(str(index), [index, *range(200)], 8000 - 300))
    while len(loop.scheduler.running) < 32:
        loop.step()
    times = []
    for _ in range(400):
        start = time.perf_counter()
        loop.step()
        times.append(time.perf_counter() - start)
    quick, median, slow = (sorted(times)[index] for index in (100, 200, 396))
    with capsys.disabled():
        print(f"\nhost work per round, 32 running, 32 waiting: median {median * 1e6:.0f} µs, 99 % {slow * 1e6:.0f} µs")
    assert len(loop.scheduler.running) == 32 and quick < 1e-3, "the quartile: other processes do not count"


def test_5000_requests_need_no_more_memory_than_500():
    """All that grows is the pool's cache, which is full before the first measurement."""
    loop = make_loop(FakeRunner(num_pages=40))
    loop.runner.log = Forgetful()  # type: ignore[attr-defined]

    def serve(first: int, last: int) -> Request:
        request = make_request("none", Script([0]))
        for index in range(first, last):
            script = Script([index % 40, index // 40 % 40, index // 1600] * 3, [index % 4])
            request = make_request(str(index), script, 4)
            loop.add(request)
            while loop.has_work and (len(loop.scheduler.waiting) > 3 or index == last - 1):
                loop.step()
        return request

    serve(0, 500)
    serve(500, 1000)
    before = allocated_blocks()
    serve(1000, 5000)
    assert allocated_blocks() - before < 500, "objects of the interpreter, one at least for each request that is kept"
    assert_nothing_leaks(loop)


def allocated_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


class Forgetful(list):
    def append(self, entry) -> None:
        """Keep nothing: the log is the fake's, not the engine's."""
