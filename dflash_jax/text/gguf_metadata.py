"""The key-value header of a GGUF file, read without touching its tensors.

Layout (GGUF versions 2 and 3, little endian): the magic, a uint32 version, a uint64 tensor count,
a uint64 pair count, then the pairs: key, uint32 type, value. Strings are a uint64 length and UTF-8
bytes; arrays are a uint32 element type, a uint64 count and the elements.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from dflash_jax.errors import UserError

Scalar = str | int | float | bool
Value = Scalar | list[Scalar]

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_VERSIONS = (2, 3)


class _Cursor:
    """Reads typed values one after the other; every method moves past what it returns."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def numbers(self, code: str, count: int) -> tuple:
        size = struct.calcsize(f"<{code}") * count
        if size > len(self.data) - self.at:
            raise ValueError(f"the file ends at byte {len(self.data)}, inside a value that starts at {self.at}")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return values

    def number(self, code: str) -> int:
        return self.numbers(code, 1)[0]

    def string(self) -> str:
        length = self.number("Q")
        if length > len(self.data) - self.at:
            raise ValueError(f"a string of {length} bytes at byte {self.at} passes the end of the file")
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind} before byte {self.at}")
        return self.number(_SCALARS[kind])

    def array(self, kind: int, count: int) -> Value:
        if kind in _SCALARS:
            return list(self.numbers(_SCALARS[kind], count))
        if kind != _STRING:
            raise ValueError(f"unknown type {kind} of array elements before byte {self.at}")
        if count > len(self.data) - self.at:
            raise ValueError(f"an array of {count} strings at byte {self.at} passes the end of the file")
        return [self.string() for _ in range(count)]


def read_gguf_metadata(path: str | Path) -> dict[str, Value]:
    """All key-value pairs of a GGUF file as plain Python values.

    Raises UserError when the file is missing, is not GGUF, is of an unknown version or is damaged.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_pairs(_Cursor(data))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # an empty file, a damaged value, a string that is not UTF-8
        raise UserError(f"{path}: not a usable GGUF file: {error}") from error


def _read_pairs(cursor: _Cursor) -> dict[str, Value]:
    if cursor.data[:4] != b"GGUF":
        raise ValueError(f"it starts with {cursor.data[:4]!r}, not b'GGUF'")
    cursor.at = 4
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version} is not one of {_VERSIONS} in little-endian byte order")
    cursor.number("Q")  # the tensor count; tensors come after the pairs
    pairs: dict[str, Value] = {}
    for _ in range(cursor.number("Q")):
        key = cursor.string()
        pairs[key] = cursor.value(cursor.number("I"))
    return pairs
