"""What the user names, on this machine and on the hub (which no test reaches)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import errors

from dflash_jax.errors import UserError
from dflash_jax.sharding import make_mesh
from dflash_jax.weights import load_draft, load_target, open_draft, open_target
from dflash_jax.weights.hub import local_path

from .tiny import DRAFT, QWEN3, draft_tensors, target_tensors, write_folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Ids that the hub has (a folder), or that fail (an exception); every call is recorded under `calls`."""
    known: dict[str, Any] = {"calls": []}

    def download(hub_id: str, *, allow_patterns: list[str]) -> str:
        known["calls"].append((hub_id, allow_patterns))
        if isinstance(known[hub_id], Exception):
            raise known[hub_id]
        return str(known[hub_id])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return known


def test_hub_ids_are_downloaded_without_other_formats(tmp_path: Path, hub: dict[str, Any]):
    hub["Qwen/Qwen3-4B"] = write_folder(tmp_path / "a", QWEN3, target_tensors(QWEN3))
    hub["z-lab/Qwen3-4B-DFlash-b16"] = write_folder(tmp_path / "b", DRAFT, draft_tensors(DRAFT))
    target = open_target("Qwen/Qwen3-4B")
    draft = open_draft("z-lab/Qwen3-4B-DFlash-b16", target.config)
    assert (target.where, target.path) == ("Qwen/Qwen3-4B", tmp_path / "a")
    assert (draft.where, draft.path) == ("z-lab/Qwen3-4B-DFlash-b16", tmp_path / "b")
    load_draft(draft, "float32", make_mesh())
    load_target(target, "float32", make_mesh())
    for _, patterns in hub["calls"]:
        assert {"*.json", "*.safetensors"} <= set(patterns)
        assert not any(pattern.endswith((".bin", ".gguf", ".pt", "*")) for pattern in patterns)


def test_local_folders_come_first(tmp_path: Path, hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_path("owner/name") == Path("owner/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/owner") == tmp_path / "owner"
    assert not hub["calls"]


@pytest.mark.parametrize(
    "name",
    ["/no/such/folder", "./owner/name", "../owner/name", "~/owner/name", "a/b/c", "name", "owner/name.gguf", "",
     "owner/model.safetensors", "https://host/owner", "owner/na me", "here/missing"],
)  # fmt: skip
def test_paths_that_do_not_exist_are_not_looked_up(
    tmp_path: Path, hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    if name == "":
        with pytest.raises(UserError):  # an empty name is the current folder, which has no config.json
            open_target(name)
    else:
        with pytest.raises(UserError, match="no such file or folder, and not a hub id"):
            open_target(name)
    with pytest.raises(UserError, match="no such file or folder, and not a hub id"):
        open_target(tmp_path / "missing")
    assert not hub["calls"]


def _http(kind: type[Exception]) -> Exception:
    return kind("404 Client Error.\nLong explanation", response=Mock())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (_http(errors.RepositoryNotFoundError), "no such file or folder, and the hub has no such model"),
        (_http(errors.GatedRepoError), "access to this model must be granted on the hub"),
        (errors.LocalEntryNotFoundError("x"), "not in the hub cache, and the hub cannot be reached"),
        (errors.OfflineModeIsEnabled("x"), "not in the hub cache, and the hub cannot be reached"),
        (_http(errors.HfHubHTTPError), "downloading from the hub failed: 404 Client Error.$"),
        (OSError(28, "No space left on device"), "downloading from the hub failed: .*No space left on device"),
    ],
)
def test_failures_of_the_hub_are_one_sentence(hub: dict[str, Any], failure: Exception, message: str):
    hub["owner/name"] = failure
    with pytest.raises(UserError, match=f"^owner/name: .*{message}") as caught:
        open_target("owner/name")
    assert "\n" not in str(caught.value)


def test_a_snapshot_without_safetensors(tmp_path: Path, hub: dict[str, Any]):
    hub["owner/name-GGUF"] = tmp_path
    with pytest.raises(UserError, match="has no config.json"):
        open_target("owner/name-GGUF")


def test_the_home_of_an_unknown_user():
    with pytest.raises(UserError, match="~nobody-of-that-name/x: "):
        local_path("~nobody-of-that-name/x")
