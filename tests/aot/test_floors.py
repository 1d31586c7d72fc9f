"""Shapes and floors without a compiler: sizes that can be worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from dflash_jax import axes
from dflash_jax.aot.floors import Floors
from dflash_jax.aot.shapes import Pair, Work, batch, device_bytes, state, weights
from dflash_jax.aot.step import Compiler, Memory, Pools, Step, Traffic
from dflash_jax.params import ParamSpec
from dflash_jax.sharding import make_mesh, memory_order, placement

WORK = Work(8, 1000, 16, 512, 1, 16, jnp.dtype(jnp.bfloat16))


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair.of("qwen3-8b")


def floors(pair: Pair, work: Work = WORK) -> Floors:
    return Floors(pair, work, 1, weights(pair, make_mesh(), work.dtype))


def test_a_round_reads_what_the_peers_table_says(pair: Pair):
    """15.1 GB of the target, 3.4 GB of the draft and the second pass of the head."""
    floor = floors(pair).decode()
    assert floor.weights_bytes == pytest.approx(15.1e9 + 3.4e9, rel=0.01)
    assert floor.kv_bytes == 8 * 1000 * (36 + 5) * 2 * 8 * 128 * 2
    assert floor.bytes == floor.weights_bytes + floor.kv_bytes


def test_operations_of_a_round(pair: Pair):
    """Two a weight and row, but the head's: all rows of the target and all but one of the draft."""
    floor = floors(pair, dataclasses.replace(WORK, committed=0)).decode()
    head = 151936 * 4096
    rest = floor.weights_bytes // 2 - 2 * head
    assert floor.flops == 2 * 128 * rest + 2 * head * (8 * 16 + 8 * 15)
    seen = floors(pair).decode().flops - floor.flops
    assert seen == 4 * 8 * 16 * 32 * 128 * 1000 * (36 + 5)


def test_a_chunk_reads_the_target_s_context_only(pair: Pair):
    late = floors(pair, dataclasses.replace(WORK, committed=1512)).prefill()
    assert late.kv_bytes == 1000 * 36 * 2 * 8 * 128 * 2
    assert floors(pair, dataclasses.replace(WORK, committed=100)).prefill().kv_bytes == 0
    assert late.weights_bytes < floors(pair).decode().weights_bytes - 2 * 151936 * 4096


def test_a_tied_head_is_read_like_any_other():
    found = floors(Pair.of("qwen3-4b"))
    assert found.read == device_bytes(found.params) // 2


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_two_devices_have_half_of_what_is_split(pair: Pair):
    one, two = (make_mesh(jax.devices()[:n]) for n in (1, 2))
    pools = [device_bytes((s.kv, s.draft)) for s in (state(pair, WORK, one), state(pair, WORK, two))]
    assert pools[0] == 2 * pools[1] == WORK.num_pages * 16 * (36 + 5) * 2 * 8 * 128 * 2
    halves = [device_bytes(weights(pair, mesh, WORK.dtype)) for mesh in (one, two)]
    assert 0 < halves[1] - halves[0] / 2 < 0.15e9, "norms and the fusion of taps are everywhere"


def test_a_batch_and_a_state_have_the_shapes_of_the_work(pair: Pair):
    held = state(pair, WORK, make_mesh())
    assert held.page_table.shape == (9, math.ceil((1000 + 32) / 16)) and WORK.num_pages == 8 * 65 + 1
    assert batch(WORK, make_mesh()).tokens.shape == (1, 512)


@pytest.mark.parametrize(
    ("shape", "names", "order"),
    [((64, 2, 256), (axes.EMBED, None, axes.FFN), (1, 0, 2)),
     ((64, 4, 6, 16), (axes.EMBED, axes.KV_HEADS, None, axes.HEAD_DIM), (1, 2, 0, 3)),
     ((64, 256), (axes.EMBED, axes.FFN), (0, 1)), ((4, 16, 64), (axes.HEADS, axes.HEAD_DIM, axes.EMBED), (0, 1, 2))],
)  # fmt: skip
def test_fused_projections_are_tiled_over_what_is_summed(shape, names, order):
    spec = ParamSpec(shape, names)
    assert memory_order(spec) == order
    assert isinstance(placement(spec, make_mesh()), NamedSharding), "elsewhere than on TPU nothing is said of memory"


def made(**changes) -> Step:
    floor = floors(Pair.of("qwen3-4b")).decode()
    step = Step(
        "decode_round", 3.0, Memory(16 * 10**9, 9 * 10**9, 10**9, 10**8, 10**7), floor, 0.0138, None,
        {"paged_write": 41}, Pools(41, 41, []), Traffic(int(floor.bytes * 1.1), 10**9, 0, [("fusion", 10**9)]),
        Compiler(2e10, 1e12, 10**6, None),
    )  # fmt: skip
    return dataclasses.replace(step, **changes)


def test_a_report_says_all_of_it():
    step = made()
    text, found = step.text(), step.as_json()
    assert step.fits and found["fits"] and found["moved_over_floor"] == pytest.approx(1.1, abs=1e-4)
    for part in ("fits: weights 9.00 GB, pools 1.00 GB, scratch 0.100 GB", "1.100 of the floor", "41 of 41 aliased",
                 "copies of a pool: none", "41 paged_write", "no time, 1.0 M cycles", "13.80 ms"):  # fmt: skip
        assert part in text, part
    assert "between" not in text
    copied = made(pools=Pools(41, 40, ["copy.7"])).text()
    assert "40 of 41 aliased; copies of a pool: copy.7" in copied


def test_what_does_not_fit_says_so():
    over = made(memory=Memory(10**9, 9 * 10**9, 10**9, 0, 0))
    assert not over.fits and "does not fit" in over.text()
    refused = made(error="Used 20G of 16G hbm", traffic=None, compiler=None, pools=None, kernels=None)
    assert not refused.fits and refused.text().endswith("the compiler: Used 20G of 16G hbm")
    assert "moved_over_floor" not in refused.as_json()
