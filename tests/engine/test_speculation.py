"""Widths of rounds: what is measured, what is chosen, and what that costs on a device whose times are made up."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from dflash_jax.engine import speculation as speculation_module
from dflash_jax.engine.loop import Round
from dflash_jax.engine.protocol import RowResult
from dflash_jax.engine.request import Request
from dflash_jax.engine.round_times import SAMPLES, RoundTimes
from dflash_jax.engine.speculation import (
    EVIDENCE_ROUNDS,
    GAIN,
    PROBE_ROUNDS,
    PROBE_SHARE,
    Speculation,
    TokensPerRound,
    block_widths,
)

from .fake_runner import FakePending, FakeRunner, Script, assert_nothing_leaks, make_loop, make_request, run, solo_run

ALL = (1, 4, 8, 16)


def key_of(slots: Sequence[int], width: int, masked: bool) -> tuple[str, int, int]:
    return "decode_round", len(slots), width


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("largest", "widths"),
    [(1, [1]), (2, [1, 2]), (4, [1, 4]), (7, [1, 7]), (8, [1, 4, 8]), (10, [1, 5, 10]), (16, [1, 4, 8, 16])],
)
def test_widths(largest: int, widths: list[int]):
    assert list(block_widths(largest)) == widths


def test_tokens_per_round_by_hand():
    tokens = TokensPerRound(ALL)
    assert [tokens.expected(width) for width in ALL] == [1, 1, 1, 1]
    tokens.add(16, [16, 2])
    assert [tokens.expected(width) for width in ALL] == [1, (4 + 2) / 2, (8 + 2) / 2, (16 + 2) / 2]
    tokens.add(16, [6, 6])
    assert [tokens.expected(width) for width in ALL] == [1, (4 + 2 + 4 + 4) / 4, (8 + 2 + 6 + 6) / 4, 30 / 4]
    tokens.add(4, [1] * 7)
    assert tokens.expected(4) == 14 / 4, "seven rows are not enough"
    tokens.add(4, [1])
    assert tokens.expected(4) == 1 and tokens.expected(8) == 22 / 4
    tokens.distrust(16)
    assert tokens.expected(4) == 14 / 4, "narrower widths follow the new trial"
    tokens.add(16, [1] * PROBE_ROUNDS)
    assert tokens.expected(16) == pytest.approx((30 / 4 + 1) / 2)


def test_tokens_per_round_forget():
    tokens = TokensPerRound((1, 4))
    for _ in range(50):
        tokens.add(4, [4, 4])
    for _ in range(100):
        tokens.add(4, [1, 1])
    assert 1 < tokens.expected(4) < 1.2


def test_round_times_are_medians_of_the_newest():
    times = RoundTimes()
    key = ("decode_round", 2, 8)
    assert times.seconds(key) is None
    for seconds in (5.0, 1.0, 9.0):
        times.add(key, seconds)
    assert times.seconds(key) == 5 and times.seconds((*key, "filter")) == 5
    times.add((*key, "filter"), 7.0)
    assert times.seconds((*key, "filter")) == 7 and times.seconds(("decode_round", 2, 4)) is None
    for _ in range(SAMPLES):
        times.add(key, 2.0)
    times.add(key, 100.0)
    assert times.seconds(key) == 2
    times.distrust(key, keep=1)
    assert times.seconds(key) == 100 and times.all() == {"decode_round 2 8": 100, "decode_round 2 8 filter": 7}


def test_round_times_are_kept(tmp_path):
    path = tmp_path / "deep" / "times.json"
    times = RoundTimes(path)
    times.add((1, 8), 0.5)
    times.save()
    again = RoundTimes(path)
    assert again.seconds((1, 8)) == 0.5 and json.loads(path.read_text()) == {"1 8": 0.5}
    assert [entry.name for entry in path.parent.iterdir()] == ["times.json"]
    for _ in range(SAMPLES // 2 + 1):
        again.add((1, 8), 0.25)
    assert again.seconds((1, 8)) == 0.25, "new measurements outweigh old ones"


DAMAGED = ["", "[1]", "{", '{"1 8": "x"}', '{"1 8": -1}', '{"1 8": NaN}', '{"1 8": [1]}', "\xff"]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_measured_again(tmp_path, caplog, text):
    path = tmp_path / "times.json"
    path.write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING, "dflash_jax"):
        times = RoundTimes(path)
    assert times.all() == {} and "times.json: not the round times of an earlier run" in caplog.text
    times.add((1, 8), 0.5)
    times.save()
    assert RoundTimes(path).all() == {"1 8": 0.5}


def test_a_place_that_cannot_be_written_is_reported_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    times = RoundTimes(tmp_path / "file" / "times.json")
    times.add((1, 8), 0.5)
    times.save()
    times.save()
    assert caplog.text.count("cannot be kept there") == 1 and times.seconds((1, 8)) == 0.5


# -- choices -----------------------------------------------------------------------------------------------------------


class Bench:
    """A chooser without a loop: one request, whose rounds of width w take time(w) and commit right(n) + 1 tokens."""

    def __init__(self, time: Callable[[int], float], largest: int = 16, compiled: Sequence[int] = ALL):
        self.time = time
        self.speculation = Speculation(largest, key_of, lambda key: key[2] in compiled)
        for width in compiled:
            self.speculation.times.add(("decode_round", 1, width), time(width))
        self.live = [make_seated()]  # the chooser asks for nothing but their slots
        self.spent_s = 0.0
        self.tokens = 0

    def rounds(self, count: int, right: int) -> Counter[int]:
        """Widths of so many rounds, the drafts of each being right for `right` tokens."""
        widths: Counter[int] = Counter()
        for _ in range(count):
            widths[self._round(right)] += 1
        return widths

    def _round(self, right: int) -> int:
        width = self.speculation.choose(self.live)
        committed = min(width, right + 1)
        self.speculation.observe(Round([committed], self.time(width), steady=True))
        self.spent_s += self.time(width)
        self.tokens += committed
        return width


def make_seated() -> Request:
    loop = make_loop(FakeRunner(), overlap=False)
    loop.add(request := make_request("a", Script([1])))
    loop.step()
    return request


def linear(width: int) -> float:
    """Like a CPU: a round of 16 takes four times that of 1."""
    return 0.8 + 0.2 * width


def flat(width: int) -> float:
    """Like a GPU at one request; the draft itself is a quarter."""
    return 1.0 if width == 1 else 1.25 + 0.005 * width


@pytest.mark.parametrize("time", [linear, flat])
def test_nothing_changes_before_there_is_evidence(time):
    assert Bench(time).rounds(EVIDENCE_ROUNDS, right=0) == {16: EVIDENCE_ROUNDS}


@pytest.mark.parametrize("time", [linear, flat])
@pytest.mark.parametrize(("right", "best"), [(0, {1}), (15, {16})])
def test_always_wrong_and_always_right(time, right, best):
    bench = Bench(time)
    bench.rounds(EVIDENCE_ROUNDS, right)
    widths = bench.rounds(1000, right)
    assert sum(widths[width] for width in best) > 900


@pytest.mark.parametrize(("right", "best"), [(1, 1), (3, 4), (4, 4), (7, 8), (11, 16)])
def test_the_best_width_in_between(right, best):
    """On the CPU-like device widths 1, 4, 8 and 16 take 1, 1.6, 2.4 and 4."""
    bench = Bench(linear)
    bench.rounds(EVIDENCE_ROUNDS, right)
    rates = {width: min(width, right + 1) / linear(width) for width in ALL}
    assert max(rates.values()) / rates[best] < 1.26
    assert bench.rounds(500, right).most_common(1)[0][0] in [w for w in ALL if rates[w] > max(rates.values()) / 1.05]


@pytest.mark.parametrize("time", [linear, flat])
def test_case_32_never_much_slower_than_plain_decoding(time):
    """With drafts that are always wrong, all that is lost is the evidence and a small share for trials."""
    bench = Bench(time)
    bench.rounds(EVIDENCE_ROUNDS, right=0)
    before_s, before = bench.spent_s, bench.tokens
    bench.rounds(3000, right=0)
    plain_s = (bench.tokens - before) * time(1)
    assert bench.spent_s - before_s < (1 + PROBE_SHARE + 0.01) * plain_s
    assert bench.speculation.stats().trials > 3, "it goes on looking"


@pytest.mark.parametrize("time", [linear, flat])
def test_changes_are_noticed(time):
    """Wrong, then right, then wrong: each time most of the next thousand rounds have the better width."""
    bench = Bench(time)
    for right, best in [(0, 1), (15, 16), (0, 1)]:
        assert bench.rounds(1000, right)[best] > 600


def test_a_device_that_slows_down_is_noticed():
    """Wide rounds become dear (long contexts, other tenants), then cheap again."""
    bench = Bench(flat)
    assert bench.rounds(500, right=3)[1] < 50
    bench.time = lambda width: 0.5 * width + 0.5
    assert bench.rounds(2000, right=3)[16] < 300
    bench.time = flat
    bench.rounds(1500, right=3)
    assert bench.rounds(1000, right=3)[1] < 100


def test_wrong_times_at_the_start_are_found_out():
    """When the engine was warmed up, something else kept the device busy for the rounds of one row."""
    bench = Bench(flat)
    bench.speculation.times = RoundTimes()
    for width in ALL:
        bench.speculation.times.add(("decode_round", 1, width), 5.0 if width == 1 else flat(width))
    assert set(bench.rounds(500, right=0)) <= {4, 8, 16}
    bench.rounds(4000, right=0)
    assert bench.rounds(500, right=0)[1] > 400


@pytest.mark.parametrize(("right", "most"), [(4, GAIN + 0.01), (15, 1.01), (0, 1 + PROBE_SHARE + 0.01)])
def test_trials_cost_little(right: int, most: float):
    """On the GPU-like device, against the best width from the start."""
    bench = Bench(flat)
    bench.rounds(EVIDENCE_ROUNDS, right)
    bench.spent_s, bench.tokens = 0.0, 0
    bench.rounds(5000, right)
    assert bench.spent_s < most * bench.tokens * min(flat(width) / min(width, right + 1) for width in ALL)


def test_only_what_is_compiled_is_chosen():
    """Without a warm-up that is the full width alone, in every bucket."""
    lazy = Bench(linear, compiled=[16])
    assert lazy.rounds(200, right=0) == {16: 200}
    assert set(Bench(linear, compiled=[1, 16]).rounds(200, right=0)) == {1, 16}
    assert set(Bench(linear, compiled=[1, 4]).rounds(200, right=0)) == {16}, "the full width comes first"


def test_what_is_compiled_but_never_timed_is_not_chosen():
    bench = Bench(linear, compiled=[16])
    bench.speculation._is_compiled = lambda key: True
    assert bench.rounds(100, right=0) == {16: 100}


def test_stats():
    bench = Bench(linear)
    bench.rounds(100, right=0)
    stats = bench.speculation.stats()
    assert stats.width == 1 and sum(stats.rounds.values()) == 100 and stats.rounds[16] >= EVIDENCE_ROUNDS
    assert stats.tokens_per_round == dict.fromkeys(ALL, 1.0)
    assert stats.round_s == {f"decode_round 1 {width}": linear(width) for width in ALL}


def test_measuring_at_warm_up(tmp_path):
    """Each compiled round is timed once; a second engine on the same machine finds the times."""
    compiled = {("decode_round", rows, width) for rows in (1, 2) for width in (1, 4, 8)} - {("decode_round", 2, 4)}
    launched: Counter[tuple[int, int]] = Counter()

    class Done:
        def result(self) -> list[RowResult]:
            return []

    def decode(slots: Sequence[int], width: int) -> Done:
        launched[len(slots), width] += 1
        return Done()

    for _ in range(2):
        speculation = Speculation(8, key_of, compiled.__contains__, RoundTimes(tmp_path / "times.json"))
        speculation.measure(decode, [[9], [9, 9]])
        assert set(speculation.times.all()) == {" ".join(map(str, key)) for key in compiled}
    assert launched == dict.fromkeys([(1, 1), (1, 4), (1, 8), (2, 1), (2, 8)], 3)


# -- in the loop -------------------------------------------------------------------------------------------------------


class TimedRunner(FakeRunner):
    """Launches take their turn on a device: a round of width w takes linear(w), whatever the host does meanwhile."""

    def __init__(self, **options):
        super().__init__(**options)
        self.now_s = 0.0
        self.free_s = 0.0
        self.widths: list[int] = []

    def clock(self) -> float:
        return self.now_s

    def decode(self, slots: Sequence[int], block_size: int) -> FakePending:
        self.widths.append(block_size)
        return self._timed(super().decode(slots, block_size), linear(block_size))

    def prefill(self, rows) -> FakePending:
        return self._timed(super().prefill(rows), 3.0)

    def _timed(self, pending: FakePending, seconds: float) -> FakePending:
        self.free_s = max(self.free_s, self.now_s) + seconds
        done_s, result = self.free_s, pending.result

        def wait() -> list[RowResult]:
            self.now_s = max(self.now_s, done_s)
            return result()

        pending.result = wait  # type: ignore[method-assign]
        return pending


def timed_loop(overlap: bool, **options):
    runner = TimedRunner(block_size=16, num_pages=400, pages_per_slot=64, **options)
    speculation = Speculation(16, key_of, lambda key: True)
    for rows in range(1, 5):
        for width in ALL:
            speculation.times.add(("decode_round", rows, width), 1.0)  # not what the rounds will take
    hooks = {"choose_block": speculation.choose, "on_round": speculation.observe, "clock": runner.clock}
    return runner, speculation, make_loop(runner, overlap=overlap, **hooks)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_loop_measures_rounds(overlap: bool):
    """Of a long request alone, exactly; the times at the start were wrong."""
    runner, speculation, loop = timed_loop(overlap)
    run(loop, make_request("a", Script([1, 2], right=[0]), 240))
    for width in (1, 16):
        assert speculation.times.seconds(("decode_round", 1, width)) == pytest.approx(linear(width))
    assert Counter(runner.widths)[1] > 180 and runner.widths[:EVIDENCE_ROUNDS] == [16] * EVIDENCE_ROUNDS
    assert loop.metrics().acceptance_by_width[16][1] == runner.widths.count(16)


@pytest.mark.parametrize("overlap", [True, False])
def test_prefill_and_idle_time_do_not_count(overlap: bool):
    """Requests come one by one, each with prefill in between and a pause of the host before it."""
    runner, speculation, loop = timed_loop(overlap)
    for name in range(12):
        runner.now_s += 50
        run(loop, make_request(str(name), Script([name, 2], right=[15]), 100))
    assert speculation.times.seconds(("decode_round", 1, 16)) == pytest.approx(linear(16))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_never_depend_on_it(overlap: bool, seed: int, monkeypatch):
    """Whatever is measured: here times are noise, so that widths change all the time."""
    monkeypatch.setattr(speculation_module, "EVIDENCE_ROUNDS", 0)
    rng = random.Random(seed)
    runner, speculation, loop = timed_loop(overlap, rng=rng)
    speculation.times.seconds = lambda key: rng.random()  # type: ignore[method-assign]
    requests = []
    for name in range(8):
        script = Script([rng.randrange(40) for _ in range(rng.randrange(1, 30))], right=[0, 15, 3, 1, 7])
        requests.append(make_request(str(name), script, rng.randrange(1, 150)))
    run(loop, *requests)
    for request in requests:
        assert isinstance(request.sampling, Script)
        solo = solo_run(request.sampling, request.max_new_tokens, block_size=16)
        assert request.output_ids == solo.tokens
    assert_nothing_leaks(loop)
    assert len(set(runner.widths)) > 2
    counted = loop.metrics().acceptance_by_width
    assert sum(n * rows for counts in counted.values() for n, rows in enumerate(counts)) == sum(
        len(request.output_ids) - 1 for request in requests
    )


def test_a_fixed_width_reads_no_clock_for_it():
    """Without a chooser nothing is measured, and every round has the whole block."""
    runner = TimedRunner(block_size=4)
    run(make_loop(runner), make_request("a", Script([1], right=[0]), 30))
    assert set(runner.widths) == {4}
