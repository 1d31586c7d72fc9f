"""Norm, rotation and the paged write of keys and values: one program for a row and a key/value head."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed(first, second, weights_ref, half, inside, eps, D: tl.constexpr, dtype: tl.constexpr):
    """Rows of two halves [N, D/2] float32, normed as the reference does (rounded before the weight and after)."""
    w1 = tl.load(weights_ref + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(weights_ref + D // 2 + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / D
    scale = tl.math.rsqrt(mean + eps)[:, None]
    first = ((first * scale).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def unturned(x_ref, cos_ref, sin_ref, base, angle, D: tl.constexpr, BH: tl.constexpr):
    """What `turned` takes of vectors of D numbers that begin at base [N]: their halves, cos and sin, [N, BH] each.

    angle [N]: where those of cos and sin (float32 [..., D/2]) begin.
    """
    return (
        halves(x_ref, base, D, BH), halves(x_ref, base + D // 2, D, BH), halves(cos_ref, angle, D, BH),
        halves(sin_ref, angle, D, BH),
    )  # fmt: skip


@triton.jit
def turned(first, second, cos, sin, norm_ref, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Halves [N, BH] of vectors, normed if NORM and rotated, in their own type."""
    half = tl.arange(0, first.shape[1])
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        first, second = _normed(first, second, norm_ref, half, half < D // 2, eps, D, dtype)  # pyright: ignore[reportGeneralTypeIssues]
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def halves(x_ref, base, D: tl.constexpr, BH: tl.constexpr):
    """D / 2 numbers from each of base [N] on: [N, BH], zero past them."""
    half = tl.arange(0, BH)
    at = x_ref + base[:, None] + half[None, :]
    if D == 2 * BH:
        return tl.load(at)
    return tl.load(at, mask=(half < D // 2)[None, :], other=0.0)


@triton.jit
def joined(first, second):
    """Halves [N, BH] side by side: [N, 2 · BH]."""
    both = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(both, (first.shape[0], 2 * first.shape[1]))


@triton.jit
def norm_rope_write(
    pool_in_ref, qkv_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, locations_ref, q_ref, kv_ref, pool_ref,
    eps: tl.constexpr, G: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BH: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Grid (S · B, G).  qkv [S·B, G, R+2, D] → q [S·B, G·R, D], kv [S·B, 2, G, D] and rows of pool [P, 2, G, C, D].

    cos, sin float32 [S·B, D/2]; locations [S·B] = page · C + offset.  pool_in is the same buffer as pool.
    """
    sb, g = tl.program_id(0), tl.program_id(1)
    r, half = tl.arange(0, RP), tl.arange(0, BH)
    inside = half < D // 2
    dtype = qkv_ref.dtype.element_ty
    at = ((sb * G + g) * (R + 2) + r)[:, None] * D + half[None, :]
    ok = (r < R + 2)[:, None] & inside[None, :]
    first = tl.load(qkv_ref + at, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(qkv_ref + at + D // 2, mask=ok, other=0.0).to(tl.float32)
    is_query, is_key = (r < R)[:, None], (r == R)[:, None]
    x1, x2 = first, second
    if NORM:
        q1, q2 = _normed(first, second, q_norm_ref, half, inside, eps, D, dtype)  # pyright: ignore[reportGeneralTypeIssues]
        k1, k2 = _normed(first, second, k_norm_ref, half, inside, eps, D, dtype)  # pyright: ignore[reportGeneralTypeIssues]
        x1, x2 = tl.where(is_query, q1, k1), tl.where(is_query, q2, k2)
    cos = tl.load(cos_ref + sb * (D // 2) + half, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ref + sb * (D // 2) + half, mask=inside, other=0.0)[None, :]
    rotates = is_query | is_key
    out1 = tl.where(rotates, x1 * cos - x2 * sin, first).to(dtype)
    out2 = tl.where(rotates, x2 * cos + x1 * sin, second).to(dtype)

    queries = is_query & inside[None, :]
    at_q = (sb * (G * R) + g * R + r)[:, None] * D + half[None, :]
    tl.store(q_ref + at_q, out1, mask=queries)
    tl.store(q_ref + at_q + D // 2, out2, mask=queries)
    rows = (r >= R)[:, None] & ok
    side = tl.maximum(r - R, 0)  # 0 the key, 1 the value
    at_kv = ((sb * 2 + side) * G + g)[:, None] * D + half[None, :]
    tl.store(kv_ref + at_kv, out1, mask=rows)
    tl.store(kv_ref + at_kv + D // 2, out2, mask=rows)
    location = tl.load(locations_ref + sb)
    page = (location // C).to(tl.int64)
    at_pool = (((page * 2 + side) * G + g) * C + location % C)[:, None] * D + half[None, :]
    tl.store(pool_ref + at_pool, out1.to(pool_ref.dtype.element_ty), mask=rows)
    tl.store(pool_ref + at_pool + D // 2, out2.to(pool_ref.dtype.element_ty), mask=rows)


@triton.jit
def inject_write(
    pool_in_ref, y_ref, k_norms_ref, cos_ref, sin_ref, locations_ref, pool_ref,
    eps: tl.constexpr, layer: tl.constexpr, L: tl.constexpr, G: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BH: tl.constexpr,
):  # fmt: skip
    """Grid (S · T, G).  Layer `layer` of y [S·T, L, 2, G, D] into pool: keys normed and rotated, values as they are."""
    st, g = tl.program_id(0), tl.program_id(1)
    side, half = tl.arange(0, 2), tl.arange(0, BH)
    inside = half < D // 2
    dtype = y_ref.dtype.element_ty
    at = (((st * L + layer) * 2 + side) * G + g)[:, None] * D + half[None, :]
    first = tl.load(y_ref + at, mask=inside[None, :], other=0.0).to(tl.float32)
    second = tl.load(y_ref + at + D // 2, mask=inside[None, :], other=0.0).to(tl.float32)
    x1, x2 = _normed(first, second, k_norms_ref + layer * D, half, inside, eps, D, dtype)  # pyright: ignore[reportGeneralTypeIssues]
    cos = tl.load(cos_ref + st * (D // 2) + half, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ref + st * (D // 2) + half, mask=inside, other=0.0)[None, :]
    is_key = (side == 0)[:, None]
    out1 = tl.where(is_key, x1 * cos - x2 * sin, first).to(dtype)
    out2 = tl.where(is_key, x2 * cos + x1 * sin, second).to(dtype)
    location = tl.load(locations_ref + st)
    page = (location // C).to(tl.int64)
    at_pool = (((page * 2 + side) * G + g) * C + location % C)[:, None] * D + half[None, :]
    tl.store(pool_ref + at_pool, out1.to(pool_ref.dtype.element_ty), mask=inside[None, :])
    tl.store(pool_ref + at_pool + D // 2, out2.to(pool_ref.dtype.element_ty), mask=inside[None, :])
