"""Counters and histograms against sums done by hand."""

import pytest

from dflash_jax.engine.metrics import LatencyHistogram, MetricsRecorder
from dflash_jax.engine.request import Request
from dflash_jax.engine.scheduler import Scheduler, SchedulerConfig

from .fake_runner import FakeRunner, Script, make_loop, make_request, run


def test_percentiles_are_within_a_bucket():
    histogram = LatencyHistogram()
    for milliseconds in range(1, 1001):
        histogram.add(milliseconds / 1000)
    for share, true in [(0.5, 0.5), (0.9, 0.9), (0.99, 0.99), (0.001, 0.001)]:
        assert histogram.percentile(share) == pytest.approx(true, rel=0.06)
    got = histogram.snapshot()
    assert (got.count, got.mean_s) == (1000, pytest.approx(0.5005))


def test_values_beyond_the_ends_stay_in_the_end_buckets():
    histogram = LatencyHistogram()
    for seconds in (0.0, -1.0, 1e9):
        histogram.add(seconds)
    assert histogram.percentile(0.5) < 2e-5 and 5e4 < histogram.percentile(1.0) < 2e5
    assert LatencyHistogram().percentile(0.5) == 0.0


def test_acceptance_by_hand():
    """Rounds of width 4 that commit 4, 1 and 2 tokens, and one of width 2 that commits 2."""
    recorder = MetricsRecorder(block_size=4)
    for width, committed in [(4, 4), (4, 1), (4, 2), (2, 2)]:
        recorder.round(width, committed)
    got = recorder.snapshot(Scheduler(SchedulerConfig.of(FakeRunner())))
    assert got.acceptance_histogram == [0, 1, 2, 0, 1]
    assert (got.num_drafts, got.num_draft_tokens, got.num_accepted_tokens) == (4, 10, 5)
    assert (got.num_drafts_per_pos, got.num_accepted_tokens_per_pos) == ([4, 3, 3], [3, 1, 1])
    assert got.acceptance_rate_per_pos == [0.75, pytest.approx(1 / 3), pytest.approx(1 / 3)]
    assert got.mean_acceptance_length == 9 / 4
    assert got.acceptance_by_width == {4: [0, 1, 1, 0, 1], 2: [0, 0, 1]}


def test_before_the_first_request_nothing_divides_by_zero():
    got = make_loop(FakeRunner()).metrics()
    assert (got.mean_acceptance_length, got.prefix_cache_hit_rate, got.kv_cache_usage) == (0, 0, 0)
    assert got.acceptance_rate_per_pos == [0, 0, 0] and got.time_to_first_token.mean_s == 0


def test_block_size_one_has_no_positions():
    recorder = MetricsRecorder(block_size=1)
    recorder.round(1, 1)
    got = recorder.snapshot(Scheduler(SchedulerConfig.of(FakeRunner(block_size=1))))
    assert (got.num_drafts, got.num_draft_tokens, got.acceptance_rate_per_pos) == (1, 0, [])


def test_a_served_request_by_hand():
    """Ten tokens: the prefill's, then rounds of 3, 3 and 3. The clock ticks once a look."""
    ticks = iter(range(100))
    loop = make_loop(FakeRunner(), overlap=False, clock=lambda: next(ticks))
    run(loop, make_request("a", Script(range(6), right=[2]), 10, arrival_s=-4.0))
    got = loop.metrics()
    assert (got.prompt_tokens, got.generation_tokens, got.prefill_launches, got.rounds) == (6, 10, 1, 3)
    assert (got.acceptance_histogram, got.mean_acceptance_length) == ([0, 0, 0, 3, 0], 3.0)
    assert got.request_success == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert (got.time_to_first_token.sum_s, got.e2e_request_latency.sum_s) == (4.0, 7.0)
    assert got.time_per_output_token.sum_s == pytest.approx(3 / 9)
    assert got.num_pages == got.num_pages_free + got.num_pages_cached == 64 and got.num_pages_cached == 3


def test_running_waiting_and_pages_of_a_loaded_engine():
    loop = make_loop(FakeRunner(num_slots=2))
    for name in "abc":
        loop.add(make_request(name, Script([ord(name), *range(9)]), 20))
    loop.step()
    got = loop.metrics()
    assert (got.num_requests_running, got.num_requests_waiting) == (2, 1)
    assert (got.num_pages_held, got.kv_cache_usage) == (10, 10 / 64)


def test_an_abort_is_counted_without_a_time_per_token():
    loop = make_loop(FakeRunner())
    loop.add(make_request("a", Script([1, 2])))
    assert loop.abort("a") and not loop.abort("a")
    got = loop.metrics()
    assert (got.request_success["abort"], got.e2e_request_latency.count, got.time_per_output_token.count) == (1, 1, 0)


def test_a_request_that_runs_is_not_counted_as_finished():
    with pytest.raises(RuntimeError, match="request a is waiting, not finished"):
        MetricsRecorder(4).finished(Request("a", [1], 1))
