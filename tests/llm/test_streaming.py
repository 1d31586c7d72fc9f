"""`LLM.stream`, and what leaving early, Ctrl-C and failing models leave behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import LLM, SamplingParams, UserError
from dflash_jax.engine.interrupts import HeldInterrupts
from dflash_jax.llm import GenerationError

from .pairs import FOLDER, generate_one, open_llm
from .text_target import PAIR, PERIOD, START, known_prompt, write_text_target


def assert_idle(llm: LLM) -> None:
    metrics = llm.engine.metrics()
    assert (metrics.num_requests_running, metrics.num_requests_waiting, metrics.num_pages_held) == (0, 0, 0)


# -- streaming ---------------------------------------------------------------------------------------------------------


def test_pieces_make_the_text_and_never_show_half_a_character(text_llm: LLM) -> None:
    pieces = list(text_llm.stream(known_prompt(), SamplingParams(max_new_tokens=39)))
    assert "".join(pieces) == START + PERIOD * 3 + PERIOD[:4]
    assert all(pieces) and len(pieces) > 5
    assert pieces[:4] == ["hi", "\ufffdxay!", " ", "b"]  # as rounds bring them; the emoji's bytes wait


def test_a_stop_text_is_never_shown(text_llm: LLM) -> None:
    pieces = list(text_llm.stream(known_prompt(), SamplingParams(max_new_tokens=40, stop="b你xay😀b")))
    assert "".join(pieces) == START[:-1]
    held_for_nothing = list(text_llm.stream(known_prompt(), SamplingParams(max_new_tokens=10, stop="b你z")))
    assert "".join(held_for_nothing) == START + "\ufffd"


def test_a_stop_text_that_is_kept_is_shown_as_it_comes(text_llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=40, stop="! b你x", include_stop_str_in_output=True)
    pieces = list(text_llm.stream(known_prompt(), params))
    assert pieces[:4] == ["hi", "\ufffdxay!", " ", "b"]
    assert "".join(pieces) == START + "你x"


def test_leaving_a_stream_aborts_its_request(text_llm: LLM) -> None:
    stream = text_llm.stream(known_prompt(), SamplingParams(max_new_tokens=200))
    assert next(stream) == "hi"
    assert text_llm.engine.metrics().num_requests_running == 1
    del stream
    assert_idle(text_llm)
    assert generate_one(text_llm, known_prompt(), max_new_tokens=11).text == START + "你"


def test_two_streams_and_a_batch_share_the_engine(two_slots: LLM) -> None:
    """A stream whose request ends while another one steps still gives all of its text."""
    params = SamplingParams(max_new_tokens=38)
    first, second = two_slots.stream(known_prompt(), params), two_slots.stream([5, *known_prompt()], params)
    texts = [next(first), next(second)]
    alone = generate_one(two_slots, [5, *known_prompt()], max_new_tokens=38).text
    assert texts[0] + "".join(first) == START + PERIOD * 3 + "你"
    assert texts[1] + "".join(second) == alone
    assert_idle(two_slots)


def test_mistakes_are_known_before_the_first_piece_is_asked_for(text_llm: LLM) -> None:
    with pytest.raises(UserError, match="the prompt holds 71, which is not a token id from 0 to 70"):
        text_llm.stream([71])
    without = open_llm(FOLDER / "x-v2-one-layer" / "target", "none")
    with pytest.raises(UserError, match="has no tokenizer, so there is no text to stream"):
        without.stream([1])


# -- interrupts --------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_the_middle_of_a_step_waits_for_its_end(text_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook: the call ends with KeyboardInterrupt, and the model can be used again."""
    launch = text_llm.engine.runner.decode
    calls: list[int] = []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return launch(*args)

    monkeypatch.setattr(text_llm.engine.runner, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        text_llm.generate([known_prompt()], SamplingParams(max_new_tokens=200))
    assert_idle(text_llm)
    assert generate_one(text_llm, known_prompt(), max_new_tokens=11).text == START + "你"


@pytest.fixture
def came() -> Iterator[list[int]]:
    """The signals that a handler saw."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_interrupts_are_held_to_the_end_of_the_outer_block(came: list[int]) -> None:
    with HeldInterrupts() as held:
        with HeldInterrupts() as inner:
            signal.raise_signal(signal.SIGTERM)
            assert (inner.arrived, held.arrived, came) == (signal.SIGTERM, None, [])
        assert (held.arrived, came) == (signal.SIGTERM, [])
    assert came == [signal.SIGTERM]


def test_a_second_interrupt_is_not_held(came: list[int]) -> None:
    with HeldInterrupts(), HeldInterrupts():
        signal.raise_signal(signal.SIGTERM)
        assert came == []
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]


def test_an_error_goes_before_a_held_interrupt() -> None:
    with pytest.raises(ZeroDivisionError):
        with HeldInterrupts():
            signal.raise_signal(signal.SIGINT)
            raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_left_alone() -> None:
    def inside() -> None:
        with HeldInterrupts() as held:
            handlers.append(signal.getsignal(signal.SIGINT))
            assert held.arrived is None

    handlers: list[Any] = []
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_a_failing_engine_shows_what_happened(text_target: Path) -> None:
    """Not what cleaning up after it would meet; and every later call says that it has stopped, and why."""
    llm = LLM(str(text_target), "none", max_running_requests=1)

    def broken(rows: Any) -> Any:
        raise ZeroDivisionError("the device burns")

    llm.engine.runner.prefill = broken
    with pytest.raises(ZeroDivisionError, match="the device burns"):
        llm.generate([[5]])
    with pytest.raises(RuntimeError, match="the engine has stopped: the device burns"):
        llm.generate([[5]])


def test_threads_share_the_engine(two_slots: LLM) -> None:
    """Each gets its own results, whoever steps; one that leaves early disturbs no other."""
    params = SamplingParams(max_new_tokens=39)
    expected = START + PERIOD * 3 + "你xay"

    def work(index: int) -> None:
        if index % 2:
            texts.append(two_slots.generate([known_prompt()], params)[0].text)
        else:
            next(left_early := two_slots.stream(known_prompt(), params))
            left_early.close()  # pyright: ignore[reportAttributeAccessIssue]
            texts.append("".join(two_slots.stream(known_prompt(), params)))

    texts: list[str | None] = []
    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 6
    assert_idle(two_slots)


# -- a model that fails ------------------------------------------------------------------------------------------------

POISONED = 69  # the token whose embedding is NaN: "b" in the known text


@pytest.fixture(scope="module")
def poisoned_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The text target with one NaN row: prompts and outputs without that token are as ever."""
    folder = write_text_target(tmp_path_factory.mktemp("poisoned") / "target")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][POISONED] = np.nan
    save_file(weights, folder / "model.safetensors")
    return open_llm(folder, PAIR / "draft", max_running_requests=2, chunked_prefill_size=16)


HEALTHY = [5, 6, 7]


def test_a_prompt_on_which_the_model_fails_harms_no_other(poisoned_llm: LLM, text_llm: LLM) -> None:
    healthy = generate_one(text_llm, HEALTHY, max_new_tokens=8)
    assert POISONED not in healthy.token_ids
    with pytest.raises(GenerationError) as caught:
        limits = [SamplingParams(max_new_tokens=n) for n in (8, 12, 12, 8)]
        poisoned_llm.generate([HEALTHY, known_prompt(), [POISONED], HEALTHY], limits)
    assert str(caught.value) == (
        "prompt 2 had to be given up after 8 tokens: the target's logits are not numbers (NaN); its weights are damaged"
        " or their values too large for the dtype in use; prompt 3 had to be given up at its first token: the target's"
        " logits are not numbers (NaN); its weights are damaged or their values too large for the dtype in use"
    )
    first, second, third, fourth = caught.value.outputs
    for out in (first, fourth):
        assert (out.token_ids, out.text, out.finish_reason, out.error) == (
            healthy.token_ids,
            healthy.text,
            "length",
            None,
        )
    assert (second.text, second.finish_reason, second.error is None) == (START, "abort", False)
    assert (third.token_ids, third.text, third.finish_reason) == ([], "", "abort")
    assert_idle(poisoned_llm)


def test_a_stream_ends_with_the_text_that_is_sound(poisoned_llm: LLM) -> None:
    pieces: list[str] = []
    with pytest.raises(GenerationError, match="the prompt had to be given up after 8 tokens"):
        pieces.extend(poisoned_llm.stream(known_prompt()))
    shown: list[str] = []
    stream = poisoned_llm.stream(known_prompt())
    with pytest.raises(GenerationError):
        while True:
            shown.append(next(stream))
    assert "".join(shown) == START
