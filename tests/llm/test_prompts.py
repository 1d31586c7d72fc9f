"""Prompts of every kind, their order, and what comes back with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams, UserError

from .pairs import generate_one
from .text_target import TEMPLATE, known_case, known_prompt

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "why is the sky blue?"}]
RENDERED = (
    "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nwhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
)


def test_text_messages_and_ids_are_the_same_prompt(text_llm: LLM) -> None:
    assert text_llm.tokenizer
    ids = text_llm.tokenizer.encode(RENDERED)
    outs = [generate_one(text_llm, prompt, max_new_tokens=24) for prompt in (RENDERED, MESSAGES, ids)]
    assert [out.prompt_token_ids for out in outs] == [ids] * 3
    assert len({(out.text, *out.token_ids) for out in outs}) == 1
    assert len({tuple(out.accept_lengths) for out in outs}) == 1
    assert [out.prompt for out in outs] == [RENDERED, MESSAGES, ids]


def test_one_prompt_of_each_kind_counts_as_a_list_of_one(text_llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=1)
    prompts: list[Any] = ["hi", [1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), MESSAGES]
    for prompt in prompts:
        assert len(text_llm.generate(prompt, params)) == 1


def test_results_keep_the_order_of_the_prompts(two_slots: LLM) -> None:
    """They end in another one, and more prompts wait than there are slots."""
    prompts: list[Any] = ["why", known_prompt(), MESSAGES, [5], known_prompt(3), "hi", [6, 7], known_prompt(6), [8]]
    lengths = [30, 1, 12, 24, 2, 40, 7, 3, 18]
    assert len(prompts) > two_slots.engine.settings.max_running_requests
    alone = [generate_one(two_slots, p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    outs = two_slots.generate(prompts, [SamplingParams(max_new_tokens=n) for n in lengths])
    assert [out.prompt for out in outs] == prompts
    assert [out.token_ids for out in outs] == [out.token_ids for out in alone]
    assert [out.accept_lengths for out in outs] == [out.accept_lengths for out in alone]
    assert [out.text for out in outs] == [out.text for out in alone]


def test_prompts_may_come_from_a_generator_and_may_be_none_at_all(two_slots: LLM) -> None:
    prompts: Iterator[list[int]] = ([token] for token in (5, 6))
    outs = two_slots.generate(prompts, SamplingParams(max_new_tokens=2))  # pyright: ignore[reportArgumentType]
    assert [out.prompt for out in outs] == [[5], [6]]
    assert two_slots.generate([]) == []


def test_a_prompt_seen_before_hits_the_cache_and_is_accepted_as_well(two_slots: LLM) -> None:
    """The cached pages hold the draft's keys too: without them acceptance would fall."""
    prompt = [3, *known_prompt(33)]
    first, second = (generate_one(two_slots, prompt, max_new_tokens=40) for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, len(prompt) // 16 * 16)
    assert first.token_ids == second.token_ids
    assert first.accept_lengths == second.accept_lengths
    assert max(first.accept_lengths) == 12
    both = two_slots.generate([prompt, prompt], SamplingParams(max_new_tokens=40))
    assert [out.accept_lengths for out in both] == [first.accept_lengths] * 2
    assert [out.cached_tokens for out in both] == [second.cached_tokens] * 2


def test_one_token_prompts(text_llm: LLM, plain_llm: LLM) -> None:
    for token in (0, 1, 2, 70):
        out = generate_one(text_llm, [token], max_new_tokens=24, ignore_eos=True)
        assert out.token_ids == generate_one(plain_llm, [token], max_new_tokens=24, ignore_eos=True).token_ids


def test_times_and_speed(text_llm: LLM) -> None:
    out = generate_one(text_llm, known_prompt(), max_new_tokens=40)
    assert out.time_to_first_token_s and out.decode_s and out.tokens_per_s
    assert out.tokens_per_s == pytest.approx(39 / out.decode_s)
    assert out.mean_accept_length == 39 / out.rounds
    single = generate_one(text_llm, known_prompt(), max_new_tokens=1)
    assert (single.rounds, single.mean_accept_length, single.tokens_per_s) == (0, None, None)


def test_compiling_is_no_part_of_decoding(text_target: Any) -> None:
    """Without overlap the first round is compiled after the first token came."""
    llm = LLM(str(text_target), "none", overlap=False, max_running_requests=1)
    [job] = llm.make_jobs([5], SamplingParams(max_new_tokens=3))
    serving = llm.serve([job])
    next(serving)
    before_s = llm.engine.compile_s
    assert [job.finished for job in serving] == [False, True]
    decode_s = job.output().decode_s
    assert decode_s is not None and 0 < decode_s < llm.engine.compile_s - before_s


def test_several_parameters(text_llm: LLM) -> None:
    with pytest.raises(UserError, match="2 sampling parameters for 3 prompts"):
        text_llm.generate([[1], [2], [3]], [SamplingParams(), SamplingParams()])


def test_the_template_is_the_one_rendered_above() -> None:
    assert "im_start" in TEMPLATE and known_case().block_size == 12
