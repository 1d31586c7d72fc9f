"""Fake drafters with acceptance worked out by hand, limits and stop tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dflash_jax.drafters import DFlashDrafter, Drafter, NoDrafter
from dflash_jax.ops import LENGTH, RUNNING, STOP
from dflash_jax.steps import StepConfig
from steps import fakes
from steps.fakes import BLOCK, MASK, PAGE, TARGET, ScriptedDrafter, prompt_of, scripted, scripted_lab, truth
from steps.lab import Lab, Request, Run, pools, solo

PROMPTS = [prompt_of(n) for n in (5, 12, 1, 20)]


def requests(new: int, prompts=PROMPTS, **how) -> list[Request]:
    return [Request(i, prompt, len(prompt) + new, **how) for i, prompt in enumerate(prompts)]


def test_the_fakes_are_drafters():
    for drafter in (ScriptedDrafter(DFlashDrafter(fakes.DRAFT)), NoDrafter(), DFlashDrafter(fakes.DRAFT)):
        assert isinstance(drafter, Drafter) and hash(drafter) is not None


def test_the_toy_text_is_worth_guessing():
    for prompt in PROMPTS:
        assert len(set(truth(prompt, 64))) > 8
    assert any(MASK in truth(prompt, 33) for prompt in PROMPTS)


@pytest.mark.parametrize("right", range(BLOCK))
def test_right_for_j_tokens_is_acceptance_j_plus_one(right: int):
    """Always right: 8.00.  Always wrong: 1.00.  The text is the target's own in every case."""
    rounds = 4
    run = scripted(right, requests(1 + rounds * (right + 1))).decode()
    for request in run.requests:
        assert request.tokens == truth(request.prompt, 1 + rounds * (right + 1))
        assert request.accepted == [right + 1] * rounds
        assert np.mean(request.accepted) == right + 1
        assert request.finish == LENGTH


@pytest.mark.parametrize("block", [2, 3, 5])
def test_blocks_shorter_than_trained(block: int):
    """`block` is an argument of the round; the drafter proposes block − 1 tokens."""
    right = block - 1
    run = scripted(right, requests(1 + 3 * block)).decode(block)
    for request in run.requests:
        assert request.tokens == truth(request.prompt, 1 + 3 * block) and request.accepted == [block] * 3


def test_an_untrained_draft_never_changes_the_text():
    lab = fakes.dflash_lab()
    run = Run(lab, requests(40)).prefill().decode()
    for request in run.requests:
        assert request.tokens == truth(request.prompt, 40) and sum(request.accepted) == 39


def test_the_mask_token_is_a_token_like_any_other():
    """CASE 15: the target says it; it is emitted, counted and carried on as bonus."""
    for right in (0, 3, BLOCK - 1):
        run = scripted(right, requests(40)).decode()
        said = [request.tokens for request in run.requests]
        assert said == [truth(prompt, 40) for prompt in PROMPTS] and any(MASK in tokens for tokens in said)


@pytest.mark.parametrize("right", [0, 2, BLOCK - 1])
@pytest.mark.parametrize("news", [(1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12), (13, 14, 15, 16)], ids=str)
def test_never_more_tokens_than_asked_for(news: tuple[int, ...], right: int):
    """CASE 12: every limit from 1 to 2B."""
    asked = [Request(i, p, len(p) + new) for i, (p, new) in enumerate(zip(PROMPTS, news, strict=True))]
    for request, new in zip(scripted(right, asked).decode().requests, news, strict=True):
        assert request.tokens == truth(request.prompt, new) and request.finish == LENGTH
        whole, rest = divmod(new - 1, right + 1)
        assert request.accepted == [right + 1] * whole + [rest] * (rest > 0)


def first_seen(index: int) -> list[int]:
    """A prompt whose text has a token for the first time at that index (0 comes from the prefill)."""
    for seed in range(40):
        prompt = prompt_of(1 + seed % 9, seed)
        text = truth(prompt, index + 1)
        if text[index] not in text[:index]:
            return prompt
    raise AssertionError(f"no text has a new token at {index}")


@pytest.mark.parametrize("nth", range(0, BLOCK + 1))
def test_a_stop_token_anywhere_in_a_block(nth: int):
    """CASE 13: from prefill (0), or as 1st to 8th of a block: reason `stop`, nothing after it; else it is text."""
    prompt = first_seen(nth)
    stop = truth(prompt, nth + 1)[nth]
    for right in (0, 3, BLOCK - 1):
        stopped, ignored = Request(0, prompt, len(prompt) + 30, stop=(99, stop)), Request(1, prompt, len(prompt) + 30)
        scripted(right, [stopped, ignored]).decode()
        assert stopped.tokens == truth(prompt, nth + 1) and stopped.finish == STOP
        assert ignored.tokens == truth(prompt, 30) and ignored.finish == LENGTH


def test_a_finished_row_writes_to_the_padding_page_only():
    """Rounds that still name a finished slot (the host is a round late) leave every other page as it was."""
    done, going = requests(3)[:2]
    going.limit += 40
    run = scripted(BLOCK - 1, [done, going]).round()
    assert (done.finish, going.finish) == (LENGTH, RUNNING)
    lab = run.lab
    before, length = pools(run.state), int(run.state.seq_len[0])
    state, packed = lab.steps.decode_round(BLOCK, lab.weights, run.state, lab.where([0]))
    assert np.asarray(packed)[0].tolist() == [0] * (BLOCK + 2)
    for a, b in zip(before, pools(state), strict=True):
        start = PAGE if a.ndim == 1 else 1  # the log is by location, pools by page
        np.testing.assert_array_equal(a[start:], b[start:])
    assert int(state.seq_len[0]) == length and bool(state.finished[0]) and not bool(state.finished[1])
    run.state = state
    assert run.decode().requests[1].tokens == truth(going.prompt, 43)


def test_the_host_stops_a_slot():
    run = scripted(3, requests(40)[:2]).round()
    run.state = run.lab.steps.finish(run.state, run.lab.where([0], 6))
    stopped, other = run.requests
    count = len(stopped.tokens)
    run.round()
    assert len(stopped.tokens) == count and stopped.accepted[-1] == 0
    stopped.finish = STOP
    assert run.decode().requests[1].tokens == truth(other.prompt, 40)


def test_pages_come_as_they_are_needed():
    """A table that starts with what the prompt needs and is extended before each round, as the engine does."""
    lab, request = scripted_lab(), requests(60)[1]
    whole = lab.table(request.slot)
    request.table = whole[:2]
    run = scripted(BLOCK - 1, [request])
    for round_ in range(20):
        if not run.live:
            break
        entries = [(request.slot, i, whole[i]) for i in range(2 + round_, min(3 + round_, lab.width))]
        updates = np.array([*entries, *[(lab.slots, 0, 0)] * (8 - len(entries))], np.int32)
        run.state = lab.steps.extend(run.state, updates)
        run.round()
    assert request.tokens == truth(request.prompt, 60)
    np.testing.assert_array_equal(run.state.page_table[-1], np.zeros(lab.width))


@pytest.mark.parametrize("prompt", [[0], [28], [MASK]], ids=str)
def test_a_prompt_of_one_token(prompt: list[int]):
    """CASE 16."""
    run = scripted(5, [Request(0, prompt, 1 + 19)]).decode()
    assert run.requests[0].tokens == truth(prompt, 19) and run.requests[0].accepted == [6, 6, 6]


def test_plain_decoding_counts_one_token_a_round():
    request = solo(fakes.plain_lab(), PROMPTS[0], 7)
    assert request.accepted == [1] * 6 and request.finish == LENGTH


def test_pages_cost_what_drafters_say():
    for drafter in (NoDrafter(), DFlashDrafter(fakes.DRAFT), ScriptedDrafter(DFlashDrafter(fakes.DRAFT))):
        lab = Lab(StepConfig(TARGET, drafter, PAGE), fakes.toy_weights(), 4, 32, 6, 4)
        held = sum(pool.nbytes for pool in pools(dataclasses.replace(lab.state(), kv=())))
        assert held == lab.num_pages * drafter.page_bytes(PAGE, np.float32)
