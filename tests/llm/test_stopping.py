"""Where an output ends: limits, end-of-text tokens, stop tokens and stop texts, at every place of a block."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dflash_jax import LLM, SamplingParams, UserError

from .pairs import generate_one, open_llm
from .text_target import BLOCK_SIZE, CYCLE, PAIR, PERIOD, START, known_case, known_prompt

STEADY = known_prompt(12)  # from here on CYCLE repeats, and the draft is right about all of it


@pytest.fixture(params=["draft", "draft, blocks of 5", "draft, no overlap", "none"])
def any_llm(request: pytest.FixtureRequest, text_target: Path) -> LLM:
    """The same target drafted for in different ways."""
    options: dict[str, dict[str, Any]] = {
        "draft, blocks of 5": {"block_size": 5},
        "draft, no overlap": {"overlap": False},
    }
    draft = "none" if request.param == "none" else PAIR / "draft"
    return open_llm(text_target, draft, **options.get(request.param, {}))


def first_completion(
    llm: LLM, token_ids: list[int], stops: list[str], keep: bool = False, min_tokens: int = 0
) -> tuple[int, str] | None:
    """By decoding every prefix anew: after how many tokens a stop text is there, and the text before it or up to it."""
    assert llm.tokenizer
    known = len(llm.tokenizer.decode(token_ids[:min_tokens]).rstrip("\ufffd"))
    for count in range(min_tokens + 1, len(token_ids) + 1):
        text = llm.tokenizer.decode(token_ids[:count])
        places = [(at, at + len(stop)) for stop in stops for at in range(len(text)) if text.startswith(stop, at)]
        found = sorted(place for place in places if place[1] > known)
        if found:
            return count, text[: found[0][keep]]
    return None


# -- the known text ----------------------------------------------------------------------------------------------------


def test_the_known_text(any_llm: LLM) -> None:
    out = generate_one(any_llm, known_prompt(), max_new_tokens=40)
    assert out.token_ids == known_case().token_ids
    assert out.text == START + PERIOD * 3 + PERIOD[:4] + "\ufffd"  # the limit falls into an emoji


def test_the_blocks_are_those_that_the_tests_below_rely_on(text_llm: LLM) -> None:
    known_case().check(*_tokens_and_lengths(generate_one(text_llm, known_prompt(), max_new_tokens=40)))
    steady = generate_one(text_llm, STEADY, max_new_tokens=1 + 2 * BLOCK_SIZE)
    assert steady.token_ids[:9] == CYCLE
    assert steady.accept_lengths == [BLOCK_SIZE] * 2


def _tokens_and_lengths(out: Any) -> tuple[list[int], list[int]]:
    return out.token_ids, out.accept_lengths


# -- limits ------------------------------------------------------------------------------------------------------------


def test_every_limit_up_to_two_blocks(text_llm: LLM) -> None:
    """Everything is accepted, so that only the limit cuts."""
    whole = generate_one(text_llm, STEADY, max_new_tokens=2 * BLOCK_SIZE).token_ids
    for limit in range(1, 2 * BLOCK_SIZE + 1):
        out = generate_one(text_llm, STEADY, max_new_tokens=limit)
        assert out.token_ids == whole[:limit]
        assert out.finish_reason == "length"
        blocks, rest = divmod(limit - 1, BLOCK_SIZE)
        assert out.accept_lengths == [BLOCK_SIZE] * blocks + [rest] * (rest > 0)


def test_the_end_of_the_context_is_a_limit(text_llm: LLM, plain_llm: LLM) -> None:
    """A prompt of 240 in a context of 256: 16 tokens, of which a block of 12 leaves 3 for the last round."""
    assert text_llm.engine.max_model_len == 256
    prompt = random.Random(0).choices(range(3, 71), k=240 - len(STEADY)) + STEADY
    for length, room in ((240, 16), (255, 1), (254, 2), (244, 12), (243, 13)):
        out = generate_one(text_llm, prompt[-length:] if length <= 240 else [5] * (length - 240) + prompt,
                           max_new_tokens=100, ignore_eos=True)  # fmt: skip
        assert (len(out.token_ids), out.finish_reason) == (room, "length")
        plain = generate_one(plain_llm, out.prompt_token_ids, max_new_tokens=100, ignore_eos=True)
        assert (plain.token_ids, plain.finish_reason) == (out.token_ids, "length")


def test_a_neighbour_of_one_at_the_end_of_its_context_is_not_touched(two_slots: LLM) -> None:
    long, neighbour = [5] * 250, known_prompt()
    alone = generate_one(two_slots, neighbour, max_new_tokens=60)
    both = two_slots.generate([long, neighbour], SamplingParams(max_new_tokens=60))
    assert (len(both[0].token_ids), both[0].finish_reason) == (6, "length")
    assert both[1].token_ids == alone.token_ids
    assert both[1].accept_lengths == alone.accept_lengths


# -- tokens that end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eos", "stop_token_ids"])
def test_the_ending_token_at_every_place_of_a_block(text_llm: LLM, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, token in enumerate(CYCLE):  # place 0 comes from prefill, place n is the n-th of a block
        extra: dict[str, Any] = {"stop_token_ids": [token]}
        if kind == "eos":
            monkeypatch.setattr(text_llm, "eos_token_ids", (token,))
            extra = {}
        out = generate_one(text_llm, STEADY, max_new_tokens=40, **extra)
        assert (out.token_ids, out.finish_reason) == (CYCLE[: place + 1], "stop")
        assert out.accept_lengths == [place] * (place > 0)
        ignoring = generate_one(text_llm, STEADY, max_new_tokens=40, ignore_eos=True, **extra)
        assert len(ignoring.token_ids) == (40 if kind == "eos" else place + 1)


def test_an_ending_token_that_is_no_special_one_is_not_in_the_text(any_llm: LLM) -> None:
    """48 spells "!": token_ids have it, text does not; where it does not end the text it is in it."""
    out = generate_one(any_llm, known_prompt(), max_new_tokens=40, stop_token_ids=[48])
    assert (out.token_ids[-1], out.text, out.finish_reason) == (48, "hi\ufffdxay", "stop")
    assert (generate_one(any_llm, known_prompt(), max_new_tokens=6).text or "")[-1] == "!"


def test_an_ending_token_at_the_limit_is_a_stop(text_llm: LLM) -> None:
    for place, token in enumerate(CYCLE):
        out = generate_one(text_llm, STEADY, max_new_tokens=place + 1, stop_token_ids=[token])
        assert (out.token_ids, out.finish_reason) == (CYCLE[: place + 1], "stop")


def test_the_ends_that_the_folder_names(text_target: Path, tmp_path: Path) -> None:
    """generation_config.json may name several, and the tokenizer's own counts beside them."""
    from .text_target import write_text_target

    llm = open_llm(write_text_target(tmp_path / "target", eos_token_id=[30, 20]), "none", max_running_requests=1)
    assert set(llm.eos_token_ids) == {2, 20, 30}
    out = generate_one(llm, known_prompt(), max_new_tokens=40)
    assert (out.token_ids[-1], out.text, out.finish_reason) == (30, "hi\ufffdxay!", "stop")
    assert len(generate_one(llm, known_prompt(), max_new_tokens=40, ignore_eos=True).token_ids) == 40


# -- texts that end ----------------------------------------------------------------------------------------------------

STOPS = [
    ["😀"],  # inside a block
    ["b你"],  # spans rounds
    ["y😀b你x"],  # begins and ends inside tokens of several characters
    ["a"],  # inside one token
    ["h"],  # nothing is left
    ["! b你xay😀b你xay😀b"],  # spans several rounds
    ["zzz", "! b"],
    ["😀b你", "ay", "xay"],  # two at once: the first in the text counts
    ["\ufffdx"],  # bytes that are no character are known to be none when the next token comes
    ["nowhere"],
]


@pytest.mark.parametrize("stops", STOPS, ids=["+".join(stops) for stops in STOPS])
def test_stop_texts(any_llm: LLM, stops: list[str]) -> None:
    whole = known_case().token_ids
    expected = first_completion(any_llm, whole, stops)
    out = generate_one(any_llm, known_prompt(), max_new_tokens=40, stop=stops)
    if stops == ["nowhere"]:
        assert expected is None
        assert (len(out.token_ids), out.finish_reason) == (40, "length")
    else:
        assert expected is not None
        assert (len(out.token_ids), out.text) == expected
        assert (out.token_ids, out.finish_reason) == (whole[: expected[0]], "stop")


@pytest.mark.parametrize("min_tokens", [0, 2, 12, 19, 39])
@pytest.mark.parametrize("stops", STOPS, ids=["+".join(stops) for stops in STOPS])
def test_stop_texts_after_the_first_tokens_and_kept(any_llm: LLM, stops: list[str], min_tokens: int) -> None:
    """`min_tokens` of blocks 1, 5 and 12 end inside blocks and between them."""
    whole = known_case().token_ids
    for keep in (False, True):
        expected = first_completion(any_llm, whole, stops, keep, min_tokens)
        out = generate_one(any_llm, known_prompt(), max_new_tokens=40, stop=stops, min_tokens=min_tokens,
                           include_stop_str_in_output=keep)  # fmt: skip
        if expected is None:
            assert (len(out.token_ids), out.finish_reason) == (40, "length")
        else:
            assert (len(out.token_ids), out.text, out.finish_reason) == (*expected, "stop")


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [2, 3, 7, 11])  # 1, 5 and 12 are above
def test_a_kept_stop_text_with_other_block_sizes(text_target: Path, block_size: int) -> None:
    llm = open_llm(text_target, PAIR / "draft", block_size=block_size, max_running_requests=1)
    for stops, min_tokens, text, used in (
        (["b你xay"], 0, START + "你xay", 12),
        (["b你xay"], 12, START + PERIOD + "你xay", 21),
        (["! b"], 0, START, 8),
        (["a"], 0, "hi\ufffdxa", 5),
    ):
        out = generate_one(llm, known_prompt(), max_new_tokens=40, stop=stops, min_tokens=min_tokens,
                           include_stop_str_in_output=True)  # fmt: skip
        assert (out.text, out.token_ids) == (text, known_case().token_ids[:used])


def test_an_ending_token_s_text_may_be_kept_too(any_llm: LLM) -> None:
    params = {"max_new_tokens": 40, "include_stop_str_in_output": True}
    out = generate_one(any_llm, known_prompt(), stop_token_ids=[48], **params)
    assert (out.token_ids[-1], out.text, out.finish_reason) == (48, "hi\ufffdxay!", "stop")
    both = generate_one(any_llm, known_prompt(), stop_token_ids=[48], stop="y!", **params)
    assert (both.token_ids, both.text, both.finish_reason) == (out.token_ids, out.text, "stop")


def test_a_stop_text_that_the_last_token_completes(any_llm: LLM) -> None:
    """By the limit, or together with an ending token, it is a stop; a token later it would not be there."""
    at_limit = generate_one(any_llm, known_prompt(), max_new_tokens=16, stop="😀")
    assert (len(at_limit.token_ids), at_limit.text, at_limit.finish_reason) == (16, START + "你xay", "stop")
    too_late = generate_one(any_llm, known_prompt(), max_new_tokens=15, stop="😀")
    assert (len(too_late.token_ids), too_late.finish_reason) == (15, "length")


def test_a_stop_text_before_an_ending_token_of_the_same_block(any_llm: LLM) -> None:
    out = generate_one(any_llm, STEADY, max_new_tokens=40, stop="😀b", stop_token_ids=[32])
    assert (out.token_ids, out.text, out.finish_reason) == (CYCLE[:5], "", "stop")


def test_an_ending_token_before_the_stop_text_is_complete(any_llm: LLM) -> None:
    out = generate_one(any_llm, STEADY, max_new_tokens=40, stop="b你", stop_token_ids=[32])
    assert (out.token_ids, out.text, out.finish_reason) == (CYCLE[:7], "😀b\ufffd", "stop")


def test_each_prompt_of_a_batch_has_its_own_stop(two_slots: LLM) -> None:
    params = [SamplingParams(max_new_tokens=40, stop=stop) for stop in ("😀", (), "y")]
    outs = two_slots.generate([known_prompt()] * 3, params)
    assert [(len(out.token_ids), out.finish_reason) for out in outs] == [(16, "stop"), (40, "length"), (5, "stop")]


def test_after_stops_and_limits_no_page_is_held(two_slots: LLM) -> None:
    two_slots.generate([known_prompt()] * 3, [SamplingParams(max_new_tokens=n, stop="😀") for n in (40, 3, 15)])
    metrics = two_slots.engine.metrics()
    assert (metrics.num_requests_running, metrics.num_requests_waiting, metrics.num_pages_held) == (0, 0, 0)
    assert metrics.num_pages_free + metrics.num_pages_cached == metrics.num_pages


@pytest.mark.parametrize("stop", ["", ["a", ""], [3], 3])
def test_stop_texts_that_are_none(stop: Any) -> None:
    with pytest.raises(UserError, match="stop must be texts of at least one character, not "):
        SamplingParams(stop=stop)
