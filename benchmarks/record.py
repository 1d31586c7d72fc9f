"""Writing results: every record says when, on what and by which command it was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "numpy", "gguf", "tokenizers", "torch", "transformers", "triton", "jax-triton")


def machine() -> dict[str, Any]:
    """Hardware and versions, as far as they can be read."""
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def record(name: str, values: dict[str, Any]) -> pathlib.Path:
    """Write `values` with date, machine, git revision and command to results/NAME.json ($RESULTS overrides)."""
    folder = pathlib.Path(os.environ.get("RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    head = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *map(_without_folder, sys.argv)]),
        "revision": _revision(),
        "machine": machine(),
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**head, **values}, indent=1) + "\n", encoding="utf-8")
    return path


def _without_folder(argument: str) -> str:
    """Where a file lay on the machine that measured says nothing to others."""
    return pathlib.PurePath(argument).name if argument.startswith("/") else argument


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _revision() -> str | None:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
