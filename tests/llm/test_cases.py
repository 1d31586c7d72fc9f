"""Faults that users of other engines met (CASES 8, 14, 17), where no other file has them: sampled, and end to end."""

from __future__ import annotations

import pytest

from dflash_jax import LLM, RequestOutput, SamplingParams

from .oracle import Oracle
from .pairs import FOLDER, open_llm, read_cases
from .text_target import known_prompt

SMALL = {"max_running_requests": 4, "chunked_prefill_size": 32, "max_model_len": 64}
PROMPTS = [[seed, 5, 9, 3, 17, seed + 1, 40, 2] for seed in range(3, 19)]


def acceptance(outputs: list[RequestOutput]) -> float:
    rounds = [length for out in outputs for length in out.accept_lengths]
    return sum(rounds) / len(rounds)


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "least"), [pytest.param("qwen3-v1", 1.15, marks=pytest.mark.soak), ("qwen3-v2", 2.2)])
def test_8_drafts_at_temperature_1_are_accepted_either_way(pair: str, least: float) -> None:
    """Drawn with the target's noise they are accepted about as often as the likeliest tokens, not half as often.

    The texts are equal.
    """
    found, texts = {}, {}
    params = [SamplingParams(max_new_tokens=40, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(16)]
    for how in ("coupled", "argmax"):
        llm = open_llm(FOLDER / pair / "target", FOLDER / pair / "draft", draft_sampling=how, **SMALL)
        outputs = llm.generate(PROMPTS, params)
        found[how], texts[how] = acceptance(outputs), [out.token_ids for out in outputs]
    assert texts["coupled"] == texts["argmax"]
    assert min(found.values()) > least and abs(found["coupled"] / found["argmax"] - 1) < 0.05, found


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["Nh你", "xay", "😀b你x", "b"])
def test_14_a_stop_text_in_a_sampled_text(stop: str, text_llm: LLM, plain_llm: LLM) -> None:
    """Inside a block or over two rounds: the text ends before it, with a row of log-probabilities a token."""
    asked = SamplingParams(max_new_tokens=60, temperature=0.25, seed=4, logprobs=1, ignore_eos=True)
    whole = plain_llm.generate([known_prompt(20)], asked)[0]
    assert whole.text is not None and stop in whole.text
    for llm in (text_llm, plain_llm):
        [out] = llm.generate([known_prompt(20)], SamplingParams(**{**vars(asked), "stop": stop}))
        assert (out.text, out.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
        assert out.token_ids == whole.token_ids[: len(out.token_ids)]
        assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids)
        assert sum(out.accept_lengths) == len(out.token_ids) - 1
        assert all(token in row for token, row in zip(out.token_ids, out.logprobs, strict=True))


@pytest.mark.slow
def test_17_a_target_whose_head_is_its_embedding() -> None:
    """Sampled and penalised requests, drafted; log-probabilities of prompt and output, too."""
    pair = FOLDER / "llama-v1-tied"
    llm = open_llm(pair / "target", pair / "draft", **SMALL)
    oracle = Oracle(llm)
    params = [
        SamplingParams(max_new_tokens=24, temperature=0.8, seed=1, frequency_penalty=0.2, logprobs=2, top_k=40,
                       prompt_logprobs=0, ignore_eos=True),
        SamplingParams(max_new_tokens=24, ignore_eos=True),
    ]  # fmt: skip
    prompts = [list(case.prompt_ids) for case in read_cases(pair.name)[:2]]
    assert max(map(len, prompts)) <= 40
    outputs = llm.generate(prompts, params)
    for prompt, out, one in zip(prompts, outputs, params, strict=True):
        assert out.token_ids == oracle.answer(prompt, one).token_ids
    assert acceptance(outputs) > 1.05
    assert outputs[0].prompt_logprobs is not None and len(outputs[0].prompt_logprobs) == len(prompts[0])
