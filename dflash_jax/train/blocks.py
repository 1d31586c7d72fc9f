"""What a draft learns from: sequences with an answer in them, and blocks that begin at random tokens of the answer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.config import DraftConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences tokens int32 [S, T]; the target wrote the tokens at start … length − 1 (int32 [S] each)."""

    tokens: Array
    start: Array
    length: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A blocks of B rows in each of S sequences.

    anchors int32 [S, A]: position of row 0, whose token is known; ids, positions, labels int32 [S, A, B]: what goes
    in, where it stands, and the token that stands there (label 0 is the anchor itself); rows bool [S, A, B]: which
    rows are learnt from, never row 0, none past the end of the answer.
    """

    anchors: Array
    ids: Array
    positions: Array
    labels: Array
    rows: Array


def sample_anchors(key: Array, batch: Batch, count: int) -> tuple[Array, Array]:
    """`count` ≤ T anchors of each sequence, int32 [S, count], all different, and bool [S, count]: which are real.

    An anchor is a token of the answer that another token follows.  A short answer has fewer of them.
    """
    at = jnp.arange(batch.tokens.shape[1])[None]
    fit = (at >= batch.start[:, None]) & (at + 1 < batch.length[:, None])
    order = jnp.where(fit, jax.random.uniform(key, fit.shape), -1.0)
    best, anchors = jax.lax.top_k(order, count)
    return anchors.astype(jnp.int32), best >= 0


def make_blocks(config: DraftConfig, batch: Batch, anchors: Array, real: Array) -> Blocks:
    """The blocks [token at anchor, MASK × (B−1)] at `anchors` int32 [S, A]; where not `real`, no row counts."""
    offsets = jnp.arange(config.block_size, dtype=jnp.int32)[None, None]
    positions = anchors[..., None] + offsets
    inside = positions < batch.length[:, None, None]
    last = batch.tokens.shape[1] - 1
    flat = jnp.minimum(positions, last).reshape(positions.shape[0], -1)
    labels = jnp.take_along_axis(batch.tokens, flat, axis=1).reshape(positions.shape)
    ids = jnp.where(offsets == 0, labels, config.mask_token_id)
    return Blocks(anchors, ids, positions, labels, inside & (offsets > 0) & real[..., None])
