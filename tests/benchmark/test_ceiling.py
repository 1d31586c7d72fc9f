"""Bytes and operations of a step, by hand."""

from __future__ import annotations

import pytest

from dflash_jax.benchmark.ceiling import ModelCost, Rates, better, level_ceiling, share

COST = ModelCost(
    target_bytes=1000, target_params=500, target_kv_bytes=2.0, head_params=50, draft_head_bytes=100,
    draft_head_params=50, draft_bytes=200, draft_params=100, draft_kv_bytes=1.0,
)  # fmt: skip
MEMORY = Rates(bytes_per_s=100.0, flops_per_s=1e12, dtype="float32")
WORK = Rates(bytes_per_s=1e12, flops_per_s=1000.0, dtype="float32")


def test_a_plain_step_reads_target_and_keys_and_multiplies_a_row():
    assert COST.round(requests=3, context=10, rows=1) == (1000 + 3 * 10 * 2, 2 * 3 * 500)


def test_a_round_reads_the_draft_and_the_head_again():
    size, work = COST.round(requests=1, context=10, rows=4)
    assert size == 1000 + 20 + 200 + 100 + 10
    assert work == 2 * (4 * 500 + 4 * 100 + 3 * 50)


def test_the_longer_of_the_two_is_the_ceiling():
    assert COST.round_s(MEMORY, 1, 0, 1) == 10.0
    assert COST.round_s(WORK, 8, 0, 1) == 8.0


def test_prefill_needs_the_head_once():
    assert COST.prefill_s(WORK, 10) == 2 * 10 * 450 / 1000


def test_a_drafter_without_weights_costs_the_target_alone():
    plain = ModelCost(1000, 500, 2.0, 50)
    assert plain.round(1, 0, 8) == (1000, 8000)


def test_ceilings_of_a_level():
    figures = {"mean_input_len": 6, "mean_output_len": 8, "accept_length": 4.0, "rounds_by_width": {1: 3, 4: 1}}
    found = level_ceiling(COST, MEMORY, 2, figures, default_rows=16)
    round_s = (3 * (1000 + 40) + 1300 + 60) / 4 / 100
    assert found["round_ms"] == pytest.approx(round_s * 1e3)
    assert found["output_throughput"] == pytest.approx(2 * 4 / round_s)
    assert found["tpot_ms"] == pytest.approx(round_s / 4 * 1e3)
    assert found["ttft_ms"] == 10_000


def test_without_counted_widths_a_level_has_the_contenders_rows():
    figures = {"mean_input_len": 0, "mean_output_len": 0, "accept_length": None, "rounds_by_width": {}}
    assert level_ceiling(COST, MEMORY, 1, figures, default_rows=4)["round_ms"] == 13_000


def test_the_best_rates_seen_count():
    assert better(None, MEMORY) == MEMORY
    assert better(MEMORY, WORK) == Rates(1e12, 1e12, "float32")


def test_share():
    assert share(1.0, 4.0) == 0.25
    assert share(None, 4.0) is share(1.0, None) is None
