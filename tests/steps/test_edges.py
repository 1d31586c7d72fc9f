"""The ends of tables and buckets, garbage where nobody looks, and numbers that are none."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.drafters import Weights
from dflash_jax.ops import BROKEN, LENGTH, RUNNING
from dflash_jax.state import DecodeState
from steps import fakes
from steps.fakes import BLOCK, PAGE, TEXT, prompt_of, scripted, scripted_lab, truth
from steps.lab import Lab, Request, Run, pools


def by_page(pool: np.ndarray) -> np.ndarray:
    return pool.reshape(-1, PAGE) if pool.ndim == 1 else pool


def unchanged_outside(before: list[np.ndarray], after: list[np.ndarray], pages: list[int]) -> None:
    """Bit for bit, but for `pages` and the padding page."""
    for a, b in zip(before, after, strict=True):
        kept = np.setdiff1d(np.arange(len(by_page(a))), [0, *pages])
        np.testing.assert_array_equal(by_page(a)[kept], by_page(b)[kept])


@pytest.mark.parametrize("right", [0, 3, BLOCK - 1])
def test_the_very_end_of_the_table(right: int):
    """CASES 19 and 20: prompt 240, context 256, B 8, with the neighbours' pages full: 16 tokens, reason `length`."""
    edge = Request(0, prompt_of(240), TEXT)
    neighbours = [Request(i, prompt_of(30 + i), TEXT) for i in (1, 2, 3)]
    run = scripted(right, [edge, *neighbours])
    before = pools(run.state)
    run.requests = [edge]
    run.decode()
    assert edge.tokens == truth(edge.prompt, 16) and edge.finish == LENGTH and edge.seq_len == TEXT - 1
    unchanged_outside(before, pools(run.state), edge.table or [])
    run.requests = neighbours
    run.round().round()
    for request in neighbours:
        assert request.tokens == truth(request.prompt, len(request.tokens)) and len(request.tokens) == 2 * right + 3


@pytest.mark.parametrize("pages, limit", [(2, 16), (2, 15), (2, 14), (1, 8)])
def test_the_end_of_what_is_reserved(pages: int, limit: int):
    """A short request whose block reaches past its own pages, where the table names the padding page."""
    short, neighbour = Request(0, prompt_of(5), limit), Request(1, prompt_of(20), TEXT)
    short.table = scripted_lab().table(0)[:pages]
    run = scripted(BLOCK - 1, [short, neighbour])
    before = pools(run.state)
    run.requests = [short]
    run.decode()
    assert short.tokens == truth(short.prompt, limit - 5) and short.finish == LENGTH
    unchanged_outside(before, pools(run.state), short.table)


def test_a_limit_past_the_table_harms_nobody_else():
    """The engine never asks for it; the request may break, its neighbour may not."""
    greedy, neighbour = Request(0, prompt_of(12), 10 * TEXT), Request(1, prompt_of(20), TEXT)
    greedy.table = scripted_lab().table(0)[:2]
    run = scripted(3, [greedy, neighbour])
    before = pools(run.state)
    run.requests = [greedy]
    for _ in range(4):
        run.round()
    unchanged_outside(before, pools(run.state), greedy.table)
    run.requests = [neighbour]
    assert run.round().requests[0].tokens == truth(neighbour.prompt, 5)


# -- buckets larger than what lives --------------------------------------------------------------------------------


def garbage(state: DecodeState, slots: list[int], rng: np.random.Generator, *, finished: bool) -> DecodeState:
    """Anything at all in these slots, tables that name everybody's pages included."""
    at, n = jnp.asarray(slots), len(slots)
    pages = state.kv[0].shape[0]

    def anything(low: int, high: int, *shape: int):
        return jnp.asarray(rng.integers(low, high, (n, *shape)), jnp.int32)

    sampling = jax.tree.map(lambda x: x.at[at].set(anything(0, 99, *x.shape[1:]).astype(x.dtype)), state.sampling)
    return dataclasses.replace(
        state,
        sampling=sampling,
        bonus=state.bonus.at[at].set(anything(0, 29)),
        seq_len=state.seq_len.at[at].set(anything(0, 100_000)),
        limit=state.limit.at[at].set(anything(0, 2_000_000_000)),
        finished=state.finished.at[at].set(finished),
        page_table=state.page_table.at[at].set(anything(0, pages, state.page_table.shape[1])),
    )


def test_thirty_three_requests_in_a_bucket_of_forty_eight():
    """CASE 21: unused slots, and the padding slot, hold garbage; nothing of it is read or written."""
    drafter = fakes.dflash_lab().config
    lab = Lab(drafter, fakes.toy_weights(), bucket=48, chunk=16, slots=50, width=6)
    rng = np.random.default_rng(0)
    slots = rng.permutation(50)[:33].tolist()
    prompts = [prompt_of(n) for n in (3, 9, 14)]
    asked = [Request(slot, prompts[i % 3], len(prompts[i % 3]) + 6 + i % 5) for i, slot in enumerate(slots)]
    unused = sorted(set(range(50)) - set(slots))
    state = garbage(lab.state(), unused, rng, finished=False)
    run = Run(lab, asked, garbage(state, [50], rng, finished=True)).prefill()
    before = pools(run.state)
    others = [page for slot in unused for page in lab.table(slot)]
    run.decode()
    for request in run.requests:
        assert request.tokens == truth(request.prompt, request.limit - len(request.prompt))
        assert request.finish == LENGTH
    owned = [page for request in run.requests for page in request.table or []]
    assert not set(others) & set(owned)
    unchanged_outside(before, pools(run.state), owned)
    for slot in unused:
        assert not bool(run.state.finished[slot])


def test_rows_of_one_request_in_any_order():
    asked = [Request(i, prompt_of(n), TEXT) for i, n in enumerate((5, 12, 1, 20))]
    run = scripted(3, asked)
    for order in ([2, 0, 3, 1], [3, 1], [0, 2, 1], [1]):
        run.requests = [asked[i] for i in order]
        run.round()
    for request in asked:
        assert request.tokens == truth(request.prompt, len(request.tokens))
        assert request.accepted == [4] * len(request.accepted)


# -- numbers that are none -----------------------------------------------------------------------------------------


def without(token: int):
    """The toy target with an embedding row of NaN: whoever reads that token computes nothing but NaN."""
    target = fakes.toy_weights().target
    return {**target, "embed": target["embed"].at[token].set(jnp.nan)}


def absent_from(*texts: list[int]) -> int:
    return next(token for token in range(29) if all(token not in text for text in texts))


def test_nan_in_a_prompt_ends_that_request_alone():
    """CASE 31: no token, finish BROKEN, and the request beside it is untouched."""
    good = prompt_of(9)
    bad_token = absent_from(good, truth(good, 40))
    bad = Request(0, [*prompt_of(5), bad_token, 1, 2], TEXT)
    other = Request(1, good, len(good) + 30)
    run = scripted(3, [bad, other], target=without(bad_token))
    assert (bad.tokens, bad.finish) == ([], BROKEN) and bool(run.state.finished[0])
    run.decode()
    assert other.tokens == truth(good, 30)


@pytest.mark.parametrize("right", [0, 3, BLOCK - 1])
def test_nan_while_decoding_keeps_the_tokens_before_it(right: int):
    """The text up to the poisonous token comes out, as in plain decoding, and then the request is broken."""
    prompt, good = prompt_of(12), prompt_of(9)
    text = truth(prompt, 40)
    bad_token = next(t for i, t in enumerate(text) if i > 12 and t not in [*prompt, *text[:i], *good, *truth(good, 30)])
    bad, other = Request(0, prompt, TEXT), Request(1, good, len(good) + 30)
    run = scripted(right, [bad, other], target=without(bad_token)).decode()
    assert bad.tokens == text[: text.index(bad_token) + 1] and bad.finish == BROKEN
    assert other.tokens == truth(good, 30)
    assert bool(run.state.finished[0])


def test_nan_behind_a_rejected_draft_says_nothing():
    """A wrong draft whose row is NaN is rejected like any other: rows before it do not see it."""
    lab, prompt = fakes.scripted_lab(), prompt_of(12)
    text = truth(prompt, 20)
    wrong = {(token + 1) % 29 for token in text}  # what the fake proposes instead
    bad_token = next(token for token in wrong if token not in [*prompt, *text])
    run = scripted(0, [Request(0, prompt, len(prompt) + 20)], target=without(bad_token)).decode()
    assert run.requests[0].tokens == text and run.requests[0].finish == LENGTH
    assert run.requests[0].accepted == [1] * 19 and lab.block == BLOCK


def test_a_pool_full_of_nan_breaks_what_reads_it():
    """So the poison of the other tests is poison."""
    asked = [Request(0, prompt_of(9), 60)]
    run = scripted(3, asked)
    run.state = dataclasses.replace(run.state, kv=tuple(layer * jnp.nan for layer in run.state.kv))
    assert run.round().requests[0].finish == BROKEN


def test_a_round_of_padding_rows_only():
    """What warm-up runs: nothing is emitted, and the state stays as it was but for the padding page."""
    lab = fakes.dflash_lab()
    run = Run(lab, [Request(0, prompt_of(9), 60)]).prefill()
    before, bonus = pools(run.state), np.asarray(run.state.bonus)
    state, packed = lab.steps.decode_round(BLOCK, lab.weights, run.state, lab.where([]))
    assert not np.asarray(packed).any()
    unchanged_outside(before, pools(state), [])
    np.testing.assert_array_equal(bonus, state.bonus)
    assert run.requests[0].finish == RUNNING and isinstance(lab.weights, Weights)
