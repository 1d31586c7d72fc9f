"""An engine over two devices: the same tokens and acceptance, half of what is split on each, nothing compiled twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import pytest

from dflash_jax import Engine, EngineSettings, SamplingParams, UserError
from dflash_jax.engine.request import Request

from .device import PAIRS

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
SIZES = {"dtype": "float32", "max_running_requests": 2, "page_size": 8, "max_model_len": 256, "speculation": "always"}
DRAWN = SamplingParams(max_new_tokens=24, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True)
EDITED = SamplingParams(max_new_tokens=24, repetition_penalty=1.3, logprobs=2, ignore_eos=True)


def engine_of(pair: str, devices: int, **settings: object) -> Engine:
    target, draft = (str(PAIRS / pair / part) for part in ("target", "draft"))
    return Engine(EngineSettings(target, draft, tensor_parallel_size=devices, **{**SIZES, **settings}))


@pytest.fixture(scope="module", params=["qwen3-v2", pytest.param("llama-v1-tied", marks=pytest.mark.soak)])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine, Engine]]:
    """The pair's name, on two devices, and on one."""
    yield request.param, engine_of(request.param, 2), engine_of(request.param, 1)


def run(engine: Engine, *asked: tuple[Sequence[int], SamplingParams], grammar: object = None) -> list[Request]:
    requests = [engine.add_request(ids, params, grammar=grammar) for ids, params in asked]
    while engine.has_work:
        engine.step()
    return requests


def test_recorded_cases(engines: tuple[str, Engine, Engine]):
    name, split, _ = engines
    cases = json.loads((PAIRS / name / "expected.json").read_text())
    block = split.runner.block_size
    cases = [case for case in cases if case["block_size"] == block][:4]
    assert cases
    params = [SamplingParams(max_new_tokens=case["max_new_tokens"], ignore_eos=True) for case in cases]
    for case, found in zip(cases, run(split, *zip((c["prompt_ids"] for c in cases), params, strict=True)), strict=True):
        assert found.output_ids == case["token_ids"] == case["greedy_token_ids"]
        n = case["comparable_rounds"]
        assert found.accept_lengths[:n] == case["accept_lengths"][:n]


def test_samples_penalties_and_masks_as_on_one_device(engines: tuple[str, Engine, Engine]):
    _, *both = engines
    asked = ([3, 1, 4, 1, 5, 9, 2, 6], DRAWN), ([3, 1, 4, 1, 5, 9, 2, 6], EDITED)
    split, one = (run(engine, *asked) for engine in both)
    for mine, theirs in zip(split, one, strict=True):
        assert mine.output_ids == theirs.output_ids and mine.accept_lengths == theirs.accept_lengths
    for mine, theirs in zip(split[1].logprobs, one[1].logprobs, strict=True):
        assert mine.top_ids == theirs.top_ids
        np.testing.assert_allclose(mine.top_logprobs, theirs.top_logprobs, atol=1e-4)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    split, one = (
        run(engine, ([5, 6, 7], params), grammar=EvenIds(both[0].loaded.config.vocab_size)) for engine in both
    )
    assert split[0].output_ids == one[0].output_ids and not any(token % 2 for token in split[0].output_ids)
    assert split[0].accept_lengths == one[0].accept_lengths


class EvenIds:
    """A grammar of even token ids."""

    def __init__(self, vocab: int):
        self._width = -(-vocab // 32)

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        return np.full((len(drafts) + 1, self._width), 0x55555555, np.uint32)

    def advance(self, tokens: Sequence[int]) -> None:
        pass


def test_steps_leave_the_state_where_it_was_and_are_compiled_once(engines: tuple[str, Engine, Engine]):
    _, split, one = engines
    before = jax.tree.map(lambda x: x.sharding, split.runner.state)
    run(split, ([1, 2, 3], SamplingParams(max_new_tokens=30, ignore_eos=True)))
    assert jax.tree.map(lambda x: x.sharding, split.runner.state) == before
    steps = split.runner.steps
    for name in ("decode_round", "prefill", "admit", "extend"):
        assert getattr(steps, name).cache_size() == steps.traces[name]
    halves, whole = split.memory, one.memory
    assert (2 * halves.target_kv, 2 * halves.draft_state) == (whole.target_kv, whole.draft_state)
    assert halves.target < 0.6 * whole.target and halves.draft < 0.6 * whole.draft
    assert {x.sharding for x in split.runner._slot_arrays.values()} == {split.runner.state.page_table.sharding}


@pytest.mark.slow
def test_rounds_in_place(engines: tuple[str, Engine, Engine], monkeypatch: pytest.MonkeyPatch):
    """As on GPUs."""
    monkeypatch.setattr("dflash_jax.engine.build.rounds_in_place", lambda loaded: True)
    name, _, one = engines
    asked = [5, 6, 7], SamplingParams(max_new_tokens=30, ignore_eos=True)
    split = engine_of(name, 2)
    [mine], [theirs] = run(split, asked), run(one, asked)
    assert mine.output_ids == theirs.output_ids and mine.accept_lengths == theirs.accept_lengths
    assert split.runner.steps.decode_round.cache_size() == split.runner.steps.traces["decode_round"] == 1


def test_pages_fill_what_each_device_has():
    """kv_cache_bytes are those of a device: two hold twice the pages."""
    settings = {"kv_cache_bytes": 100_000, "max_running_requests": 64, "max_model_len": 16}
    split, one = (engine_of("qwen3-v2", devices, **settings).runner.sizes for devices in (2, 1))
    assert abs(split.num_pages - 2 * one.num_pages) <= 1


def test_prompt_look_up_on_two_devices():
    target = str(PAIRS / "qwen3-v2" / "target")
    found = [
        run(Engine(EngineSettings(target, "ngram", tensor_parallel_size=devices, **SIZES)),
            ([5, 6, 7, 5, 6, 7, 5], SamplingParams(max_new_tokens=40, ignore_eos=True)))[0]
        for devices in (2, 1)
    ]  # fmt: skip
    assert found[0].output_ids == found[1].output_ids and found[0].accept_lengths == found[1].accept_lengths


@pytest.mark.parametrize(
    ("devices", "message"),
    [(99, r"tensor_parallel_size 99 needs 99 devices, and there are 2 \("), (0, "tensor_parallel_size must be an"),
     (True, "tensor_parallel_size must be an integer of at least 1, not True")],
)  # fmt: skip
def test_devices_that_are_not_there(devices: int, message: str):
    with pytest.raises(UserError, match=message):
        engine_of("qwen3-v2", devices)
