"""Recipes, and a whole run from nothing to a draft that loads."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from models.goldens import DATA

from dflash_jax.errors import UserError
from dflash_jax.sharding import make_mesh
from dflash_jax.train.__main__ import main
from dflash_jax.train.data import load_shards, save_shard
from dflash_jax.train.recipe import read_recipe
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
    target = open_target(TARGET).config
    draft = load_draft(open_draft(whole / "draft", target), jnp.float32, make_mesh())
    assert draft["fc"].shape == (2 * target.hidden_size, target.hidden_size)
    changed = recipe_file(tmp_path, RECIPE.replace("anchors = 3", "anchors = 2"))
    assert main([str(changed), "--run", str(whole), "--stage", "train"]) == 2


@pytest.mark.slow
def test_data_from_nothing(tmp_path):
    assert main([str(recipe_file(tmp_path)), "--run", str(tmp_path / "run"), "--stage", "data"]) == 0
    learn, held = load_shards(tmp_path / "run" / "data")
    assert learn and all(c.tokens[:2] == [3, 4] and c.tokens[c.start - 1] == 5 for c in [*learn, *held])
    stops = {2, 7, 11, 13, 17}
    assert all(c.tokens[-1] in stops or len(c.tokens) - c.start == 24 for c in learn)
