"""Attention and keys/values without pages: the same ops the models call, over dense arrays, so that one draft serves
both decoding and training.

In place of a page pool a layer gets its dense context, keys and values [S, T, 2, G, D] of S sequences, or None where
there is none.  The rows of a call may be several blocks of each sequence, sequence by sequence: [S·A, B, …].
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from dflash_jax.ops import Kernels, align, dot, norm_rope
from dflash_jax.ops.reference.attention import block_mask
from dflash_jax.ops.reference.numerics import precision


@dataclasses.dataclass(frozen=True)
class DenseKernels(Kernels):
    """The ops of `Kernels` that touch a cache, over dense contexts; all others are XLA's."""

    def cache_write(
        self, pool: Any, qkv: Array, q_norm: Array | None, k_norm: Array | None, eps: float, cos: Array, sin: Array,
        locations: Array,
    ) -> tuple[Array, Array, Any]:  # fmt: skip
        """Nothing is written: the rows of a whole sequence see each other directly."""
        return *norm_rope(qkv, q_norm, k_norm, eps, cos, sin), pool

    def kv_inject(
        self, pools: tuple[Any, ...], fused: Array, weight: Array, bias: Array | None, k_norms: Array, eps: float,
        cos: Array, sin: Array, locations: Array,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Fused context [S, T, H] → the dense context [S, T, 2, G, D] of each layer."""
        y = dot(fused, weight)  # [S, T, L, 2, G, D]
        y = y if bias is None else y + align(bias, y)
        rows = [y[:, :, i].swapaxes(2, 3) for i in range(len(pools))]  # [S, T, G, 2, D]: a projection without queries
        return tuple(norm_rope(row, k, k, eps, cos, sin)[1] for row, k in zip(rows, k_norms, strict=True))

    def block_attention(
        self, q: Array, kv: Array, pool: Array | None, page_table: Array, lengths: Array, *, causal: bool,
        window: int | None = None,
    ) -> Array:  # fmt: skip
        return dense_attention(q, kv, pool, lengths, causal, window)

    prefill_attention = block_attention


DENSE = DenseKernels()
_KEPT = "softmax"


# The scores are large, and not kept: only what each row's softmax needs from all of them.
@functools.partial(jax.checkpoint, static_argnums=(4, 5), policy=jax.checkpoint_policies.save_only_these_names(_KEPT))
def dense_attention(
    q: Array, kv: Array, context: Array | None, lengths: Array, causal: bool, window: int | None
) -> Array:
    """As `paged_attention`: blocks q [S·A, B, N, D], kv [S·A, B, 2, G, D] over context [S, T, 2, G, D] and themselves.

    A block sees the first `lengths` int32 [S·A] rows of its sequence's context, within `window` if given, and all of
    itself, or only back if `causal`.  Block row i sits at position lengths + i.

    Heads come first, so that all products are plain ones, row after row.  With tokens first XLA laid the weights out
    with the R queries of a key innermost, or the B rows of a block, and on an H200 that took longer than all else here.
    """
    if context is None:
        return _self_attention(q, kv, block_mask(q.shape[1], causal, window))
    blocks, b, n, d = q.shape
    s, g, a = context.shape[0], kv.shape[3], blocks // context.shape[0]
    heads = q.reshape(s, a, b, g, -1, d).transpose(0, 3, 1, 4, 2, 5)  # [S, G, A, R, B, D]
    own_keys, own_values = kv.reshape(s, a, b, 2, g, d).transpose(3, 0, 4, 1, 2, 5)
    keys, values = context.transpose(2, 0, 3, 1, 4)
    scores = _product("sgamd,sgacd->sgamc", heads.reshape(s, g, a, -1, d), own_keys)
    own = _masked(scores.reshape(*heads.shape[:-1], -1), block_mask(b, causal, window)[None, None, None, None], d)
    scores = _product("sgmd,sgtd->sgmt", heads.reshape(s, g, -1, d), keys)
    seen = context_mask(lengths.reshape(s, a), context.shape[1], b, window)[:, None, :, None]
    own, before = _softmax([own, _masked(scores.reshape(*heads.shape[:-1], -1), seen, d)])
    out = _mixed("sgamc,sgacd->sgamd", own.reshape(s, g, a, -1, b), own_values).reshape(heads.shape)
    out = out + _mixed("sgmt,sgtd->sgmd", before.reshape(s, g, -1, before.shape[-1]), values).reshape(heads.shape)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(blocks, b, n, d)


def _self_attention(q: Array, kv: Array, seen: Array) -> Array:
    """q [S, T, N, D] and kv [S, T, 2, G, D] of whole sequences among themselves; seen bool [T, T]."""
    s, t, n, d = q.shape
    heads = q.reshape(s, t, kv.shape[3], -1, d).transpose(0, 2, 3, 1, 4)
    keys, values = kv.transpose(2, 0, 3, 1, 4)
    scores = _masked(_product("sgrtd,sgcd->sgrtc", heads, keys), seen[None, None, None], d)
    out = _mixed("sgrtc,sgcd->sgrtd", jax.nn.softmax(scores, axis=-1), values)
    return out.transpose(0, 3, 1, 2, 4).reshape(s, t, n, d)


def _softmax(parts: list[Array]) -> list[Array]:
    """Softmax over the last axes of all parts together, without laying them side by side."""
    top = functools.reduce(jnp.maximum, [x.max(axis=-1, keepdims=True) for x in parts])
    top = checkpoint_name(jax.lax.stop_gradient(top), _KEPT)
    raised = [jnp.exp(x - top) for x in parts]
    total = checkpoint_name(sum(x.sum(axis=-1, keepdims=True) for x in raised), _KEPT)
    return [x / total for x in raised]


def context_mask(lengths: Array, tokens: int, block: int, window: int | None) -> Array:
    """bool [S, A, B, T]: may row i of a block over `lengths` int32 [S, A] see context row t?"""
    at = jnp.arange(tokens)[None, None, None]
    seen = jnp.broadcast_to(at < lengths[:, :, None, None], (*lengths.shape, block, tokens))
    if window is None:
        return seen
    position = lengths[:, :, None] + jnp.arange(block)[None, None]
    return seen & (position[..., None] - at < window)


def _masked(products: Array, seen: Array, size: int) -> Array:
    """Scores of the products of heads of that size, −inf where not `seen`."""
    return jnp.where(seen, products * size**-0.5, -jnp.inf)


def _mixed(product: str, weights: Array, values: Array) -> Array:
    return _product(product, weights.astype(values.dtype), values).astype(values.dtype)


def _einsum(product: str, x: Array, y: Array) -> Array:
    """The einsum `product` in float32 of two arrays of one dtype.

    It should sum over one axis, as should those of its gradients: several are made one by copying.
    """
    return jnp.einsum(product, x, y, precision=precision(x.dtype), preferred_element_type=jnp.float32)


def _einsum_backward(product: str, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, y = kept
    operands, out = product.split("->")
    of_x, of_y = operands.split(",")
    narrow = gradient.astype(x.dtype)
    to_x, to_y = _einsum(f"{out},{of_y}->{of_x}", narrow, y), _einsum(f"{out},{of_x}->{of_y}", narrow, x)
    return to_x.astype(x.dtype), to_y.astype(y.dtype)


# `_einsum` whose gradients are products in the dtype of x and y too, where JAX would take them in float32.
_product: Any = jax.custom_vjp(_einsum, nondiff_argnums=(0,))
_product.defvjp(lambda product, x, y: (_einsum(product, x, y), (x, y)), _einsum_backward)
