"""Prompt look-up: what it proposes, by hand and against a search written in the plainest way."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import fakes
from steps.lab import Lab, Request, Run, solo

from dflash_jax.drafters import Drafter, NgramDrafter
from dflash_jax.models import Rows
from drafters.cycles import PAGE, ngram_lab, says

COUNT = 5
WIDTH = 8  # pages of a table


def proposal(text: Sequence[int], count: int, longest: int, shortest: int) -> list[int]:
    """The drafter's contract, on the host."""
    last = len(text) - 1
    for size in range(min(longest, last), shortest - 1, -1):
        for end in range(last - 1, size - 2, -1):
            if text[end - size + 1 : end + 1] == text[last - size + 1 :]:
                period = text[end + 1 :]
                return [period[k % len(period)] for k in range(count)]
    return [text[-1]] * count


@jax.jit
def _draft(pool, rows):
    return NgramDrafter(COUNT + 1).draft(None, pool, rows)  # type: ignore[arg-type]


def device_proposals(texts: Sequence[Sequence[int]], drafter: NgramDrafter | None = None) -> list[list[int]]:
    """Four texts, committed but for their last token, in shuffled pages with rubbish around them."""
    rng = np.random.default_rng(len(texts[0]))
    tables = 1 + rng.permutation(len(texts) * WIDTH).reshape(len(texts), WIDTH)
    pool = rng.integers(0, 6, (len(texts) * WIDTH + 1, PAGE)).astype(np.int32)
    for table, text in zip(tables, texts, strict=True):
        for position, token in enumerate(text[:-1]):
            pool[table[position // PAGE], position % PAGE] = token
    lengths = np.array([len(text) - 1 for text in texts], np.int32)
    ids = np.full((len(texts), COUNT + 1), 0, np.int32)
    ids[:, 0] = [text[-1] for text in texts]
    rows = Rows(jnp.asarray(ids), jnp.zeros_like(ids), jnp.zeros_like(ids), jnp.asarray(tables, jnp.int32),
                jnp.asarray(lengths))  # fmt: skip
    if drafter is None:
        return np.asarray(_draft(jnp.asarray(pool), rows)).tolist()
    return np.asarray(drafter.draft(None, jnp.asarray(pool), rows)).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcdxxabcd", "xxabc"),  # four tokens match; what followed them follows again
        ("abxcabyab", "yabya"),  # the more recent of two matches; past the end it repeats
        ("zabcqabdabc", "qabda"),  # three tokens before two, though the two are more recent
        ("aaaa", "aaaaa"),  # the match overlaps the suffix
        ("abababa", "babab"),
        ("abcdefa", "bcdef"),  # one token is enough by default
        ("abcdef", "fffff"),  # nothing: the bonus again
        ("a", "aaaaa"),
        ("aa", "aaaaa"),
        ("ab", "bbbbb"),
    ],
)
def test_proposals_by_hand(text: str, expected: str):
    ids = [ord(letter) - ord("a") for letter in text]
    assert proposal(ids, COUNT, 4, 1) == [ord(letter) - ord("a") for letter in expected]
    assert device_proposals([ids] * 4)[0] == proposal(ids, COUNT, 4, 1)


def test_random_texts_agree_with_a_plain_search():
    """400 texts of every length that the pages hold, over two to six tokens, so that matches abound."""
    rng = random.Random(5)
    found = 0
    for _ in range(100):
        texts = []
        for _ in range(4):
            alphabet = rng.randrange(2, 7)
            texts.append([rng.randrange(alphabet) for _ in range(rng.randrange(1, WIDTH * PAGE + 1))])
        expected = [proposal(text, COUNT, 4, 1) for text in texts]
        assert device_proposals(texts) == expected
        found += sum(row != [text[-1]] * COUNT for row, text in zip(expected, texts, strict=True))
    assert found > 250


@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (6, 3)])
def test_shortest_and_longest_suffix(longest: int, shortest: int):
    rng = random.Random(longest)
    texts = [[rng.randrange(3) for _ in range(n)] for n in (3, 9, 20, 32)]
    drafter = NgramDrafter(COUNT + 1, longest, shortest)
    assert device_proposals(texts, drafter) == [proposal(text, COUNT, longest, shortest) for text in texts]


# -- in rounds -------------------------------------------------------------------------------------------------------


def served(lab: Lab, prompt: Sequence[int], new: int, block: int | None = None) -> Request:
    request = solo(lab, prompt, new, block)
    assert request.tokens == says(prompt, new)
    return request


def test_it_is_a_drafter():
    drafter = NgramDrafter()
    assert isinstance(drafter, Drafter) and drafter == NgramDrafter(8, 4, 1) and hash(drafter) == hash(NgramDrafter())
    lab = ngram_lab()
    assert np.asarray(lab.state().draft).nbytes == lab.num_pages * drafter.page_bytes(PAGE, np.float32)


def test_acceptance_by_hand():
    """The text goes 0 1 2 3 4 0 1 …: nothing is right until the sixth token, everything after it."""
    assert served(ngram_lab(), [0], 1 + 4 + 3 * 8).accepted == [1, 1, 1, 1, 8, 8, 8]
    assert served(ngram_lab(), [0, 1, 2, 3, 4, 0], 1 + 16).accepted == [8, 8]
    # 0 1 was followed by 2 9, of which 2 is right; 3 and 4 have not occurred; the newest 0 was followed by 1 2 3 4 0.
    assert served(ngram_lab(), [0, 1, 2, 9, 0], 1 + 12).accepted == [2, 1, 1, 8]


def test_acceptance_of_longer_suffixes_only():
    """With prompt_lookup_min 3 the text 0 1 2 3 4 0 1 2 needs eight tokens before a suffix of three has occurred."""
    lab = ngram_lab(prompt_lookup_max=3, prompt_lookup_min=3)
    assert served(lab, [0], 1 + 6 + 2 * 8).accepted == [1] * 6 + [8, 8]


@pytest.mark.parametrize("block", [2, 3, 8])
def test_blocks_of_any_size(block: int):
    assert served(ngram_lab(), [0, 1, 2, 3, 4, 0], 1 + 3 * block, block).accepted == [block] * 3


def test_requests_in_a_batch_and_at_random_widths():
    """Each row of a launch searches its own text; widths may change from round to round."""
    lab, rng = ngram_lab(), random.Random(1)
    news = {0: ([0], 60), 1: ([7, 7], 20), 2: ([30, 31, 5], 60), 3: ([3] * 9, 60)}
    requests = [Request(i, prompt, len(prompt) + new) for i, (prompt, new) in news.items()]
    run = Run(lab, requests).prefill()
    while run.live:
        run.round(rng.choice([1, 2, 3, 8]))
    for request in requests:
        assert request.tokens == says(request.prompt, news[request.slot][1])
    assert max(requests[0].accepted) == 8 > 1 == max(requests[1].accepted)  # 8 9 10 … 27 does not come round


def test_a_shared_prefix_carries_its_text():
    """CASES 3 and 22: the second request's table names the first one's pages, whose tokens it has not written.

    The match 0 1 is in them, followed by 2 3 4 20, of which three are right.
    """
    lab, prompt = ngram_lab(), [20, 0, 1, 2, 3, 4, 20, 21]
    first = Request(0, prompt, len(prompt) + 9)
    run = Run(lab, [first]).prefill()
    second = Request(1, [*prompt, 0], len(prompt) + 18, shared=8, table=[*lab.table(0)[:2], *lab.table(1)[2:]])
    before = np.asarray(run.state.draft)[lab.table(0)[:2]]
    both = Run(lab, [second], run.state).prefill().decode()
    assert second.tokens == says(second.prompt, 17) and second.accepted == [4, 8, 4]
    np.testing.assert_array_equal(before, np.asarray(both.state.draft)[lab.table(0)[:2]])


def test_the_pool_holds_the_committed_tokens_and_nothing_else_is_read():
    """Invariant 4: after each round the committed rows are the text; rubbish in all others changes nothing."""
    lab = ngram_lab()
    request = Request(2, [0], 1 + 29)
    run = Run(lab, [request]).prefill()
    while run.live:
        tokens = [*request.prompt, *request.tokens]
        pool = np.array(run.state.draft)
        where = [((request.table or [])[p // PAGE], p % PAGE) for p in range(request.seq_len)]
        assert [pool[at].item() for at in where] == tokens[:-1]
        poisoned = np.full_like(pool, -7)
        for at in where:
            poisoned[at] = pool[at]
        run.state = dataclasses.replace(run.state, draft=jnp.asarray(poisoned))
        run.round()
    assert request.tokens == says([0], 29) and request.accepted == [1, 1, 1, 1, 8, 8, 8]


def test_a_real_target_keeps_its_text():
    """The toy target of the step tests, whose text goes on for long before it repeats."""
    lab = Lab(dataclasses.replace(fakes.plain_lab().config, drafter=NgramDrafter(fakes.BLOCK)),
              fakes.plain_lab().weights, 4, 32, 6, fakes.TEXT // fakes.PAGE, True)  # fmt: skip
    prompts = [fakes.prompt_of(n) for n in (5, 12, 1)]
    run = Run(lab, [Request(i, prompt, len(prompt) + 80) for i, prompt in enumerate(prompts)]).prefill().decode()
    for request in run.requests:
        assert request.tokens == fakes.truth(request.prompt, 80) and sum(request.accepted) == 79
    assert max(max(request.accepted) for request in run.requests) > 1


def test_a_slot_used_again_does_not_see_the_old_text():
    """CASE 9."""
    lab = ngram_lab()
    state = Run(lab, [Request(0, [0, 1, 2, 3, 4] * 5, 60)]).prefill().decode().state
    short = Request(0, [0], 1 + 13)
    Run(lab, [short], state).prefill().decode()
    assert short.accepted == [1, 1, 1, 1, 8] and short.tokens == says([0], 13)
