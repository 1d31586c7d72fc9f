"""Every op at a named shape: its arguments, the bytes it must move and the operations it must make."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.benchmark.drawn import shuffled_pages
from dflash_jax.ops import Kernels, SamplingRows, token_locations
from dflash_jax.ops.shapes import DRAFT, PREFILL, VERIFY, Shape
from dflash_jax.params import normal

EPS, MASK_ID, STOP_IDS = 1e-6, 5, 16
ENOUGH_BYTES = 1 << 28
OPS = {
    VERIFY: ("prepare_block", "cache_write", "block_attention", "verify_attention", "head_logits", "sample_tokens",
             "accept_bonus", "kv_inject", "add_norm", "project", "project_add_norm", "gated_product"),
    DRAFT: ("block_attention", "draft_attention", "argmax_head", "top_tokens", "add_norm", "project",
            "project_add_norm", "gated_product"),
    PREFILL: ("cache_write", "prefill_attention", "kv_inject", "add_norm"),
}  # fmt: skip


@dataclasses.dataclass
class OpCase:
    """One call of an op.

    pools: arrays that the op updates in place, first among its arguments.  take: the updated pools out of its result.
    moved_bytes: what has to be read and written; flops: multiplications and additions of matrix products.
    """

    op: str
    arguments: tuple[Any, ...]
    moved_bytes: int
    flops: int = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    pools: Any = None
    take: Callable[[Any], Any] = lambda result: None

    def launcher(self, kernels: Kernels, times: int = 1) -> Callable[[], Any]:
        """A function that launches one program with the op in it `times` times, each on arrays of its own.

        So a chip's launch counts once, no run finds in a cache what another read, and XLA does not make one product of
        several.  Pools are donated and handed on.
        """
        op = functools.partial(getattr(kernels, self.op), **self.options)
        pools = [() if self.pools is None else (_copied(self.pools),) for _ in range(times)]
        # Numbers are constants of a kernel: they must not become arrays.
        own = [[None if isinstance(x, float) else _copied(x) for x in self.arguments] for _ in range(times)]

        def program(pools: Any, own: Any) -> list[Any]:
            return [op(*pool, *self._given(arrays)) for pool, arrays in zip(pools, own, strict=True)]

        compiled = jax.jit(program, donate_argnums=0)

        def launch() -> list[Any]:
            nonlocal pools
            results = compiled(pools, own)
            if self.pools is not None:
                pools = [(self.take(result),) for result in results]
            return results

        return launch

    def _given(self, arrays: list[Any]) -> list[Any]:
        """All arguments of a call."""
        return [number if array is None else array for array, number in zip(arrays, self.arguments, strict=True)]

    @property
    def times(self) -> int:
        """How often a program should have it, to be longer than its launch and to leave a chip's caches behind."""
        size = max(self.moved_bytes, sum(x.nbytes for x in jax.tree.leaves(self.pools)))
        return max(2, min(32, ENOUGH_BYTES // size))


def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


class Draw:
    """Random arrays of a shape's kind, one after another."""

    def __init__(self, dtype: Any):
        self.dtype = dtype
        self._key = jax.random.key(0)

    def normal(self, *size: int, dtype: Any = None) -> Array:
        self._key, own = jax.random.split(self._key)
        return normal(own, size, dtype or self.dtype)


def op_cases(shape: Shape, dtype: Any) -> list[OpCase]:
    """The ops of a launch of that role."""
    draw = Draw(dtype)
    return [MAKERS[op](shape, draw) for op in OPS[shape.role]]


def page_table(shape: Shape) -> Array:
    return shuffled_pages(shape.requests, shape.pages_per_slot)


def lengths(shape: Shape) -> Array:
    return jnp.asarray(shape.lengths(), jnp.int32)


def positions(shape: Shape) -> Array:
    return lengths(shape)[:, None] + jnp.arange(shape.rows, dtype=jnp.int32)[None]


def locations(shape: Shape) -> Array:
    """Where the rows' keys and values go, int32 [S, B]."""
    at = positions(shape)
    return token_locations(page_table(shape), at, jnp.ones_like(at, dtype=bool), shape.page_size)


def pool(shape: Shape, draw: Draw) -> Array:
    model = shape.model
    return draw.normal(shape.num_pages, 2, model.kv_heads, shape.page_size, model.head_dim)


def tables(shape: Shape) -> tuple[Array, Array]:
    """cos, sin float32 [S, B, D/2]."""
    half = shape.model.head_dim // 2
    slower = 1e4 ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions(shape)[..., None].astype(jnp.float32) * slower[None, None]
    return jnp.cos(angle), jnp.sin(angle)


def size_of(*arrays: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


# -- ops ---------------------------------------------------------------------------------------------------------------


def _committed_and_flops(shape: Shape) -> tuple[int, int]:
    """Numbers of the pool that attention must read, and its multiplications and additions."""
    model, seen = shape.model, [min(n, shape.window or n) for n in shape.lengths()]
    flops = 4 * shape.rows * model.heads * model.head_dim * sum(n + shape.rows for n in seen)
    return sum(seen) * 2 * model.kv_heads * model.head_dim, flops


def _attention(op: str, shape: Shape, draw: Draw) -> OpCase:
    model, (committed, flops) = shape.model, _committed_and_flops(shape)
    q = draw.normal(shape.requests, shape.rows, model.heads, model.head_dim)
    kv = draw.normal(shape.requests, shape.rows, 2, model.kv_heads, model.head_dim)
    moved_bytes = committed * q.dtype.itemsize + 2 * q.nbytes + kv.nbytes
    return OpCase(
        op, (q, kv, pool(shape, draw), page_table(shape), lengths(shape)), moved_bytes, flops,
        {"causal": shape.causal, "window": shape.window},
    )  # fmt: skip


def block_attention(shape: Shape, draw: Draw) -> OpCase:
    return _attention("block_attention", shape, draw)


def prefill_attention(shape: Shape, draw: Draw) -> OpCase:
    return _attention("prefill_attention", shape, draw)


def _projected(shape: Shape, draw: Draw, norm: bool) -> tuple[Any, ...]:
    """A fused projection, norms, eps and rotation."""
    model = shape.model
    qkv = draw.normal(shape.requests, shape.rows, model.kv_heads, model.group + 2, model.head_dim)
    return qkv, *[draw.normal(model.head_dim) if norm else None] * 2, EPS, *tables(shape)


def verify_attention(shape: Shape, draw: Draw) -> OpCase:
    """From the projection on: rows in, attended rows out, and keys and values to their pages."""
    projected, (committed, flops) = _projected(shape, draw, shape.model.qk_norm), _committed_and_flops(shape)
    qkv = projected[0]  # as large as what is written: attended rows, keys and values
    return OpCase(
        "verify_attention", (*projected, locations(shape), page_table(shape), lengths(shape)),
        committed * qkv.dtype.itemsize + 2 * qkv.nbytes, flops, {"causal": shape.causal, "window": shape.window},
        pools=pool(shape, draw), take=lambda result: result[1],
    )  # fmt: skip


def draft_attention(shape: Shape, draw: Draw) -> OpCase:
    """The same without the write."""
    model, projected, (committed, flops) = shape.model, _projected(shape, draw, True), _committed_and_flops(shape)
    qkv = projected[0]
    attended = qkv.nbytes * model.group // (model.group + 2)
    return OpCase(
        "draft_attention", (pool(shape, draw), *projected, page_table(shape), lengths(shape)),
        committed * qkv.dtype.itemsize + qkv.nbytes + attended, flops,
        {"causal": shape.causal, "window": shape.window},
    )  # fmt: skip


def cache_write(shape: Shape, draw: Draw) -> OpCase:
    model, projected = shape.model, _projected(shape, draw, shape.model.qk_norm)
    qkv = projected[0]
    written = qkv.nbytes + 2 * qkv.nbytes // (model.group + 2)  # q and kv as they are, kv once more to its pages
    arguments = *projected, locations(shape)
    return OpCase("cache_write", arguments, qkv.nbytes + written, pools=pool(shape, draw), take=lambda r: r[-1])


def kv_inject(shape: Shape, draw: Draw) -> OpCase:
    model, tokens = shape.model, shape.requests * shape.rows
    fused = draw.normal(shape.requests, shape.rows, model.hidden)
    weight = draw.normal(model.hidden, model.draft_layers, 2, model.kv_heads, model.head_dim)
    norms = draw.normal(model.draft_layers, model.head_dim)
    written = tokens * weight.size // model.hidden * weight.dtype.itemsize
    arguments = fused, weight, None, norms, EPS, *tables(shape), locations(shape)
    pools = tuple(pool(shape, draw) for _ in range(model.draft_layers))
    return OpCase("kv_inject", arguments, size_of(fused, weight, norms) + written, 2 * tokens * weight.size,
                  pools=pools, take=lambda result: result)  # fmt: skip


def add_norm(shape: Shape, draw: Draw) -> OpCase:
    hidden = shape.model.hidden
    x, delta = (draw.normal(shape.requests, shape.rows, hidden) for _ in range(2))
    weight = draw.normal(hidden)
    return OpCase("add_norm", (x, delta, weight, EPS), 2 * size_of(x, delta) + weight.nbytes)


def project_add_norm(shape: Shape, draw: Draw) -> OpCase:
    """The end of an MLP."""
    return product_case(shape.requests, shape.rows, shape.model.ffn, shape.model.hidden, draw)


def product_case(requests: int, rows: int, k: int, hidden: int, draw: Draw) -> OpCase:
    """`project_add_norm` of any k, the width of what is projected."""
    x, y = draw.normal(requests, rows, hidden), draw.normal(requests, rows, k)
    w, norm = draw.normal(k, hidden), draw.normal(hidden)
    moved_bytes = 3 * x.nbytes + size_of(y, w, norm)
    return OpCase("project_add_norm", (x, y, w, norm, EPS), moved_bytes, 2 * requests * rows * w.size)


def project(shape: Shape, draw: Draw) -> OpCase:
    """The projection before attention."""
    model, tokens = shape.model, shape.requests * shape.rows
    y = draw.normal(shape.requests, shape.rows, model.hidden)
    w = draw.normal(model.hidden, model.kv_heads, model.group + 2, model.head_dim)
    moved_bytes = size_of(y, w) + tokens * w.size // model.hidden * w.dtype.itemsize
    return OpCase("project", (y, w), moved_bytes, 2 * tokens * w.size)


def gated_product(shape: Shape, draw: Draw) -> OpCase:
    model, tokens = shape.model, shape.requests * shape.rows
    y, gate_up = draw.normal(shape.requests, shape.rows, model.hidden), draw.normal(model.hidden, 2, model.ffn)
    moved_bytes = size_of(y, gate_up) + tokens * model.ffn * y.dtype.itemsize
    return OpCase("gated_product", (y, gate_up), moved_bytes, 2 * tokens * gate_up.size)


def head_logits(shape: Shape, draw: Draw) -> OpCase:
    model = shape.model
    hidden, head = draw.normal(shape.requests, shape.rows, model.hidden), draw.normal(model.vocab, model.hidden)
    tokens = shape.requests * shape.rows
    moved_bytes = size_of(hidden, head) + 4 * tokens * model.vocab
    return OpCase("head_logits", (hidden, head), moved_bytes, 2 * tokens * head.size)


def argmax_head(shape: Shape, draw: Draw) -> OpCase:
    """Of the rows after the bonus."""
    model, tokens = shape.model, shape.requests * (shape.rows - 1)
    hidden, head = draw.normal(shape.requests, shape.rows - 1, model.hidden), draw.normal(model.vocab, model.hidden)
    return OpCase("argmax_head", (hidden, head), size_of(hidden, head) + 4 * tokens, 2 * tokens * head.size)


def top_tokens(shape: Shape, draw: Draw) -> OpCase:
    """A selector's candidates, of the rows after the bonus."""
    logits = draw.normal(shape.requests, shape.rows - 1, shape.model.vocab, dtype=jnp.float32)
    k = min(shape.model.candidates, shape.model.vocab)
    return OpCase("top_tokens", (logits,), logits.nbytes + 8 * logits.shape[0] * logits.shape[1] * k, options={"k": k})


def sample_tokens(shape: Shape, draw: Draw) -> OpCase:
    """At a temperature, without filters: greedy rows need no op."""
    logits = draw.normal(shape.requests, shape.rows, shape.model.vocab, dtype=jnp.float32)
    n = shape.requests
    rows = SamplingRows(
        jnp.full(n, 0.8, jnp.float32), jnp.zeros(n, jnp.float32), jnp.zeros(n, jnp.int32), jnp.ones(n, jnp.float32),
        jnp.ones((n, 2), jnp.uint32),
    )  # fmt: skip
    return OpCase("sample_tokens", (logits, rows, positions(shape)), logits.nbytes, options={"filters": False})


def prepare_block(shape: Shape, draw: Draw) -> OpCase:
    n = shape.requests
    arguments = jnp.ones(n, jnp.int32), lengths(shape), jnp.ones(n, bool), page_table(shape)
    options = {"block": shape.rows, "mask_id": MASK_ID, "page_size": shape.page_size}
    return OpCase("prepare_block", arguments, size_of(arguments) + 3 * 4 * n * shape.rows, options=options)


def accept_bonus(shape: Shape, draw: Draw) -> OpCase:
    n, b = shape.requests, shape.rows
    tokens = jnp.ones((n, b), jnp.int32)
    arguments = (
        tokens, tokens, jnp.zeros((n, b), bool), lengths(shape), jnp.full(n, 10**6, jnp.int32),
        jnp.full((n, STOP_IDS), -1, jnp.int32), jnp.ones(n, bool),
    )  # fmt: skip
    return OpCase("accept_bonus", arguments, size_of(arguments) + 4 * n * (b + 3))


MAKERS = {
    make.__name__: make
    for make in (prepare_block, cache_write, block_attention, verify_attention, draft_attention, prefill_attention,
                 argmax_head, top_tokens, head_logits, sample_tokens, accept_bonus, kv_inject, add_norm,
                 project, project_add_norm, gated_product)
}  # fmt: skip
