"""Every recorded pair decodes token for token, and with the reference's acceptance, drafts included."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dflash_jax.ops import LENGTH
from dflash_jax.state import gather
from dflash_jax.steps import draft, prepare
from steps.lab import PAIRS, Lab, Request, Run, light_options, oracle_cases, oracle_lab, pools

NAMES = sorted(path.name for path in PAIRS.iterdir())
each_pair = pytest.mark.parametrize("name", NAMES)


def requests_of(cases) -> list[Request]:
    return [Request(i, c["prompt_ids"], len(c["prompt_ids"]) + c["max_new_tokens"]) for i, c in enumerate(cases)]


def check(request: Request, case) -> None:
    """Tokens, acceptance of the comparable rounds, and that no token came from nowhere."""
    assert request.tokens == case["token_ids"] == case["greedy_token_ids"]
    count = case["comparable_rounds"]
    assert request.accepted[:count] == case["accept_lengths"][:count]
    assert sum(request.accepted) == len(request.tokens) - 1
    assert request.finish == LENGTH


def whole_blocks(name: str):
    lab = oracle_lab(name)
    return lab, [case for case in oracle_cases(name) if case["block_size"] == lab.block]


@each_pair
def test_a_batch_of_whole_blocks(name: str):
    """Six prompts of 1 to 40 tokens in one batch."""
    lab, cases = whole_blocks(name)
    run = Run(lab, requests_of(cases)).prefill().decode()
    for request, case in zip(run.requests, cases, strict=True):
        check(request, case)


@pytest.mark.parametrize("name", ["qwen3-v1-window", "x-causal-yarn", "x-noncausal-window", "x-v2-scaled"])
def test_every_drafted_token(name: str):
    """The rejected ones too: each block before each round is the recorded one, right or wrong."""
    lab, cases = whole_blocks(name)
    run = Run(lab, requests_of(cases)).prefill()
    proposals = _proposals(lab)
    found: list[list[list[int]]] = [[] for _ in cases]
    while run.live:
        slots = [request.slot for request in run.live]
        proposed = np.asarray(proposals(lab.weights, run.state, lab.where(slots))).tolist()
        for slot, row in zip(slots, proposed, strict=False):
            found[slot].append(row)
        run.round()
    for drafted, case in zip(found, cases, strict=True):
        assert drafted[: case["comparable_rounds"]] == case["drafts"]


def _proposals(lab: Lab):
    """The drafts of a round as a function of its own; the state is only read."""

    def proposals(weights, state, slots):
        rows = prepare(lab.config, gather(state, slots), lab.block)
        return draft(lab.config, weights, state, rows).ids[:, 1:]

    return jax.jit(proposals, compiler_options=light_options())


def shorter(name: str):
    return [case for case in oracle_cases(name) if case["block_size"] < oracle_lab(name).block]


@pytest.mark.parametrize(
    "name, which",
    [
        pytest.param(name, which, marks=pytest.mark.slow if (i + which) % 2 else ())
        for i, name in enumerate(NAMES)
        for which in (0, 1)
    ],
)
def test_a_shorter_block(name: str, which: int):
    """Blocks of 3 or 4 tokens, and of 2; half of them are enough for every day."""
    case = shorter(name)[which]
    run = Run(oracle_lab(name), requests_of([case])).prefill().decode(case["block_size"])
    check(run.requests[0], case)


def test_recorded_blocks_are_of_many_sizes():
    sizes = {case["block_size"] for name in NAMES for case in oracle_cases(name)}
    assert sizes >= {2, 3, 4, 5, 6, 8, 12}


CHUNKED = "x-default-taps"  # the cheapest to compile; its bucket is the one above


@pytest.mark.parametrize("chunk", [1, 13, 16, 39])
def test_a_prompt_in_chunks(chunk: int):
    """CASE 16: a remainder of exactly one token (40 = 39 + 1, 17 = 16 + 1), and chunks of one token."""
    lab, cases = whole_blocks(CHUNKED)
    run = Run(lab, requests_of(cases)).prefill(chunk).decode()
    for request, case in zip(run.requests, cases, strict=True):
        check(request, case)


def test_chunks_leave_the_same_pages_behind():
    lab, cases = whole_blocks(CHUNKED)
    one, many = (Run(lab, requests_of(cases)).prefill(chunk) for chunk in (None, 13))
    for a, b in zip(pools(one.state), pools(many.state), strict=True):
        np.testing.assert_allclose(a[1:], b[1:], atol=1e-4)
    for name in ("bonus", "seq_len", "limit", "finished"):
        np.testing.assert_array_equal(getattr(one.state, name)[:-1], getattr(many.state, name)[:-1])


def test_a_request_alone_equals_itself_in_a_batch():
    """Alone, in any slot, and joined later by another: same tokens, same acceptance."""
    lab, cases = whole_blocks(CHUNKED)
    for slot in (0, 3, 5):
        request = requests_of([cases[2]])[0]
        request.slot = slot
        check(Run(lab, [request]).prefill().decode().requests[0], cases[2])
    first, second = requests_of(cases[2:4])
    alone = Run(lab, [first]).prefill().round().round()
    joined = Run(lab, [second], alone.state).prefill()
    Run(lab, [second, first], joined.state, admit=False).decode()
    check(first, cases[2])
    check(second, cases[3])


def test_a_slot_used_again():
    """CASE 9: a long request, then a short one in the same slot and pages, without anything of the first."""
    lab, cases = whole_blocks(CHUNKED)
    long, short = requests_of([cases[3]])[0], requests_of([cases[0]])[0]
    state = Run(lab, [long]).prefill().decode().state
    check(Run(lab, [short], state).prefill().decode().requests[0], cases[0])


def test_a_cached_prefix():
    """CASES 3 and 22: pages shared by table carry the draft's KV too, and nobody writes to them."""
    lab, cases = whole_blocks(CHUNKED)
    first, second = requests_of([cases[3]])[0], requests_of([cases[3]])[0]
    run = Run(lab, [first]).prefill()
    second.slot, second.shared = 1, 32
    second.table = [*lab.table(0)[:2], *lab.table(1)[2:]]
    before = [pool[lab.table(0)[:2]] for pool in pools(run.state)]
    both = Run(lab, [second], run.state).prefill()
    both.requests.append(first)
    both.decode()
    check(first, cases[3])
    check(second, cases[3])
    for a, b in zip(before, (pool[lab.table(0)[:2]] for pool in pools(both.state)), strict=True):
        np.testing.assert_array_equal(a, b)
