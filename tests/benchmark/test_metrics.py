"""Figures of responses whose times are known."""

from __future__ import annotations

import pytest

from dflash_jax.benchmark.contender import Counters
from dflash_jax.benchmark.metrics import accept_length, acceptance, latencies, level_figures

from .fakes import response


def test_times_of_one_response():
    one = response(sent_s=1.0, pieces=(1.5, 2.0, 3.5), tokens=6)
    assert one.ttft_s == 0.5 and one.e2e_s == 2.5
    assert one.tpot_s == pytest.approx(2.0 / 5)  # 2 s for the five tokens after the first
    assert one.itl_s == [0.5, 1.5]  # of pieces, whatever they hold


def test_a_single_token_has_no_time_per_token():
    found = latencies([response(tokens=1)])
    assert found["mean_tpot_ms"] is None and found["p99_itl_ms"] is None
    assert found["mean_ttft_ms"] == found["mean_e2el_ms"] == 1000


def test_an_answer_that_comes_as_a_whole_has_no_itl():
    found = latencies([response(pieces=(1.0, 5.0), tokens=9, streamed=False)])
    assert found["median_itl_ms"] is None and found["mean_tpot_ms"] == 500


def test_latencies_are_in_milliseconds_over_all_responses():
    found = latencies([response(pieces=(0.1 * i, 0.1 * i + 1), tokens=2) for i in range(1, 102)])
    assert found["mean_ttft_ms"] == pytest.approx(5100)
    assert found["median_ttft_ms"] == pytest.approx(5100)
    assert found["p99_ttft_ms"] == pytest.approx(10000)
    assert [found["mean_tpot_ms"], found["p99_tpot_ms"]] == pytest.approx([1000, 1000])


def test_throughput_is_the_median_of_the_repeats():
    runs = [([response(tokens=n)], 2.0) for n in (10, 40, 20)]
    found = level_figures(runs, [None] * 3)
    assert found["output_throughput_runs"] == [5, 20, 10]
    assert found["output_throughput"] == 10
    assert found["request_throughput"] == 0.5
    assert found["total_token_throughput"] == 15  # ten prompt tokens each


def test_acceptance_is_the_mean_of_the_responses_means():
    found = [response(accept_lengths=[8]), response(accept_lengths=[1, 1, 1, 1])]
    assert accept_length(found, [None]) == 4.5  # not 12 / 5
    assert accept_length([*found, response(accept_lengths=[])], []) == 4.5  # no round, no opinion
    assert accept_length([response(accept_length=3.0), response(accept_length=4.0)], []) == 3.5
    assert accept_length([response()], []) is None


def test_acceptance_of_a_server_that_counts_only():
    counted = [Counters(10, 40, 25), Counters(10, 40, 15)]
    assert accept_length([response()], counted) == 3.0


def test_positions_and_histogram_from_rounds():
    found = acceptance([response(accept_lengths=[1, 3]), response(accept_lengths=[3, 2])], [])
    assert found["acceptance_histogram"] == [0, 0.25, 0.25, 0.5]
    assert found["acceptance_rate_per_pos"] == [0.75, 0.5]


def test_counters_are_preferred_and_added_up():
    counted = [Counters(4, 8, 3, [4, 4], [2, 1], [0, 2, 1, 1], {3: 4}), Counters(2, 1, 1, [2], [1], [0, 1, 1], {2: 2})]
    found = acceptance([response(accept_lengths=[9])], counted)
    assert found["acceptance_rate_per_pos"] == [0.5, 0.25]
    assert found["acceptance_histogram"] == [0, 0.5, pytest.approx(1 / 3), pytest.approx(1 / 6)]
    assert found["rounds_by_width"] == {2: 2, 3: 4}


def test_a_run_has_its_share_of_the_counters():
    before = Counters(4, 8, 3, [4], [2], [0, 2, 2], {1: 1, 3: 3})
    after = Counters(9, 20, 5, [9, 5], [3, 1], [0, 5, 3, 1], {1: 1, 3: 8})
    assert after.since(before) == Counters(5, 12, 2, [5, 5], [1, 1], [0, 3, 1, 1], {3: 5})
