"""Compiles `few_rows.cc` with the machine's C++ compiler, and keeps the result in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax

from dflash_jax.places import cache_folder

log = logging.getLogger("dflash_jax")
SOURCE = Path(__file__).with_name("few_rows.cc")
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
CPU_FACTS = Path("/proc/cpuinfo")
TIMEOUT_S = 120


class CannotBuild(Exception):
    """Why there is no library, in a few words."""


def built_library() -> Path:
    """The library for this processor, made now if it is not in the cache.  CannotBuild where it cannot be made."""
    compiler = find_compiler()
    library = cache_folder() / "native" / f"{_fingerprint(compiler)}.so"
    if not library.is_file():
        log.info("compiling the native kernels for this processor, once (%s)", " ".join(compiler))
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            _compile(compiler, library)
        except OSError as error:
            raise CannotBuild(f"{library.parent} cannot be written: {error.strerror or error}") from error
    return library


def find_compiler() -> list[str]:
    """The command that `CXX` names, else the first of the usual ones that is there."""
    try:
        asked = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise CannotBuild(f"CXX={os.environ['CXX']!r} is no command: {error}") from error
    if asked:
        return asked
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    if found is None:
        raise CannotBuild(f"no C++ compiler ({', '.join(COMPILERS)}, or what CXX names)")
    return [found]


def _compile(compiler: list[str], library: Path) -> None:
    """Several processes may do so at once: each puts a whole file in its place."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [*compiler, *OPTIONS, "-I", jax.ffi.include_dir(), str(SOURCE), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except OSError as error:
            raise CannotBuild(f"{compiler[0]} cannot be run: {error.strerror or error}") from error
        except subprocess.TimeoutExpired as error:
            raise CannotBuild(f"{compiler[0]} was not done after {TIMEOUT_S} s") from error
        if done.returncode != 0 or not made.is_file():
            said = next((line for line in done.stderr.splitlines() if "error" in line), "without a word")
            raise CannotBuild(f"{compiler[0]} failed: {said[:200]}")
        made.replace(library)


def _fingerprint(compiler: list[str]) -> str:
    """Of what the library is made of and for.  A home may be shared by machines of different processors."""
    source, headers = SOURCE.read_text(encoding="utf-8"), version("jaxlib")
    facts = source, compiler, OPTIONS, headers, platform.machine(), _features()
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _features() -> str:
    """What Linux says of the processor's instructions."""
    try:
        lines = CPU_FACTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
