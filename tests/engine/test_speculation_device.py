"""Speculation on real compiled rounds: CASE 32, CASE 33, and what the settings mean."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from drafters.cycles import EchoDrafter, loaded, make_engine, says

from dflash_jax import Engine, EngineSettings, SamplingParams, UserError
from dflash_jax.drafters import Drafter, NgramDrafter, NoDrafter
from dflash_jax.engine import build
from dflash_jax.engine.build import load
from dflash_jax.engine.round_times import RoundTimes
from dflash_jax.engine.speculation import EVIDENCE_ROUNDS

PAIR = Path(__file__).resolve().parents[1] / "data" / "pairs" / "x-default-taps"
SETTINGS = EngineSettings(
    "cycles", "echo", page_size=4, max_running_requests=1, max_model_len=512, chunked_prefill_size=16
)


@pytest.fixture(autouse=True)
def times_path(tmp_path, monkeypatch) -> Path:
    """Round times of other runs on this machine shall not count here."""
    path = tmp_path / "times.json"
    monkeypatch.setattr(build, "round_times_path", lambda *_: path)
    return path


def warm_engine(drafter: Drafter, **settings) -> Engine:
    engine = make_engine(dataclasses.replace(SETTINGS, **settings), drafter)
    engine.warmup(progress=False)
    return engine


def served(engine: Engine, prompt: list[int], new: int) -> float:
    """Seconds for `new` tokens, which must be right."""
    start_s = time.perf_counter()
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    tokens = [token for update in engine.generate(prompt, params) for token in update.tokens]
    assert tokens == says(prompt, new)
    return time.perf_counter() - start_s


def test_case_32_a_draft_that_is_dear_and_always_wrong(no_retrace, times_path):
    """Soon it is used no longer, and decoding is as fast as width 1 can be, not as slow as the whole block."""
    engine = warm_engine(EchoDrafter(cost=512))
    assert engine.speculation is not None and RoundTimes(times_path).all() == engine.speculation.times.all()
    with no_retrace():
        with_draft_s = served(engine, [0], EVIDENCE_ROUNDS) / EVIDENCE_ROUNDS
        later_s = served(engine, [7], 400) / 400
    widths = {width: sum(counts) for width, counts in engine.metrics().acceptance_by_width.items()}
    assert widths[1] > 350 and widths[8] < 60, (widths, engine.speculation.stats())
    assert later_s < with_draft_s / 2, engine.speculation.stats()


def test_a_draft_that_is_cheap_and_right_stays():
    engine = warm_engine(NgramDrafter())
    for _ in range(6):
        served(engine, [0, 1, 2, 3, 4, 0], 1 + 8 * 20)
    widths = {width: sum(counts) for width, counts in engine.metrics().acceptance_by_width.items()}
    assert widths[8] > 100, widths


def test_without_warm_up_every_round_is_whole():
    engine = make_engine(SETTINGS, EchoDrafter())
    served(engine, [0], 100)
    assert engine.metrics().acceptance_by_width == {8: [0, 99, *[0] * 7]}


@pytest.mark.parametrize("settings", [{"speculation": "always"}, {"block_size": 8}], ids=str)
def test_fixed_widths(settings):
    """`always`, or a block size: warm-up compiles one width, and every round has it."""
    engine = make_engine(dataclasses.replace(SETTINGS, **settings), EchoDrafter())
    assert engine.speculation is None
    served(engine, [0], 60)
    assert engine.metrics().acceptance_by_width == {8: [0, 59, *[0] * 7]}


def test_never_leaves_the_draft_out():
    settings = EngineSettings(str(PAIR / "target"), str(PAIR / "draft"), speculation="never", max_model_len=64)
    model = load(settings)
    assert model.drafter == NoDrafter() and model.weights.draft is None
    assert Engine(settings, model).speculation is None


def test_settings_that_are_refused():
    with pytest.raises(UserError, match="speculation 'sometimes' is not one of auto, always, never"):
        EngineSettings("t", "d", speculation="sometimes")
    with pytest.raises(UserError, match="block_size 4 has no meaning with speculation 'never'"):
        EngineSettings("t", "d", speculation="never", block_size=4)


def test_times_are_kept_for_each_model_and_machine(monkeypatch):
    """One file for equal steps on equal devices, another for everything else."""
    monkeypatch.undo()
    runners = [Engine(SETTINGS, loaded(d)).runner for d in (NgramDrafter(), NgramDrafter(), NgramDrafter(5))]
    paths = [build.round_times_path(r.steps.config, loaded(NgramDrafter())) for r in runners]
    assert paths[0] == paths[1] != paths[2] and paths[0] is not None and paths[0].suffix == ".json"
    half = dataclasses.replace(loaded(NgramDrafter()), dtype="bfloat16")
    assert build.round_times_path(runners[0].steps.config, half) not in paths
