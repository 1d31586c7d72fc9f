"""Building parameters from a checkpoint, one at a time and in their final dtype."""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from dflash_jax.errors import CheckpointError
from dflash_jax.params import Params, ParamSpec, build, walk
from dflash_jax.sharding import place, spec_shardings
from dflash_jax.weights.sources import TensorSource
from dflash_jax.weights.tables import Piece, Table

# A part of a tensor is read, converted and put in place before the next: about this many numbers at once.
BLOCK_ELEMENTS = 1 << 20
THREADS = min(4, os.cpu_count() or 1)  # reading, converting and copying all leave the interpreter lock
_ALIGNMENT = 64  # bytes; the CPU backend takes such a buffer as it is, without a second copy


def load_params(
    specs: Any, table: Table, source: TensorSource, dtype: Any, mesh: Mesh, progress: bool = False
) -> Params:
    """The parameters declared by `specs`, read from `source` by `table`, in `dtype`, placed on `mesh`.

    Everything is checked before anything is read: all missing, unexpected, wrong-shaped and unreadable tensors
    come in one CheckpointError.  Peak host memory is the model in `dtype` plus one parameter (plus a few MB a
    thread) where host memory is the device; elsewhere it is one parameter.
    """
    spec_shardings(specs, mesh)  # an uneven split is an error before the first byte is read
    check(specs, table, source)
    total = sum(spec.size for _, spec in walk(specs)) * np.dtype(dtype).itemsize
    with (
        ThreadPoolExecutor(THREADS) as pool,
        tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=None if progress else True) as bar,
    ):

        def leaf(path: str, spec: ParamSpec) -> Any:
            array = place(assemble(spec, table.pieces[path], source, dtype, pool), spec, mesh)
            array.block_until_ready()  # unless the device took it over, the host buffer is free before the next is made
            bar.update(array.nbytes)
            return array

        return build(specs, leaf)


def check(specs: Any, table: Table, source: TensorSource) -> None:
    """Raise one CheckpointError with everything in which `source` differs from what the table asks for."""
    if set(table.pieces) != {path for path, _ in walk(specs)}:
        differing = set(table.pieces) ^ {path for path, _ in walk(specs)}
        raise ValueError(f"the table and the declared parameters differ in {sorted(differing)}")
    problems, used = [], set()
    for piece in (piece for pieces in table.pieces.values() for piece in pieces):
        found = [name for name in piece.names if name in source.tensors]
        used.update(found)
        problems += _piece_problems(piece, found, source)
    extra = [name for name in source.tensors if name not in used and not _tolerated(name, table.tolerated)]
    problems += [f"{name} of shape {list(source.tensors[name].shape)} is unexpected" for name in extra]
    if problems:
        raise CheckpointError(source.where, problems)


def _piece_problems(piece: Piece, found: list[str], source: TensorSource) -> list[str]:
    note = f" ({piece.note})" if piece.note else ""
    if not found:
        return [f"{piece.names[0]} of shape {list(piece.shape)}{note} is missing"]
    if len(found) > 1:
        return [f"{' and '.join(found)} are two names of one tensor"]
    info = source.tensors[found[0]]
    problems = [f"{found[0]} {info.problem}"] if info.problem else []
    if info.shape != piece.shape:
        problems.append(f"{found[0]} has shape {list(info.shape)}, expected {list(piece.shape)}{note}")
    return problems


def _tolerated(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def assemble(
    spec: ParamSpec, pieces: Iterable[Piece], source: TensorSource, dtype: Any, pool: ThreadPoolExecutor
) -> np.ndarray:
    """One parameter on the host, filled block by block from its pieces."""
    out = _aligned_empty(spec.shape, np.dtype(dtype))
    jobs = [job for piece in pieces for job in _blocks(out, piece, source)]
    for _ in pool.map(lambda job: job(), jobs):  # iterating raises what a job raised
        pass
    return out


def _blocks(out: np.ndarray, piece: Piece, source: TensorSource) -> Iterator[Callable[[], None]]:
    """Calls that each fill a part of `out`: whole units of the first axis of `piece.split`."""
    name = next(name for name in piece.names if name in source.tensors)
    target = out[piece.index].reshape(piece.filled)  # only takes axes apart, so it is a view
    units = piece.split[0]
    step = max(1, BLOCK_ELEMENTS * units // max(1, math.prod(piece.shape)))
    for begin in range(0, units, step):
        part = range(begin, min(begin + step, units))
        yield lambda part=part: _fill(target, piece, source, name, part)


def _fill(target: np.ndarray, piece: Piece, source: TensorSource, name: str, units: range) -> None:
    """Read the rows of `units`, convert them and copy them to their place."""
    rows = piece.shape[0] // piece.split[0]
    block = source.read(name, units.start * rows, units.stop * rows).astype(target.dtype, copy=False)
    block = block.reshape(len(units), *piece.split[1:]).transpose(piece.order)
    place_in = [slice(None)] * target.ndim
    place_in[piece.order.index(0)] = slice(units.start, units.stop)
    bits = np.dtype(f"u{target.dtype.itemsize}")  # numpy moves plain integers faster than foreign number types
    target[tuple(place_in)].view(bits)[...] = block.view(bits)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose first byte is aligned to `_ALIGNMENT`."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
