"""Paged attention against whole float64 matrices; every pool row that holds no committed token is NaN."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.dispatch import Kernels
from dflash_jax.ops.reference import paged_attention
from dflash_jax.ops.shapes import PREFILL, TINY, ModelShape, Shape
from ops import dense
from ops.dense import QUICKLY, Pages

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])


def model(head_dim: int, heads: int, kv_heads: int) -> ModelShape:
    return ModelShape("test", 32, 64, heads, kv_heads, head_dim, 61, 8, 1, 1)


@dataclasses.dataclass
class Case:
    """Queries, keys and values of a block over a context: arrays for the device and their exact values."""

    q: np.ndarray
    kv: np.ndarray
    context: list[np.ndarray]
    pages: Pages
    dtype: type

    @classmethod
    def random(cls, shape: Shape, lengths, dtype=jnp.float32, seed: int = 0) -> Case:
        """Values that `dtype` holds exactly."""
        rng = np.random.default_rng(seed)
        m, s, b = shape.model, len(lengths), shape.rows

        def draw(*size: int) -> np.ndarray:
            return np.array(jnp.asarray(rng.normal(size=size), dtype), np.float32)

        width = -(-(max(lengths) + b) // shape.page_size)
        return cls(
            draw(s, b, m.heads, m.head_dim), draw(s, b, 2, m.kv_heads, m.head_dim),
            [draw(length, 2, m.kv_heads, m.head_dim) for length in lengths],
            Pages.deal(rng, s, width, shape.page_size), dtype,
        )  # fmt: skip

    @property
    def lengths(self) -> list[int]:
        return [len(rows) for rows in self.context]

    def run(self, op, **how) -> np.ndarray:
        arrays = [jnp.asarray(x, self.dtype) for x in (self.q, self.kv, self.pages.poisoned(self.context))]
        op = jax.jit(functools.partial(op, **how), compiler_options=QUICKLY)
        found = op(*arrays, jnp.asarray(self.pages.table), jnp.asarray(self.lengths, jnp.int32))
        assert found.dtype == self.dtype and found.shape == self.q.shape
        return np.asarray(found, np.float64)

    def expected(self, causal: bool, window: int | None) -> np.ndarray:
        out = []
        for q, kv, rows in zip(self.q, self.kv, self.context, strict=True):
            both = np.concatenate([rows, kv])
            seen = dense.mask(len(rows), len(kv), causal, window)
            out.append(dense.attention(q, both[:, 0], both[:, 1], seen))
        return np.stack(out)

    def check(self, op, causal: bool, window: int | None = None, **how) -> None:
        found = self.run(op, causal=causal, window=window, **how)
        tolerance = TOLERANCE[self.dtype]
        np.testing.assert_allclose(found, self.expected(causal, window), rtol=tolerance, atol=tolerance)


@each_dtype
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_each_shape(kernels: Kernels, shape: Shape, dtype):
    op = kernels.prefill_attention if shape.role == PREFILL else kernels.block_attention
    Case.random(shape, shape.lengths(), dtype).check(op, shape.causal, shape.window)


@pytest.mark.parametrize(
    "head_dim, heads, kv_heads, causal, window",
    [
        (16, 2, 2, True, None), (16, 2, 2, False, 1), (16, 4, 1, True, 1), (16, 2, 1, True, 40), (16, 2, 1, False, 6),
        (64, 4, 2, False, None), (64, 4, 2, True, 6), (80, 4, 1, True, None), (80, 4, 1, False, 40),
        (128, 4, 2, False, None), (128, 4, 2, True, 6),
        (192, 2, 1, True, None), (256, 4, 2, True, 6), (256, 2, 1, False, None),
    ],
)  # fmt: skip
def test_heads_windows_and_lengths_at_every_boundary(kernels, head_dim, heads, kv_heads, causal, window):
    """None committed, one, around a page (16), around the reference's chunk (128), and a full last page."""
    shape = Shape(model(head_dim, heads, kv_heads), "test", 9, 5, 0)
    lengths = [0, 1, 15, 16, 17, 127, 128, 129, 144]
    Case.random(shape, lengths).check(kernels.block_attention, causal, window)


@pytest.mark.parametrize("page_size, chunk_tokens", [(1, 1), (4, 48), (16, 1), (16, 32), (16, 1000), (64, 100)])
@pytest.mark.parametrize("window", [None, 7])
def test_the_chunk_of_the_reference_changes_nothing(page_size: int, chunk_tokens: int, window: int | None):
    shape = Shape(model(16, 4, 2), "test", 5, 3, 0, page_size)
    case = Case.random(shape, [0, 5, 33, 48, 63])
    case.check(paged_attention, False, window, chunk_tokens=chunk_tokens)


def test_only_short_requests_under_a_window_beside_a_long_one(kernels: Kernels):
    """The window lets the loop start late: the start is the earliest that any request needs."""
    shape = Shape(model(16, 4, 2), "test", 4, 4, 0)
    for lengths in ([300, 129, 260, 137], [300, 3, 0, 299]):
        Case.random(shape, lengths).check(kernels.block_attention, True, 9)


def test_three_times_the_window_with_mixed_layers(kernels: Kernels):
    """CASE 4: the same context under a window and without one; a swap of the two would show."""
    case = Case.random(Shape(model(16, 4, 2), "test", 2, 6, 0), [36, 48])
    case.check(kernels.block_attention, True, 12)
    case.check(kernels.block_attention, False, None)
    assert np.abs(case.expected(True, 12) - case.expected(False, None)).max() > 0.1


# -- masks, drawn --------------------------------------------------------------------------------------------------

DRAWN = {  # (committed, causal, window): committed columns, then the block's
    (3, True, None): "111 1000 / 111 1100 / 111 1110 / 111 1111",
    (3, False, None): "111 1111 / 111 1111 / 111 1111 / 111 1111",
    (3, True, 2): "001 1000 / 000 1100 / 000 0110 / 000 0011",
    (3, False, 2): "001 1100 / 000 1110 / 000 0111 / 000 0011",
    (5, True, 4): "00111 1000 / 00011 1100 / 00001 1110 / 00000 1111",
    (5, False, 4): "00111 1111 / 00011 1111 / 00001 1111 / 00000 1111",
    (2, True, 1): "00 1000 / 00 0100 / 00 0010 / 00 0001",
    (0, True, None): "1000 / 1100 / 1110 / 1111",
    (0, False, 3): "1110 / 1111 / 1111 / 0111",
}


def rows_of(drawing: str) -> np.ndarray:
    return np.array([[int(c) for c in row if c in "01"] for row in drawing.split("/")])


@pytest.mark.parametrize("key", DRAWN, ids=str)
def test_masks_as_drawn(kernels: Kernels, key):
    """Queries of zero weigh what they see alike, and the value of key k is unit vector k: the output is the mask."""
    length, causal, window = key
    case = Case.random(Shape(model(16, 2, 1), "test", 1, 4, 0, page_size=2), [length])
    units = np.eye(16, dtype=np.float32)
    case.q[:] = 0
    case.context[0][:, 1, 0] = units[:length]
    case.kv[0, :, 1, 0] = units[length : length + 4]
    found = case.run(kernels.block_attention, causal=causal, window=window)[0, :, 0, : length + 4]
    drawn = rows_of(DRAWN[key])
    np.testing.assert_allclose(found, drawn / drawn.sum(axis=1, keepdims=True), atol=1e-6)
    np.testing.assert_array_equal(dense.mask(length, 4, causal, window), drawn)


# -- who sees whom -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_the_last_row_of_a_block_reaches_the_first_one(kernels: Kernels, head_dim: int):
    """CASE 5: both ways, changing the last row's key changes the first row's output; causally it must not."""
    case = Case.random(Shape(model(head_dim, 4, 2), "test", 2, 8, 0), [20, 0])
    changed = dataclasses.replace(case, kv=case.kv.copy())
    changed.kv[:, -1] += 1.0
    for causal in (True, False):
        before, after = (c.run(kernels.block_attention, causal=causal) for c in (case, changed))
        reached = np.abs(before - after).max(axis=(2, 3)) > 1e-3  # [S, B]
        assert reached.tolist() == [[not causal] * 7 + [True]] * 2


def test_requests_do_not_see_each_other(kernels: Kernels):
    """Changing everything of request 1 leaves the others' outputs bit for bit."""
    shape = Shape(model(16, 4, 2), "test", 3, 4, 0)
    case, other = Case.random(shape, [30, 30, 30]), Case.random(shape, [30, 30, 30], seed=1)
    changed = dataclasses.replace(case, q=case.q.copy(), kv=case.kv.copy(), context=list(case.context))
    changed.q[1], changed.kv[1], changed.context[1] = other.q[1], other.kv[1], other.context[1]
    before, after = (c.run(kernels.block_attention, causal=False) for c in (case, changed))
    np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])
    assert np.abs(before[1] - after[1]).min() > 0


def test_large_scores_do_not_overflow(kernels: Kernels):
    case = Case.random(Shape(model(16, 4, 2), "test", 2, 4, 0), [20, 140])
    case.q *= 300.0
    case.check(kernels.block_attention, True)


@pytest.mark.parametrize("where", ["all of it", "a key", "a value"])
def test_a_row_of_nan_spoils_only_the_rows_that_see_it(kernels: Kernels, where: str):
    """A rejected draft may be NaN through and through; the rows before it decide what is kept."""
    case = Case.random(Shape(model(16, 4, 2), "test", 2, 6, 0), [20, 0])
    if where == "all of it":
        case.q[:, 3], case.kv[:, 3] = np.nan, np.nan
    else:
        case.kv[:, 3, int(where == "a value"), :, 5] = np.nan
    for how, spoilt in (
        ({"causal": True}, [3, 4, 5]),
        ({"causal": True, "window": 2}, [3, 4]),
        ({"causal": False, "window": 2}, [2, 3, 4]),
        ({"causal": False}, range(6)),
    ):
        nan = np.isnan(case.run(kernels.block_attention, **how))
        assert [i for i in range(6) if nan[:, i].all()] == list(spoilt) and nan.any(axis=(0, 2, 3)).sum() == len(spoilt)
