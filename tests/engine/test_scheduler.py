"""Scheduling decisions without a device: order, admission, chunks, growth, preemption, release."""

import pytest

from dflash_jax.engine.request import Phase, Request
from dflash_jax.engine.scheduler import DecodeBatch, PrefillBatch, Scheduler, SchedulerConfig
from dflash_jax.errors import UserError

from .fake_runner import FakeRunner

SIZES = dict(
    page_size=4,
    num_pages=33,
    block_size=4,
    max_prefill_rows=4,
    prefill_chunk=16,
    max_running_requests=4,
    max_model_len=64,
    chunked_prefill_size=16,
)


def make(**sizes) -> Scheduler:
    return Scheduler(SchedulerConfig(**{**SIZES, **sizes}))


def request(name: str, prompt: int = 8, new: int = 8, first: int = 0, **options) -> Request:
    """Prompts of different `first` share no page."""
    return Request(name, [first, *range(1, prompt)], new, **options)


def names(requests) -> str:
    return "".join(request.request_id for request in requests)


def land(scheduler: Scheduler, batch, tokens: int = 1) -> None:
    """Digest a launch: every row that emits anything gets `tokens` tokens (one for a prefill)."""
    for row in batch.rows:
        if not scheduler.landed(row):
            continue
        decode = isinstance(batch, DecodeBatch)
        if not decode:
            scheduler.prefilled(row)
        if decode or row.last:
            row.request.take([9] * (tokens if decode else 1), is_round=decode, now_s=0.0)
            if row.request.num_tokens >= row.request.limit_tokens:
                scheduler.finish(row.request, "length", 0.0)


def launch(scheduler: Scheduler) -> PrefillBatch | DecodeBatch:
    """The next batch with nothing in flight; there must be one."""
    batch = scheduler.next_batch(idle=True)
    assert batch is not None
    return batch


def prefill_all(scheduler: Scheduler) -> None:
    """Bring everyone that fits to RUNNING with its first token known."""
    while scheduler.admit() or scheduler.prefilling:
        scheduler._prefilled_last = False
        land(scheduler, launch(scheduler))


# -- add -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request("a", [], 8), "the prompt of request 'a' is empty"),
        (Request("a", [1], 0), "max_new_tokens of request 'a' is 0"),
        (request("a", prompt=64), "has 64 tokens, which leaves no room .* 64 of max_model_len"),
        (request("a", prompt=100), "has 100 tokens"),
        (request("a", prompt=40, new=24), "'a' may reach 64 tokens = 16 pages of 4, but the KV pool has 12"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_and_harms_nobody(bad, message):
    scheduler = make(num_pages=13)
    good = request("b")
    scheduler.add(good)
    with pytest.raises(UserError, match=message):
        scheduler.add(bad)
    assert scheduler.waiting == [good] and list(scheduler.requests) == ["b"]


def test_an_id_in_use_and_a_request_served_before_are_refused():
    scheduler = make()
    first = request("a")
    scheduler.add(first)
    with pytest.raises(UserError, match="request id 'a' is in use"):
        scheduler.add(request("a"))
    scheduler.finish(first, "abort", 0.0)
    with pytest.raises(UserError, match="'a' has been served already"):
        scheduler.add(first)
    scheduler.add(request("a"))


def test_the_limit_is_cut_to_the_model_length():
    scheduler = make()
    cut, whole = request("a", prompt=60, new=50), request("b", prompt=10, new=5)
    for one in (cut, whole):
        scheduler.add(one)
    assert (cut.limit_tokens, whole.limit_tokens) == (64, 15)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_running_requests": 5}, "max_running_requests is 5, must be at least 1 and at most 4"),
        ({"max_running_requests": 0}, "max_running_requests is 0"),
        ({"max_model_len": 65}, "max_model_len is 65, must be at least 1 and at most 64"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size is 0, must be at least 1"),
    ],
)
def test_limits_beyond_the_device_state_are_refused(limits, message):
    with pytest.raises(UserError, match=message):
        SchedulerConfig.of(FakeRunner(), **limits)


def test_limits_default_to_what_the_device_has():
    config = SchedulerConfig.of(FakeRunner())
    assert (config.max_running_requests, config.max_model_len, config.chunked_prefill_size) == (4, 64, 16)


def test_stop_ids_with_and_without_eos():
    both = Request("a", [1], 1, stop_token_ids=[5], eos_token_ids=[2, 3])
    assert both.stop_ids == (5, 2, 3)
    both.ignore_eos = True
    assert both.stop_ids == (5,)


# -- admission -------------------------------------------------------------------------------------------------------


def test_first_come_first_served_then_by_priority():
    scheduler = make(max_running_requests=2)
    for name, priority in [("a", 0), ("b", 0), ("c", -1), ("d", 1), ("e", 0)]:
        scheduler.add(request(name, priority=priority))
    assert names(scheduler.waiting) == "cabed"
    assert names(scheduler.admit()) == "ca"


def test_admission_takes_pages_for_the_prompt_and_two_blocks():
    scheduler = make()
    one, short = request("a", prompt=9, new=40), request("b", prompt=9, new=2)
    scheduler.add(one)
    scheduler.add(short)
    scheduler.admit()
    assert one.seat and len(one.seat.pages) == 5  # 9 + 2·4 = 17 tokens
    assert short.seat and len(short.seat.pages) == 3  # nothing at or past token 11


def test_a_large_request_at_the_head_is_not_overtaken():
    scheduler = make(num_pages=13)
    for name, prompt in [("a", 24), ("b", 30), ("c", 4)]:
        scheduler.add(request(name, prompt=prompt, new=4))
    assert names(scheduler.admit()) == "a"  # 7 pages; b needs 9 of 12; c would fit
    assert names(scheduler.waiting) == "bc"


@pytest.mark.parametrize(("free", "admitted"), [(5, "b"), (4, "")])
def test_admission_leaves_what_running_requests_need_next(free, admitted):
    scheduler = make(num_pages=5 + free)
    scheduler.add(request("a", prompt=8, new=24, first=1))
    prefill_all(scheduler)  # 16 tokens, 4 pages; the round after the next asks for one more
    scheduler.add(request("b", prompt=8, new=8))
    assert scheduler.cache.available == free
    assert names(scheduler.admit()) == admitted  # 4 pages


def test_a_blocked_head_is_looked_up_again_only_after_a_release(monkeypatch):
    scheduler = make(num_pages=9)
    first = request("a", prompt=16, new=4)
    scheduler.add(first)
    scheduler.admit()
    scheduler.add(request("b", prompt=16, new=4, first=1))
    lookups = []
    monkeypatch.setattr(scheduler.cache, "lookup", lambda *args: lookups.append(1) or [])
    assert [scheduler.admit() for _ in range(5)] == [[]] * 5 and len(lookups) == 1
    scheduler.finish(first, "abort", 0.0)
    assert names(scheduler.admit()) == "b"


def test_a_hit_is_counted_once_and_prefill_starts_behind_it():
    scheduler = make()
    for name in "ab":
        one = request(name, prompt=12, new=4)
        scheduler.add(one)
        scheduler.admit()
        batch = launch(scheduler)
        assert isinstance(batch, PrefillBatch)
        assert (batch.rows[0].start, batch.rows[0].length) == ((0, 12) if name == "a" else (8, 4))
        land(scheduler, batch)
        scheduler.finish(one, "stop", 0.0)
        assert one.cached_tokens == (0 if name == "a" else 8)
    assert (scheduler.prefix_cache_hits, scheduler.prefix_cache_queries) == (8, 24)


# -- batches ---------------------------------------------------------------------------------------------------------


def rows(batch) -> list[tuple[str, int, int, bool]]:
    return [(row.request.request_id, row.start, row.length, row.last) for row in batch.rows]


def test_short_prompts_share_a_launch_up_to_the_budget():
    scheduler = make(chunked_prefill_size=16)
    for index, (name, prompt) in enumerate([("a", 5), ("b", 3), ("c", 5), ("d", 2)]):
        scheduler.add(request(name, prompt=prompt, first=index))
    scheduler.admit()
    assert rows(launch(scheduler)) == [("a", 0, 5, True), ("b", 0, 3, True), ("c", 0, 5, True)]
    assert isinstance(launch(scheduler), DecodeBatch)
    assert rows(launch(scheduler)) == [("d", 0, 2, True)]


def test_rows_of_a_launch_are_limited():
    scheduler = make(max_prefill_rows=2)
    for index, name in enumerate("abc"):
        scheduler.add(request(name, prompt=2, first=index))
    scheduler.admit()
    assert names(row.request for row in launch(scheduler).rows) == "ab"


@pytest.mark.parametrize(
    ("chunk", "lengths"), [(16, [16, 16, 1]), (40, [16, 16, 1]), (11, [11, 11, 11]), (5, [5] * 6 + [3])]
)
def test_a_long_prompt_goes_in_chunks_and_others_do_not_widen_it(chunk, lengths):
    scheduler = make(chunked_prefill_size=chunk)
    scheduler.add(request("a", prompt=33))
    scheduler.admit()
    got = []
    while scheduler.prefilling:
        batch = launch(scheduler)
        got += [row.length for row in batch.rows]
        assert [row.last for row in batch.rows] == [not scheduler.prefilling]
    assert got == lengths


def test_prefill_and_decode_take_turns():
    scheduler = make()
    scheduler.add(request("a", prompt=4, new=30))
    prefill_all(scheduler)
    scheduler._prefilled_last = False
    scheduler.add(request("b", prompt=40, new=8, first=1))
    scheduler.admit()
    kinds = ""
    for _ in range(6):
        batch = launch(scheduler)
        kinds += "p" if isinstance(batch, PrefillBatch) else "d"
        land(scheduler, batch)
    assert kinds == "pdpdpd"


def test_a_request_that_must_be_finished_is_not_launched_again():
    scheduler = make()
    scheduler.add(request("a", new=2))
    scheduler.admit()
    assert isinstance(launch(scheduler), PrefillBatch)
    assert isinstance(scheduler.next_batch(idle=False), DecodeBatch)  # the second token comes with this round
    assert scheduler.next_batch(idle=False) is None


# -- growth and preemption -------------------------------------------------------------------------------------------


def test_tables_grow_ahead_by_two_blocks():
    scheduler = make()
    scheduler.add(request("a", prompt=8, new=40))
    prefill_all(scheduler)
    (one,) = scheduler.running
    sizes = []
    for _ in range(6):
        batch = launch(scheduler)
        assert one.seat and isinstance(batch, DecodeBatch)
        sizes.append((one.num_tokens - 1, len(one.seat.pages), [index for _, index, _ in batch.new_pages]))
        land(scheduler, batch, tokens=3)
    assert sizes == [(8, 4, []), (11, 5, [4]), (14, 6, [5]), (17, 7, [6]), (20, 7, []), (23, 8, [7])]


def two_that_do_not_fit(**options) -> tuple[Scheduler, Request, Request]:
    """Two requests of 4 pages each in a pool of 9; both want to grow to 10."""
    scheduler = make(num_pages=10)
    old, young = request("a", prompt=8, new=28), request("b", prompt=8, new=28, first=1, **options)
    scheduler.add(old)
    scheduler.add(young)
    scheduler._headroom = lambda: 0
    prefill_all(scheduler)
    return scheduler, old, young


def test_the_youngest_is_preempted_keeps_its_tokens_and_comes_back_first():
    scheduler, old, young = two_that_do_not_fit()
    for one in (old, young):
        one.take([9, 9, 9], is_round=True, now_s=0.0)  # 11 committed: 5 pages each
    scheduler.add(request("c", first=2))
    batch = launch(scheduler)
    assert names(row.request for row in batch.rows) == "a"
    assert (young.phase, young.seat, young.preemptions) == (Phase.WAITING, None, 1)
    assert young.output_ids == [9, 9, 9, 9] and names(scheduler.waiting) == "bc"
    scheduler.integrity()
    land(scheduler, batch)
    scheduler.finish(old, "stop", 0.0)
    assert names(scheduler.admit())[0] == "b"
    assert young.seat and young.seat.tokens == [*young.prompt_ids, 9, 9, 9, 9]
    assert young.seat.done == 8, "its committed pages were kept in the cache: 11 tokens, two full pages"


def test_priority_decides_who_is_preempted():
    scheduler, old, young = two_that_do_not_fit(priority=-1)
    for one in (old, young):
        one.take([9, 9, 9], is_round=True, now_s=0.0)
    assert names(row.request for row in launch(scheduler).rows) == "b"
    assert old.phase is Phase.WAITING


def test_nobody_is_preempted_while_a_launch_is_in_flight():
    scheduler, old, young = two_that_do_not_fit()
    flying = launch(scheduler)
    assert len(flying.rows) == 2
    for one in (old, young):  # 12 tokens known, 11 committed: one page more each, and there is one for both
        one.take([9, 9, 9], is_round=True, now_s=0.0)
    assert scheduler.next_batch(idle=False) is None
    assert (old.phase, young.phase) == (Phase.RUNNING, Phase.RUNNING)
    for row in flying.rows:
        assert scheduler.landed(row)
    assert names(row.request for row in launch(scheduler).rows) == "a"


def test_a_preempted_request_is_no_cache_hit():
    scheduler, old, young = two_that_do_not_fit()
    for one in (old, young):
        one.take([9, 9, 9], is_round=True, now_s=0.0)
    queries = scheduler.prefix_cache_queries
    batch = launch(scheduler)
    scheduler.finish(old, "abort", 0.0)
    land(scheduler, batch)
    scheduler.admit()
    assert young.seat and young.seat.done == 8
    assert (young.cached_tokens, scheduler.prefix_cache_queries) == (0, queries)


# -- release ---------------------------------------------------------------------------------------------------------


def test_pages_outlive_the_request_until_its_launch_lands_but_the_slot_does_not():
    scheduler = make(max_running_requests=1, enable_prefix_caching=False)
    first, second = request("a"), request("b")
    scheduler.add(first)
    scheduler.add(second)
    prefill_all(scheduler)
    flying = launch(scheduler)
    held = scheduler.pool.num_held
    assert scheduler.finish(first, "stop", 0.0) == 0
    assert scheduler.pool.num_held == held and scheduler.has_work
    assert scheduler.admit() == [second] and second.seat and second.seat.slot == 0
    assert not set(second.seat.pages) & set(flying.rows[0].seat.pages)
    assert not scheduler.landed(flying.rows[0])
    assert scheduler.pool.num_held == len(second.seat.pages)
    scheduler.integrity()


def test_committed_pages_of_prompt_and_output_stay_cached():
    scheduler = make()
    one = request("a", prompt=6, new=20)
    scheduler.add(one)
    prefill_all(scheduler)
    assert len(scheduler.cache) == 1
    land(scheduler, launch(scheduler), tokens=3)  # 10 tokens, 9 committed
    scheduler.finish(one, "stop", 0.0)
    assert len(scheduler.cache) == 2
    assert len(scheduler.cache.lookup([*one.tokens(), 1, 2, 3, 4])) == 2


def test_tokens_dropped_by_a_stop_string_are_not_cached():
    scheduler = make()
    one = request("a", prompt=6, new=20)
    scheduler.add(one)
    prefill_all(scheduler)
    land(scheduler, launch(scheduler), tokens=3)
    one.drop_tail(2)
    scheduler.finish(one, "stop", 0.0)
    assert (one.output_ids, one.accept_lengths) == ([9, 9], [1])
    assert len(scheduler.cache) == 1  # 8 tokens, 7 committed


def test_only_tokens_of_the_last_round_can_be_dropped():
    one = request("a")
    one.take([1], is_round=False, now_s=0.0)
    with pytest.raises(ValueError, match="cannot drop 1 of the 1 newest tokens of request a"):
        one.drop_tail(1)
    one.take([2, 3], is_round=True, now_s=0.0)
    one.drop_tail(0)
    one.drop_tail(1)
    assert (one.output_ids, one.accept_lengths) == ([1, 2], [1])


def test_integrity_finds_a_page_that_no_seat_knows():
    scheduler = make()
    scheduler.pool.allocate(1)
    with pytest.raises(RuntimeError, match="seats hold 0 pages, the pool says 1"):
        scheduler.integrity()
