"""Presets from `configs/`: model pairs (shapes, taps, mask ids) and machines (memory, bandwidth, arithmetic)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.places import shipped_folder

KINDS = ("models", "machines")


def list_presets(kind: str | None = None) -> list[str]:
    """Names of presets, sorted: of one kind ("models" or "machines"), or of both."""
    if kind is not None and kind not in KINDS:
        raise UserError(f"preset kind {kind!r} is not one of {', '.join(KINDS)}")
    return sorted(path.stem for path in _files(KINDS if kind is None else (kind,)))


def load_preset(name: str) -> dict[str, Any]:
    """The preset called `name`, as read from its JSON file.

    A model has `target_id`, `draft_id`, `target` and `draft` (contents of the two config.json files) and `notes`
    (where they come from; `assumed` lists keys that are not from the published file).  A machine has `platform`,
    `memory_bytes`, `memory_bandwidth_bytes_per_s`, `bf16_flops_per_s` (per chip) and `sources`.
    """
    for path in _files(KINDS):
        if path.stem == name:
            return json.loads(path.read_text(encoding="utf-8"))
    raise UserError(f"there is no preset {name!r} (known: {', '.join(list_presets())})")


def _files(kinds: tuple[str, ...]) -> list[Path]:
    folder = shipped_folder("configs", "configs")
    if folder is None:
        raise UserError("this installation of dflash_jax has no presets (dflash_jax/configs is missing)")
    return [path for kind in kinds for path in (folder / kind).glob("*.json")]
