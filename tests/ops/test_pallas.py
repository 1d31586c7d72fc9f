"""Pallas kernels beyond the shared tests: many small steps, with races looked for; what they decline; heads on a mesh.

The interpreter for TPUs runs copies as the chip may, keeps a clock for each, and fills fresh buffers with NaN.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dflash_jax import UserError
from dflash_jax.ops import reference
from dflash_jax.ops.dispatch import Kernels, select
from dflash_jax.ops.kernel_packages import load_kernel, load_kernel_package
from dflash_jax.ops.reference.write import write_rows
from dflash_jax.ops.shapes import Shape
from dflash_jax.sharding import make_mesh
from ops.test_attention import Case, model

attention = load_kernel("pallas", "block_attention").block_attention
load_kernel("pallas", "cache_write")


def module(name: str) -> Any:
    """A module of the package, by the name that its kernels load it under."""
    return sys.modules[f"{load_kernel_package('pallas').__name__}.{name}"]


tiles, writing, Declined = module("tiles"), module("writing"), load_kernel_package("pallas").Declined


@pytest.fixture
def watched() -> Iterator[Any]:
    """The interpreter's settings; fails where two copies or accesses met that nothing keeps apart."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    pltpu.reset_tpu_interpret_mode_state()
    yield pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    races = interpret_pallas_call.races
    assert races is not None, "nothing was interpreted"
    assert not races.races_found
    pltpu.reset_tpu_interpret_mode_state()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """VMEM for next to nothing: one head, one request, few rows and one page at a time."""
    monkeypatch.setattr(tiles, "LANES", 8)
    for name in ("CHUNK_BYTES", "OWN_BYTES", "WRITE_BYTES"):
        monkeypatch.setattr(tiles, name, 1)
    monkeypatch.setattr(tiles, "TILE_ROWS", 16)


@pytest.mark.parametrize(
    ("lengths", "rows", "causal", "window"),
    [([0, 1, 40, 17], 5, True, None), ([40, 0, 33], 4, False, 9), ([30, 9], 20, True, None), ([3, 25], 20, True, 6)],
)
def test_attention_in_many_small_steps(small, watched, lengths, rows, causal, window):
    shape = Shape(model(16, 4, 2), "test", len(lengths), rows, 0, page_size=4)
    cut = tiles.attention_tiles(len(lengths), rows, 2, 2, 16, 10, 4, 4)
    assert cut.heads == 1 and cut.pages <= 2 and (cut.row_tiles > 1) == (rows > 8)
    Case.random(shape, lengths).check(functools.partial(attention, interpret=watched), causal, window)


def test_attention_in_one_step_for_all(watched):
    shape = Shape(model(16, 4, 2), "test", 3, 5, 0)
    Case.random(shape, [0, 140, 20]).check(functools.partial(attention, interpret=watched), True)


def written(kv, locations, pages: int, size: int, **how: Any) -> tuple[np.ndarray, np.ndarray]:
    """(by the kernel, by the reference): a pool of NaN with kv [S, B, 2, G, D] written at `locations`."""
    pool = jnp.full((pages, 2, kv.shape[3], size, kv.shape[4]), jnp.nan, kv.dtype)
    mine = jax.jit(functools.partial(writing.write_rows, **how))(pool, kv, locations)
    return np.asarray(mine[1:], np.float32), np.asarray(write_rows(pool, kv, locations)[1:], np.float32)


def consecutive(rng: np.random.Generator, requests: int, rows: int, size: int) -> tuple[np.ndarray, int]:
    """Locations int32 [S, B] of rows from any offset on, a fifth of them sent to the padding page; how many pages."""
    width = (rows + size - 2) // size + 1
    table = 1 + rng.permutation(requests * width).reshape(requests, width)
    at = rng.integers(0, size, requests)[:, None] + np.arange(rows)
    page = np.where(rng.random(at.shape) < 0.2, 0, np.take_along_axis(table, at // size, axis=1))
    return (page * size + at % size).astype(np.int32), requests * width + 1


@pytest.mark.parametrize(("requests", "rows", "size"), [(4, 5, 4), (3, 1, 8), (2, 40, 16), (2, 3, 64), (5, 20, 1)])
def test_writes_in_many_small_steps(small, watched, requests, rows, size):
    rng = np.random.default_rng(rows)
    locations, pages = consecutive(rng, requests, rows, size)
    cut = tiles.write_tiles(requests, rows, 2, 16, size, 4)
    assert (cut.requests, cut.heads) == (1, 1)
    kv = jnp.asarray(rng.normal(size=(requests, rows, 2, 2, 16)), jnp.float32)
    np.testing.assert_array_equal(*written(kv, locations, pages, size, interpret=watched))


@pytest.mark.parametrize("dim", [16, 128, 192, 256])
def test_writes_of_every_head_dimension_and_of_nan(watched, dim):
    """A row of NaN goes where it belongs and touches no other."""
    rng = np.random.default_rng(dim)
    locations, pages = consecutive(rng, 3, 6, 4)
    kv = rng.normal(size=(3, 6, 2, 1, dim)).astype(np.float32)
    kv[1, 2] = np.nan
    mine, theirs = written(jnp.asarray(kv, jnp.bfloat16), locations, pages, 4, interpret=watched)
    np.testing.assert_array_equal(mine, theirs)


def test_all_rows_sent_to_the_padding_page_write_nothing(watched):
    kv = jnp.ones((2, 4, 2, 1, 16))
    mine, _ = written(kv, jnp.tile(jnp.arange(4, dtype=jnp.int32), (2, 1)), 5, 4, interpret=watched)
    assert np.isnan(mine).all()


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_each_device_of_a_mesh_runs_its_own_heads():
    kernels = select("pallas", "cpu", make_mesh(jax.devices()[:2]))
    assert kernels.mesh is not None and kernels != select("pallas", "cpu")
    case = Case.random(Shape(model(16, 4, 2), "test", 2, 5, 0), [20, 7])
    case.check(kernels.block_attention, True)
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.normal(size=(2, 5, 2, 4, 16)), jnp.float32)
    cos, sin = (jnp.asarray(rng.normal(size=(2, 5, 8)), jnp.float32) for _ in range(2))
    locations, pages = consecutive(rng, 2, 5, 4)
    pool = jnp.zeros((pages, 2, 2, 4, 16))
    args = pool, qkv, jnp.ones(16), jnp.ones(16), 1e-5, cos, sin, locations
    for mine, theirs in zip(kernels.cache_write(*args), reference.cache_write(*args), strict=True):
        rows = slice(1 if mine.shape == pool.shape else 0, None)  # all but the padding page
        np.testing.assert_allclose(mine[rows], theirs[rows], rtol=1e-5, atol=1e-5)
    fused, weight = jnp.asarray(rng.normal(size=(2, 5, 24)), jnp.float32), rng.normal(size=(24, 1, 2, 2, 16))
    args = (pool,), fused, jnp.asarray(weight, jnp.float32), None, jnp.ones((1, 16)), 1e-5, cos, sin, locations
    np.testing.assert_allclose(kernels.kv_inject(*args)[0][1:], reference.kv_inject(*args)[0][1:], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_every_device_of_a_mesh_decides_alike():
    kernels = select("pallas", "cpu", make_mesh(jax.devices()[:2]))
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    args = ints([7, 8]), ints([3, 6]), jnp.asarray([True, False]), ints([[2, 4, 5], [1, 3, 6]])
    options = {"block": 4, "mask_id": 9, "page_size": 4}
    mine, theirs = kernels.prepare_block(*args, **options), reference.prepare_block(*args, **options)
    np.testing.assert_array_equal(np.stack(mine), np.stack(theirs))
    block, target = ints([[7, 3, 4, 9], [8, 1, 1, 1]]), ints([[3, 4, 5, 1], [1, 1, 2, 2]])
    args = block, target, target < 0, ints([3, 6]), ints([99, 9]), ints([[-1], [4]]), jnp.asarray([True, True])
    for mine, theirs in zip(kernels.accept_bonus(*args), reference.accept_bonus(*args), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_mesh_leaves_the_largest_of_the_head_to_xla():
    """Its vocabulary is split, and only XLA's argmax looks at all parts."""
    assert "argmax_head" in select("pallas", "cpu").reason
    if jax.device_count() > 1:
        kernels = select("pallas", "cpu", make_mesh(jax.devices()[:2]))
        assert kernels.argmax_head is reference.argmax_head and "argmax_head" not in kernels.reason
        assert kernels.prepare_block is not reference.prepare_block


def test_tiles_of_the_head_hold_all_rows_and_tokens():
    """Sizes of the real pairs: 4 MB of the head a step, the vocabulary in two lanes."""
    one, many = tiles.head_tiles(15, 151936, 4096, 2), tiles.head_tiles(32 * 31, 151936, 4096, 2)
    assert (one.rows, one.row_tiles, one.vocab, one.lanes) == (16, 1, 512, 2)
    assert (many.rows, many.row_tiles) == (512, 2)
    assert one.vocab * one.steps * one.lanes >= 151936 > one.vocab * (one.steps * one.lanes - 2)
    assert tiles.head_tiles(3, 61, 32, 4).lanes == 1


def test_one_device_needs_no_mesh():
    assert select("pallas", "tpu", make_mesh()).mesh is None


# -- what is declined ------------------------------------------------------------------------------------------------


def shapes(requests: int, width: int, dtype: Any = jnp.bfloat16, rows: int = 4, dim: int = 128) -> list[Any]:
    """Arguments of attention without their values."""
    sizes = [(requests, rows, 2, dim), (requests, rows, 2, 1, dim), (9, 2, 1, 16, dim)]
    floats = [jax.ShapeDtypeStruct(size, dtype) for size in sizes]
    ints = [jax.ShapeDtypeStruct(size, jnp.int32) for size in ((requests, width), (requests,))]
    return floats + ints


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(shapes(128, 2560), "page tables of 1311232 bytes exceed the 983040 that fit .* larger pages make them smaller"),
     (shapes(2, 4, jnp.float16), "keys and values are float16, and there are kernels for bfloat16 and float32"),
     (shapes(1, 4, rows=100_000), r"its buffers need \d+ bytes of the \d+ of VMEM: smaller chunks need less")],
)  # fmt: skip
def test_what_the_chip_cannot_do_is_refused_in_a_sentence(arguments, reason):
    op = functools.partial(Kernels("pallas").block_attention, causal=True)
    with pytest.raises(UserError, match=f"kernels 'pallas' cannot do block_attention here: {reason}"):
        jax.eval_shape(op, *arguments)
    with pytest.raises(Declined):
        jax.eval_shape(functools.partial(attention, causal=True), *arguments)


def test_tiles_fill_vmem_and_no_more():
    """Sizes of the real pairs: all heads at once, half of them where one request runs, chunks of whole registers."""
    round_of_8 = tiles.attention_tiles(8, 16, 8, 4, 128, 130, 16, 2)
    assert (round_of_8.heads, round_of_8.rows, round_of_8.row_tiles, round_of_8.pages) == (8, 64, 1, 32)
    assert tiles.attention_tiles(1, 16, 8, 4, 128, 130, 16, 2).heads == 4
    assert tiles.attention_tiles(1, 16, 8, 4, 128, 130, 16, 2).lanes == 2
    chunk = tiles.attention_tiles(1, 512, 8, 4, 128, 160, 16, 2)
    assert chunk.rows == 1024 and chunk.rows * chunk.row_tiles == 512 * 4
    assert tiles.attention_tiles(1, 1, 8, 4, 128, 2, 16, 2).pages == 8  # 128 tokens, though the table has 32
