"""`benchmark tune`: what it tries, what it keeps, and how launches use that."""

from __future__ import annotations

import json

import pytest

from dflash_jax.benchmark import tune
from dflash_jax.benchmark.__main__ import main
from dflash_jax.ops.kernel_packages import kernel_module

TILES = kernel_module("triton", "tiles")
LOAD = TILES.Load(streams=8, lanes=64, head_dim=128, float32=False, width=1024)
RULE = TILES.rule_of_thumb(LOAD)
BETTER = RULE._replace(tokens=32, programs=528)


def result(load, *tried):
    rows = [{"cut": cut._asdict(), "us": us, "error": None if us else "too large"} for cut, us in tried]
    return {"name": "by hand", "load": load._asdict(), "bytes": 1000, "tried": rows}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The table of tuned tiles, somewhere else."""
    monkeypatch.setattr(TILES, "TUNED", tmp_path / "tuned.json")
    TILES._table.cache_clear()
    yield TILES.TUNED
    TILES._table.cache_clear()


def test_what_is_tried_differs():
    tried = list(tune.neighbours(RULE, LOAD))
    assert tried[0] == RULE and 15 < len(set(tried)) == len(tried) <= 26
    assert {cut.lanes for cut in tried} == {16, 32, 64, 128}
    assert {cut.ahead for cut in tried} == {0, 64, 256}
    few = LOAD._replace(lanes=1)
    assert {cut.lanes for cut in tune.neighbours(TILES.rule_of_thumb(few), few)} == {16}


def test_what_runs_first_is_at_no_disadvantage(monkeypatch):
    """The chip's clock rises while it works."""
    slowness = iter([5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(tune, "median_s", lambda launch: launch() * next(slowness))
    assert list(tune.fastest([lambda: 10.0, lambda: 30.0, lambda: 20.0])) == [10.0, 30.0, 20.0]


def test_only_what_is_better_is_kept(table):
    other = LOAD._replace(streams=256)
    tune.keep([result(LOAD, (RULE, 10.0), (BETTER, 8.0)), result(other, (RULE, 10.0), (BETTER, 9.9))], "9.0", table)
    [row] = json.loads(table.read_text())
    assert row["cut"] == BETTER._asdict() and row["us"] == 8.0 and row["rule_us"] == 10.0
    assert TILES.tuned(LOAD, "9.0") == BETTER
    assert TILES.tuned(other, "9.0") == BETTER, "the nearest number of streams"
    assert TILES.tuned(LOAD._replace(width=9000), "9.0") == BETTER, "the nearest width"
    assert TILES.tuned(LOAD, "8.0") is None and TILES.tuned(LOAD._replace(lanes=16), "9.0") is None
    tune.keep([result(LOAD, (RULE, 10.0), (BETTER, 11.0))], "9.0", table)
    assert json.loads(table.read_text()) == [], "measured again: the rule is best"


def test_the_nearest_width_is_that_of_the_nearest_number_of_streams(table, monkeypatch):
    monkeypatch.setattr(TILES, "_chip", lambda: "9.0")
    long, many = LOAD._replace(width=32768), LOAD._replace(streams=64)
    deep, wide = RULE._replace(stages=5), RULE._replace(warps=8)
    best = [(LOAD, BETTER), (long, deep), (many, wide)]
    tune.keep([result(load, (RULE, 9.0), (cut, 8.0)) for load, cut in best], "9.0", table)
    assert TILES.tuned(LOAD._replace(width=8016), "9.0") == deep
    assert TILES.tuned(LOAD._replace(width=2064), "9.0") == BETTER
    assert TILES.tuned(many._replace(width=32768), "9.0") == wide
    assert [TILES.attention_tiles(1, 16, 8, 4, 128, width, False).stages for width in (1024, 32768)] == [3, 5]


def test_a_rule_that_a_chip_cannot_do_is_replaced(table):
    tune.keep([result(LOAD, (RULE, None), (BETTER, 12.0))], "12.0", table)
    assert TILES.tuned(LOAD, "12.0") == BETTER


def test_launches_follow_the_table_and_what_is_forced(table, monkeypatch):
    tune.keep([result(LOAD, (RULE, 10.0), (BETTER, 8.0))], "9.0", table)
    monkeypatch.setattr(TILES, "_chip", lambda: "9.0")
    tiles = TILES.attention_tiles(1, 16, 8, 4, 128, 4096, False)
    assert (tiles.tokens, tiles.shares) == (32, 32)
    with TILES.forced(RULE._replace(programs=16)):
        tiles = TILES.attention_tiles(1, 16, 8, 4, 128, 4096, False)
    assert (tiles.tokens, tiles.shares) == (64, 2)


@pytest.mark.parametrize("programs, width, shares, parts", [
    (264, 1024, 8, 9),  # no more tokens to share: the block has a program of its own
    (72, 1024, 8, 9), (64, 1024, 8, 8),  # no more programs: the last takes the block, too
    (264, 16384, 32, 33), (8, 1024, 1, 1), (264, 64, 1, 1),
])  # fmt: skip
def test_the_block_has_a_program_of_its_own_where_there_is_room(programs, width, shares, parts):
    with TILES.forced(RULE._replace(programs=programs)):
        tiles = TILES.attention_tiles(1, 16, 8, 4, 128, width, False)
    assert (tiles.shares, tiles.parts) == (shares, parts)


def test_the_table_that_ships_is_of_the_rules_kind():
    for chip, load, cut in TILES._table():
        assert chip.count(".") == 1 and cut in set(tune.neighbours(TILES.rule_of_thumb(load), load))


@pytest.mark.parametrize("words, message", [
    (["--shape", "qwen3-8b prefill 1x512 over 0"], "tune is for verify and draft shapes"),
    (["--shape", "qwen9"], "there is no shape 'qwen9'"),
    ([], "triton"),
])  # fmt: skip
def test_mistakes(words, message, capsys):
    assert main(["tune", *words]) == 2
    assert message in capsys.readouterr().err
