"""Where things lie: files shipped with the package, and the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped_folder(installed: str, checkout: str) -> Path | None:
    """A folder that ships with dflash_jax: `installed` inside the package, or `checkout` in the repository root."""
    inside = PACKAGE / installed
    if inside.is_dir():
        return inside
    beside = PACKAGE.parent / checkout
    return beside if _is_checkout(PACKAGE.parent) and beside.is_dir() else None


def _is_checkout(root: Path) -> bool:
    """Our own pyproject.toml is there; the neighbours of an installed package are other people's folders."""
    project = root / "pyproject.toml"
    return project.is_file() and 'name = "dflash-jax"' in project.read_text(encoding="utf-8", errors="replace")


def cache_folder() -> Path:
    """`DFLASH_JAX_CACHE`, else `dflash_jax` in the user's cache folder.  Not created here."""
    chosen = os.environ.get("DFLASH_JAX_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_jax"
