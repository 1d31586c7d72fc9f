"""Conversations that a target writes: which are kept, that shards resume, and the order of batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from dflash_jax.errors import UserError
from dflash_jax.sampling import SamplingParams
from dflash_jax.train.data import (
    Conversation,
    DataConfig,
    Part,
    Written,
    batch_at,
    check_made_of,
    converse,
    engine_writer,
    is_fit,
    load_shards,
    save_shard,
    write_shards,
)
from dflash_jax.train.prompts import Prompt

STOP = 99
CONFIG = DataConfig((1, 2), (3,), (STOP,), conversations=10, shard=4, min_answer_tokens=4)


class Told:
    """A target whose turns are told by seed; counts what it is asked."""

    def __init__(self, users: dict[int, Written] | None = None, answers: dict[int, Written] | None = None):
        self.users, self.answers = users or {}, answers or {}
        self.calls: list[tuple[list[list[int]], list[SamplingParams]]] = []

    def __call__(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Written]:
        self.calls.append(([list(p) for p in prompts], list(params)))
        return [self._one(list(p), int(how.seed or 0)) for p, how in zip(prompts, params, strict=True)]

    def _one(self, prompt: list[int], seed: int) -> Written:
        if prompt == [1, 2]:
            return self.users.get(seed, ([10 + seed, 11, STOP], True))
        return self.answers.get(seed, ([20 + seed, 21, 22, STOP], True))


def test_a_conversation_is_headers_turn_and_answer():
    target = Told()
    found = converse(CONFIG, [4, 49], target)
    assert found[0] == Conversation([1, 2, 14, 11, STOP, 3, 24, 21, 22, STOP], 6, False)
    assert found[1].held_out, "each fiftieth"
    (_, users), (prompts, answers) = target.calls
    assert [p.temperature for p in users] == [1.0, 1.0] and prompts[0] == [1, 2, 14, 11, STOP, 3]
    assert answers[0].temperature == 0.0 and 0.7 <= answers[1].temperature < 1.0


def test_what_is_left_out():
    loop = [5, 6, 7] * 4
    target = Told(
        users={0: ([10, 11, 12], False), 1: ([12, 11, STOP], True)},  # does not end; says what number 2 says
        answers={3: ([20, STOP], True), 4: ([*loop, STOP], True), 5: ([20, 21, 22, 23], False)},  # cut
    )
    found = converse(CONFIG, range(7), target)
    assert [c.tokens[2] for c in found] == [12, 15, 16], "numbers 1 (2 repeats it), 5 and 6"


@pytest.mark.parametrize(("tokens", "fit"), [
    ([1, 2, 3, STOP], True), ([1, STOP], False), ([9, *[1, 2, 3] * 4, STOP], False), ([*[1, 2, 3] * 4, 1, STOP], False),
    ([*[1, 2, 3] * 3, STOP], True), ([7, 7, 7, 7, STOP], True), ([7] * 8 + [STOP], False),
    ([*[1, 2, 3] * 4, 8, STOP], True),
])  # fmt: skip
def test_loops_and_short_ones(tokens, fit):
    assert is_fit(tokens, 3) is fit


def stored(folder):
    """What shards hold, in lists that can be compared."""
    return [[(list(c.tokens), c.start, c.held_out) for c in side] for side in load_shards(folder)]


def test_shards_resume(tmp_path):
    target = Told()
    paths = write_shards(CONFIG, tmp_path, target)
    assert len(paths) == 3 and len(target.calls) == 6
    whole = stored(tmp_path)
    paths[1].unlink()
    again = Told()
    write_shards(CONFIG, tmp_path, again)
    assert len(again.calls) == 2, "only the missing shard is written"
    assert stored(tmp_path) == whole and len(whole[0]) == 10


def test_equal_texts_are_one_and_a_prompt_is_on_one_side(tmp_path):
    """Another answer to a prompt is another text, but one that was learnt from is not held out."""
    first, second = Conversation([1, 2, 3], 2, False), Conversation([1, 2, 4], 2, True)
    third, fourth = Conversation([1, 5, 4], 2, True), Conversation([1, 5, 6], 2, False)
    save_shard(tmp_path / "shard-00000.npz", [first, third])
    save_shard(tmp_path / "shard-00001.npz", [second, fourth, first])
    learn, held = load_shards(tmp_path)
    assert [list(c.tokens) for c in learn] == [[1, 2, 3], [1, 2, 4]] and not any(c.held_out for c in learn)
    assert [list(c.tokens) for c in held] == [[1, 5, 4], [1, 5, 6]] and all(c.held_out for c in held)


GIVEN = [Prompt((7, 8)), Prompt((7, 9), held_out=True)]


def test_given_prompts_come_first_each_with_several_answers():
    config = dataclasses.replace(CONFIG, answers_per_prompt=3, conversations=2)
    target = Told()
    found = converse(config, range(8), target, GIVEN)
    assert [c.tokens[: c.start] for c in found[:6]] == [[7, 8]] * 3 + [[7, 9]] * 3
    assert [c.held_out for c in found] == [False] * 3 + [True] * 3 + [False] * 2
    assert [c.tokens[2] for c in found[6:]] == [16, 17], "the rest is from nothing"
    how = target.calls[1][1]
    assert [p.temperature == 0 for p in how] == [True, False, False, True, False, False, True, False]
    assert len({p.seed for p in how}) == 8


def test_processes_share_the_shards(tmp_path):
    config = dataclasses.replace(CONFIG, answers_per_prompt=3)  # 6 + 10 conversations: four shards
    whole = write_shards(config, tmp_path / "whole", Told(), GIVEN)
    parts = [write_shards(config, tmp_path / "parts", Told(), GIVEN, Part(i, 3)) for i in (2, 0, 1)]
    assert [[p.stem[-1] for p in paths] for paths in parts] == [["2"], ["0", "3"], ["1"]]
    assert stored(tmp_path / "parts") == stored(tmp_path / "whole") and len(whole) == 4


def test_shards_of_another_recipe_are_not_gone_on_with(tmp_path):
    check_made_of(tmp_path / "data", {"seed": 0, "user_ids": (1, 2)})
    check_made_of(tmp_path / "data", {"seed": 0, "user_ids": (1, 2)})
    with pytest.raises(UserError, match=r"data of another recipe \(prompts None, now 'x'; seed 0, now 1\)"):
        check_made_of(tmp_path / "data", {"seed": 1, "user_ids": (1, 2), "prompts": "x"})
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["made-of.json"]


@pytest.mark.parametrize(("change", "message"), [
    ({"conversations": -1}, "conversations must be at least 0, not -1"), ({"shard": 0}, "shard must be at least 1"),
    ({"answers_per_prompt": 0}, "answers_per_prompt must be at least 1, not 0"),
])  # fmt: skip
def test_numbers_of_data_are_checked(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_shards_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="has no shards"):
        load_shards(tmp_path)
    (tmp_path / "shard-00000.npz").write_bytes(b"nothing")
    with pytest.raises(UserError, match="is not a shard that can be read"):
        load_shards(tmp_path)


def test_batches_pass_over_all_in_shuffled_order():
    data = [Conversation([i] * (i + 3), 2, False) for i in range(5)]
    batches = [batch_at(step, data, 1, 2, 6, seed=0) for step in range(10)]
    first = [int(x) for b in batches for x in np.asarray(b.tokens)[..., 0].ravel()]
    passes = [first[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(p) == [0, 1, 2, 3, 4] for p in passes) and len({tuple(p) for p in passes}) > 1
    again = batch_at(7, data, 1, 2, 6, seed=0)
    np.testing.assert_array_equal(again.tokens, batches[7].tokens)
    long = next(b for b in batches if 4 in np.asarray(b.tokens)[..., 0])
    assert np.asarray(long.length).max() == 6, "cut"
    assert [f.name for f in dataclasses.fields(long)] == ["tokens", "start", "length"]


@pytest.mark.slow
def test_a_real_engine_writes():
    from models.goldens import DATA

    from dflash_jax.engine.engine import Engine
    from dflash_jax.engine.settings import EngineSettings

    folder = DATA / "pairs" / "qwen3-v1"
    engine = Engine(EngineSettings(str(folder / "target"), str(folder / "draft"), max_model_len=64, page_size=8))
    write = engine_writer(engine, [5])
    how = [SamplingParams(max_new_tokens=20, temperature=1.0, seed=seed) for seed in range(6)]
    found = write([[7, 8]] * 6, how)
    assert all(0 < len(tokens) <= 20 and (tokens[-1] == 5) == ended for tokens, ended in found)
    assert len({tuple(tokens) for tokens, _ in found}) == 6
    assert write([[7, 8]] * 6, how) == found, "the same seeds, the same texts"
