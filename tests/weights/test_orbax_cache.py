"""The cache of converted weights: equal values, used when it fits, rebuilt when it does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax.errors import UserError
from dflash_jax.sharding import make_mesh
from dflash_jax.weights import load_draft, load_target, open_draft, open_target, orbax_cache

from .tiny import DRAFT2, LLAMA, QWEN3, draft_tensors, target_tensors, write_folder, write_tiny_gguf

CONFIG = {**LLAMA, "attention_bias": True, "mlp_bias": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", CONFIG, target_tensors(CONFIG, biases=True))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The source of every conversion that the cache asks for."""
    seen: list[str] = []
    convert = orbax_cache.load_params

    def counted(specs: Any, table: Any, source: Any, *rest: Any) -> Any:
        seen.append(source.where)
        return convert(specs, table, source, *rest)

    monkeypatch.setattr(orbax_cache, "load_params", counted)
    return seen


def load(path: Path, cache: Path | None, dtype: Any = "float32", devices: Any = None) -> Any:
    return load_target(open_target(path), dtype, make_mesh(devices), cache_dir=cache)


def assert_trees_equal(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert [leaf.dtype for leaf in jax.tree.leaves(left)] == [leaf.dtype for leaf in jax.tree.leaves(right)]


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "weights").iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_load_reads_the_cache(tmp_path: Path, folder: Path, conversions: list[str], dtype: str, capfd: Any):
    cache = tmp_path / "cache"
    first = load(folder, cache, dtype)
    second = load(folder, cache, dtype)
    assert conversions == [str(folder)]
    assert_trees_equal(first, load(folder, None, dtype))
    assert_trees_equal(second, first)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(second))
    assert capfd.readouterr().out == ""


def test_gguf_and_draft(tmp_path: Path, conversions: list[str]):
    cache, file = tmp_path / "cache", tmp_path / "tiny.gguf"
    write_tiny_gguf(file, QWEN3, target_tensors(QWEN3), "Q8_0")
    assert_trees_equal(load(file, cache), load(file, cache))
    target = open_target(file).config
    draft = open_draft(write_folder(tmp_path / "draft", DRAFT2, draft_tensors(DRAFT2)), target)
    first, second = (load_draft(draft, "float32", make_mesh(), cache_dir=cache) for _ in range(2))
    assert_trees_equal(first, second)
    assert "inject" in second and len(conversions) == 2


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_one_entry_serves_every_mesh(tmp_path: Path, folder: Path, conversions: list[str]):
    one = load(folder, tmp_path)
    two = load(folder, tmp_path, devices=jax.devices()[:2])
    assert_trees_equal(one, two)
    assert len(conversions) == 1
    assert len(two["embed"].sharding.device_set) == 2


def test_dtypes_and_sources_have_their_own_entries(tmp_path: Path, folder: Path):
    cache = tmp_path / "cache"
    other = write_folder(tmp_path / "b" / "model", CONFIG, target_tensors(CONFIG, biases=True))
    load(folder, cache)
    load(folder, cache, "bfloat16")
    load(other, cache)
    names = [entry.name.rsplit("-", 1)[0] for entry in entries(cache)]
    assert names == ["model-bfloat16", "model-float32", "model-float32"]


def test_changed_files_make_the_entry_anew(tmp_path: Path, folder: Path, conversions: list[str], capfd: Any):
    cache = tmp_path / "cache"
    before = load(folder, cache)
    changed = {name: value + 1 for name, value in target_tensors(CONFIG, biases=True).items()}
    write_folder(folder, CONFIG, changed)  # the same sizes; only the time of change differs
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    after = load(folder, cache)
    np.testing.assert_array_equal(after["embed"], changed["model.embed_tokens.weight"])
    assert not np.array_equal(before["embed"], after["embed"])
    assert "are of other files or another layout; converting again" in capfd.readouterr().err
    assert_trees_equal(load(folder, cache), after)
    assert len(conversions) == 2 and len(entries(cache)) == 1


def _largest(entry: Path) -> Path:
    return max((path for path in entry.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def _shorten(entry: Path) -> None:
    path = _largest(entry)
    path.write_bytes(path.read_bytes()[:-1])


def _garble(entry: Path) -> None:
    """Bytes of the same length, where only Orbax can notice."""
    for path in entry.rglob("manifest.ocdbt"):
        path.write_bytes(bytes(len(path.read_bytes())))


DAMAGE = {
    "file gone": (lambda entry: _largest(entry).unlink(), "are damaged"),
    "file short": (_shorten, "are damaged"),
    "file added": (lambda entry: (entry / "extra").write_text("x"), "are damaged"),
    "manifest gone": (lambda entry: (entry / "manifest.json").unlink(), "have no readable manifest.json"),
    "manifest no JSON": (lambda entry: (entry / "manifest.json").write_text("{"), "have no readable manifest.json"),
    "manifest a list": (lambda entry: (entry / "manifest.json").write_text("[]"), "have no readable manifest.json"),
    "manifest of another": (lambda entry: (entry / "manifest.json").write_text(json.dumps({"key": "x", "files": {}})),
                            "are of other files"),
    "content garbled": (_garble, r"cannot be read \("),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_entries_are_made_anew(tmp_path: Path, folder: Path, conversions: list[str], capfd: Any, name: str):
    damage, message = DAMAGE[name]
    cache = tmp_path / "cache"
    expected = load(folder, cache)
    damage(entries(cache)[0])
    capfd.readouterr()
    assert_trees_equal(load(folder, cache), expected)
    err = capfd.readouterr().err
    assert message.replace("\\", "") in err and "converting again" in err
    assert_trees_equal(load(folder, cache), expected)
    assert len(conversions) == 2 and len(entries(cache)) == 1


def test_a_failed_write_costs_only_the_cache(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    cache = tmp_path / "cache"
    save = orbax_cache._save

    def full(aside: Path, params: Any) -> None:
        save(aside, {"norm": params["norm"]})
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(orbax_cache, "_save", full)
    assert_trees_equal(load(folder, cache), load(folder, None))
    assert "could not be cached in" in capfd.readouterr().err
    assert entries(cache) == []


def test_a_place_that_is_no_folder(tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "cache").write_text("")
    load(folder, tmp_path / "cache")
    assert "could not be cached in" in capfd.readouterr().err


def test_asides_of_dead_processes_are_removed(tmp_path: Path, folder: Path):
    cache = tmp_path / "cache"
    load(folder, cache)
    entry = entries(cache)[0]
    dead, alive = entry.with_name(f".{entry.name}.{2**22 + 1}"), entry.with_name(f".{entry.name}.{os.getppid()}")
    for aside in (dead, alive):
        aside.mkdir()
    (entry / "manifest.json").unlink()
    load(folder, cache)
    assert entries(cache) == [alive, entry]


def test_a_bad_checkpoint_is_never_cached(tmp_path: Path):
    tensors = target_tensors(LLAMA)
    del tensors["lm_head.weight"]
    with pytest.raises(UserError, match="lm_head.weight of shape"):
        load(write_folder(tmp_path / "model", LLAMA, tensors), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
