"""Opening targets and drafts: a folder, a `.gguf` file or a hub id; then loading them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from dflash_jax.config import DraftConfig, TargetConfig, read_draft, read_json, read_target
from dflash_jax.errors import UserError
from dflash_jax.models import FAMILIES
from dflash_jax.models.dflash import draft_specs, with_injection
from dflash_jax.params import Params
from dflash_jax.weights.gguf_config import gguf_target
from dflash_jax.weights.gguf_source import GgufSource
from dflash_jax.weights.hub import local_path
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.orbax_cache import load_cached
from dflash_jax.weights.sources import TensorSource, open_safetensors
from dflash_jax.weights.tables import Table, draft_table, gguf_target_table, hf_target_table


@dataclasses.dataclass(frozen=True)
class TargetCheckpoint:
    """A target that has been opened and whose configuration is read, but not its weights.

    `where` is what the user named; `path` is the folder or `.gguf` file (where a tokenizer is looked for).
    """

    config: TargetConfig
    source: TensorSource
    table: Table
    path: Path
    where: str


@dataclasses.dataclass(frozen=True)
class DraftCheckpoint:
    """A draft that has been opened and checked against its target's configuration; as `TargetCheckpoint`."""

    config: DraftConfig
    source: TensorSource
    table: Table
    path: Path
    where: str


def open_target(path_or_id: str | Path) -> TargetCheckpoint:
    """Open a Hugging Face folder, a hub id or a `.gguf` file.  Reads headers and configuration only."""
    path = local_path(path_or_id)
    if path.is_file() and path.suffix == ".gguf":
        source = GgufSource(path)
        config, family = gguf_target(source)
        return TargetCheckpoint(config, source, gguf_target_table(config, family.gguf_permuted), path, str(path_or_id))
    _need_folder(path, "a target is a folder with config.json or a .gguf file")
    generation = path / "generation_config.json"
    raw = read_json(_config_file(path))
    config = read_target(str(path / "config.json"), raw, read_json(generation) if generation.is_file() else None)
    return TargetCheckpoint(config, open_safetensors(path), hf_target_table(config), path, str(path_or_id))


def open_draft(path_or_id: str | Path, target: TargetConfig) -> DraftCheckpoint:
    """Open a draft folder (z-lab layout) or hub id and check its configuration against the `target` it serves."""
    path = local_path(path_or_id)
    _need_folder(path, "a draft is a folder with config.json and safetensors")
    config = read_draft(str(path / "config.json"), read_json(_config_file(path)), target)
    return DraftCheckpoint(config, open_safetensors(path), draft_table(config), path, str(path_or_id))


def load_target(
    checkpoint: TargetCheckpoint, dtype: Any, mesh: Mesh, progress: bool = False, cache_dir: Path | None = None
) -> Params:
    """The target's parameters in `dtype` on `mesh`; see `load_params` for memory and errors.

    With `cache_dir` the converted weights are kept there and read back the next time.
    """
    specs = FAMILIES[checkpoint.config.family].specs(checkpoint.config)
    return _load(checkpoint, specs, dtype, mesh, progress, cache_dir)


def load_draft(
    checkpoint: DraftCheckpoint, dtype: Any, mesh: Mesh, progress: bool = False, cache_dir: Path | None = None
) -> Params:
    """The draft's parameters as in `load_target`, and the joined key/value projections that serving uses."""
    params = _load(checkpoint, draft_specs(checkpoint.config), dtype, mesh, progress, cache_dir)
    return with_injection(params, checkpoint.config)


def _load(
    checkpoint: TargetCheckpoint | DraftCheckpoint,
    specs: Any,
    dtype: Any,
    mesh: Mesh,
    progress: bool,
    cache_dir: Path | None,
) -> Params:
    if cache_dir is None:
        return load_params(specs, checkpoint.table, checkpoint.source, dtype, mesh, progress)
    return load_cached(cache_dir, specs, checkpoint.table, checkpoint.source, dtype, mesh, progress)


def _need_folder(path: Path, meaning: str) -> None:
    if not path.is_dir():
        raise UserError(f"{path} is a file; {meaning}")


def _config_file(folder: Path) -> Path:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json")
    return path
