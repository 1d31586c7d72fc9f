"""Where tensors come from: a file or a folder of files, read a few rows at a time.

Files are read, not mapped: mapped pages would count as this process's memory until the system takes them back.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from dflash_jax.config import read_json
from dflash_jax.errors import CheckpointError, UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_READABLE = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Shape and kind of one stored tensor; `kind` as the file names it, `problem` when it cannot be read."""

    shape: tuple[int, ...]
    kind: str
    problem: str = ""


class TensorSource(Protocol):
    """Tensors by name.  `where` names the source in messages; `files` are what its contents depend on."""

    where: str
    files: tuple[Path, ...]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1 of a tensor's first axis, as floats of any width."""
        ...


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where a safetensors file keeps a tensor."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


class SafetensorsSource:
    """One or several safetensors files as one set of tensors."""

    def __init__(self, where: str, files: tuple[Path, ...]):
        self.where = where
        self.files = files
        self.tensors: dict[str, TensorInfo] = {}
        self._stored: dict[str, _Stored] = {}
        problems: list[str] = []
        for file in files:
            problems += self._add(file)
        if problems:
            raise CheckpointError(where, problems)

    def _add(self, file: Path) -> list[str]:
        header, data_start, size = _read_header(file)
        problems = []
        for name, entry in header.items():
            if name in self._stored or name in self.tensors:
                problems.append(f"{name} is in {file.name} and in another file")
                continue
            kind, shape, begin, end = _entry(file, name, entry)
            self.tensors[name] = TensorInfo(shape, kind, _kind_problem(kind))
            if data_start + end > size:
                raise UserError(f"{file} is truncated: {name} ends at byte {data_start + end} of {size}")
            if kind in _READABLE:
                self._stored[name] = _Stored(file, _READABLE[kind], shape, data_start + begin)
                wanted = math.prod(shape) * _READABLE[kind].itemsize
                if end - begin != wanted:
                    raise UserError(
                        f"{file} is damaged: {name} of shape {list(shape)} needs {wanted} bytes, not {end - begin}"
                    )
        return problems

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        stored = self._stored[name]
        row = math.prod(stored.shape[1:])
        count = (stop - start) * row
        offset = stored.offset + start * row * stored.dtype.itemsize
        data = read_bytes(stored.file, offset, count * stored.dtype.itemsize)
        return data.view(stored.dtype).reshape(stop - start, *stored.shape[1:])


def read_bytes(file: Path, offset: int, size: int) -> np.ndarray:
    """uint8 [size] from `file`; UserError when it cannot be read or ends earlier."""
    try:
        data = np.fromfile(file, np.uint8, size, offset=offset)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    if data.size != size:
        raise UserError(f"{file} is truncated: {size} bytes wanted at byte {offset}, {data.size} found")
    return data


def _kind_problem(kind: str) -> str:
    return "" if kind in _READABLE else f"has dtype {kind}, which is not supported (supported: {', '.join(_READABLE)})"


def _read_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The tensor entries of a safetensors file, where its data starts and the file's size, both in bytes."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    if size < 8:
        raise UserError(f"{file} is not a safetensors file: it has {size} bytes")
    length = int(read_bytes(file, 0, 8).view("<u8")[0])
    if length > _MAX_HEADER_BYTES:
        raise UserError(f"{file} is not a safetensors file: its header would have {length} bytes")
    if 8 + length > size:
        raise UserError(f"{file} is truncated: its header ends at byte {8 + length} of {size}")
    try:
        header = json.loads(read_bytes(file, 8, length).tobytes())
    except ValueError as error:
        raise UserError(f"{file} is not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise UserError(f"{file} is not a safetensors file: its header is a {type(header).__name__}")
    header.pop("__metadata__", None)
    return header, 8 + length, size


def _entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(kind, shape, first byte, end byte) of one header entry."""
    try:
        begin, end = entry["data_offsets"]
        kind, shape = entry["dtype"], tuple(entry["shape"])
        sound = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise UserError(f"{file} is damaged: its header describes {name} as {entry!r}")
    return kind, shape, begin, end


def open_safetensors(folder: Path) -> SafetensorsSource:
    """The safetensors files of a model folder: `model.safetensors`, else the files of the index, else the only one."""
    if (folder / SINGLE).is_file():
        return SafetensorsSource(str(folder), (folder / SINGLE,))
    if (folder / INDEX).is_file():
        return _open_index(folder)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return SafetensorsSource(str(folder), tuple(found))
    if found:
        names = ", ".join(file.name for file in found)
        raise UserError(f"{folder} has several safetensors files but no {INDEX}: {names}")
    raise UserError(f"{folder} has no weights: no {SINGLE} and no {INDEX}{_other_weights(folder)}")


def _other_weights(folder: Path) -> str:
    others = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(kind))
    if not others:
        return ""
    return f" (found {', '.join(others)}; a .gguf file is given by its own path, other formats need converting)"


def _open_index(folder: Path) -> SafetensorsSource:
    """Files of the index; a tensor that is not in the file the index names is a problem of its own."""
    path = folder / INDEX
    where = read_json(path).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise UserError(f"{path}: weight_map must map tensor names to file names")
    files = tuple(folder / name for name in sorted(set(where.values())))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(str(folder), [f"{INDEX} names {name}, which is not there" for name in missing])
    source = SafetensorsSource(str(folder), files)
    lost = [name for name in where if name not in source.tensors]
    if lost:
        raise CheckpointError(str(folder), [f"{INDEX} lists {name}, which is in none of its files" for name in lost])
    return source
