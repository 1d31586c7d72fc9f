"""Tensors of a GGUF file, dequantised to float32 by the `gguf` library a few rows at a time."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from dflash_jax.config.gguf_header import GgufTensor, read_gguf_header
from dflash_jax.errors import UserError
from dflash_jax.weights.sources import TensorInfo, read_bytes


class GgufSource:
    """One GGUF file as a set of tensors; `header` is its whole header (array values unread)."""

    def __init__(self, path: Path):
        self.where = str(path)
        self.files = (path,)
        self.header = read_gguf_header(path)
        self.tensors = {name: _info(tensor) for name, tensor in self.header.tensors.items()}
        for name, info in self.tensors.items():
            if not info.problem:
                self._check_extent(name)

    def _check_extent(self, name: str) -> None:
        tensor = self.header.tensors[name]
        end = tensor.offset + math.prod(tensor.shape[:-1]) * _row_bytes(tensor)
        if end > self.header.file_bytes:
            raise UserError(f"{self.where} is truncated: {name} ends at byte {end} of {self.header.file_bytes}")

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        tensor = self.header.tensors[name]
        if len(tensor.shape) == 1:  # one row; its numbers may be packed, so it is read whole
            return self._rows(tensor, 0, 1).reshape(tensor.shape)[start:stop]
        between = math.prod(tensor.shape[1:-1])
        return self._rows(tensor, start * between, stop * between).reshape(stop - start, *tensor.shape[1:])

    def _rows(self, tensor: GgufTensor, start: int, stop: int) -> np.ndarray:
        """float32 [stop − start, width]: rows along the last axis, which is the packed one."""
        row = _row_bytes(tensor)
        packed = read_bytes(self.files[0], tensor.offset + start * row, (stop - start) * row)
        return dequantize(packed.reshape(stop - start, row), GGMLQuantizationType(tensor.type_id))


def _row_bytes(tensor: GgufTensor) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
    return tensor.shape[-1] // block * size


def _info(tensor: GgufTensor) -> TensorInfo:
    try:
        kind = GGMLQuantizationType(tensor.type_id)
    except ValueError:
        name = f"type {tensor.type_id}"
        return TensorInfo(tensor.shape, name, f"has GGUF {name}, which this version of `gguf` does not know")
    if not _readable(kind):
        return TensorInfo(tensor.shape, kind.name, f"has GGUF type {kind.name}, which `gguf` cannot dequantise")
    block, _ = GGML_QUANT_SIZES[kind]
    uneven = f"has rows of {tensor.shape[-1]}, not whole blocks of {block} ({kind.name})"
    return TensorInfo(tensor.shape, kind.name, uneven if tensor.shape[-1] % block else "")


@functools.cache
def _readable(kind: GGMLQuantizationType) -> bool:
    """Whether the library can dequantise `kind`, asked with one block of zeros."""
    _, size = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
