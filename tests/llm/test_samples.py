"""n > 1: every sample is what a request of its own with its seed gives, and all share the prompt's pages."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dflash_jax import LLM, RequestOutput, SamplingParams, UserError
from dflash_jax.llm import GenerationError, Job, sample_params

from .pairs import generate_one, open_llm
from .test_streaming import POISONED, assert_idle, poisoned_llm  # noqa: F401  (a fixture)
from .text_target import PAIR, known_prompt

HOT = SamplingParams(max_new_tokens=40, temperature=0.7, seed=5, n=4)


def essence(out: RequestOutput) -> tuple[Any, ...]:
    return out.token_ids, out.text, out.finish_reason, out.accept_lengths, out.seed


def alone(llm: LLM, prompt: Any, params: SamplingParams, index: int) -> RequestOutput:
    return llm.generate([prompt], dataclasses.replace(params, n=1, seed=(params.seed or 0) + index))[0]


@pytest.mark.slow
def test_every_sample_is_that_of_a_request_of_its_own(two_slots: LLM) -> None:
    """More samples than slots, two prompts, one of them greedy; acceptance too."""
    long = [4, *known_prompt(33)]
    first, greedy, second = two_slots.generate(
        [long, known_prompt(), [5, 6]], [HOT, SamplingParams(max_new_tokens=12), dataclasses.replace(HOT, n=3, seed=70)]
    )
    assert [out.index for out in first.outputs] == [0, 1, 2, 3]
    assert [out.seed for out in first.outputs] == [5, 6, 7, 8]
    assert [out.seed for out in second.outputs] == [70, 71, 72]
    assert (greedy.outputs, greedy.index, greedy.seed) == ([greedy], 0, None)
    for i, out in enumerate(first.outputs):
        assert essence(out) == essence(alone(two_slots, long, HOT, i))
    for i, out in enumerate(second.outputs):
        assert essence(out) == essence(alone(two_slots, [5, 6], dataclasses.replace(HOT, seed=70), i))
    assert len({tuple(out.token_ids) for out in first.outputs}) == 4
    assert max(length for out in first.outputs for length in out.accept_lengths) > 4, "drafts are of use"
    assert_idle(two_slots)


@pytest.mark.slow
def test_samples_do_not_depend_on_the_draft(two_slots: LLM, plain_llm: LLM) -> None:
    drafted, plain = (llm.generate([known_prompt(12)], HOT)[0] for llm in (two_slots, plain_llm))
    assert [out.token_ids for out in drafted.outputs] == [out.token_ids for out in plain.outputs]
    assert all(set(out.accept_lengths) == {1} for out in plain.outputs)
    assert any(max(out.accept_lengths) > 1 for out in drafted.outputs)


def test_the_others_find_the_prefix_pages_of_the_first(two_slots: LLM) -> None:
    """Even where the prompt was never seen before; pages of 16 tokens, of which the last token's is computed anew."""
    prompt = [9, 9, 8, *known_prompt(34)]
    [out] = two_slots.generate([prompt], HOT)
    assert len(prompt) == 39
    assert [one.cached_tokens for one in out.outputs] == [0, 32, 32, 32]
    metrics = two_slots.engine.metrics()
    assert metrics.num_pages_free + metrics.num_pages_cached == metrics.num_pages
    assert_idle(two_slots)


def test_a_first_sample_that_ends_at_once_is_followed_too(two_slots: LLM) -> None:
    [out] = two_slots.generate([known_prompt()], dataclasses.replace(HOT, max_new_tokens=1))
    assert [len(one.token_ids) for one in out.outputs] == [1] * 4
    assert_idle(two_slots)


def test_seeds_wrap_around_and_unset_ones_are_reported(two_slots: LLM) -> None:
    assert [one.seed for one in sample_params(dataclasses.replace(HOT, seed=2**64 - 2))] == [2**64 - 2, 2**64 - 1, 0, 1]
    [first], [second] = (two_slots.generate([[5]], dataclasses.replace(HOT, seed=None, n=2)) for _ in range(2))
    assert first.seed is not None and first.seed != second.seed
    assert first.others[0].seed == first.seed + 1
    again = generate_one(two_slots, [5], max_new_tokens=40, temperature=0.7, seed=first.seed + 1)
    assert again.token_ids == first.others[0].token_ids


def test_outputs_can_be_compared_shown_and_turned_into_objects(two_slots: LLM) -> None:
    [out] = two_slots.generate([[5]], dataclasses.replace(HOT, n=2))
    assert out == out and out != out.others[0]
    assert dataclasses.asdict(out)["others"][0]["index"] == 1
    assert repr(out).count("RequestOutput(") == 2


# -- an end for all ----------------------------------------------------------------------------------------------------


def reasons(jobs: list[Job]) -> list[str | None]:
    assert all(job.finished for job in jobs)
    return [job.output().finish_reason for job in jobs]


def test_leaving_early_ends_all_samples(two_slots: LLM) -> None:
    """The first is running, one beside it, and the others wait."""
    endless = dataclasses.replace(HOT, max_new_tokens=200, ignore_eos=True)
    jobs = two_slots.make_jobs([known_prompt()], endless)
    serving = two_slots.serve(jobs)
    while jobs[1].request is None or not jobs[1].request.output_ids:
        next(serving)
    serving.close()
    assert reasons(jobs) == ["abort"] * 4
    assert_idle(two_slots)


def test_leaving_before_the_others_are_submitted(two_slots: LLM) -> None:
    jobs = two_slots.make_jobs([known_prompt(), [5]], dataclasses.replace(HOT, max_new_tokens=200, ignore_eos=True))
    serving = two_slots.serve(jobs)
    next(serving)
    serving.close()
    assert reasons(jobs) == ["abort"] * 8
    assert_idle(two_slots)


def test_an_abort_of_one_sample_ends_all_of_its_prompt(two_slots: LLM) -> None:
    endless = dataclasses.replace(HOT, max_new_tokens=200, ignore_eos=True)
    jobs = two_slots.make_jobs([known_prompt(), [5]], [endless, dataclasses.replace(HOT, n=2)])
    for job in two_slots.serve(jobs):
        if job is jobs[1]:
            job.abort()
    assert reasons(jobs) == ["abort"] * 4 + [job.output().finish_reason for job in jobs[4:]]
    assert "abort" not in reasons(jobs[4:])
    assert_idle(two_slots)


def test_an_abort_before_the_first_token(two_slots: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    add, abort = two_slots.engine.add_request, two_slots.engine.abort

    def add_and_abort(*args: Any, **options: Any) -> Any:
        request = add(*args, **options)
        abort(request.request_id)
        return request

    monkeypatch.setattr(two_slots.engine, "add_request", add_and_abort)
    jobs = two_slots.make_jobs([known_prompt()], HOT)
    assert set(two_slots.serve(jobs)) == set(jobs)
    assert reasons(jobs) == ["abort"] * 4
    assert [job.output().seed for job in jobs] == [5, 6, 7, 8]
    assert_idle(two_slots)


def test_a_model_that_fails_names_the_sample(poisoned_llm: LLM) -> None:  # noqa: F811
    with pytest.raises(GenerationError) as caught:
        poisoned_llm.generate([[5, 6], [POISONED]], dataclasses.replace(HOT, n=2, max_new_tokens=2))
    assert str(caught.value).startswith("prompt 2, sample 0 had to be given up at its first token: ")
    assert "; prompt 2, sample 1 had to be given up at its first token: " in str(caught.value)
    assert [[one.error is None for one in out.outputs] for out in caught.value.outputs] == [[True] * 2, [False] * 2]
    assert_idle(poisoned_llm)


def test_a_stream_is_of_one_sample(two_slots: LLM) -> None:
    with pytest.raises(UserError, match="a stream is the text of one sample, and n is 4"):
        two_slots.stream([5], HOT)


@pytest.mark.slow
def test_without_prefix_caching_samples_are_the_same(text_target: Path, two_slots: LLM) -> None:
    uncached = open_llm(text_target, PAIR / "draft", max_running_requests=2, chunked_prefill_size=16,
                        enable_prefix_caching=False)  # fmt: skip
    params = dataclasses.replace(HOT, n=2)
    [shared], [apart] = (llm.generate([[7, *known_prompt(33)]], params) for llm in (two_slots, uncached))
    assert [one.cached_tokens for one in (*shared.outputs, *apart.outputs)] == [0, 32, 0, 0]
    assert [essence(one) for one in shared.outputs] == [essence(one) for one in apart.outputs]
