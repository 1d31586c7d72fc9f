"""accept_bonus against a reference that walks token by token, over every small case and many large ones."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from dflash_jax.ops import BROKEN, LENGTH, RUNNING, STOP
from dflash_jax.ops.dispatch import Kernels
from ops.conftest import PLATFORM


def walk(block, target, broken, seq_len, limit, stops, live):
    """(commit_len, bonus, finish, tokens) of one request, one token at a time."""
    out, row, finish = [], 0, RUNNING
    while live:
        if seq_len + 1 + len(out) >= limit:  # prompt, earlier output and the bonus of this block count
            finish = LENGTH
        elif broken[row]:
            finish = BROKEN
        else:
            out.append(target[row])
            if target[row] in stops:
                finish = STOP
            elif seq_len + 1 + len(out) >= limit:
                finish = LENGTH
            elif row + 1 < len(block) and block[row + 1] == target[row]:
                row += 1
                continue
        break
    return len(out), out[-1] if out else block[0], finish, out + [0] * (len(block) - len(out))


def accept(kernels: Kernels, block, target, broken=None, seq_len=5, limit=1000, stops=(-1,), live=True):
    """One request through the op, as `walk` returns it."""
    broken = np.zeros(len(block), bool) if broken is None else np.asarray(broken)
    found = kernels.accept_bonus(
        np.asarray([block], np.int32), np.asarray([target], np.int32), broken[None], np.asarray([seq_len], np.int32),
        np.asarray([limit], np.int32), np.asarray([stops], np.int32), np.asarray([live]),
    )  # fmt: skip
    *numbers, tokens = (np.asarray(x)[0] for x in found)
    return (*map(int, numbers), tokens.tolist())


def check_all(kernels: Kernels, cases) -> None:
    """All cases in one call of the op; some of them where a program for each is interpreted."""
    if kernels.backend == "triton" and PLATFORM != "gpu":
        cases = random.Random(0).sample(cases, 300)
    block, target, broken, seq_len, limit, stops, live = zip(*cases, strict=True)
    found = kernels.accept_bonus(
        np.asarray(block, np.int32), np.asarray(target, np.int32), np.asarray(broken), np.asarray(seq_len, np.int32),
        np.asarray(limit, np.int32), np.asarray(stops, np.int32), np.asarray(live),
    )  # fmt: skip
    expected = [walk(*case) for case in cases]
    for name, mine, theirs in zip(found._fields, found, zip(*expected, strict=True), strict=True):
        different = np.flatnonzero((np.asarray(mine) != np.asarray(theirs)).reshape(len(cases), -1).any(axis=1))
        assert not different.size, (name, cases[different[0]], np.asarray(mine)[different[0]], theirs[different[0]])
        assert mine.dtype == np.int32


def test_the_example_of_the_design(kernels: Kernels):
    """Accept 2 drafts, commit 3, bonus 5: out [3, 4, 5]."""
    assert accept(kernels, [7, 3, 4, 9], [3, 4, 5, 1]) == (3, 5, RUNNING, [3, 4, 5, 0])


@pytest.mark.parametrize("right", range(8))
def test_right_for_j_tokens_commits_j_plus_one(kernels: Kernels, right: int):
    text = [10 + i for i in range(9)]  # bonus, then what the target says
    drafts = [token if k <= right else 99 for k, token in enumerate(text[:8])]
    expected = text[1 : right + 2]
    tokens = expected + [0] * (7 - right)
    assert accept(kernels, drafts, text[1:]) == (right + 1, expected[-1], RUNNING, tokens)


@pytest.mark.parametrize("room", range(0, 17))
def test_every_limit_from_none_to_two_blocks(kernels: Kernels, room: int):
    """CASE 12: everything is accepted; the limit leaves `room` tokens, and never one more comes out."""
    text = [10 + i for i in range(9)]
    commit, bonus, finish, tokens = accept(kernels, text[:8], text[1:], seq_len=5, limit=6 + room)
    assert commit == min(room, 8) and tokens[:commit] == text[1 : commit + 1] and not any(tokens[commit:])
    assert finish == (LENGTH if room <= 8 else RUNNING)
    assert bonus == text[commit]


@pytest.mark.parametrize("nth", range(1, 9))
@pytest.mark.parametrize("ignore", [False, True])
def test_a_stop_token_as_first_to_last_of_a_block(kernels: Kernels, nth: int, ignore: bool):
    """CASE 13: reason `stop`, nothing after it; under ignore_eos (no stop ids) the block goes on."""
    text = [10 + i for i in range(9)]
    commit, bonus, finish, tokens = accept(kernels, text[:8], text[1:], stops=[-1, -1 if ignore else text[nth]])
    assert (commit, finish) == ((8, RUNNING) if ignore else (nth, STOP))
    assert tokens == text[1 : commit + 1] + [0] * (8 - commit) and bonus == text[commit]


def test_a_stop_token_behind_the_first_wrong_draft_does_not_count(kernels: Kernels):
    assert accept(kernels, [7, 3, 9, 5], [3, 4, 5, 1], stops=[5]) == (2, 4, RUNNING, [3, 4, 0, 0])


def test_a_stop_token_at_the_limit_is_a_stop(kernels: Kernels):
    assert accept(kernels, [7, 3], [3, 4], seq_len=5, limit=8, stops=[4])[2] == STOP
    assert accept(kernels, [7, 3], [3, 4], seq_len=5, limit=8, stops=[9])[2] == LENGTH


def test_minus_one_pads_stop_ids_and_no_token_equals_it(kernels: Kernels):
    assert accept(kernels, [7, 0], [0, 1], stops=[-1] * 16)[2] == RUNNING


def test_rows_before_a_nan_are_kept_and_the_request_ends(kernels: Kernels):
    """CASE 31: what was chosen before the NaN stands; a NaN behind a wrong draft says nothing."""
    nan_in_2 = [False, False, True, False]
    assert accept(kernels, [7, 3, 4, 5], [3, 4, 5, 6], nan_in_2) == (2, 4, BROKEN, [3, 4, 0, 0])
    assert accept(kernels, [7, 3, 9, 5], [3, 4, 5, 6], nan_in_2) == (2, 4, RUNNING, [3, 4, 0, 0])
    assert accept(kernels, [7, 3, 4, 5], [3, 4, 5, 6], [True] * 4) == (0, 7, BROKEN, [0, 0, 0, 0])


def test_a_row_that_is_not_live_commits_nothing(kernels: Kernels):
    found = accept(kernels, [7, 3, 4, 9], [3, 4, 5, 1], [True] * 4, limit=0, stops=[3], live=False)
    assert found == (0, 7, RUNNING, [0, 0, 0, 0])


def test_plain_decoding_is_a_block_of_one_row(kernels: Kernels):
    assert accept(kernels, [7], [3]) == (1, 3, RUNNING, [3])
    assert accept(kernels, [7], [3], stops=[3]) == (1, 3, STOP, [3])


def test_every_case_of_three_rows_and_two_tokens(kernels: Kernels):
    bits = list(itertools.product((0, 1), repeat=3))
    nans = list(itertools.product((False, True), repeat=3))
    rooms, stops = range(5, 11), [(-1, -1), (0, -1), (-1, 1), (0, 1)]
    check_all(kernels, list(itertools.product(bits, bits, nans, [5], rooms, stops, [True, False])))


@pytest.mark.parametrize("seed", range(3))
def test_random_cases_of_eight_rows(kernels: Kernels, seed: int):
    """Drafts that agree most of the time, so that every length of acceptance occurs."""
    rng = np.random.default_rng(seed)
    cases, lengths = [], set()
    for _ in range(4000):
        target = rng.integers(0, 20, 8)
        drafts = np.where(rng.random(7) < 0.85, target[:-1], rng.integers(0, 20, 7))
        seq_len = int(rng.integers(0, 50))
        stops = rng.choice([-1, *range(20)], 4, p=[0.8, *[0.01] * 20])
        cases.append((
            [int(rng.integers(0, 20)), *drafts.tolist()], target.tolist(), rng.random(8) < 0.05, seq_len,
            seq_len + int(rng.integers(-2, 40)), stops.tolist(), bool(rng.random() < 0.9),
        ))  # fmt: skip
        lengths.add(walk(*cases[-1])[0])
    assert lengths == set(range(9))
    check_all(kernels, cases)
