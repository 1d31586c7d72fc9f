"""Acceptance measured by decoding: what is averaged, of which prompts, and that it is what `LLM` reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.engine.request import Request
from dflash_jax.engine.settings import EngineSettings
from dflash_jax.errors import UserError
from dflash_jax.train.data import Conversation, save_shard
from dflash_jax.train.evaluate import (
    Acceptance,
    EvalConfig,
    eval_prompts,
    evaluate,
    evenly,
    file_name,
    summed,
    table,
)
from dflash_jax.train.prompts import Encode, Prompt
from dflash_jax.train.recipe import read_recipe
from train.test_run import RECIPE, TARGET, recipe_file

DRAFT = TARGET.parent / "draft"


def by_character(target: str) -> Encode:
    return lambda messages: [ord(c) % 64 for c in messages[-1]["content"]]


def response(*accept_lengths: int) -> Request:
    request = Request("", [1], 96)
    request.take([5], is_round=False, now_s=0.0)
    for length in accept_lengths:
        request.take([5] * length, is_round=True, now_s=0.0)
    return request


def test_a_mean_of_means():
    """A long response counts as much as a short one; one without rounds counts nothing."""
    found = summed("code", 1.0, [response(4), response(1, 1, 1, 1), response()])
    assert found == Acceptance("code", 1.0, 2.5, 2, 10)
    assert summed("code", 0.0, [response()]) == Acceptance("code", 0.0, None, 0, 0)


def test_the_table():
    rows = [Acceptance("questions", 0.0, 3.456, 40, 3840), Acceptance("all", 1.0, None, 0, 0)]
    assert table(rows).splitlines() == [
        "category     T  acceptance  responses   tokens",
        "questions  0.0        3.46         40     3840",
        "all        1.0           -          0        0",
    ]


def test_prompts_are_taken_from_all_places():
    prompts = [Prompt((i,)) for i in range(10)]
    assert [p.tokens[0] for p in evenly(prompts, 4)] == [0, 2, 5, 7] and evenly(prompts, 99) == prompts


def test_each_evaluation_has_its_file():
    assert file_name(EvalConfig()) == "eval.json"
    assert file_name(EvalConfig("z/b 16", Path("x/own.jsonl"))) == "eval-b_16-own.json"


def test_held_out_prompts_have_the_categories_of_the_file(tmp_path):
    own = {"prompt": "ab", "category": "code"}
    (tmp_path / "own.jsonl").write_text(json.dumps(own))
    recipe = read_recipe(recipe_file(tmp_path, RECIPE.replace("[data]", '[data]\nprompts = "own.jsonl"')))
    (tmp_path / "data").mkdir()
    texts = [[33, 34, 9], [33, 34, 8], [7, 7, 7], [6, 6, 6]]  # the first two are answers to "ab"
    save_shard(tmp_path / "data" / "shard-00000.npz", [Conversation(t, 2, i < 3) for i, t in enumerate(texts)])
    found = eval_prompts(recipe, tmp_path, EvalConfig(), by_character)
    assert found == [Prompt((33, 34), "code", True), Prompt((7, 7), "held_out", True)]


def test_a_file_of_prompts(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "ab"}\n{"prompt": "c", "category": "code"}')
    found = eval_prompts(read_recipe(recipe_file(tmp_path)), tmp_path, EvalConfig(prompts=path), by_character)
    assert [(p.tokens, p.category) for p in found] == [((33, 34), "held_out"), ((35,), "code")]


def test_mistakes(tmp_path):
    recipe = read_recipe(recipe_file(tmp_path))
    with pytest.raises(UserError, match="has no draft yet: train one, or name another with --draft"):
        evaluate(recipe, tmp_path, EvalConfig(), by_character)
    (tmp_path / "data").mkdir()
    save_shard(tmp_path / "data" / "shard-00000.npz", [Conversation([1, 2, 3], 2, False)])
    with pytest.raises(UserError, match="holds nothing out: name a file of prompts with --prompts"):
        evaluate(recipe, tmp_path, EvalConfig("none"), by_character)
    with pytest.raises(UserError, match="--max-new-tokens must be at least 2, not 1"):
        EvalConfig(max_new_tokens=1)
    with pytest.raises(UserError, match="--count must be at least 1, not 0"):
        EvalConfig(count=0)


@pytest.mark.slow
def test_what_is_reported_is_what_generation_reports(tmp_path, monkeypatch):
    """With one engine for both, as compiling it takes most of the time."""
    from dflash_jax import LLM, SamplingParams

    llm = LLM(str(TARGET), str(DRAFT), speculation="always", max_running_requests=1, max_model_len=64)
    asked: list[EngineSettings] = []
    monkeypatch.setattr("dflash_jax.train.evaluate.Engine", lambda settings: asked.append(settings) or llm.engine)
    recipe = read_recipe(recipe_file(tmp_path))
    rows = [{"prompt": text, "category": kind} for text, kind in (("abc", "one"), ("xyzw", "two"), ("pq", "two"))]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = EvalConfig(str(DRAFT), tmp_path / "own.jsonl", max_new_tokens=24)
    found = {(a.category, a.temperature): a for a in evaluate(recipe, tmp_path / "run", config, by_character)}
    assert (asked[0].target, asked[0].draft, asked[0].max_model_len) == (str(TARGET), str(DRAFT), 4 + 24)
    assert asked[0].speculation == "always"
    kept = json.loads((tmp_path / "run" / "eval-draft-own.json").read_text())
    assert kept["block_size"] > 1 and kept["token_map"] is None and len(kept["acceptance"]) == len(found) == 6
    prompts = [[ord(c) % 64 for c in row["prompt"]] for row in rows]
    for heat in (0.0, 1.0):
        params = [SamplingParams(max_new_tokens=24, temperature=heat, seed=i, stop_token_ids=recipe.data.stop_ids)
                  for i in range(3)]  # fmt: skip
        means = [out.mean_accept_length for out in llm.generate(prompts, params)]
        assert all(means) and found["one", heat].acceptance == means[0]
        assert found["all", heat].acceptance == pytest.approx(np.mean([m for m in means if m]))
        assert found["two", heat].responses == 2
