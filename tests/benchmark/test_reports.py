"""`benchmark kernels` and `benchmark round`: what they count, and what they write."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llm.pairs import FOLDER, compiling_lightly  # pyright: ignore[reportMissingImports]

from dflash_jax.benchmark import op_cases as cases
from dflash_jax.benchmark.__main__ import main
from dflash_jax.benchmark.drawn import redrawn, shuffled_pages
from dflash_jax.benchmark.round_report import make_timer
from dflash_jax.benchmark.split import LAUNCHES, REPEATS, median_s
from dflash_jax.benchmark.synthetic import random_pair
from dflash_jax.ops.dispatch import OPS, Kernels, select
from dflash_jax.ops.shapes import REAL, TINY, VERIFY, ModelShape, Shape, find

MODEL = ModelShape(
    "by-hand", hidden=32, ffn=64, heads=4, kv_heads=2, head_dim=16, vocab=50, block=8, draft_layers=3, taps=2
)
SHAPE = Shape(MODEL, VERIFY, requests=2, rows=8, committed=40)  # 20 and 40 tokens


@pytest.fixture(autouse=True)
def light() -> Iterator[None]:
    with compiling_lightly():
        yield


def test_all_ops_are_covered():
    assert {op for ops in cases.OPS.values() for op in ops} == set(cases.MAKERS) == set(OPS)


def test_bytes_and_operations_by_hand():
    by_op = {case.op: case for case in cases.op_cases(SHAPE, jnp.float32)}
    names = "block_attention", "head_logits", "cache_write", "kv_inject", "add_norm"
    attention, head, write, inject, norm = (by_op[op] for op in names)
    rows = 2 * 8
    assert attention.moved_bytes == 4 * ((20 + 40) * 2 * 2 * 16 + rows * (2 * 4 * 16 + 2 * 2 * 16))
    assert attention.flops == 4 * 8 * 4 * 16 * (28 + 48)
    assert head.moved_bytes == 4 * (rows * 32 + 50 * 32 + rows * 50)
    assert head.flops == 2 * rows * 32 * 50
    assert write.moved_bytes == 4 * rows * 2 * 16 * (4 + 4 + 2)  # read q, k, v of R = 2; write q, k, v; k, v once more
    assert norm.moved_bytes == 4 * (4 * rows * 32 + 32) and norm.flops == 0  # two arrays in, two out
    project, gated = by_op["project_add_norm"], by_op["gated_product"]
    assert project.moved_bytes == 4 * (3 * rows * 32 + rows * 64 + 64 * 32 + 32)  # x in, sum and norm out
    assert gated.moved_bytes == 4 * (rows * 32 + 32 * 2 * 64 + rows * 64) and gated.flops == 2 * rows * 32 * 128
    assert project.flops == 2 * rows * 64 * 32
    assert inject.flops == 2 * rows * 32 * 3 * 2 * 2 * 16
    assert inject.moved_bytes == 4 * (rows * 32 + 32 * 192 + 3 * 16 + rows * 192)


def test_the_bytes_of_a_layer_s_attention_are_those_of_its_parts_without_what_lies_between():
    by_op = {case.op: case for case in cases.op_cases(SHAPE, jnp.float32)}
    whole, parts = by_op["verify_attention"], (by_op["cache_write"], by_op["block_attention"])
    between = 4 * 16 * 2 * 16 * (2 + 2)  # q, k and v of R = 2: written by one and read by the other
    assert whole.moved_bytes == sum(part.moved_bytes for part in parts) - 2 * between
    assert whole.flops == by_op["block_attention"].flops


def test_numbers_reach_an_op_as_numbers():
    """A kernel compiles them in."""
    seen = []

    class Watching:
        def cache_write(self, pool, qkv, q_norm, k_norm, eps, *rest):
            seen.append(eps)
            return qkv, qkv, pool

    by_op = {case.op: case for case in cases.op_cases(SHAPE, jnp.float32)}
    by_op["cache_write"].launcher(Watching(), times=2)()
    assert seen == [cases.EPS] * 2


def test_a_program_of_several_runs_updates_pools_of_its_own():
    [case] = [one for one in cases.op_cases(SHAPE, jnp.float32) if one.op == "kv_inject"]
    launch, before = case.launcher(Kernels("xla"), times=3), case.pools[0].copy()
    launch()
    found = launch()
    assert len(found) == 3 and all(not (pools[0] == before).all() for pools in found)
    assert (case.pools[0] == before).all(), "the case can be launched again"


@pytest.mark.parametrize("op", sorted(cases.MAKERS))
def test_every_run_has_arrays_of_its_own(op):
    """Else a GPU finds in its cache what the run before it read, and XLA makes one product of two."""
    seen = []

    class Watching:
        def __getattr__(self, name):
            def call(*given, **_):
                seen.append(given)
                return given, given[0]  # of both, one is where an op has its pool

            return call

    case = cases.MAKERS[op](SHAPE, cases.Draw(jnp.float32))
    case.take = lambda result: result[1]
    case.launcher(Watching(), times=2)()
    first, second = (jax.tree.leaves(given) for given in seen)
    pairs = [pair for pair in zip(first, second, strict=True) if not isinstance(pair[0], float)]
    assert pairs and all(one is not other for one, other in pairs)


def test_a_window_reads_no_more_than_the_window():
    narrow = Shape(MODEL, VERIFY, 2, 8, 40, window=10)
    [case] = [one for one in cases.op_cases(narrow, jnp.float32) if one.op == "block_attention"]
    assert case.flops == 4 * 8 * 4 * 16 * (18 + 18)


@pytest.mark.slow
def test_kernels_report(tmp_path, capsys):
    shapes, path = (TINY[0], TINY[-1]), tmp_path / "k.json"
    words = [word for shape in shapes for word in ("--shape", shape.name)]
    assert main(["kernels", *words, "--kernels", "xla", "--dtype", "float32", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert "block_attention" in out
    document = json.loads(path.read_text())
    assert document["rates"]["bytes_per_s"] > 0
    for result, shape in zip(document["results"], shapes, strict=True):
        assert result["name"] == shape.name
        assert [one["op"] for one in result["levels"]] == list(cases.OPS[shape.role])
        for one in result["levels"]:
            assert one["backend"] == "xla" and one["speedup_over_xla"] == 1 and one["bytes"] > 0
            assert one["share_of_ceiling"] == pytest.approx(one["ceiling_us"] / one["op_us"])
    assert main(["compare", str(path), str(path)]) == 0
    assert "op µs" in capsys.readouterr().out


def test_shapes_by_name(capsys):
    assert find(REAL[0].name) is REAL[0]
    assert main(["kernels", "--shape", "qwen9"]) == 2
    err = capsys.readouterr().err
    assert "there is no shape 'qwen9'" in err and "or a model's name: llama-3.1-8b, qwen3-4b" in err


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a preset whose shape is a recorded pair's."""
    pair = FOLDER / "qwen3-v1"
    shape = {name: json.loads((pair / name / "config.json").read_text()) for name in ("target", "draft")}
    monkeypatch.setattr("dflash_jax.benchmark.synthetic.load_preset", lambda name: shape)
    return "tiny"


def test_a_timed_round_reads_other_random_numbers_for_each_request(tiny):
    """On zeros a GPU takes less power, and at its limit less time."""
    state = make_timer(random_pair(tiny, "float32", True), select("xla", "cpu"), 3, 33, 8).state
    assert len(set(state.bonus[:3].tolist())) == 3
    arrays = [*jax.tree.leaves(state.kv), *jax.tree.leaves(state.draft)]
    pages = [np.asarray(x[state.page_table[i, 0]]) for x in arrays for i in range(3)]  # the first of each request
    assert len({page.tobytes() for page in pages}) == len(pages) == 3 * len(arrays) > 6
    for x in arrays:
        assert 0.95 < float(x.std()) < 1.05 and abs(float(x.mean())) < 0.05


def test_a_timer_begins_anew_with_as_many_tokens(tiny):
    """Rounds commit tokens: without it the last would be timed over more of them than the first."""
    timer = make_timer(random_pair(tiny, "float32", True), select("xla", "cpu"), 3, 33, 8)
    for _ in range(2):
        timer.whole()
    assert min(timer.state.seq_len[:3].tolist()) >= 33 + 2
    for _ in range(2):  # the copy that is kept is not donated
        timer.rewind()
        assert timer.state.seq_len[:3].tolist() == [33] * 3
        timer.whole()


def test_every_part_of_a_round_begins_with_as_many_tokens(tiny, monkeypatch):
    timer = make_timer(random_pair(tiny, "float32", True), select("xla", "cpu"), 3, 33, 8)
    begun: list[list[int]] = []
    rewind = timer.rewind

    def watched() -> None:
        rewind()
        begun.append(timer.state.seq_len[:3].tolist())

    monkeypatch.setattr(timer, "rewind", watched)
    assert len(timer.split()) == 4 and begun == [[33] * 3] * (4 * REPEATS)
    timer.launch_s()
    assert len(begun) == 4 * REPEATS + 1


def test_rows_of_launches_begin_with_begin():
    calls: list[str] = []
    median_s(lambda: calls.append("launch"), lambda: calls.append("begin"))
    launches = LAUNCHES[jax.default_backend() != "cpu"]
    assert calls[0] == "launch" and calls[1:] == (["begin"] + ["launch"] * launches) * REPEATS


def test_pages_of_timed_requests_are_in_no_order():
    """Pages one after another in memory are not what serving has."""
    table = np.asarray(shuffled_pages(3, 50))
    assert table.shape == (3, 50) and table.dtype == np.int32
    assert sorted(table.ravel().tolist()) == list(range(1, 151))
    assert (np.diff(table, axis=1) == 1).mean() < 0.1


def test_whole_numbers_of_a_cache_are_left_alone():
    tokens = jnp.arange(12, dtype=jnp.int32)
    same, drawn = redrawn((tokens, jnp.zeros(12)))
    assert same is tokens and float(jnp.abs(drawn).min()) > 0


def test_drawn_bfloat16_numbers_are_as_fine_as_the_type():
    """`jax.random.normal` has 128 different ones, whose bits take a GPU less power than a model's."""
    [drawn] = redrawn([jnp.zeros(20_000, jnp.bfloat16)])
    assert drawn.dtype == jnp.bfloat16 and len(np.unique(np.asarray(drawn))) > 2000


@pytest.mark.slow
def test_round_report(tiny, tmp_path, capsys):
    path = tmp_path / "r.json"
    words = ["round", "--preset", tiny, "--requests", "2", "--context", "33", "--dtype", "float32",
             "--kernels", "xla"]  # fmt: skip
    assert main([*words, "--output", str(path)]) == 0
    assert "33 tokens committed" in capsys.readouterr().out
    plain, drafted = json.loads(path.read_text())["results"]
    assert plain["name"] == "plain (xla)" and plain["block_size"] == 1 and plain["levels"][0]["parts_ms"] == {}
    [level] = drafted["levels"]
    assert set(level["parts_ms"]) == {"draft", "verify", "accept and commit"}
    assert 0 < level["ceiling_ms"] < level["round_ms"] and level["bytes"] > plain["levels"][0]["bytes"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--context", "0"], "--context must be at least 1, not 0"),
        (["--preset", "h200"], "preset 'h200' is a machine, not a pair of models"),
        (["--block-size", "99"], "block_size 99 is outside 2 … 8"),
    ],
)
def test_mistakes_of_a_round(capsys, words, told):
    assert main(["round", *words]) == 2
    assert told in capsys.readouterr().err
