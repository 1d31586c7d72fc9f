"""project, project_add_norm and gated_product: products of few rows and what follows them, against float64."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import goldens

from dflash_jax.layers import Following, project_out, project_out_norm, swiglu, swiglu_norm
from dflash_jax.models import FAMILIES, embed
from dflash_jax.models.dflash import draft_rows
from dflash_jax.ops import Turned, dispatch, dot, reference
from dflash_jax.ops.dispatch import Kernels
from dflash_jax.ops.kernel_packages import kernel_module
from dflash_jax.ops.shapes import DRAFT, TINY, VERIFY, Shape
from dflash_jax.sharding import make_mesh
from ops import dense
from ops.triton_host import ASKED, SHARED_BYTES, hosted, interpreting, recording, with_triton

EPS = 1e-5
BF16 = 2.0**-8  # half the distance of two bfloat16 numbers, at most, of the number
RELATIVE = {jnp.float32: 1e-5, jnp.bfloat16: 4 * BF16}
each_dtype = pytest.mark.parametrize("dtype", RELATIVE, ids=["float32", "bfloat16"])
SMALL = [shape for shape in TINY if shape.role in (VERIFY, DRAFT)]
each_shape = pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)


def drawn(*sizes: tuple[int, ...], dtype: Any) -> list[jax.Array]:
    rng = np.random.default_rng(sum(map(sum, sizes)))
    return [jnp.asarray(rng.normal(size=size), dtype) for size in sizes]


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def close(found: Any, expected: np.ndarray, dtype: Any, scale: float = 1.0) -> None:
    """Within the roundings of numbers as large as `scale`."""
    assert found.dtype == dtype and found.shape == expected.shape
    tolerance = RELATIVE[dtype]
    np.testing.assert_allclose(wide(found), expected, rtol=tolerance, atol=tolerance * scale)


def check_projected(op: Callable[..., Any], rows: tuple[int, ...], k: int, h: int, dtype: Any) -> None:
    x, y, w, norm = drawn((*rows, h), (*rows, k), (k, h), (h,), dtype=dtype)
    total, normed = jax.jit(op, static_argnums=4)(x, y, w, norm, EPS)
    product = wide(y) @ wide(w)
    close(total, wide(x) + product, dtype, np.abs(product).max())
    close(normed, dense.rms_norm(wide(total), wide(norm), EPS), dtype)


def check_product(op: Callable[..., Any], rows: tuple[int, ...], k: int, n: tuple[int, ...], dtype: Any) -> None:
    y, w = drawn((*rows, k), (k, *n), dtype=dtype)
    expected = np.tensordot(wide(y), wide(w), 1)
    close(jax.jit(op)(y, w), expected, dtype, np.abs(expected).max())


def check_gated(op: Callable[..., Any], rows: tuple[int, ...], k: int, f: int, dtype: Any) -> None:
    y, w = drawn((*rows, k), (k, 2, f), dtype=dtype)
    w = w / np.asarray(k**0.5, dtype)
    gate, up = np.moveaxis(np.tensordot(wide(y), wide(w), 1), -2, 0)
    expected = gate / (1 + np.exp(-gate)) * up
    close(jax.jit(op)(y, w), expected, dtype, np.abs(expected).max())


@each_dtype
@each_shape
def test_rows_of_each_shape(kernels: Kernels, shape: Shape, dtype: Any):
    model, rows = shape.model, (shape.requests, shape.rows)
    check_projected(kernels.project_add_norm, rows, model.ffn, model.hidden, dtype)
    check_gated(kernels.gated_product, rows, model.hidden, model.ffn, dtype)
    heads = model.kv_heads, model.group + 2, model.head_dim
    check_product(kernels.project, rows, model.hidden, heads, dtype)


@pytest.mark.parametrize(("k", "n"), [(576, 576), (70, 200), (1, 1), (129, 33), (96, 2100)])
def test_any_width(kernels: Kernels, k: int, n: int):
    """Depths and columns that fill no tile, and shares of unlike size."""
    check_projected(kernels.project_add_norm, (3, 2), k, n, jnp.bfloat16)
    check_gated(kernels.gated_product, (7,), k, n, jnp.bfloat16)
    check_product(kernels.project, (7,), k, (n,), jnp.bfloat16)


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_any_number_of_rows(kernels: Kernels, rows: int):
    check_projected(kernels.project_add_norm, (rows,), 96, 72, jnp.bfloat16)
    check_gated(kernels.gated_product, (rows,), 72, 96, jnp.bfloat16)
    check_product(kernels.project, (rows,), 72, (2, 6, 8), jnp.bfloat16)


def test_the_product_is_rounded_before_it_is_added(kernels: Kernels):
    """256 − (255 + 1/2): the product becomes 256 in bfloat16, as the reference's does."""
    y, w = jnp.asarray([[255.0, 0.5]], jnp.bfloat16), jnp.ones((2, 8), jnp.bfloat16)
    x = jnp.full((1, 8), -256.0, jnp.bfloat16)
    total, normed = kernels.project_add_norm(x, y, w, x[0], EPS)
    np.testing.assert_array_equal(wide(total), np.zeros((1, 8)))
    np.testing.assert_array_equal(wide(normed), np.zeros((1, 8)))


def test_a_nan_stays_in_its_row(kernels: Kernels):
    x, y, w, norm = drawn((4, 40), (4, 96), (96, 40), (40,), dtype=jnp.bfloat16)
    gate_up = drawn((96, 2, 24), dtype=jnp.bfloat16)[0]
    broken = y.at[1, 5].set(jnp.nan).at[2, 95].set(jnp.inf)

    def normed(rows: jax.Array) -> jax.Array:
        return kernels.project_add_norm(x, rows, w, norm, EPS)[1]

    def gated(rows: jax.Array) -> jax.Array:
        return kernels.gated_product(rows, gate_up)

    def projected(rows: jax.Array) -> jax.Array:
        return kernels.project(rows, w)

    for op in (normed, gated, projected):
        mine, whole = wide(op(broken)), wide(op(y))
        np.testing.assert_array_equal(mine[[0, 3]], whole[[0, 3]])
        assert np.isnan(mine[1]).all() and not np.isfinite(mine[2]).all()


def test_gates_far_from_zero(kernels: Kernels):
    """silu(−200) is nothing, though exp(200) is too large for float32; silu(200) is 200."""
    y, w = jnp.asarray([[-200.0], [200.0], [0.0]], jnp.bfloat16), jnp.ones((1, 2, 16), jnp.bfloat16)
    found = wide(kernels.gated_product(y, w))
    np.testing.assert_allclose(found, np.repeat([[0.0], [40000.0], [0.0]], 16, axis=1), rtol=BF16)


def test_a_mesh_takes_xlas(kernels: Kernels):
    """What is summed over lies apart there."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    split = Kernels(kernels.backend, interpret=kernels.interpret, mesh=make_mesh(jax.devices()[:2]))
    assert not {"project", "project_add_norm", "gated_product"} & set(split.own_ops)
    check_product(split.project, (2, 3), 24, (5, 8), jnp.float32)
    check_projected(split.project_add_norm, (2, 3), 40, 24, jnp.float32)
    check_gated(split.gated_product, (2, 3), 24, 40, jnp.float32)


@each_dtype
def test_turned_weights(dtype: Any):
    """As a CPU has them."""
    x, y, w, norm = drawn((2, 3, 24), (2, 3, 40), (40, 24), (24,), dtype=dtype)
    gate_up = drawn((40, 2, 16), dtype=dtype)[0]
    found = Kernels().project_add_norm(x, y, Turned(w.T), norm, EPS)
    for mine, theirs in zip(found, Kernels().project_add_norm(x, y, w, norm, EPS), strict=True):
        np.testing.assert_allclose(wide(mine), wide(theirs), rtol=RELATIVE[dtype], atol=RELATIVE[dtype])
    mine, theirs = (Kernels().gated_product(y, one) for one in (Turned(jnp.moveaxis(gate_up, 0, -1)), gate_up))
    np.testing.assert_allclose(wide(mine), wide(theirs), rtol=RELATIVE[dtype], atol=RELATIVE[dtype])


# -- how they are cut --------------------------------------------------------------------------------------------------


def all_cuts(rules: Any) -> tuple[Callable[..., Any], ...]:
    return rules.product_cut, rules.gated_cut, rules.whole_cut


@contextlib.contextmanager
def tiles() -> Iterator[Any]:
    """The module that the ops ask, while Triton's kernels are interpreted."""
    with interpreting():
        yield kernel_module("triton", "tiles")


@hosted
@pytest.mark.parametrize(
    "cut",
    [(16, 32, 1, 1, 2, False), (32, 32, 3, 4, 3, False), (64, 64, 2, 4, 3, True), (64, 16, 9, 4, 4, True)],
    ids=["whole", "shares", "left", "more shares than work"],
)
def test_any_cut_computes_the_same(cut: tuple[Any, ...]):
    with tiles() as rules, rules.forced(rules.ProductCut(*cut)):
        check_projected(Kernels("triton").project_add_norm, (9,), 100, 88, jnp.bfloat16)
        check_gated(Kernels("triton").gated_product, (9,), 88, 100, jnp.bfloat16)
        check_product(Kernels("triton").project, (9,), 100, (8, 11), jnp.bfloat16)


@hosted
@pytest.mark.slow
def test_more_rows_of_a_wide_weight_on_a_hopper(monkeypatch: pytest.MonkeyPatch):
    rows = 17
    with tiles() as rules:
        monkeypatch.setattr(rules, "_chip", lambda: "9.0")
        assert all(cut(rows, 96, 8192, 2).columns > 32 for cut in all_cuts(rules))
        check_projected(Kernels("triton").project_add_norm, (rows,), 130, 2100, jnp.bfloat16)
        check_gated(Kernels("triton").gated_product, (rows,), 40, 8200, jnp.bfloat16)
        check_product(Kernels("triton").project, (rows,), 130, (3, 700), jnp.bfloat16)


def test_more_rows_are_xlas_where_they_were_not_measured(monkeypatch: pytest.MonkeyPatch):
    rules = kernel_module("triton", "tiles")
    for chip, rows, itemsize in ((None, 128, 2), ("8.0", 17, 2), ("9.0", 129, 2), ("9.0", 128, 4)):
        monkeypatch.setattr(rules, "_chip", lambda chip=chip: chip)
        assert not any(cut(rows, 4096, 8192, itemsize) for cut in all_cuts(rules))
    monkeypatch.setattr(rules, "_chip", lambda: "9.0")
    assert not any(cut(128, 576, 960, 2) for cut in all_cuts(rules))  # of a narrow weight


def test_one_share_is_for_few_rows_of_a_narrow_weight():
    rules = kernel_module("triton", "tiles")
    assert rules.whole_cut(16, 576, 960, 2) is not None
    assert not any(rules.whole_cut(*case) for case in ((17, 576, 960, 2), (16, 4096, 6144, 2), (16, 576, 960, 4)))


def test_cuts_are_for_few_rows_of_two_bytes(monkeypatch: pytest.MonkeyPatch):
    rules = kernel_module("triton", "tiles")
    monkeypatch.setattr(rules, "_chip", lambda: None)
    for cut in (rules.product_cut, rules.gated_cut):
        assert cut(1, 4096, 4096, 2) is not None and cut(rules.FEW_ROWS, 4096, 4096, 2) is not None
        assert cut(rules.FEW_ROWS + 1, 4096, 4096, 2) is None and cut(1, 4096, 4096, 4) is None


def test_cuts_keep_all_multiprocessors_busy():
    """Shares fill the chip where columns do not, and none is without work."""
    rules = kernel_module("triton", "tiles")
    for k, n in ((4096, 4096), (12288, 4096), (9728, 2560), (576, 576), (1536, 576)):
        cut = rules.product_cut(16, k, n, 2)
        assert 64 <= -(-n // cut.columns) * cut.shares <= 2 * rules.PROGRAMS and cut.depth * cut.shares < k + cut.depth
    assert rules.product_cut(1, 4096, 4096, 2) == rules.product_cut(16, 4096, 4096, 2)  # sums are the same


@pytest.mark.slow
@with_triton
@pytest.mark.parametrize("rows", [17, 128])
def test_more_rows_fit_a_hopper(rows: int, monkeypatch: pytest.MonkeyPatch):
    def trace(*arrays: jax.Array) -> None:
        x, y, w, norm, gate_up, qkv = arrays
        Kernels("triton").project_add_norm(x, y, w, norm, EPS)
        Kernels("triton").gated_product(x, gate_up)
        Kernels("triton").project(x, qkv)

    with recording() as found:
        monkeypatch.setattr(kernel_module("triton", "tiles"), "_chip", lambda: "9.0")
        shapes = (rows, 4096), (rows, 12288), (12288, 4096), (4096,), (4096, 2, 12288), (4096, 8, 6, 128)
        jax.eval_shape(trace, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    assert len(found) == 4
    assert all(one.compile(90).metadata.shared <= SHARED_BYTES[90] for one in found)


@with_triton
def test_only_kernels_that_are_given_a_weight_ask():
    x, y, w, norm, ahead = drawn((2, 40), (2, 96), (96, 40), (40,), (96, 40), dtype=jnp.bfloat16)
    with recording() as found:
        for more in ((), (ahead,)):
            jax.eval_shape(lambda more=more: Kernels("triton").project_add_norm(x, y, w, norm, EPS, *more))
    norms = [one.compile(90).asm["ptx"] for one in found if one.kernel.fn.__name__ == "add_shares_norm"]
    assert [ptx.count("prefetch.global.L2") for ptx in norms] == [0, 1]


@with_triton
@pytest.mark.parametrize(
    ("rows", "dtype", "expected"),
    [(8, jnp.bfloat16, ["share_of_product", "add_shares_norm", "gated_tile", "share_of_product"]),
     (17, jnp.bfloat16, ["add_norm_row"]), (8, jnp.float32, ["add_norm_row"])],
)  # fmt: skip
def test_what_is_launched(rows: int, dtype: Any, expected: list[str]):
    """Many rows, and float32, are XLA's to multiply."""

    def trace() -> None:
        x, y, w, norm, gate_up = drawn((rows, 24), (rows, 40), (40, 24), (24,), (24, 2, 40), dtype=dtype)
        Kernels("triton").project_add_norm(x, y, w, norm, EPS)
        Kernels("triton").gated_product(x, gate_up)
        Kernels("triton").project(x, gate_up)

    with recording() as found:
        jax.eval_shape(trace)
    assert [one.kernel.fn.__name__ for one in found] == expected


def test_a_weight_that_comes_next_counts_for_nothing(kernels: Kernels):
    x, y, w, norm, ahead = drawn((3, 40), (3, 96), (96, 40), (40,), (40, 5, 99), dtype=jnp.bfloat16)
    without, found = (kernels.project_add_norm(x, y, w, norm, EPS, *more) for more in ((), (ahead,)))
    for mine, theirs in zip(found, without, strict=True):
        np.testing.assert_array_equal(wide(mine), wide(theirs))


@hosted
@pytest.mark.parametrize("size", [1, 64, 65, 8448, 8449, 70001])
def test_all_of_a_small_weight_is_asked_for(size: int):
    """Every line of it, and nothing beyond: the norm's kernel has x, shares, the norm's weight and it."""
    x, y, w, norm, ahead = drawn((2, 40), (2, 96), (96, 40), (40,), (size,), dtype=jnp.bfloat16)
    with tiles():
        ASKED.clear()
        jax.block_until_ready(Kernels("triton").project_add_norm(x, y, w, norm, EPS, ahead))
    assert set(ASKED) == {(3, at) for at in range(0, size * 2, 128)}


@hosted
def test_a_large_weight_is_not_asked_for(monkeypatch: pytest.MonkeyPatch):
    """It would only take the memory's time from what is read now."""
    x, y, w, norm, ahead = drawn((2, 40), (2, 96), (96, 40), (40,), (40, 5), dtype=jnp.bfloat16)
    with tiles() as rules:
        ASKED.clear()
        monkeypatch.setattr(rules, "ASKED_EARLY", ahead.nbytes - 1)
        jax.block_until_ready(Kernels("triton").project_add_norm(x, y, w, norm, EPS, ahead))
    assert not ASKED


# -- in the models -----------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_layers_are_the_sum_of_their_parts(bias: bool, dtype: Any):
    """Bit for bit, and with biases, which come between product and sum."""
    attended, x, norm = drawn((2, 3, 4, 8), (2, 3, 24), (24,), dtype=dtype)
    o, gate_up, down = drawn((4, 8, 24), (24, 2, 40), (40, 24), dtype=dtype)
    o_bias, gate_up_bias, down_bias = drawn((24,), (2, 40), (24,), dtype=dtype)
    attn, mlp = {"o": o}, {"gate_up": gate_up, "down": down}
    if bias:
        attn, mlp = attn | {"o_bias": o_bias}, mlp | {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    then = Following(norm)
    found = project_out_norm(attn, attended, x, then, EPS, Kernels()), swiglu_norm(mlp, x, x, then, EPS, Kernels())
    product = dot(attended.reshape(2, 3, 32), o.reshape(32, 24)) + (o_bias[None, None] if bias else 0)
    both = dot(x, gate_up) + (gate_up_bias[None, None] if bias else 0)
    mixed = dot(jax.nn.silu(both[..., 0, :]) * both[..., 1, :], down) + (down_bias[None, None] if bias else 0)
    for mine, delta, alone in zip(found, (product, mixed), (project_out(attn, attended), swiglu(mlp, x)), strict=True):
        np.testing.assert_array_equal(wide(alone), wide(delta))
        for one, other in zip(mine, reference.add_norm(x, delta, norm, EPS), strict=True):
            np.testing.assert_array_equal(wide(one), wide(other))


def target_states(kernels: Kernels, dtype: Any) -> list[np.ndarray]:
    """Last hidden states and taps of a target over its recorded prompts."""
    case = goldens.model("qwen3-dim80")
    rows = dataclasses.replace(goldens.rows(case.golden["input_ids"][:1, :8]), kernels=kernels)
    forward, taps = FAMILIES[case.config.family].forward, tuple(range(case.config.num_layers))
    params, pool = jax.tree.map(lambda x: x.astype(dtype), (case.params, goldens.poisoned_pool(case.config, 1)))
    run = goldens.jit(lambda params, pool: forward(params, case.config, rows, pool, taps)[:2])
    return jax.tree.map(wide, jax.tree.leaves(run(params, pool)))


def draft_states(kernels: Kernels, dtype: Any, name: str) -> list[np.ndarray]:
    """Hidden states of a draft over an empty context."""
    pair = goldens.pair(name)
    rows = dataclasses.replace(goldens.rows(pair.golden["block_ids"][None]), kernels=kernels)
    trees = pair.draft_params, pair.target_params, goldens.poisoned_pool(pair.draft, 1)
    run = goldens.jit(lambda params, target, pool: draft_rows(params, pair.draft, embed(target, rows.ids), rows, pool))
    return [wide(run(*jax.tree.map(lambda x: x.astype(dtype), trees)))]


MODELS_STATES = {
    "target": target_states,
    "draft": lambda kernels, dtype: draft_states(kernels, dtype, "qwen3-v1"),
    "convolutions": lambda kernels, dtype: draft_states(kernels, dtype, "qwen3-v2"),
}


@hosted
@pytest.mark.parametrize("states", MODELS_STATES.values(), ids=MODELS_STATES)
def test_models_with_the_kernels_compute_what_they_do_with_xla(states: Callable[..., list[np.ndarray]]):
    """As near as XLA's bfloat16 is to its float32."""
    own = ("project", "gated_product", "project_add_norm")
    alone = Kernels("triton", spared=tuple(op for op in dispatch.OPS if op not in own))
    with interpreting():
        assert set(alone.own_ops) == set(own)
        found = states(alone, jnp.bfloat16)
    exact, xla = states(Kernels(), jnp.float32), states(Kernels(), jnp.bfloat16)
    for mine, theirs, truth in zip(found, xla, exact, strict=True):
        assert np.isfinite(mine).all()
        assert np.abs(mine - truth).mean() <= 1.5 * np.abs(theirs - truth).mean()


@hosted
def test_layers_say_what_comes_next_and_are_traced_together():
    """A layer's two norms ask for what follows.  Of three layers the first is traced, and the others once for both."""
    case = goldens.model("qwen3-dim80", "bfloat16")
    rows = goldens.rows(case.golden["input_ids"][:1, :7])  # as many as no other test traces
    rows, pool = dataclasses.replace(rows, kernels=Kernels("triton")), goldens.poisoned_pool(case.config, 1)
    forward = FAMILIES[case.config.family].forward
    with recording() as found:
        jax.eval_shape(lambda params, pool: forward(params, case.config, rows, pool), case.params, pool)
    asked = [one.constants["AHEAD"] for one in found if one.kernel.fn.__name__ == "add_shares_norm"]
    layer = case.params["layers"][0]
    assert case.config.num_layers == 3 and asked == 2 * [layer["mlp"]["gate_up"].size, layer["attn"]["qkv"].size]
