"""The least that a step can cost, whoever computes it."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_jax.aot.shapes import Pair, Work, device_bytes
from dflash_jax.cache import page_bytes
from dflash_jax.config import AttentionShape
from dflash_jax.drafters import Weights


@dataclass(frozen=True)
class Floor:
    """On one device: bytes of weights and of committed keys and values to read, operations of all products."""

    weights_bytes: int
    kv_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes


@dataclass(frozen=True)
class Floors:
    """Floors of the steps of a pair whose weights are split over `devices` as `params` are."""

    pair: Pair
    work: Work
    devices: int
    params: Weights

    def decode(self) -> Floor:
        """Every weight once, the head once more (draft and target), and the committed keys and values of both."""
        work, head, read = self.work, self.head, self.read
        rows = work.requests * work.block
        kv_bytes = self._kv_bytes(work.requests * work.committed, self.pair.target, self.pair.draft)
        products = 2 * rows * (read - head) + 2 * (2 * rows - work.requests) * head
        return self._floor(read + head, kv_bytes, products, work.block)

    def prefill(self) -> Floor:
        """A prompt's chunk passes the target and is injected; the head sees one row of it, the draft's layers none."""
        work, size = self.work, self.work.dtype.itemsize
        read = self.read - device_bytes(self.params.draft["layers"]) // size
        kv_bytes = self._kv_bytes(work.chunk_rows * work.before_chunk, self.pair.target)
        products = 2 * work.chunk_rows * (work.chunk * (read - self.head) + self.head)
        return self._floor(read, kv_bytes, products, work.chunk)

    @property
    def head(self) -> int:
        """Numbers of the output head on one device."""
        target = self.params.target
        return device_bytes(target.get("head", target["embed"])) // self.work.dtype.itemsize

    @property
    def read(self) -> int:
        """Numbers on one device that a step reads: all, but of an embedding that is not the head only rows."""
        target = self.params.target
        lookup = device_bytes(target["embed"]) if "head" in target else 0
        return (device_bytes(self.params) - lookup) // self.work.dtype.itemsize

    def _kv_bytes(self, tokens: int, *configs: AttentionShape) -> int:
        return tokens * sum(page_bytes(config, 1, self.work.dtype) for config in configs) // self.devices

    def _floor(self, read: int, kv_bytes: int, products: int, rows: int) -> Floor:
        """`rows` rows of each request see its committed tokens."""
        size = self.work.dtype.itemsize
        attention = 2 * rows * self.pair.target.group * (kv_bytes // size)
        return Floor(read * size, kv_bytes, products + attention)
