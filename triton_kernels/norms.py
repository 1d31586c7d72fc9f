"""A sum and its norm: one program for a row, which stays in registers between the two."""

from __future__ import annotations

import triton
import triton.language as tl

from .early import ask_for_share


@triton.jit
def _kept(x, delta, at, h, weight_ref, sum_ref, normed_ref, eps: tl.constexpr, H: tl.constexpr):
    """x + delta and its norm to `at`, of a row of float32 numbers at h [BH], zero past H.

    Rounded where the reference rounds: the sum, the norm before the weight, and after it.
    """
    inside = h < H
    dtype = sum_ref.dtype.element_ty
    weight = tl.load(weight_ref + h, mask=inside, other=0.0).to(tl.float32)
    total = (x + delta).to(dtype)
    tl.store(sum_ref + at, total, mask=inside)
    f = total.to(tl.float32)
    normed = (f * tl.math.rsqrt(tl.sum(f * f, axis=0) / H + eps)).to(dtype).to(tl.float32)
    tl.store(normed_ref + at, (normed * weight).to(dtype), mask=inside)


@triton.jit
def add_norm_row(
    x_ref, delta_ref, weight_ref, sum_ref, normed_ref, eps: tl.constexpr, H: tl.constexpr, BH: tl.constexpr
):
    """Grid (rows).  x, delta [rows, H] and weight [H] → sum, normed [rows, H]; BH: H or more lanes."""
    h = tl.arange(0, BH)
    inside = h < H
    at = tl.program_id(0).to(tl.int64) * H + h
    x = tl.load(x_ref + at, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_ref + at, mask=inside, other=0.0).to(tl.float32)
    _kept(x, delta, at, h, weight_ref, sum_ref, normed_ref, eps, H)


@triton.jit
def add_shares_norm(
    x_ref, part_ref, weight_ref, ahead_ref, sum_ref, normed_ref,
    eps: tl.constexpr, SHARES: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    ASKING: tl.constexpr, AHEAD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`add_norm_row` of a delta that is the sum of part float32 [SHARES, rows, H], rounded to x's type.

    Grid (rows + ASKING): the last ASKING programs ask for the AHEAD numbers of `ahead`, LANES lines at a time.
    """
    row, rows = tl.program_id(0), tl.num_programs(0) - ASKING
    if row < rows:
        h = tl.arange(0, BH)
        inside = h < H
        at = row.to(tl.int64) * H + h
        x = tl.load(x_ref + at, mask=inside, other=0.0).to(tl.float32)
        delta = tl.zeros([BH], tl.float32)
        for share in tl.static_range(SHARES):
            delta += tl.load(part_ref + share * rows * H + at, mask=inside, other=0.0)
        delta = delta.to(x_ref.dtype.element_ty).to(tl.float32)
        _kept(x, delta, at, h, weight_ref, sum_ref, normed_ref, eps, H)
    else:
        ask_for_share(ahead_ref, row - rows, ASKING, AHEAD, LANES)
