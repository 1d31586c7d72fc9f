"""Recipes, and a whole run from nothing to a draft that loads."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.goldens import DATA

from dflash_jax.errors import UserError
from dflash_jax.sharding import make_mesh
from dflash_jax.train.__main__ import chat_encoder, main
from dflash_jax.train.curves import can_draw
from dflash_jax.train.data import load_shards, save_shard
from dflash_jax.train.export import export_draft
from dflash_jax.train.prompts import Encode
from dflash_jax.train.recipe import read_recipe
from dflash_jax.train.run import Run, given_prompts, write_data
from dflash_jax.weights import load_draft, open_draft, open_target
from train.test_data import Conversation

TARGET = DATA / "pairs" / "x-v2-one-layer" / "target"
SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "train"
RECIPE = f"""
target = "{TARGET}"
[draft]
version = 1
layers = 1
block_size = 4
mask_token_id = 70
taps = [1, 3]
heads = 2
kv_heads = 1
head_dim = 16
intermediate_size = 32
[data]
user_ids = [3, 4]
turn_ids = [5]
stop_ids = [2, 7, 11, 13, 17]
conversations = 60
max_user_tokens = 24
max_answer_tokens = 24
min_answer_tokens = 4
requests = 8
[train]
steps = 6
sequences = 2
length = 48
anchors = 3
dtype = "float32"
log_every = 1
save_every = 2
"""


def recipe_file(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_recipes_read(path: Path):
    recipe = read_recipe(path)
    assert recipe.data.stop_ids and recipe.train.length >= 256


@pytest.mark.parametrize(("old", "new", "message"), [
    ("steps = 6", "stepz = 6", r"\[train\]: unknown stepz; missing steps"),
    ("steps = 6", "steps = 6.5", r"\[train\] steps must be int, not 6.5"),
    ("taps = [1, 3]", "taps = 1", r"\[draft\] taps must be a list of integers, not 1"),
    ("[data]", "[date]", r"\[data\]: missing user_ids"),
    ("[data]", "[data", "is not TOML"),
])  # fmt: skip
def test_mistakes_in_recipes(tmp_path, old, new, message):
    with pytest.raises(UserError, match=message):
        read_recipe(recipe_file(tmp_path, RECIPE.replace(old, new)))


def test_mistakes_on_the_command_line(tmp_path, capsys):
    assert main([str(tmp_path / "none.toml"), "--run", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith("error: cannot read")
    assert main([str(recipe_file(tmp_path)), "--run", str(tmp_path / "run"), "--stage", "train"]) == 2
    assert "has no shards" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "message"), [
    (["--shards", "0/2"], "--shards needs --stage data"),
    (["--stage", "data", "--shards", "2/2"], "--shards must be I/N .* not '2/2'"),
    (["--stage", "data", "--shards", "1"], "--shards must be I/N"),
    (["--stage", "data", "--shards", "-1/2"], "--shards must be I/N"),
    (["--draft", "x", "--count", "3"], "--draft and --count only go with --eval"),
    (["--eval", "--stage", "data"], "--stage cannot go with --eval"),
    (["--eval"], "has no draft yet"),
    (["--stop-at", "0"], "--stop-at must be at least 1, not 0"),
    (["--token-map", "0"], "--token-map must be at least 1, which the draft chooses among, not 0"),
    (["--token-map", "5"], "draft is not there: a token map belongs to a trained draft"),
    (["--token-map", "5", "--stage", "data", "--stop-at", "3"], "--stage and --stop-at cannot go with --token-map"),
    (["--token-map", "5", "--eval"], "--token-map cannot go with --eval"),
])  # fmt: skip
def test_mistakes_in_options(tmp_path, capsys, options, message):
    if "-1/2" in options:
        options = [*options[:-2], "--shards=-1/2"]
    assert main([str(recipe_file(tmp_path)), "--run", str(tmp_path / "run"), *options]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_the_most_frequent_tokens_of_answers_are_kept(tmp_path, capsys):
    """Those of prompts and of texts that are held out do not count."""
    run = tmp_path / "run"
    (run / "draft").mkdir(parents=True)
    texts = [Conversation([7, 7, 7, 3, 3, 3, 5], 3, False), Conversation([7, 2, 5, 9], 1, False),
             Conversation([1, 8, 8, 8, 8, 8], 1, True)]  # fmt: skip
    (run / "data").mkdir()
    save_shard(run / "data" / "shard-00000.npz", texts)
    assert main([str(recipe_file(tmp_path)), "--run", str(run), "--token-map", "2"]) == 0
    assert json.loads((run / "draft" / "token_map.json").read_text()) == [3, 5]
    assert "71.43% of the tokens in answers" in capsys.readouterr().err
    assert main([str(recipe_file(tmp_path)), "--run", str(run), "--token-map", "50"]) == 0
    assert json.loads((run / "draft" / "token_map.json").read_text()) == [2, 3, 5, 9]


def with_prompts(folder: Path, *rows: dict, target: Path | None = None, conversations: int = 0) -> Path:
    """A recipe beside its file of prompts."""
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = RECIPE.replace("conversations = 60", f'conversations = {conversations}\nprompts = "own.jsonl"')
    return recipe_file(folder, text.replace(str(TARGET), str(target or TARGET)))


def test_prompts_lie_beside_the_recipe(tmp_path):
    assert read_recipe(with_prompts(tmp_path)).data.prompts == str(tmp_path / "own.jsonl")


def test_a_target_without_a_tokenizer_takes_no_prompts(tmp_path, capsys):
    recipe = with_prompts(tmp_path, {"prompt": "x"})
    assert main([str(recipe), "--run", str(tmp_path / "run"), "--stage", "data"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_long_prompts_are_left_out_and_told(tmp_path, caplog):
    recipe = read_recipe(with_prompts(tmp_path, {"prompt": "x"}, {"prompt": "y" * 45}))
    with caplog.at_level("WARNING"):
        assert [len(p.tokens) for p in given_prompts(recipe, by_character)] == [1]
    assert "1 of 2 prompts have more than 44 tokens" in caplog.text
    recipe = read_recipe(with_prompts(tmp_path, {"prompt": "y" * 45}))
    with pytest.raises(UserError, match="each of its 1 prompts has more than 44 tokens, and .* length is 48"):
        given_prompts(recipe, by_character)


def test_the_targets_own_template(demo_target):
    """Prompts look as conversations from nothing do: the recipe's ids are what the template writes."""
    recipe = read_recipe(SHIPPED / "smollm2-135m.toml")
    tokens = chat_encoder(str(demo_target))([{"role": "user", "content": "Why is the sky blue?"}])
    before, after = list(recipe.data.user_ids), [*recipe.data.stop_ids, *recipe.data.turn_ids]
    assert tokens[: len(before)] == before and tokens[-len(after) :] == after
    assert len(tokens) == len(before) + 6 + len(after), "a token for each word, and the question mark"


def by_character(target: str) -> Encode:
    assert target == str(TARGET)
    return lambda messages: [ord(c) % 64 for c in messages[-1]["content"]]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def invented(folder: Path) -> Path:
    """Shards of random texts, so that no engine has to write them."""
    rng = np.random.default_rng(0)
    texts = [Conversation(rng.integers(0, 70, 40).tolist(), 9, i % 5 == 4) for i in range(20)]
    (folder / "data").mkdir(parents=True)
    save_shard(folder / "data" / "shard-00000.npz", texts)
    return folder


@pytest.mark.slow
def test_a_run_that_stops_goes_on_as_if_it_had_not(tmp_path):
    recipe = recipe_file(tmp_path)
    whole, halves = invented(tmp_path / "whole"), invented(tmp_path / "halves")
    assert main([str(recipe), "--run", str(whole), "--stage", "train"]) == 0
    assert main([str(recipe), "--run", str(halves), "--stage", "train", "--stop-at", "3"]) == 0
    assert [line["step"] for line in lines(halves) if "loss" in line] == [1, 2, 3]
    assert main([str(recipe), "--run", str(halves), "--stage", "train"]) == 0
    steps = [[line for line in lines(folder) if "loss" in line] for folder in (whole, halves)]
    assert steps[0] == steps[1] and [line["step"] for line in steps[0]] == [1, 2, 3, 4, 5, 6]
    assert lines(whole)[-1]["held_out"]["loss"] > 0
    assert (halves / "curves.png").exists() == can_draw()
    target = open_target(TARGET).config
    draft = load_draft(open_draft(whole / "draft", target), jnp.float32, make_mesh())
    assert draft["fc"].shape == (2 * target.hidden_size, target.hidden_size)
    changed = recipe_file(tmp_path, RECIPE.replace("anchors = 3", "anchors = 2"))
    assert main([str(changed), "--run", str(whole), "--stage", "train"]) == 2


def test_a_run_that_begins_with_a_draft(tmp_path):
    first = Run(read_recipe(recipe_file(tmp_path)), invented(tmp_path / "first"))
    export_draft(tmp_path / "own", first.raw, first.target, jax.device_get(first.state.params), "float32")
    further = RECIPE.replace("[train]", '[train]\nseed = 5\nstart = "own"')
    second = Run(read_recipe(recipe_file(tmp_path, further)), invented(tmp_path / "second"))
    jax.tree.map(np.testing.assert_array_equal, second.state.params, first.state.params)
    shorter = Run(read_recipe(recipe_file(tmp_path, further.replace("block_size = 4", "block_size = 3"))), first.folder)
    jax.tree.map(np.testing.assert_array_equal, shorter.state.params, first.state.params)
    other = read_recipe(recipe_file(tmp_path, further.replace("intermediate_size = 32", "intermediate_size = 16")))
    told = r"own is not of the recipe's shape: layers.0.mlp.gate_up \(32, 2, 32\) instead of \(32, 2, 16\); "
    with pytest.raises(UserError, match=told):
        Run(other, tmp_path / "second")


def test_a_start_that_is_not_there_is_told_before_anything_is_written(tmp_path, capsys):
    recipe = recipe_file(tmp_path, RECIPE.replace("[train]", '[train]\nstart = "nowhere"'))
    assert main([str(recipe), "--run", str(tmp_path / "run")]) == 2
    assert re.search("start '.*nowhere' is neither random nor target nor a draft's folder", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_data_from_prompts(tmp_path):
    recipe = read_recipe(with_prompts(tmp_path, *({"prompt": f"{a}{b}"} for a in "abcdefg" for b in "uvwxyz")))
    write_data(recipe, tmp_path / "run", by_character)
    learn, held = load_shards(tmp_path / "run" / "data")
    prompts = [tuple(c.tokens[: c.start]) for c in learn]
    assert not held and {len(p) for p in prompts} == {2} and len(set(prompts)) > 10
    assert any(prompts.count(p) == 2 for p in prompts), "two different answers are both kept"
    faster = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, draft="ngram"))
    write_data(faster, tmp_path / "faster", by_character)
    texts = [[list(c.tokens) for c in load_shards(tmp_path / run / "data")[0]] for run in ("run", "faster")]
    assert texts[0] == texts[1], "a draft changes how fast the target writes, not what"
    other = read_recipe(with_prompts(tmp_path, {"prompt": "other"}))
    with pytest.raises(UserError, match="holds data of another recipe"):
        write_data(other, tmp_path / "run", by_character)


@pytest.mark.slow
def test_data_from_nothing(tmp_path):
    assert main([str(recipe_file(tmp_path)), "--run", str(tmp_path / "run"), "--stage", "data"]) == 0
    learn, held = load_shards(tmp_path / "run" / "data")
    assert learn and all(list(c.tokens[:2]) == [3, 4] and c.tokens[c.start - 1] == 5 for c in [*learn, *held])
    stops = {2, 7, 11, 13, 17}
    assert all(c.tokens[-1] in stops or len(c.tokens) - c.start == 24 for c in learn)
