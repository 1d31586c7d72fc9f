"""Log-probabilities through the engine: those of plain decoding with any draft, of the whole prompt, a row a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine.device import V1, V2, Device, open_device, random_prompt, serve, target_logits

from dflash_jax import Engine, SamplingParams
from dflash_jax.engine.protocol import TokenLogprobs
from dflash_jax.engine.request import Request
from dflash_jax.logprobs import by_token

from .oracle import log_softmax

CLOSE = 1e-5
MIX = [  # the first asks for everything and lasts longest, which spares compiling
    SamplingParams(max_new_tokens=32, ignore_eos=True, logprobs=20, temperature=1.1, seed=4, top_p=0.9, min_p=0.02,
                   repetition_penalty=1.2, logit_bias={5: 2.0}, stop_token_ids=[7], min_tokens=32),
    SamplingParams(max_new_tokens=20, logprobs=3),
    SamplingParams(max_new_tokens=18, logprobs=0, temperature=0.8, seed=3),
    SamplingParams(max_new_tokens=16, ignore_eos=True),
]  # fmt: skip


def ask(engine: Engine, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[Request]:
    """All at once, to the end; books checked."""
    requests = [engine.add_request(prompt, params) for prompt, params in asked]
    while engine.has_work:  # `serve` would clear the prefix cache
        engine.step()
    for request, (_, params) in zip(requests, asked, strict=True):
        check_counts(request, params)
    return requests


def mixed(device: Device) -> list[tuple[list[int], SamplingParams]]:
    return [(random_prompt(device, 8, seed), params) for seed, params in enumerate(MIX)]


def check_counts(request: Request, params: SamplingParams) -> None:
    """A row a token, of as many alternatives as were asked for."""
    assert len(request.logprobs) == (0 if params.logprobs is None else len(request.output_ids))
    assert len(request.prompt_logprobs) == (0 if params.prompt_logprobs is None else len(request.prompt_ids) - 1)
    assert {len(one.top_ids) for one in request.logprobs} <= {params.logprobs}
    assert {len(one.top_ids) for one in request.prompt_logprobs} <= {params.prompt_logprobs}


def numbers(found: Sequence[TokenLogprobs]) -> list[list[float]]:
    return [[one.logprob, *one.top_logprobs] for one in found]


def acceptance(requests: Sequence[Request]) -> float:
    rounds = [length for request in requests for length in request.accept_lengths]
    return sum(rounds) / len(rounds)


# -- of the output -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("pair", [V1, pytest.param(V2, marks=pytest.mark.soak)])
def test_values_are_plain_decoding_s(pair: str) -> None:
    """With the pair's draft and with prompt look-up."""
    plain = open_device(pair, "none")
    asked = mixed(plain)
    want = ask(plain.engine(), asked)
    assert acceptance(want) == 1
    for draft in (None, "ngram"):
        got = ask(open_device(pair, draft).engine(), asked)
        assert acceptance(got) > 1.05
        for one, other in zip(want, got, strict=True):
            assert one.output_ids == other.output_ids
            assert [row.rank for row in one.logprobs] == [row.rank for row in other.logprobs]
            np.testing.assert_allclose(numbers(one.logprobs), numbers(other.logprobs), atol=CLOSE, rtol=0)


@pytest.mark.slow
def test_they_are_the_target_s_own() -> None:
    """Rank 1 is the likeliest; a greedy token is that, and its alternatives begin with itself."""
    device = open_device(V2)
    requests = ask(device.engine(), mixed(device))
    for request in requests:
        check_output(device, request)
    assert all(one.rank == 1 and one.top_logprobs[0] == one.logprob for one in requests[1].logprobs)
    assert any(one.rank > 1 for one in requests[0].logprobs)


def check_output(device: Device, request: Request) -> None:
    """Against one forward pass over the whole text."""
    values = target_logits(device, request.tokens())[len(request.prompt_ids) - 1 : -1]
    if request.num_logprobs is not None:
        check_rows(request.logprobs, values, request.output_ids)


def check_rows(found: Sequence[TokenLogprobs], logits: np.ndarray, tokens: Sequence[int]) -> None:
    """Each row by the definition; alternatives that nearly tie may stand in either order."""
    for one, row, token in zip(found, logits, tokens, strict=True):
        values = log_softmax(row)
        assert abs(one.logprob - values[token]) < 5 * CLOSE
        assert one.rank - 1 in ((values > values[token] + CLOSE).sum(), (values >= values[token] - CLOSE).sum() - 1)
        np.testing.assert_allclose(one.top_logprobs, np.sort(values)[::-1][: len(one.top_ids)], atol=5 * CLOSE)
        np.testing.assert_allclose(one.top_logprobs, values[one.top_ids], atol=5 * CLOSE)


def test_the_token_alone() -> None:
    """logprobs=0 reports no alternatives; it stands in the output as the one entry of its position."""
    device = open_device(V2)
    [request] = ask(device.engine(), [(random_prompt(device, 9), MIX[2])])
    assert all((one.top_ids, one.top_logprobs) == ([], []) for one in request.logprobs)
    token, one = request.output_ids[0], request.logprobs[0]
    assert {key: (at.logprob, at.rank) for key, at in by_token(token, one, None).items()} == {
        token: (one.logprob, one.rank)
    }


@pytest.mark.parametrize("nth", range(1, 8))
def test_as_many_rows_as_tokens_at_a_stop_token_and_at_every_limit(nth: int) -> None:
    """Inside a block whose other drafts were right, too."""
    device = open_device(V2)
    prompt = random_prompt(device, 9)
    [whole] = ask(device.engine(), [(prompt, replace(MIX[1], ignore_eos=True))])
    token = whole.output_ids[nth]
    asked = [(prompt, replace(MIX[1], ignore_eos=True, stop_token_ids=[token])),
             (prompt, replace(MIX[1], ignore_eos=True, max_new_tokens=nth))]  # fmt: skip
    stopped, short = ask(device.engine(), asked)
    assert (stopped.finish_reason, short.finish_reason) == ("stop", "length")
    assert len(stopped.output_ids) == whole.output_ids.index(token) + 1 and len(short.output_ids) == nth
    for one in (stopped, short):
        np.testing.assert_allclose(numbers(one.logprobs), numbers(whole.logprobs)[: len(one.output_ids)], atol=CLOSE)


def test_as_many_rows_as_tokens_where_the_host_takes_some_back() -> None:
    """A stop text that ends inside a block: what came after it goes, with its rows."""
    device = open_device(V2)
    params = replace(MIX[1], ignore_eos=True, max_new_tokens=40)
    [whole] = ask(device.engine(), [(random_prompt(device, 9), params)])
    assert max(whole.accept_lengths) > 2
    for wanted in range(1, 20):

        def cut(request: Request, tokens: Sequence[int], wanted: int = wanted) -> bool:
            surplus = len(request.output_ids) - wanted
            if surplus >= 0:
                request.drop_tail(surplus)
            return surplus >= 0

        engine = device.engine()
        request = engine.add_request(whole.prompt_ids, params, on_tokens=cut)
        serve(engine)
        check_counts(request, params)
        assert request.output_ids == whole.output_ids[:wanted] and request.finish_reason == "stop"
        np.testing.assert_allclose(numbers(request.logprobs), numbers(whole.logprobs)[:wanted], atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_requests_lose_no_row_and_have_none_twice(overlap: bool) -> None:
    """Sampled, penalised and plain ones; counts of tokens that are there already survive as well."""
    device = open_device(V2)
    options: list[dict[str, Any]] = [
        {}, {"temperature": 0.9, "seed": 1}, {"frequency_penalty": 0.3, "repetition_penalty": 1.1},
        {"temperature": 1.2, "seed": 2, "presence_penalty": 0.4, "min_tokens": 60},
    ]  # fmt: skip
    asked = [(random_prompt(device, 40, seed), SamplingParams(max_new_tokens=70, logprobs=2, prompt_logprobs=1,
                                                              ignore_eos=True, **how))
             for seed, how in enumerate(options)]  # fmt: skip
    want = ask(device.engine(overlap=overlap), asked)
    got = ask(device.engine(overlap=overlap, num_pages=20), asked)
    assert sum(request.preemptions for request in got) > 1 and not any(request.preemptions for request in want)
    for one, other in zip(want, got, strict=True):
        assert one.output_ids == other.output_ids
        np.testing.assert_allclose(numbers(one.logprobs), numbers(other.logprobs), atol=CLOSE)
        np.testing.assert_allclose(numbers(one.prompt_logprobs), numbers(other.prompt_logprobs), atol=CLOSE)
        check_output(device, other)
        check_prompt(device, other)


# -- of the prompt -----------------------------------------------------------------------------------------------------


def check_prompt(device: Device, request: Request) -> None:
    """Every token but the first, against one forward pass."""
    check_rows(request.prompt_logprobs, target_logits(device, request.prompt_ids)[:-1], request.prompt_ids[1:])


def prompt_asked(n: int = 2, **how: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=3, prompt_logprobs=n, **how)


@pytest.mark.parametrize("length", [1, 2, 15, 32, 33, 64, 65, 90])
def test_of_a_prompt_in_chunks(length: int) -> None:
    """CASE 16: chunks of 32, with a remainder of one token, too."""
    device = open_device(V2)
    [request] = ask(device.engine(), [(random_prompt(device, length, seed=7), prompt_asked())])
    check_prompt(device, request)


def test_of_chunks_narrower_than_the_device_s() -> None:
    """Rows of five tokens are padded to a launch of sixteen, whose padding says nothing."""
    device = open_device(V2)
    [request] = ask(device.engine(chunked_prefill_size=5), [(random_prompt(device, 23, seed=8), prompt_asked())])
    check_prompt(device, request)


def test_of_chunks_of_an_odd_width() -> None:
    """The device takes a chunk some rows at a time; their number must divide the chunk."""
    device = open_device(V2, chunked_prefill_size=33)
    [request] = ask(device.engine(), [(random_prompt(device, 70, seed=8), prompt_asked())])
    check_prompt(device, request)


def test_of_prompts_in_a_batch_with_others() -> None:
    """The others' tokens and acceptance are those of their solo runs."""
    device = open_device(V2)
    plain = SamplingParams(max_new_tokens=12)
    prompts = [random_prompt(device, length, seed=9) for length in (6, 1, 15, 40, 6, 8)]
    params = [plain, prompt_asked(5), plain, prompt_asked(0), prompt_asked(2), plain]
    requests = ask(device.engine(), [*zip(prompts, params, strict=True)])
    for request, one in zip(requests, params, strict=True):
        if one is plain:
            [alone] = ask(device.engine(), [(list(request.prompt_ids), plain)])
            assert (alone.output_ids, alone.accept_lengths) == (request.output_ids, request.accept_lengths)
        else:
            check_prompt(device, request)


@pytest.mark.parametrize("overlap", [True, False])
def test_of_a_prompt_whose_prefix_is_cached(overlap: bool) -> None:
    """It runs once more, right and as accepted as before, and others find the prefix before, beside and after it."""
    device = open_device(V2)
    prompt, plain = random_prompt(device, 40, seed=10), SamplingParams(max_new_tokens=12)
    engine = device.engine(overlap=overlap)
    [first] = ask(engine, [(prompt, plain)])
    [read] = ask(engine, [(prompt, replace(plain, prompt_logprobs=1))])
    beside = ask(engine, [(prompt, replace(plain, prompt_logprobs=0)), (prompt, plain)])
    [last] = ask(engine, [(prompt, plain)])
    requests = [first, read, *beside, last]
    assert [request.cached_tokens for request in requests] == [0, 0, 0, 32, 32]
    assert {(tuple(one.output_ids), tuple(one.accept_lengths)) for one in requests} == {
        (tuple(first.output_ids), tuple(first.accept_lengths))
    }
    for request in (read, beside[0]):
        check_prompt(device, request)


def test_a_prompt_that_is_read_first_is_found_by_others() -> None:
    device = open_device(V2)
    prompt, engine = random_prompt(device, 40, seed=11), device.engine()
    [read] = ask(engine, [(prompt, prompt_asked())])
    [other] = ask(engine, [(prompt, SamplingParams(max_new_tokens=3))])
    assert (read.cached_tokens, other.cached_tokens) == (0, 32) and read.output_ids == other.output_ids
    check_prompt(device, read)


def test_rounds_are_not_compiled_anew_for_the_prompt_s() -> None:
    """Nothing of a prompt is reported in rounds."""
    device = open_device(V2)
    engine = device.engine()
    ask(engine, [(random_prompt(device, 5), SamplingParams(max_new_tokens=4))])
    request = engine.add_request(random_prompt(device, 5), SamplingParams(max_new_tokens=30, prompt_logprobs=1))
    while not request.output_ids:
        engine.step()
    assert request.seat is not None
    assert device.runner.decode_key([request.seat.slot], 1) == ("decode_round", 1, 1)
    serve(engine)
