"""verify_attention and draft_attention: from a fused projection to attended rows, against float64 matrices."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.dispatch import Kernels
from dflash_jax.ops.kernel_packages import kernel_module
from dflash_jax.ops.shapes import TINY, VERIFY, ModelShape, Shape
from ops import dense
from ops.dense import QUICKLY
from ops.test_write import EPS, Launch, split
from ops.triton_host import hosted, interpreting

TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 3e-2}
PLAIN, *_, OTHER = (shape for shape in TINY if shape.role == VERIFY and shape.window is None)
WIDE = Shape(ModelShape("test", 32, 64, 8, 1, 16, 61, 8, 1, 1), VERIFY, 2, 16, 40)  # query rows for two tiles
UNEVEN = Shape(ModelShape("uneven", 48, 136, 4, 2, 64, 97, 5, 3, 1), VERIFY, 4, 5, 64)


@dataclasses.dataclass
class Projected:
    """A projection over committed tokens, for the device and in float64."""

    launch: Launch
    qkv: np.ndarray
    norms: list[np.ndarray | None]
    context: list[np.ndarray]

    @classmethod
    def of(cls, shape: Shape, dtype: type, norm: bool) -> Projected:
        launch, m = Launch.of(shape, dtype), shape.model
        qkv = launch.random(shape.requests, shape.rows, m.kv_heads, m.group + 2, m.head_dim)[1]
        norms = [launch.random(m.head_dim, near=1.0)[1] if norm else None for _ in range(2)]
        context = [launch.random(n, 2, m.kv_heads, m.head_dim)[1] for n in shape.lengths()]
        return cls(launch, qkv, norms, context)

    def run(self, op, *where: np.ndarray, **how):
        launch, shape = self.launch, self.launch.shape
        arrays = (launch.pages.poisoned(self.context), self.qkv, *self.norms)
        pool, qkv, *norms = (x if x is None else jnp.asarray(x, launch.dtype) for x in arrays)
        jitted = jax.jit(functools.partial(op, **how), static_argnums=4, compiler_options=QUICKLY)
        last = jnp.asarray(launch.pages.table), jnp.asarray(shape.lengths(), jnp.int32)
        return jitted(pool, qkv, *norms, EPS, launch.cos, launch.sin, *where, *last)

    def turned(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q [S, B, N, D], k and v [S, B, G, D] of the block."""
        q, k, v = split(self.qkv, self.launch.shape.model.heads)
        q, k = (
            dense.rope(x if w is None else dense.rms_norm(x, w, EPS), self.launch.cos, self.launch.sin)
            for x, w in zip((q, k), self.norms, strict=True)
        )
        return q, k, v

    def expected(self, causal: bool, window: int | None) -> np.ndarray:
        out = []
        for q, k, v, rows in zip(*self.turned(), self.context, strict=True):
            both = np.concatenate([rows, np.stack([k, v], axis=1)])
            out.append(dense.attention(q, both[:, 0], both[:, 1], dense.mask(len(rows), len(k), causal, window)))
        return np.stack(out)


def check(found, expected: np.ndarray, dtype: type) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "shape, norm, dtype",
    [(PLAIN, True, jnp.float32), (OTHER, False, jnp.float32), (WIDE, True, jnp.float32), (PLAIN, True, jnp.bfloat16)],
    ids=["norm", "no norm", "wide", "bfloat16"],
)
def test_a_target_layer_attends_and_writes_its_rows(kernels: Kernels, shape: Shape, norm: bool, dtype):
    case = Projected.of(shape, dtype, norm)
    locations = case.launch.locations(np.zeros_like(case.launch.positions, dtype=bool))
    out, pool = case.run(kernels.verify_attention, jnp.asarray(locations), causal=True)
    check(out, case.expected(True, None), dtype)
    before = case.launch.pages.poisoned(case.context)
    _, keys, values = case.turned()
    for s, b in np.ndindex(*locations.shape):
        page, offset = divmod(int(locations[s, b]), shape.page_size)
        before[page, :, :, offset] = np.stack([keys[s, b], values[s, b]])
    np.testing.assert_allclose(np.asarray(pool, np.float64), before, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("shape, causal, window", [(PLAIN, False, None), (WIDE, False, 6)], ids=["whole", "window"])
def test_a_draft_layer_only_reads_the_pool(kernels: Kernels, shape: Shape, causal: bool, window: int | None):
    case = Projected.of(shape, jnp.float32, norm=True)
    found = case.run(kernels.draft_attention, causal=causal, window=window)
    check(found, case.expected(causal, window), jnp.float32)


@hosted
@pytest.mark.parametrize("programs, parts", [(24, 2), (36, 3), (12, 1)])
def test_the_block_is_a_part_apart_or_the_last_shares(programs: int, parts: int):
    """Two shares of 12 streams, and room for the block or not; and one program for all."""
    case = Projected.of(PLAIN, jnp.bfloat16, norm=True)
    with interpreting():
        tiles = kernel_module("triton", "tiles")
        with tiles.forced(tiles.Cut(lanes=16, tokens=16, warps=4, stages=2, programs=programs)):
            assert tiles.attention_tiles(3, 8, 4, 1, 16, 48, False).parts == parts
            found = case.run(Kernels("triton").draft_attention, causal=False)
    check(found, case.expected(False, None), jnp.bfloat16)


@hosted
@pytest.mark.parametrize("many, rows", [(4, 8), (24, 4), (81, 1)])
def test_several_rows_are_combined_by_one_program(many: int, rows: int, monkeypatch: pytest.MonkeyPatch):
    """Ten rows of eight streams, which eight and four do not divide."""
    case = Projected.of(UNEVEN, jnp.bfloat16, norm=True)
    with interpreting():
        tiles = kernel_module("triton", "tiles")
        monkeypatch.setattr(tiles, "MANY", many)
        assert tiles.rows_to_combine(8, 10) == rows
        with tiles.forced(tiles.Cut(lanes=16, tokens=16, warps=4, stages=2, programs=24)):
            found = case.run(Kernels("triton").draft_attention, causal=False)
    check(found, case.expected(False, None), jnp.bfloat16)


def holds_something(pool: np.ndarray) -> np.ndarray:
    """bool [P, C] of a pool [P, 2, G, C, D]."""
    return np.logical_not(np.isnan(pool).all(axis=(1, 2, 4)))


def test_rows_that_are_not_to_be_kept_go_to_the_padding_page(kernels: Kernels):
    case = Projected.of(PLAIN, jnp.float32, norm=True)
    skip = case.launch.skips()
    locations = case.launch.locations(skip)
    _, pool = case.run(kernels.verify_attention, jnp.asarray(locations), causal=True)
    written = holds_something(np.asarray(pool))
    kept = holds_something(case.launch.pages.poisoned(case.context))
    for location in locations[~skip]:
        kept[divmod(int(location), case.launch.shape.page_size)] = True
    np.testing.assert_array_equal(written[1:], kept[1:])
