"""Names of drafters: which factory they find, what it is told, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from dflash_jax import Engine, EngineSettings, UserError
from dflash_jax.drafters import (
    Capabilities,
    DFlashDrafter,
    DraftContext,
    NgramDrafter,
    NoDrafter,
    drafter_names,
    make_drafter,
    register_drafter,
    registry,
)
from dflash_jax.sharding import make_mesh
from dflash_jax.weights import open_target

PAIR = Path(__file__).resolve().parents[1] / "data" / "pairs" / "x-default-taps"
DRAFT = str(PAIR / "draft")
OWN = ["dflash", "ngram", "none"]


@pytest.fixture
def context() -> DraftContext:
    return DraftContext("ignored", open_target(PAIR / "target"), jnp.dtype("float32"), make_mesh())


@pytest.fixture(autouse=True)
def _only_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone afterwards, and what other files registered is not there."""
    monkeypatch.setattr(registry, "_factories", {name: registry._factories[name] for name in OWN})
    yield


@dataclasses.dataclass(frozen=True)
class Odd(NgramDrafter):
    """Prompt look-up that says other things about itself."""

    mask_id: int = 0
    taps: Any = ()
    capabilities: Any = Capabilities()


def test_what_comes_with_the_package(context):
    assert drafter_names() == OWN
    assert make_drafter("none", context) == (NoDrafter(), None)
    assert make_drafter("ngram", context) == (NgramDrafter(8, 4, 1), None)
    assert make_drafter("ngram:3", context) == (NgramDrafter(8, 3, 1), None)
    assert make_drafter("ngram:5,2", context) == (NgramDrafter(8, 5, 2), None)
    wide = dataclasses.replace(context, block_size=20)
    assert make_drafter("ngram", wide) == (NgramDrafter(20, 4, 1), None)


def test_a_folder_is_a_dflash_draft(context):
    by_path, by_name = make_drafter(DRAFT, context), make_drafter(f"dflash:{DRAFT}", context)
    assert isinstance(by_path[0], DFlashDrafter) and by_path[0] == by_name[0] and "inject" in by_path[1]


@pytest.mark.parametrize(
    ("draft", "block_size", "message"),
    [
        ("none", 4, "block_size 4 needs a draft, and draft is 'none'"),
        ("none:x", None, "draft 'none' takes no argument, and 'x' is given"),
        ("ngram:0", None, "draft 'ngram:0' is not ngram:MAX or ngram:MAX,MIN with 1 ≤ MIN ≤ MAX ≤ 16"),
        ("ngram:2,3", None, "draft 'ngram:2,3' is not"),
        ("ngram:17", None, "draft 'ngram:17' is not"),
        ("ngram:2,1,1", None, "draft 'ngram:2,1,1' is not"),
        ("ngram:four", None, "draft 'ngram:four' is not"),
        ("dflash", None, "draft 'dflash' needs a folder or hub id"),
        ("dflash:", None, "draft 'dflash' needs a folder or hub id"),
        ("medusa", None, "draft 'medusa' is no drafter (dflash, ngram, none), no folder and no hub id (owner/name)"),
        ("medusa:3", None, "draft 'medusa:3' is no drafter"),
        ("./medusa", None, "./medusa: no such file or folder"),
        (DRAFT, 9, "block_size 9 is outside 2 … 4, the block size that the draft was trained for"),
        (DRAFT, 1, "block_size 1 is outside 2 … 4"),
        ("ngram", 1000000, "block_size 1000000 is outside 2 … 256 of draft 'ngram'"),
    ],
)
def test_what_is_refused(context, monkeypatch, draft, block_size, message):
    """In one sentence, and before any weights are read."""
    monkeypatch.setattr(registry, "load_draft", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UserError) as caught:
        make_drafter(draft, dataclasses.replace(context, block_size=block_size))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_factory_is_told_everything(context):
    told: list[DraftContext] = []

    def factory(given: DraftContext):
        told.append(given)
        return NgramDrafter(given.block_size or 3), {"x": 1}

    register_drafter("mine", factory)
    assert "mine" in drafter_names()
    assert make_drafter("mine:a:b,c", dataclasses.replace(context, block_size=3)) == (NgramDrafter(3), {"x": 1})
    assert told[0] == dataclasses.replace(context, block_size=3, argument="a:b,c")
    assert told[0].target == context.checkpoint.config
    make_drafter("mine", context)
    assert told[1].argument == ""
    with pytest.raises(UserError, match="block_size 9 is outside 2 … 7 of draft 'seven'"):
        register_drafter("seven", lambda _: (NgramDrafter(7), None))
        make_drafter("seven", dataclasses.replace(context, block_size=9))


def test_a_name_is_taken_once(context):
    for name in ("none", "ngram", "dflash"):
        with pytest.raises(ValueError, match=f"a drafter named '{name}' is registered already"):
            register_drafter(name, registry.make_none)
    register_drafter("ngram", lambda _: (NgramDrafter(5), None), replace=True)
    assert make_drafter("ngram", context) == (NgramDrafter(5), None)
    for name in ("", "Mine", "a/b", "a:b", "-a", "a.b"):
        with pytest.raises(ValueError, match="a drafter's name is made of a-z, 0-9, - and _"):
            register_drafter(name, registry.make_none)


def test_names_go_before_folders(context, tmp_path, monkeypatch):
    (tmp_path / "ngram").symlink_to(DRAFT)
    (tmp_path / "draft").symlink_to(DRAFT)
    monkeypatch.chdir(tmp_path)
    assert isinstance(make_drafter("ngram", context)[0], NgramDrafter)
    for path in ("./ngram", "draft"):
        assert isinstance(make_drafter(path, context)[0], DFlashDrafter)


def test_hub_ids_are_drafts(context, monkeypatch):
    opened = []

    def open_draft(where, target):
        opened.append((where, target))
        raise UserError("not here")

    monkeypatch.setattr(registry, "open_draft", open_draft)
    with pytest.raises(UserError, match="not here"):
        make_drafter("z-lab/Qwen3-8B-DFlash-b16", context)
    assert opened == [("z-lab/Qwen3-8B-DFlash-b16", context.target)]


def test_installed_packages_bring_drafters(context, tmp_path, monkeypatch):
    """Entry points of the group `dflash_jax.drafters`; what is registered here goes first."""
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dflash_jax.drafters]\nfar = outside_drafter:make\nngram = nowhere:make\n")
    (tmp_path / "outside_drafter.py").write_text(
        "from dflash_jax.drafters import NgramDrafter\n"
        "def make(context):\n    return NgramDrafter(int(context.argument)), None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert drafter_names() == ["dflash", "far", "ngram", "none"]
    assert make_drafter("far:6", context) == (NgramDrafter(6), None)
    assert make_drafter("ngram", context) == (NgramDrafter(8), None)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("a string", "its factory made 'a string', which is not a hashable Drafter"),
        (Odd(max_block=0), "max_block 0 is not one of 1 … 256"),
        (Odd(max_block=257), "max_block 257 is not one of 1 … 256"),
        (Odd(mask_id=71), "mask_id 71 is outside 0 … 70"),
        (Odd(taps=(7,), capabilities=Capabilities(needs_hidden=True)), r"taps \(7,\) are outside 0 … 6"),
        (Odd(taps=(1,)), r"needs_hidden and taps \(1,\) contradict each other"),
        (Odd(capabilities=Capabilities(needs_hidden=True)), r"needs_hidden and taps \(\) contradict each other"),
        (Odd(capabilities="all"), "capabilities are 'all'; needs_hidden"),
    ],
)
def test_a_drafter_that_cannot_work_is_refused(context, made, message):
    register_drafter("odd", lambda _: (made, None))
    with pytest.raises(UserError, match=f"draft 'odd': .*{message}"):
        make_drafter("odd", context)


def test_an_unhashable_drafter_is_refused(context):
    @dataclasses.dataclass
    class Mutable:
        pass

    made: Any = Mutable()
    for name in ("max_block", "mask_id", "taps", "page_bytes", "init_cache", "draft", "absorb", "capabilities"):
        setattr(made, name, getattr(NgramDrafter(), name))
    register_drafter("mutable", lambda _: (made, None))
    with pytest.raises(UserError, match="not a hashable Drafter"):
        make_drafter("mutable", context)


def test_an_engine_takes_them_by_name():
    target = str(PAIR / "target")
    engine = Engine(EngineSettings(target, "ngram:2", block_size=5, max_running_requests=1, max_model_len=64))
    assert engine.loaded.drafter == NgramDrafter(5, 2, 1) and engine.runner.block_size == 5
    assert engine._loop.overlap and engine.runner.memory.draft_state == engine.runner.num_pages * 16 * 4
    with pytest.raises(UserError, match="draft 'nothing' is no drafter"):
        Engine(EngineSettings(target, "nothing"))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_drafter_that_needs_lengths_on_the_host_is_not_overlapped(overlap: bool):
    register_drafter("slow", lambda _: (Odd(capabilities=Capabilities(needs_cpu_lengths=True)), None))
    engine = Engine(EngineSettings(str(PAIR / "target"), "slow", overlap=overlap, max_model_len=64))
    assert not engine._loop.overlap
