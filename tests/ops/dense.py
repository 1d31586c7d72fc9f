"""The ops written out in float64 numpy over dense arrays: loops and whole matrices, nothing paged, nothing running."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

Array = np.ndarray
# Interpreted kernels are large programs: on CPU they are compiled three times as fast without optimisation.
QUICKLY = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


def mask(length: int, block: int, causal: bool, window: int | None) -> Array:
    """0/1 matrix [B, length + B]: does the row at position length + i see the key at position k?"""
    seen = np.zeros((block, length + block), int)
    for i in range(block):
        for k in range(length + block):
            ahead = k - (length + i)
            hidden = (causal and ahead > 0) or (window is not None and abs(ahead) >= window)
            seen[i, k] = not hidden
    return seen


def attention(q: Array, keys: Array, values: Array, seen: Array) -> Array:
    """q [B, N, D] over keys and values [T, G, D] where seen [B, T]: [B, N, D]."""
    q, keys, values = (x.astype(np.float64) for x in (q, keys, values))
    group = q.shape[1] // keys.shape[1]
    out = np.zeros_like(q)
    for n in range(q.shape[1]):
        scores = q[:, n] @ keys[:, n // group].T / np.sqrt(q.shape[-1])
        weights = np.where(seen, np.exp(scores - scores.max(axis=1, keepdims=True)), 0)
        out[:, n] = weights / weights.sum(axis=1, keepdims=True) @ values[:, n // group]
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight.astype(np.float64)


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """x [..., heads, D]: dimension i and i + D/2 are one complex number, turned by cos, sin [..., D/2]."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * (cos + 1j * sin)[..., None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


@dataclasses.dataclass
class Pages:
    """Pages dealt in random order to requests: table [S, W], and what a pool of them should hold."""

    table: Array
    page_size: int
    num_pages: int

    @classmethod
    def deal(cls, rng: np.random.Generator, requests: int, width: int, page_size: int) -> Pages:
        """W pages for each request and two that nobody owns."""
        order = rng.permutation(np.arange(1, requests * width + 1))
        return cls(order.reshape(requests, width).astype(np.int32), page_size, requests * width + 3)

    def location(self, request: int, position: int) -> int:
        return int(self.table[request, position // self.page_size]) * self.page_size + position % self.page_size

    def poisoned(self, context: Sequence[Array], dtype: type = np.float32) -> Array:
        """A pool [P, 2, G, C, D] with request s's context [len, 2, G, D] in its pages and NaN in every other row."""
        _, _, heads, dim = context[0].shape
        pool = np.full((self.num_pages, 2, heads, self.page_size, dim), np.nan, dtype)
        for request, rows in enumerate(context):
            for position, row in enumerate(rows):
                page, offset = divmod(self.location(request, position), self.page_size)
                pool[page, :, :, offset] = row
        return pool
