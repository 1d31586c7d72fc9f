"""An optional cache of converted weights, so that the next start reads them back as they lie in memory.

One folder per source and dtype: a manifest, and one Orbax checkpoint for each layer and each other top-level
parameter, so that restoring needs room for the model and about twice its largest part.  Entries are written aside
and renamed, and made anew when the source files, the dtype or the parameter layout changed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dflash_jax.errors import UserError
from dflash_jax.params import Params, map_specs, walk
from dflash_jax.sharding import place, spec_shardings
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.sources import TensorSource
from dflash_jax.weights.tables import Table

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_ROOM_NAME = "weights"


def load_cached(
    cache_dir: Path, specs: Any, table: Table, source: TensorSource, dtype: Any, mesh: Mesh, progress: bool = False
) -> Params:
    """`load_params`, kept in `cache_dir`.  A stale or damaged entry is rebuilt with a line on stderr.

    Damage is noticed by missing files and sizes and by what Orbax itself checks, not by a checksum of the data.
    """
    if jax.process_count() > 1:
        raise UserError(f"the weight cache serves one process, not {jax.process_count()}; leave it off")
    entry = _entry(cache_dir, source, dtype)
    key = fingerprint(specs, table, source, dtype)
    if entry.exists():
        problem = _problem(entry, key)
        if not problem:
            try:
                return _restore(entry, specs, dtype, mesh)
            except (ValueError, KeyError, OSError) as error:  # what Orbax and TensorStore raise on damaged files
                problem = f"cannot be read ({_first_line(error)})"
        _tell(f"the cached weights in {entry} {problem}; converting again")
    params = load_params(specs, table, source, dtype, mesh, progress)
    _keep(entry, key, params)
    return params


def fingerprint(specs: Any, table: Table, source: TensorSource, dtype: Any) -> str:
    """A digest of all that the converted weights depend on: source files, dtype, names and layout."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in source.files]
    shapes = [(path, spec.shape) for path, spec in walk(specs)]
    known = (FORMAT_VERSION, np.dtype(dtype).name, stats, shapes, sorted(table.pieces.items()))
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _entry(cache_dir: Path, source: TensorSource, dtype: Any) -> Path:
    """The folder of this source and dtype: a readable name and a digest of the full path."""
    path = Path(source.where).resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    return Path(cache_dir) / _ROOM_NAME / f"{path.name}-{np.dtype(dtype).name}-{digest}"


def _problem(entry: Path, key: str) -> str:
    """Why an entry cannot be used, or nothing."""
    try:
        manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        found, files = manifest["key"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"have no readable {MANIFEST}"
    if found != key:
        return "are of other files or another layout"
    return "" if _sizes(entry) == files else "are damaged (files missing or of another size)"


def _sizes(entry: Path) -> dict[str, int]:
    """Bytes of every file below an entry but its manifest."""
    files = (path for path in entry.rglob("*") if path.is_file() and path != entry / MANIFEST)
    return {str(path.relative_to(entry)): path.stat().st_size for path in files}


def _keep(entry: Path, key: str, params: Params) -> None:
    """Write an entry aside and rename it; what goes wrong costs the cache only."""
    aside = entry.with_name(f".{entry.name}.{os.getpid()}")
    try:
        _sweep(entry)
        _save(aside, params)
        (aside / MANIFEST).write_text(json.dumps({"key": key, "files": _sizes(aside)}), encoding="utf-8")
        shutil.rmtree(entry, ignore_errors=True)
        aside.rename(entry)
    except (OSError, ValueError) as error:
        _tell(f"the converted weights could not be cached in {entry} ({_first_line(error)})")
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(entry: Path) -> None:
    """Remove what processes that died while writing `entry` left behind."""
    for aside in entry.parent.glob(f".{glob.escape(entry.name)}.*"):
        process = aside.suffix[1:]
        if process.isdigit() and not _alive(int(process)):
            shutil.rmtree(aside, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _parts(tree: Any) -> Iterator[tuple[str, Any]]:
    """(name, subtree) of each layer and each other top-level parameter."""
    for name, child in tree.items():
        if isinstance(child, tuple):
            yield from ((f"{name}.{i}", part) for i, part in enumerate(child))
        else:
            yield name, child


def _save(folder: Path, params: Params) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with _checkpointer() as checkpointer:
        for name, part in _parts(params):
            checkpointer.save(folder.resolve() / name, {"part": part})


def _restore(entry: Path, specs: Any, dtype: Any, mesh: Mesh) -> Params:
    """The parameters of an entry, part by part, each placed on `mesh` as it is read."""
    from orbax.checkpoint import checkpoint_utils

    def described(spec: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, np.dtype(dtype), sharding=sharding)

    wanted = map_specs(described, specs, spec_shardings(specs, mesh))
    with _checkpointer() as checkpointer:

        def one(name: str, part: Any, part_specs: Any) -> Any:
            item = {"part": part}
            arguments = checkpoint_utils.construct_restore_args(item)
            found = checkpointer.restore(entry.resolve() / name, item=item, restore_args=arguments)["part"]
            return jax.block_until_ready(map_specs(lambda spec, x: place(x, spec, mesh), part_specs, found))

        specs_of = dict(_parts(specs))
        return _rebuilt(wanted, {name: one(name, part, specs_of[name]) for name, part in _parts(wanted)})


def _rebuilt(tree: dict[str, Any], parts: dict[str, Any]) -> Params:
    """The inverse of `_parts`: `parts` in the structure of `tree`."""
    return {
        name: tuple(parts[f"{name}.{i}"] for i in range(len(child))) if isinstance(child, tuple) else parts[name]
        for name, child in tree.items()
    }


def _checkpointer() -> Any:
    """Orbax, imported only where a cache is asked for (half a second); weights hardly compress."""
    from orbax import checkpoint

    return checkpoint.Checkpointer(checkpoint.PyTreeCheckpointHandler(use_compression=False))


def _tell(message: str) -> None:
    print(message, file=sys.stderr)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
