"""Whatever a request asks for, the answer is the slow reader's, with any draft, block, batch, chunk and loop.

`-m soak` runs 500 requests over 24 engines; without it some of both.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from conftest import too_many_maps

from dflash_jax import LLM, RequestOutput, SamplingParams

from .oracle import Answer, Oracle
from .pairs import FOLDER, open_llm
from .told import register_told

NEW_TOKENS = 24
V1, V2 = "qwen3-v1-window", "qwen3-v2"
Asked = tuple[list[int], SamplingParams]


def ask(rng: random.Random, vocab: int) -> SamplingParams:
    """Any options, each as likely off as on."""

    def some(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    new = rng.randint(1, NEW_TOKENS)
    return SamplingParams(
        max_new_tokens=new,
        temperature=rng.choice([0.0, 0.0, 0.5, 0.8, 1.0, 1.6]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5]),
        top_k=rng.choice([0, 0, 1, 5, 40]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.3]),
        seed=rng.getrandbits(64),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=some(rng.choice([0, 0, 3])),
        min_tokens=rng.choice([0, 0, rng.randint(0, new)]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4, -0.3]),
        logit_bias=rng.choice([None, None, {token: rng.uniform(-5, 5) for token in some(4)}]),
        allowed_token_ids=rng.choice([None, None, None, sorted(set(some(30)))]),
        bad_token_ids=some(rng.choice([0, 0, 5])),
        logprobs=rng.choice([None, None, 0, 2, 7]),
    )


def requests(count: int, vocab: int, seed: int) -> list[Asked]:
    rng = random.Random(seed)
    made: list[Asked] = []
    while len(made) < count:
        asked = ask(rng, vocab)
        left = set(asked.allowed_token_ids or range(vocab)) - {*asked.bad_token_ids}
        if len(left) > 8:  # so that something is left, whatever may stop it
            made.append(([rng.randrange(vocab) for _ in range(rng.choice([1, 2, 7, 16, 21]))], asked))
    return made


class Exam:
    """Requests to a target and the answers to them."""

    def __init__(self, pair: str, count: int, seed: int):
        self.pair, self.target = pair, FOLDER / pair / "target"
        oracle = Oracle(open_llm(self.target, "none", max_running_requests=2, chunked_prefill_size=16))
        self.asked = requests(count, oracle.config.vocab_size, seed)
        self.answers = [oracle.answer(prompt, params) for prompt, params in self.asked]
        texts = [[*prompt, *answer.token_ids] for (prompt, _), answer in zip(self.asked, self.answers, strict=True)]
        register_told(f"right-{pair}-{count}", texts, off=0)
        register_told(f"wrong-{pair}-{count}", texts, off=1)

    def take(self, draft: str, block: int, batch: int, overlap: bool, chunk: int, part: slice) -> list[RequestOutput]:
        """The part's requests through an engine, each answer checked."""
        llm = self.open(draft, block, batch, overlap, chunk)
        asked, answers = self.asked[part], self.answers[part]
        outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
        for (prompt, params), out, answer in zip(asked, outputs, answers, strict=True):
            check(out, answer, params, f"{draft} B={block} {prompt} {params}")
        return outputs

    def open(self, draft: str, block: int, batch: int, overlap: bool, chunk: int) -> LLM:
        name = {"right": f"right-{self.pair}-{len(self.asked)}", "wrong": f"wrong-{self.pair}-{len(self.asked)}",
                "dflash": str(FOLDER / self.pair / "draft")}.get(draft, draft)  # fmt: skip
        width = {} if draft == "none" else {"block_size": block}
        return open_llm(self.target, name, max_running_requests=batch, overlap=overlap, chunked_prefill_size=chunk,
                        max_model_len=64, **width)  # fmt: skip


def check(out: RequestOutput, answer: Answer, params: SamplingParams, what: str) -> None:
    assert (out.token_ids, out.finish_reason) == (answer.token_ids, answer.finish_reason), what
    assert sum(out.accept_lengths) == len(out.token_ids) - 1, what
    if params.logprobs is None:
        assert out.logprobs is None
        return
    assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids), what
    for token, found, (own, rank, values) in zip(out.token_ids, out.logprobs, answer.logprobs, strict=True):
        assert abs(found[token].logprob - own) < 1e-4 and found[token].rank == rank, what
        best = sorted(values, reverse=True)[: params.logprobs]
        top = sorted((one.logprob for one in found.values()), reverse=True)[: params.logprobs]
        np.testing.assert_allclose(top, best, atol=1e-4, err_msg=what)


def acceptance(outputs: Sequence[RequestOutput]) -> float:
    rounds = [length for out in outputs for length in out.accept_lengths]
    return sum(rounds) / len(rounds)


def check_acceptance(draft: str, block: int, outputs: Sequence[RequestOutput]) -> None:
    mean = acceptance(outputs)
    if draft in ("none", "wrong"):
        assert mean == 1
    elif draft == "right":  # rounds are full but a request's last, and those of texts that have begun as another did
        full = [length == block for out in outputs for length in out.accept_lengths[:-1]]
        assert sum(full) >= 0.8 * len(full)
    else:
        assert mean > 1.02


@pytest.fixture(scope="module")
def exam() -> Exam:
    return Exam(V2, 48, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "block", "batch", "overlap", "chunk"),
    [pytest.param("none", 1, 3, True, 16, marks=pytest.mark.soak), ("dflash", 8, 4, True, 16),
     pytest.param("right", 5, 3, False, 512, marks=pytest.mark.soak)],
)  # fmt: skip
def test_every_request_has_the_slow_reader_s_answer(
    exam: Exam, draft: str, block: int, batch: int, overlap: bool, chunk: int
) -> None:
    check_acceptance(draft, block, exam.take(draft, block, batch, overlap, chunk, slice(None)))


ENGINES = [
    (draft, block, batch, overlap, chunk)
    for (draft, block), (batch, overlap, chunk) in zip(
        itertools.chain(
            *(zip(("none", "dflash", "ngram", "right", "wrong"), blocks, strict=True)
              for blocks in ((1, 8, 3, 4, 2), (1, 2, 8, 7, 5), (1, 5, 6, 2, 8), (1, 3, 2, 8, 4)))
        ),
        itertools.cycle([(1, True, 16), (6, False, 512), (3, True, 16), (4, True, 512), (2, False, 16), (5, True, 8)]),
        strict=False,
    )
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize(("pair", "engines"), [(V2, ENGINES[:14]), (V1, ENGINES[10:])])
def test_500_combinations(pair: str, engines: list[tuple[str, int, int, bool, int]]) -> None:
    exam = Exam(pair, 25 * len(engines) - (len(engines) > 12) * 50, seed=17)
    share = len(exam.asked) // len(engines)
    for i, (draft, block, batch, overlap, chunk) in enumerate(engines):
        if too_many_maps():  # each engine brings some hundred compiled steps
            jax.clear_caches()
        part = slice(i * share, (i + 1) * share)
        check_acceptance(draft, block, exam.take(draft, block, batch, overlap, chunk, part))


def test_options_that_are_off_ask_nothing_of_the_device() -> None:
    plain = SamplingParams(temperature=1.0)
    assert not plain.edits_logits and dataclasses.replace(plain, min_tokens=1).edits_logits
