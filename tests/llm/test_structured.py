"""Structured output: the text has its shape, is what plain decoding under the same masks gives, and is drafted."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams, StructuredOutputs, UserError
from dflash_jax.cache import page_bytes
from dflash_jax.errors import GrammarError
from dflash_jax.llm import GenerationError

from .oracle import Answer, Oracle
from .pairs import open_llm
from .text_target import PAIR
from .told import register_told

SHAPES = [
    StructuredOutputs(regex="(xay|b|h|i)+!"),
    StructuredOutputs(regex="[a-z ]{3,9}"),
    StructuredOutputs(choice=["hi", "hi there", "xay b", "bib"]),
    StructuredOutputs(regex="(你|😀|b){2,5}"),
    StructuredOutputs(grammar='start: item ("," item){0,4} "."\nitem: /[0-9]{1,2}/'),
    None,
]
NEW_TOKENS = 30


def matches(text: str, shape: StructuredOutputs) -> bool:
    if shape.choice:
        return text in shape.choice
    return re.fullmatch(shape.regex or r"[0-9]{1,2}(,[0-9]{1,2}){0,4}\.", text) is not None


class Exam:
    """Requests of every shape, greedy and sampled, and the answers of a slow reader."""

    def __init__(self, target: Path):
        self.target = target
        plain = open_llm(target, "none", max_running_requests=2, chunked_prefill_size=16)
        oracle, rng = Oracle(plain), random.Random(4)
        self.config = oracle.config
        self.prompts = [[rng.randrange(3, 71) for _ in range(rng.choice([1, 5, 19]))] for _ in range(18)]
        self.params = [
            SamplingParams(NEW_TOKENS, temperature=rng.choice([0.0, 1.0]), seed=i, logprobs=rng.choice([None, 1]),
                           presence_penalty=rng.choice([0.0, 1.0]), structured_outputs=SHAPES[i % len(SHAPES)])
            for i in range(len(self.prompts))
        ]  # fmt: skip
        grammars = [plain.grammar(params.structured_outputs) for params in self.params]
        self.answers = [oracle.answer(*one) for one in zip(self.prompts, self.params, grammars, strict=True)]
        texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(self.prompts, self.answers, strict=True)]
        register_told("right-shape", texts, off=0)
        register_told("wrong-shape", texts, off=1)


@pytest.fixture(scope="module")
def exam(text_target: Path) -> Exam:
    return Exam(text_target)


def test_the_slow_reader_s_answers_have_their_shapes(exam: Exam, text_llm: LLM) -> None:
    assert text_llm.tokenizer is not None
    ended = 0
    for answer, params in zip(exam.answers, exam.params, strict=True):
        if params.structured_outputs and answer.finish_reason == "stop":
            ended += 1
            text = text_llm.tokenizer.decode(answer.token_ids[:-1])
            assert matches(text, params.structured_outputs), (text, params.structured_outputs)
    assert ended >= 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "batch", "overlap", "pages"),
    [("dflash", 4, True, None), ("right-shape", 4, True, 9),
     pytest.param("none", 3, True, None, marks=pytest.mark.soak),
     pytest.param("wrong-shape", 2, False, None, marks=pytest.mark.soak),
     pytest.param("right-shape", 3, False, None, marks=pytest.mark.soak)],
)  # fmt: skip
def test_structured_output_is_plain_decoding_under_masks(
    exam: Exam, draft: str, batch: int, overlap: bool, pages: int | None
) -> None:
    name = str(PAIR / "draft") if draft == "dflash" else draft
    options: dict[str, Any] = {} if draft == "none" else {"block_size": 6}
    if pages:  # of 8 tokens, with a word for each token that the drafter keeps
        options["kv_cache_bytes"] = pages * (page_bytes(exam.config, 8, jnp.float32) + 8 * 4)
    llm = open_llm(exam.target, name, max_running_requests=batch, overlap=overlap, chunked_prefill_size=16,
                   max_model_len=64, page_size=8, **options)  # fmt: skip
    outputs = llm.generate(exam.prompts, exam.params)
    assert (llm.engine.metrics().num_preemptions > 0) == bool(pages), "the few pages shall force some"
    for out, answer, params in zip(outputs, exam.answers, exam.params, strict=True):
        assert (out.token_ids, out.finish_reason) == (answer.token_ids, answer.finish_reason), params
        resumed = len(out.token_ids) - 1 - sum(out.accept_lengths)  # its first token is in no round, either
        assert resumed == 0 or (pages and resumed > 0)
        check_logprobs(out.logprobs, answer, params)
    lengths = [out.accept_lengths for out in outputs]
    if draft == "right-shape" and pages:
        assert max(length for each in lengths for length in each) == 6
    elif draft == "right-shape":
        assert all(length == 6 for each in lengths for length in each[:-1])
    elif draft == "dflash":
        assert max(length for each in lengths for length in each) > 1
    else:
        assert {length for each in lengths for length in each} == {1}


def check_logprobs(found: object, answer: Answer, params: SamplingParams) -> None:
    if params.logprobs is None:
        assert found is None
        return
    assert isinstance(found, list)
    for token, one, (own, rank, _) in zip(answer.token_ids, found, answer.logprobs, strict=True):
        assert abs(one[token].logprob - own) < 1e-4 and one[token].rank == rank


def test_what_cannot_be_combined_is_refused() -> None:
    shape = StructuredOutputs(choice=["a", "b"])
    for name, value in {"ignore_eos": True, "min_tokens": 2, "allowed_token_ids": [1], "bad_token_ids": [2]}.items():
        with pytest.raises(UserError, match=f"structured_outputs cannot be combined with {name}"):
            SamplingParams(structured_outputs=shape, **{name: value})
    with pytest.raises(UserError, match="structured_outputs must be StructuredOutputs"):
        SamplingParams(structured_outputs={"choice": ["a"]})  # type: ignore[arg-type]


def test_a_bad_shape_is_refused_before_anything_runs(text_llm: LLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputs(regex="(a"))
    before = text_llm.engine.metrics()
    with pytest.raises(UserError, match="structured output: regex"):
        text_llm.generate(["hi", "b"], [SamplingParams(max_new_tokens=2), bad])
    assert not text_llm.engine.has_work and text_llm.engine.metrics() == before


def test_an_engine_alone_has_no_tokenizer_for_it(text_llm: LLM) -> None:
    asked = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    with pytest.raises(UserError, match="structured_outputs need the tokenizer that LLM has"):
        text_llm.engine.add_request([5], asked)


class Breaking:
    """A grammar whose library gives up at some point."""

    def __init__(self, after: int, where: str):
        self.after, self.where = after, where

    def masks(self, drafts: object) -> object:
        if self.where == "masks" and self.after <= 0:
            raise GrammarError("too complex")
        return np.full((len(drafts) + 1, 3), 0xFFFFFFFF, np.uint32)  # type: ignore[arg-type]

    def advance(self, tokens: list[int]) -> None:
        self.after -= len(tokens)
        if self.where == "advance" and self.after <= 0:
            raise GrammarError("too complex")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("where", "after"), [("masks", 0), ("masks", 3), ("advance", 1), ("advance", 4)])
def test_a_grammar_that_breaks_ends_its_own_request_alone(
    text_target: Path, where: str, after: int, overlap: bool
) -> None:
    llm = open_llm(text_target, "none", overlap=overlap, max_running_requests=2, chunked_prefill_size=16)
    engine, news = llm.engine, []
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    alone = llm.generate([[9, 4]], params)[0].token_ids
    broken = engine.add_request([5, 6], params, grammar=Breaking(after, where), on_update=news.append)
    other = engine.add_request([9, 4], params, on_update=lambda update: None)
    while engine.has_work:
        engine.step()
    assert (broken.finish_reason, str(broken.error)) == ("error", "too complex")
    assert news[-1].finish_reason == "error" and [update.finish_reason for update in news].count("error") == 1
    assert other.output_ids == alone and other.finish_reason == "length"
    assert engine.metrics().num_requests_running == 0


def test_a_broken_grammar_is_told_when_the_others_are_done(text_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SamplingParams(max_new_tokens=12, structured_outputs=StructuredOutputs(regex="b*"))
    monkeypatch.setattr(text_llm, "grammar", lambda asked: asked and Breaking(3, "masks"))
    with pytest.raises(GenerationError, match="prompt 1 had to be given up: too complex") as caught:
        text_llm.generate([[5, 6], [9, 4]], [shape, SamplingParams(max_new_tokens=12, ignore_eos=True)])
    assert [len(out.token_ids) for out in caught.value.outputs][1] == 12
    assert [out.finish_reason for out in caught.value.outputs] == ["abort", "length"]
