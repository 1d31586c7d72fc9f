"""Every recorded case of every pair through `LLM`: tokens and acceptance, whatever else is going on."""

from __future__ import annotations

import pytest

from .pairs import FOLDER, NAMES, block_sizes, cases_of, open_llm, open_pair, read_cases

CHUNK = 16  # prompts of 17 and 40 tokens end with chunks of 1 and 8
BATCHED = ["llama-v1-tied", "qwen3-v1-window", "x-v2-scaled"]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_case(name: str, overlap: bool) -> None:
    block_size, *smaller = block_sizes(name)
    llm = open_pair(name, overlap=overlap, chunked_prefill_size=CHUNK)
    for case in cases_of(name, block_size):
        [out] = llm.generate([case.prompt_ids], case.params)
        case.check(out.token_ids, out.accept_lengths)
        assert (out.finish_reason, out.text) == ("length", None)
    assert len(smaller) == 2, "each pair has cases of three block sizes; the other two are below"


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_smaller_blocks(name: str, overlap: bool) -> None:
    """One of the two smaller block sizes with overlap, the other without."""
    block_size = block_sizes(name)[1 if overlap else 2]
    llm = open_pair(name, block_size=block_size, overlap=overlap, chunked_prefill_size=CHUNK)
    [case] = cases_of(name, block_size)
    [out] = llm.generate([case.prompt_ids], case.params)
    case.check(out.token_ids, out.accept_lengths)


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_gives_what_each_prompt_gives_alone(name: str) -> None:
    llm = open_pair(name, overlap=True, chunked_prefill_size=CHUNK)
    cases = cases_of(name, block_sizes(name)[0])
    outs = llm.generate([case.prompt_ids for case in cases], [case.params for case in cases])
    for case, out in zip(cases, outs, strict=True):
        assert out.prompt_token_ids == case.prompt_ids
        case.check(out.token_ids, out.accept_lengths)


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHED[:2])
def test_without_a_draft_the_tokens_are_the_same(name: str) -> None:
    llm = open_llm(FOLDER / name / "target", "none", chunked_prefill_size=CHUNK)
    for case in read_cases(name)[:3]:
        [out] = llm.generate([case.prompt_ids], case.params)
        assert out.token_ids == case.greedy_token_ids
        assert out.accept_lengths == [1] * (case.max_new_tokens - 1)


def test_the_mask_id_is_a_token_like_any_other() -> None:
    """qwen3-v1's target emits 96, the id that fills its draft's blocks."""
    case = read_cases("qwen3-v1")[0]
    [out] = open_pair("qwen3-v1", overlap=True, chunked_prefill_size=CHUNK).generate([case.prompt_ids], case.params)
    assert out.token_ids.count(96) == case.greedy_token_ids.count(96) > 0
