"""Products of few rows with a large weight, which take as long as the weight's way from memory.

Each program streams a tile of the weight's columns, and of its depth a share.  What shares give is float32, and
`add_shares_norm` (`norms.py`) adds it up where a product would be read anyway.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _added(y, w, total, LEFT: tl.constexpr):
    """total + y·w of y [M, BK] and w [BK, BN].

    With LEFT total is turned, [BN, M]: a Hopper's matrix unit then takes the weights straight from shared memory.
    """
    if LEFT:
        total = tl.dot(tl.trans(w), tl.trans(y), total)
    else:
        total = tl.dot(y, w, total)
    return total


@triton.jit
def _nothing(M: tl.constexpr, BN: tl.constexpr, LEFT: tl.constexpr):
    """What `_added` starts from."""
    if LEFT:
        total = tl.zeros([BN, M], tl.float32)
    else:
        total = tl.zeros([M, BN], tl.float32)
    return total


@triton.jit
def _weights(ref, k, n, K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Weights [BK, BN] at `ref` of depths k and columns n, zero past K and N."""
    if K % BK == 0 and N % BN == 0:
        w = tl.load(ref)
    elif N % BN == 0:
        w = tl.load(ref, mask=(k < K)[:, None], other=0.0)
    else:
        w = tl.load(ref, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
    return w


@triton.jit
def _rows(ref, row, k, ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BK: tl.constexpr):
    """Rows [M, BK] at `ref`, zero past ROWS and K."""
    if K % BK != 0:
        y = tl.load(ref, mask=(row < ROWS)[:, None] & (k < K)[None, :], other=0.0)
    elif M != ROWS:
        y = tl.load(ref, mask=(row < ROWS)[:, None], other=0.0)
    else:
        y = tl.load(ref)
    return y


@triton.jit
def _stored(ref, total, row, n, ROWS: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr):
    """`total` to [ROWS, N] at `ref`."""
    if LEFT:
        tl.store(ref + row[None, :] * N + n[:, None], total, mask=(n < N)[:, None] & (row < ROWS)[None, :])
    else:
        tl.store(ref + row[:, None] * N + n[None, :], total, mask=(row < ROWS)[:, None] & (n < N)[None, :])


@triton.jit
def share_of_product(
    y_ref, w_ref, part_ref,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BN columns, shares of STEPS · BK depths).  y [ROWS, K], w [K, N] → part [shares, ROWS, N].

    That is the product itself where there is one share.  M: ROWS or more lanes.
    """
    share = tl.program_id(1)
    row, n = tl.arange(0, M), tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    y_at = y_ref + row[:, None] * K + k[None, :]
    w_at = w_ref + k[:, None] * N + n[None, :]
    total = _nothing(M, BN, LEFT)
    for at in range(share * (STEPS * BK), tl.minimum((share + 1) * (STEPS * BK), K), BK):
        w = _weights(w_at + at * N, k + at, n, K, N, BN, BK)
        y = _rows(y_at + at, row, k + at, ROWS, K, M, BK)
        total = _added(y, w, total, LEFT)
    _stored(part_ref + share * (ROWS * N), total, row, n, ROWS, N, LEFT)


@triton.jit
def gated_tile(
    y_ref, w_ref, out_ref,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BN columns).  y [ROWS, K], w [K, 2, N] → out [ROWS, N] = silu(gate) ⊙ up, rounded step by step.

    M: ROWS or more lanes.
    """
    row, n = tl.arange(0, M), tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    y_at = y_ref + row[:, None] * K + k[None, :]
    w_at = w_ref + k[:, None] * (2 * N) + n[None, :]
    gate = _nothing(M, BN, LEFT)
    up = _nothing(M, BN, LEFT)
    for at in range(0, K, BK):
        w_gate = _weights(w_at + at * (2 * N), k + at, n, K, N, BN, BK)
        w_up = _weights(w_at + at * (2 * N) + N, k + at, n, K, N, BN, BK)
        y = _rows(y_at + at, row, k + at, ROWS, K, M, BK)
        gate = _added(y, w_gate, gate, LEFT)
        up = _added(y, w_up, up, LEFT)
    dtype = out_ref.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    half = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    silu = (gate * half).to(dtype).to(tl.float32)
    out = (silu * up.to(dtype).to(tl.float32)).to(dtype)
    _stored(out_ref, out, row, n, ROWS, N, LEFT)
