"""The header of a GGUF file: its key-value pairs and where its tensors lie.  Plain Python, no tensor is touched.

Layout (versions 2 and 3, little endian): magic, uint32 version, uint64 tensor count, uint64 pair count; the pairs
(key, uint32 type, value); the tensors (name, uint32 rank, uint64 widths from the last axis to the first, uint32
type, uint64 offset); padding; data.  Strings are a uint64 length and UTF-8 bytes; arrays are a uint32 element
type, a uint64 count and the elements.  (The `gguf` library's reader takes ten seconds for a vocabulary of 49k.)
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dflash_jax.errors import UserError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UINT64 = struct.Struct("<Q")
_MAX_RANK = 4
_VERSIONS = (2, 3)


class Unread(NamedTuple):
    """An array that was passed over: only its length is known."""

    count: int


class GgufTensor(NamedTuple):
    """A stored tensor: its shape (first axis first), ggml type number and offset in the file, in bytes."""

    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says before its data; `file_bytes` is the size of the whole file."""

    pairs: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    file_bytes: int


def read_gguf_header(path: Path, arrays: bool = False) -> GgufHeader:
    """The header of `path`.  Without `arrays`, array values are `Unread` (vocabularies take long to decode).

    Raises UserError when the file cannot be read, is no GGUF, is of an unknown version or is damaged.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(_Cursor(data, arrays))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # an empty file, a damaged value, a string that is not UTF-8
        raise UserError(f"{path} is not a usable GGUF file: {error}") from error


class _Cursor:
    """Reads typed values one after the other; every method moves past what it returns."""

    def __init__(self, data: mmap.mmap, arrays: bool):
        self.data = data
        self.at = 0
        self.arrays = arrays

    def skip(self, size: int) -> int:
        """Move past `size` bytes and return where they start."""
        start = self.at
        if size > len(self.data) - start:
            raise ValueError(f"it is truncated: {size} bytes wanted at byte {start}, the file has {len(self.data)}")
        self.at += size
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.skip(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        start = self.skip(self.number("Q"))
        return self.data[start : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
            return self.array(kind, count) if self.arrays else self.pass_over(kind, count)
        return self.number(self._code(kind))

    def array(self, kind: int, count: int) -> list[Any]:
        if kind in _SCALARS:
            code = _SCALARS[kind]
            start = self.skip(count * struct.calcsize(f"<{code}"))
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        self._check_count(count)
        return [self.value(kind) for _ in range(count)]

    def pass_over(self, kind: int, count: int) -> Unread:
        if kind == _STRING:
            self._pass_over_strings(count)
        elif kind == _ARRAY:
            self.array(kind, count)
        else:
            self.skip(count * struct.calcsize(f"<{self._code(kind)}"))
        return Unread(count)

    def _pass_over_strings(self, count: int) -> None:
        self._check_count(count)
        data, at, last, unpack = self.data, self.at, len(self.data) - 8, _UINT64.unpack_from
        for _ in range(count):
            if at > last:
                break
            at += 8 + unpack(data, at)[0]
        self.skip(at - self.at if at <= len(data) else len(data) + 1)

    def _check_count(self, count: int) -> None:
        if count > len(self.data) - self.at:
            raise ValueError(f"an array of {count} values at byte {self.at} passes the end of the file")

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind} before byte {self.at}")
        return _SCALARS[kind]


def _header(cursor: _Cursor) -> GgufHeader:
    if cursor.data[:4] != b"GGUF":
        raise ValueError(f"it starts with {cursor.data[:4]!r}, not b'GGUF'")
    cursor.at = 4
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version} is not one of {_VERSIONS} in little-endian byte order")
    tensor_count, pair_count = cursor.number("Q"), cursor.number("Q")
    pairs = {}
    for _ in range(pair_count):
        key = cursor.string()
        pairs[key] = cursor.value(cursor.number("I"))
    tensors = [_tensor(cursor) for _ in range(tensor_count)]
    start = _aligned(cursor.at, pairs.get("general.alignment", 32))
    placed = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in tensors}
    if len(placed) != len(tensors):
        raise ValueError("it names a tensor twice")
    return GgufHeader(pairs, placed, len(cursor.data))


def _tensor(cursor: _Cursor) -> tuple[str, GgufTensor]:
    name, rank = cursor.string(), cursor.number("I")
    if not 1 <= rank <= _MAX_RANK:
        raise ValueError(f"tensor {name!r} has {rank} axes")
    widths = [cursor.number("Q") for _ in range(rank)]
    return name, GgufTensor(tuple(reversed(widths)), cursor.number("I"), cursor.number("Q"))


def _aligned(at: int, alignment: Any) -> int:
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    return -(-at // alignment) * alignment
