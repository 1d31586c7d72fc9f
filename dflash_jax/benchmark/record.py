"""The one JSON file of a run: results, and all that is needed to repeat it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import dflash_jax
from dflash_jax.errors import UserError

SCHEMA = "dflash_jax.benchmark/1"
PACKAGES = ("dflash-jax", "jax", "jaxlib", "jax-triton", "triton", "libtpu", "numpy", "flax", "httpx")
FLAGS = ("XLA_FLAGS", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")


def head(argv: Sequence[str], with_device: bool = True) -> dict[str, Any]:
    """What stands above the results of any subcommand."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", "dflash_jax.benchmark", *map(without_folder, argv)]),
        "version": dflash_jax.__version__,
        "revision": revision(),
        "machine": machine(with_device),
    }


def machine(with_device: bool) -> dict[str, Any]:
    """Hardware and versions, as far as they can be read; `with_device` asks JAX, which then takes the device."""
    found = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "environment": {name: os.environ[name] for name in FLAGS if name in os.environ},
    }
    return found | (_devices() if with_device else {})


def _devices() -> dict[str, Any]:
    import jax

    devices = jax.devices()
    stats = devices[0].memory_stats() or {}
    return {"device": devices[0].device_kind, "platform": devices[0].platform, "devices": len(devices),
            "device_memory_bytes": stats.get("bytes_limit")}  # fmt: skip


def revision() -> str | None:
    """The checkout's git revision, with + where files have changed since; None for an installed package."""
    folder = Path(dflash_jax.__file__).resolve().parents[1]
    if not (folder / ".git").exists():
        return None
    found = _git(folder, "rev-parse", "--short", "HEAD")
    return found and found + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def write(document: dict[str, Any], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"the results cannot be written to {path}: {error.strerror}") from error


def read(path: str) -> dict[str, Any]:
    """A file that `write` made."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA or "results" not in found:
        raise UserError(f"{path} holds no results of this benchmark (schema {schema!r}, wanted {SCHEMA!r})")
    return found


def check_folder(path: Path) -> None:
    """UserError now rather than after the run, if results could not be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"--output {path} cannot be written to")


def without_folder(value: Any) -> Any:
    """Where a file lay on the machine that measured says nothing to others."""
    is_path = isinstance(value, str) and value.startswith("/") and len(value) > 1
    return PurePath(value).name if is_path else value


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), sys.platform)
