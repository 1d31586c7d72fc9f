"""Asking for what will be read: it comes from memory to the chip's cache while something else is done."""

from __future__ import annotations

import triton
import triton.language as tl

LINE_BITS = tl.constexpr(1024)  # what is brought at once


@triton.jit
def ask(lines):
    """For the lines of 128 bytes that the pointers `lines` point into."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], tl.int32, False, 1)


@triton.jit
def ask_for_share(ref, share, SHARES: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr):
    """For share `share` of SHARES (0: nothing) of the SIZE numbers from `ref` on, LANES lines at a time."""
    if SHARES > 0:
        LINE: tl.constexpr = LINE_BITS // ref.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = triton.cdiv(SIZE, LINE)
        EACH: tl.constexpr = triton.cdiv(LINES, SHARES)
        end = tl.minimum((share + 1) * EACH, LINES)
        for at in range(share * EACH, end, LANES):
            ask(ref + tl.minimum(at + tl.arange(0, LANES), end - 1) * LINE)
