"""The letters of array axes in docstrings, and the logical axis names of parameters.

Docstrings write shapes with these letters::

    B  block rows          S  request slots (rows of a round)   T  rows of a prefill bucket
    P  pages of a pool     C  tokens of a page                  W  pages of one request's table
    L  layers              N  query heads                       G  key/value heads
    R  query heads per key/value head (N = G * R)               D  head dimension
    H  hidden width        F  feed-forward width                V  vocabulary
    K  taps (target layers the draft reads)

Parameters name their axes logically; `sharding.RULES` says which of them a mesh splits.
"""

from __future__ import annotations

EMBED = "embed"  # the hidden width H
VOCAB = "vocab"
KV_HEADS = "kv_heads"  # G: query heads are grouped by their key/value head, so splitting G splits both
HEADS = "heads"  # N, grouped by key/value head
HEAD_DIM = "head_dim"
FFN = "ffn"
TAPS = "taps"
RANK = "rank"  # width of the DFlash 2 candidate codebooks
CONV_GROUPS = "conv_groups"
