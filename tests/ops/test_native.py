"""The C++ kernels for CPU: products against float64, attention where `test_attention` does not look, how they are made,
and what is said where they cannot be."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import UserError
from dflash_jax.ops import Kernels, Turned, dot, native, reference, select
from dflash_jax.ops.dispatch import backends
from dflash_jax.ops.native import build
from dflash_jax.sharding import make_mesh
from dflash_jax.weights.turned import served_by

REASON = native.refusal() if jax.default_backend() == "cpu" else "for CPUs"
here = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def drawn(*size: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(size)).normal(size=size), jnp.float32)


@here
@pytest.mark.parametrize("rows", [*range(1, 18), 33])
@pytest.mark.parametrize(("k", "n"), [(64, 128), (97, 61), (7, 5), (16, 1), (576, 1000), (40000, 3)])
def test_products_are_float64s(rows: int, k: int, n: int):
    y, w = drawn(rows, k), drawn(n, k)
    expected = np.asarray(y, np.float64) @ np.asarray(w, np.float64).T
    found = jax.jit(native.product)(y, w)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@here
@pytest.mark.parametrize(("k", "n"), [(576, 100), (1540, 37)])
def test_a_row_is_the_same_to_the_last_bit_however_many_it_comes_with(k: int, n: int):
    """So that a block's logits are plain decoding's as far as products go."""
    y, w = drawn(17, k), drawn(n, k)
    alone = np.concatenate([native.product(row[None], w) for row in y])
    for rows in range(2, 18):
        np.testing.assert_array_equal(native.product(y[:rows], w), alone[:rows])


@here
@pytest.mark.soak
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86's instructions")
@pytest.mark.parametrize("without", ["-mno-avx512f", "-mno-avx"])
def test_processors_with_less(without: str, tmp_path: Path):
    """The same tests of products and attention, with kernels made for a processor that has not all instructions."""
    asked = "float64s or last_bit or many_at_once or not_a_number or many_tiles or read_nothing"
    asked += " or (native and not test_native)"
    files = [__file__, *(str(Path(__file__).with_name(f"test_{name}.py")) for name in ("norm", "attention"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", asked, *files]
    compiler = f"{build.find_compiler()[0]} {without}"
    done = subprocess.run(
        command, env={**os.environ, "CXX": compiler, "DFLASH_JAX_CACHE": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
    assert list((tmp_path / "native").glob("*.so"))


@here
def test_many_at_once_and_one_after_another():
    """Threads that come late to a product find nothing left of it, and harm no other."""
    y, ws = drawn(8, 256), [drawn(300 + i, 256) for i in range(40)]

    @jax.jit
    def run(y: jax.Array, ws: list[jax.Array]) -> list[jax.Array]:
        side_by_side = [native.product(y, w) for w in ws]
        last = y
        for w in ws:
            last = native.product(last, w[:256]) / 16
        return [*side_by_side, last]

    for _ in range(20):
        *found, last = run(y, ws)
        for one, w in zip(found, ws, strict=True):
            np.testing.assert_allclose(one, np.asarray(y) @ np.asarray(w).T, rtol=1e-4, atol=1e-3)
    assert np.isfinite(np.asarray(last)).all()


@here
def test_what_is_not_a_number_stays_in_its_row_and_column():
    y, w = np.array(drawn(5, 40)), np.array(drawn(30, 40))
    y[2, 39] = np.nan
    w[7, 0] = np.inf
    found = np.asarray(native.product(jnp.asarray(y), jnp.asarray(w)))
    assert np.isnan(found[2]).all() and np.isinf(np.delete(found[:, 7], 2)).all()
    assert np.isfinite(np.delete(np.delete(found, 2, 0), 7, 1)).all()


@here
@pytest.mark.parametrize("rows", [1, native.MOST_ROWS, native.MOST_ROWS + 1])
def test_few_rows_are_its_own_and_more_are_xlas(rows: int):
    y, w = drawn(1, rows, 24), Turned(drawn(3, 5, 24))
    mine = served_by({"w": w, "norm": y}, Kernels(native.NAME))["w"]
    assert served_by(mine, Kernels()) == w
    text = jax.jit(dot).lower(y, mine).as_text()
    assert (native.PRODUCT in text) == (rows <= native.MOST_ROWS)
    np.testing.assert_allclose(dot(y, mine), dot(y, w), rtol=1e-5, atol=1e-5)
    logits = dot(y.astype(jnp.bfloat16), served_by(Turned(w.array.astype(jnp.bfloat16)), Kernels(native.NAME)))
    assert logits.dtype == jnp.bfloat16  # XLA's: it is for float32


@here
def test_lengths_and_tables_beyond_what_there_is_read_nothing_else():
    """Slots that nobody reads may hold anything: no crash, and their neighbours are as they were."""
    q, kv, pool = drawn(3, 4, 6, 16), drawn(3, 4, 2, 2, 16), drawn(9, 2, 2, 8, 16)
    table = np.array([[1, 2], [3, 4], [10**9, -(10**9)]], np.int32)
    good = jnp.asarray([11, 16, 5], jnp.int32)
    expected = reference.paged_attention(q, kv, pool, jnp.asarray(table), good, causal=True)
    for wild in (10**9, -5, 17):
        lengths = good.at[2].set(wild)
        found = native.block_attention(q, kv, pool, jnp.asarray(table), lengths, causal=True)
        np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-5, atol=1e-5)


@here
@pytest.mark.parametrize("rows", [24, 130])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 10, 64])
def test_a_window_and_many_tiles_of_rows(window: int | None, causal: bool, rows: int):
    """Rows of three query heads each, some with a window that begins within the chunk, off the pages' edges."""
    q, kv, pool = drawn(2, rows, 6, 20), drawn(2, rows, 2, 2, 20), drawn(9, 2, 2, 8, 20)
    table, lengths = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]], jnp.int32), jnp.asarray([27, 3], jnp.int32)
    found = native.block_attention(q, kv, pool, table, lengths, causal=causal, window=window)
    expected = reference.paged_attention(q, kv, pool, table, lengths, causal=causal, window=window)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# -- who is chosen -----------------------------------------------------------------------------------------------------


@here
def test_auto_is_native_on_cpu():
    chosen = select("auto", "cpu")
    assert chosen == Kernels(native.NAME) and backends("cpu") == ("xla", native.NAME)
    own = "block_attention, prefill_attention, add_norm and float32 products of up to 16 rows"
    assert chosen.reason == f"kernels: native for {own}, xla for all else (auto)"


def test_it_is_for_one_cpu():
    with pytest.raises(UserError, match="'native' cannot be used: they run on cpu, and the platform is gpu"):
        select("native", "gpu")


@here
def test_several_devices_are_xlas():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = make_mesh(jax.devices()[:2])
    assert select("auto", "cpu", mesh).backend == "xla"
    with pytest.raises(UserError, match="'native' cannot be used: they serve one device, and 2 are asked for"):
        select("native", "cpu", mesh)


def test_without_a_compiler_it_is_xla_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "refusal", lambda: "no C++ compiler")
    chosen = select("auto", "cpu")
    assert backends("cpu") == ("xla",)
    assert chosen == Kernels("xla") and chosen.reason == "kernels: xla (auto; not native: no C++ compiler)"
    with pytest.raises(UserError, match=r"'native' cannot be used: no C\+\+ compiler \(available: xla\)"):
        select("native", "cpu")


# -- how it is made ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path))
    return tmp_path / "native"


@pytest.mark.parametrize(
    ("command", "message"),
    [("false", "false failed: without a word"), ("no-such-compiler -x", "no-such-compiler cannot be run: No such file"),
     ("/", "/ cannot be run: Permission denied"), ("g++ '", r"CXX=\"g\+\+ '\" is no command: No closing quotation"),
     ("sh -c 'echo fatal error: nothing works >&2; exit 1'", "sh failed: fatal error: nothing works")],
)  # fmt: skip
def test_what_the_compiler_says_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(build.CannotBuild, match=message):
        build.built_library()
    assert not cache.exists() or not list(cache.iterdir())


def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.CannotBuild, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+, or what CXX names\)"):
        build.built_library()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", "c++")
    with pytest.raises(build.CannotBuild, match="cannot be written"):
        build.built_library()


@here
@pytest.mark.slow
def test_it_is_made_once_for_a_processor(cache: Path, monkeypatch: pytest.MonkeyPatch):
    first = build.built_library()
    assert list(cache.iterdir()) == [first]
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
        assert build.built_library() == first
    monkeypatch.setattr(build, "_features", lambda: "another processor")
    assert build.built_library() != first


@here
def test_a_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    monkeypatch.setattr(native, "built_library", lambda: broken)
    native.refusal.cache_clear()
    try:
        assert "cannot be loaded" in str(native.refusal())
    finally:
        native.refusal.cache_clear()
