"""What one request asks for and what it does to others: texts that can be worked out by hand, over one small engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from llm.told import UNKNOWN, Told

from dflash_jax import Engine, SamplingParams, UserError
from dflash_jax.drafters import NgramDrafter
from dflash_jax.engine.request import Request

from .bigram import bigram_logits, changed_logits, make_engine

VOCAB, BLOCK = 16, 5
PLAIN = SamplingParams(max_new_tokens=20)
PROMPTS = [[0, 1, 2, 1], [3, 4], [9], [5, 6, 7, 5, 6, 7, 8]]
EVERYTHING = SamplingParams(
    max_new_tokens=30, temperature=0.9, seed=3, top_k=9, top_p=0.95, min_p=0.01, repetition_penalty=1.2,
    presence_penalty=0.2, frequency_penalty=0.3, logit_bias={4: 1.5}, bad_token_ids=[7], stop_token_ids=[3],
    min_tokens=30, logprobs=5, prompt_logprobs=1,
)  # fmt: skip
ODD = [
    EVERYTHING,
    SamplingParams(max_new_tokens=30, temperature=1.0, seed=1),
    SamplingParams(max_new_tokens=30, temperature=1.0, seed=2, top_p=0.5),
    SamplingParams(max_new_tokens=30, frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=0.8),
    SamplingParams(max_new_tokens=30, logit_bias={0: 9.0, 5: 9.0}),
    SamplingParams(max_new_tokens=30, allowed_token_ids=[11, 12], logprobs=0),
    SamplingParams(max_new_tokens=30, bad_token_ids=range(9), prompt_logprobs=0),
    SamplingParams(max_new_tokens=30, stop_token_ids=range(8), min_tokens=29),
]  # fmt: skip


def sticky_logits() -> np.ndarray:
    """Most tokens are followed by themselves, as long as nothing is said against it."""
    return bigram_logits(VOCAB) + 2 * np.eye(VOCAB, dtype=np.float32)


def by_hand(prompt: Sequence[int], params: SamplingParams, logits: np.ndarray) -> list[int]:
    """The greedy text, by the definition."""
    text: list[int] = []
    while len(text) < params.max_new_tokens:
        raw = logits[[*prompt, *text][-1]].astype(np.float64)
        text.append(int(changed_logits(raw, params, prompt, text).argmax()))
        if text[-1] in params.stop_token_ids:
            break
    return text


def serve(engine: Engine, asked: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Request]:
    requests = [engine.add_request(list(prompt), params) for prompt, params in asked]
    while engine.has_work:
        engine.step()
    return requests


def told_engine(texts: Sequence[Sequence[int]], off: int = 0, **settings: Any) -> Engine:
    """Sticky target; a draft that knows these texts, prompts included, and says each token plus `off`."""
    table = np.full((len(texts), 64), UNKNOWN, np.int32)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = text
    drafter = Told(BLOCK, off=off, vocab=VOCAB)
    return make_engine(drafter, jnp.asarray(table), VOCAB, sticky_logits(), **settings)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(NgramDrafter(4))


# -- greedy requests beside others -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_10_a_greedy_request_beside_any_other_is_as_alone(engine: Engine) -> None:
    """Its tokens and how they were accepted."""
    for prompt in PROMPTS:
        [alone] = serve(engine, [(prompt, PLAIN)])
        assert alone.output_ids == by_hand(prompt, PLAIN, bigram_logits(VOCAB))
        for one, other in zip(ODD[::2], ODD[1::2], strict=True):
            requests = serve(engine, [(PROMPTS[0], one), (prompt, PLAIN), (PROMPTS[1], other)])
            assert requests[1].output_ids == alone.output_ids, (one, other)
            assert requests[1].accept_lengths == alone.accept_lengths, (one, other)
    assert max(alone.accept_lengths) > 1


@pytest.mark.slow
def test_odd_requests_beside_each_other_are_as_alone(engine: Engine) -> None:
    alone = [serve(engine, [(PROMPTS[3], odd)])[0] for odd in ODD]
    together = serve(engine, [(PROMPTS[3], odd) for odd in ODD])
    for one, other, odd in zip(alone, together, ODD, strict=True):
        assert (one.output_ids, one.accept_lengths) == (other.output_ids, other.accept_lengths), odd
        if odd.greedy:
            assert one.output_ids == by_hand(PROMPTS[3], odd, bigram_logits(VOCAB))


# -- slots -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slot_forgets_what_its_last_request_asked_for(engine: Engine) -> None:
    """Nothing of it acts on the next one, also while another request of the round has something to change."""
    for odd in ODD:
        serve(engine, [(PROMPTS[0], odd)] * 4)  # all slots have it
        for beside in ([], [(PROMPTS[1], ODD[4])]):
            request, *_ = serve(engine, [(PROMPTS[2], PLAIN), *beside])
            assert request.output_ids == by_hand(PROMPTS[2], PLAIN, bigram_logits(VOCAB)), (odd, beside)


@pytest.mark.slow
def test_a_request_inherits_no_counts_from_its_slot(engine: Engine) -> None:
    """Neither from one with penalties before it, nor from one without that ran beside one with penalties."""
    params = SamplingParams(max_new_tokens=20, frequency_penalty=0.6, repetition_penalty=1.3)
    want = by_hand(PROMPTS[1], params, bigram_logits(VOCAB))
    for before in (params, PLAIN):
        serve(engine, [(PROMPTS[0], before)] * 3 + [(PROMPTS[0], params)])
        for request in serve(engine, [(PROMPTS[1], params)] * 4):
            assert request.output_ids == want


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_counts_survive_preemption(overlap: bool) -> None:
    """Pages for a little more than the longest of four; prompt and output count as they did."""
    params = [dataclasses.replace(one, max_new_tokens=40, stop_token_ids=[], min_tokens=0) for one in ODD[:4]]
    asked = list(zip(PROMPTS, params, strict=True))
    roomy, short = (make_engine(NgramDrafter(4), overlap=overlap, kv_cache_bytes=size) for size in (None, 27 * 144))
    want, got = serve(roomy, asked), serve(short, asked)
    assert sum(request.preemptions for request in got) > 1 and not any(request.preemptions for request in want)
    for one, other in zip(want, got, strict=True):
        assert one.output_ids == other.output_ids
        assert [row.logprob for row in one.logprobs] == pytest.approx([row.logprob for row in other.logprobs], abs=1e-5)
    assert want[3].output_ids == by_hand(PROMPTS[3], params[3], bigram_logits(VOCAB))


# -- drafts that repeat or stop ----------------------------------------------------------------------------------------

REPEATING = [
    SamplingParams(max_new_tokens=31),
    SamplingParams(max_new_tokens=31, frequency_penalty=0.4),
    SamplingParams(max_new_tokens=31, presence_penalty=1.9, frequency_penalty=0.3),
    SamplingParams(max_new_tokens=31, frequency_penalty=0.7, repetition_penalty=1.4, logit_bias={3: 1.0}),
]


@pytest.mark.slow
@pytest.mark.parametrize("off", [0, 1])
def test_penalties_count_the_same_token_again_and_again_within_a_block(off: int) -> None:
    """Drafts that are right are accepted to the last, and wrong ones never, though each counts for the rows after."""
    asked = list(zip(PROMPTS, REPEATING, strict=True))
    texts = [by_hand(prompt, params, sticky_logits()) for prompt, params in asked]
    engine = told_engine([[*prompt, *text] for (prompt, _), text in zip(asked, texts, strict=True)], off)
    requests = serve(engine, asked)
    assert len(set(texts[0])) == 1 and all(len(set(text)) > 3 for text in texts[1:])
    assert any(a == b == c for text in texts[1:] for a, b, c in zip(text, text[1:], text[2:], strict=False))
    for request, text in zip(requests, texts, strict=True):
        assert request.output_ids == text
        assert request.accept_lengths == ([1] * 30 if off else [BLOCK] * 6)


@pytest.mark.parametrize("least", range(1, 9))
def test_a_stop_token_that_is_drafted_too_early(least: int) -> None:
    """The draft says 9 for ever, and so does the target, were 9 not a stop token that may come from `least` on only."""
    params = SamplingParams(max_new_tokens=20, stop_token_ids=[9], min_tokens=least)
    text = by_hand([9], params, sticky_logits())
    engine = told_engine([[9] * 22])
    [request] = serve(engine, [([9], params)])
    assert request.output_ids == text and 9 not in text[:least]
    [right] = serve(told_engine([[9, *text]]), [([9], params)])
    assert right.output_ids == text and right.finish_reason == request.finish_reason
    assert set(right.accept_lengths[:-1]) <= {BLOCK}
    if text[-1] == 9:
        assert request.finish_reason == "stop"


# -- what is refused ---------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"bad_token_ids": [3, VOCAB]}, "bad_token_ids holds 16, which is not a token id from 0 to 15"),
    ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids holds 16, which is not a token id from 0 to 15"),
    ({"logit_bias": {99: 1.0}}, "logit_bias holds 99, which is not a token id from 0 to 15"),
    ({"stop_token_ids": [16]}, "stop_token_ids holds 16, which is not a token id from 0 to 15"),
    ({"bad_token_ids": range(VOCAB)}, "bad_token_ids forbid every token of the vocabulary"),
    ({"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1},
     "min_tokens 1 forbids stop tokens, but no others are allowed"),
    ({"temperature": 1.0, "n": 2}, "a request of the engine is one sample, and n is 2: add a request for each"),
]  # fmt: skip


def test_28_a_bad_request_is_refused_and_harms_nobody(engine: Engine) -> None:
    good = engine.add_request(PROMPTS[0], PLAIN)
    for options, message in BAD:
        engine.step()
        with pytest.raises(UserError) as caught:
            engine.add_request([1], SamplingParams(max_new_tokens=20, **options))
        assert str(caught.value) == message
    while engine.has_work:
        engine.step()
    [alone] = serve(engine, [(PROMPTS[0], PLAIN)])
    assert (good.output_ids, good.accept_lengths) == (alone.output_ids, alone.accept_lengths)
    assert good.output_ids == by_hand(PROMPTS[0], PLAIN, bigram_logits(VOCAB))


def test_stop_tokens_that_are_the_whole_vocabulary() -> None:
    small = make_engine(NgramDrafter(4), vocab=8)
    with pytest.raises(UserError, match="min_tokens 1 forbids stop tokens, but no others are allowed"):
        small.add_request([1], SamplingParams(stop_token_ids=range(8), min_tokens=1))
    [request] = serve(small, [([1], SamplingParams(stop_token_ids=range(8)))])
    assert len(request.output_ids) == 1 and request.finish_reason == "stop"


def test_an_engine_without_room_for_changes_refuses_them_and_serves_on() -> None:
    engine = make_engine(NgramDrafter(4))
    engine.runner.state = dataclasses.replace(engine.runner.state, edits=None)
    with pytest.raises(UserError, match="made without room for penalties, biases and token lists"):
        engine.add_request([1], ODD[4])
    [request] = serve(engine, [(PROMPTS[2], PLAIN)])
    assert request.output_ids == by_hand(PROMPTS[2], PLAIN, bigram_logits(VOCAB))
