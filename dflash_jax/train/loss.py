"""The loss of a draft: weighted cross-entropy of the target's tokens, and what it says about acceptance."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dflash_jax.config import DraftConfig
from dflash_jax.errors import UserError
from dflash_jax.models import head_weight
from dflash_jax.ops import Turned, dot
from dflash_jax.ops.reference.numerics import precision
from dflash_jax.params import Params
from dflash_jax.train.blocks import Blocks
from dflash_jax.train.head import Head, Rows, capped, head_ce
from dflash_jax.train.tables import pair_scores

WEIGHTINGS = ("decay", "dpace")
_GAMMA_AT = ((8, 10, 16), (4.0, 5.0, 7.0))  # arXiv:2602.06036, appendix: γ of blocks of 8, 10 and 16


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """How rows count.  Hashable: it is static in a compiled step.

    weighting: `decay`, exp(−(k−1)/γ), or `dpace` (arXiv:2605.18810), which follows the draft's own confidence.
    gamma: None takes the one that belongs to the block size.  selector_weight: of DFlash 2's second term.
    slice_rows: about how many rows of float32 logits may exist at once.  soft: the share of a row's target that is the
    target's distribution after the true tokens before it, rather than its token.
    """

    weighting: str = "decay"
    gamma: float | None = None
    dpace_alpha: float = 0.5
    selector_weight: float = 1.0
    slice_rows: int = 2048
    soft: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.soft <= 1.0:
            raise UserError(f"soft must be between 0 and 1, not {self.soft}")
        if self.weighting not in WEIGHTINGS:
            raise UserError(f"weighting {self.weighting!r} is not one of {', '.join(WEIGHTINGS)}")


class Scored(NamedTuple):
    """Rows 1 … B−1 of every block, each [S, A, B−1].

    ce: cross-entropy of the label under the head; selector_ce: of the label among the selector's candidates (0 for
    v1); hit: is the label what would be drafted, if everything before it in the block was right?
    """

    ce: Array
    selector_ce: Array
    hit: Array


class Sums(NamedTuple):
    """Sums over rows of a step; those of parts of a step add up.  hits, rows float32 [B−1], all others scalars.

    weight Σw, ce Σw·CE, selector Σw·CE of the selector; blocks: those that the answer's end does not cut; accepted:
    Σ over them of rows right from the first on.
    """

    weight: Array
    ce: Array
    selector: Array
    hits: Array
    rows: Array
    accepted: Array
    blocks: Array


def default_gamma(block_size: int) -> float:
    """4, 5 and 7 for blocks of 8, 10 and 16, linear between them and constant beyond."""
    return float(np.interp(block_size, *_GAMMA_AT))


def decay_weights(block_size: int, gamma: float | None = None) -> np.ndarray:
    """exp(−(k−1)/γ) for rows k = 1 … B−1, float32 [B−1]."""
    return np.exp(-np.arange(block_size - 1) / (gamma or default_gamma(block_size))).astype(np.float32)


def dpace_weights(ce: Array, rows: Array, alpha: float) -> Array:
    """D-PACE weights (arXiv:2605.18810, eq. 7 and 8) of ce float32 [..., B−1] where `rows`, constant to gradients.

    With q_i = exp(−CE_i) and q̃_i = (1 − α) q_i + α: w_j = Σ_{m ≥ j} Π_{i ≤ m} q̃_i, m up to the block's last row.
    """
    confidence = jnp.where(rows, (1 - alpha) * jnp.exp(-ce) + alpha, 0.0)
    survival = jnp.cumprod(confidence, axis=-1)
    return jax.lax.stop_gradient(jnp.cumsum(survival[..., ::-1], axis=-1)[..., ::-1])


def score_blocks(
    params: Params, config: DraftConfig, target: Params, hidden: Array, blocks: Blocks, loss: LossConfig,
    teacher: Array | None = None,
) -> Scored:  # fmt: skip
    """Scores of blocks' hidden states [S, A, B, H] by the target's head, a few blocks of all sequences at a time.

    teacher: the target's own last hidden states [S, T, H], from which `loss.soft` takes what the rows are to say.
    """
    s, a, b, _ = hidden.shape
    at_once = _blocks_at_once(a, s * (b - 1), loss.slice_rows)

    def split(x: Array) -> Array:
        slices = jnp.moveaxis(x.reshape(s, a // at_once, at_once, *x.shape[2:]), 1, 0)
        return slices.reshape(a // at_once, -1, *x.shape[3:])

    def joined(x: Array) -> Array:
        parts = x.reshape(a // at_once, s, at_once, b - 1, *x.shape[2:])
        return jnp.moveaxis(parts, 0, 1).reshape(s, a, b - 1, *x.shape[2:])

    weight = _head_of(target)
    labels, previous = blocks.labels[:, :, 1:], blocks.labels[:, :, :-1]
    asked = None if teacher is None else _asked(teacher, blocks)
    rows = Rows(split(hidden[:, :, 1:]), split(labels), None if asked is None else split(asked))
    head = Head(config.candidates, config.output_multiplier, config.logit_softcap, loss.soft)
    ce, tokens = map(joined, head_ce(head, weight, rows))
    if config.selector is None:
        return Scored(ce, jnp.zeros_like(ce), tokens[..., 0] == labels)
    told = Rows(hidden[:, :, 1:], labels, asked)
    return Scored(ce, *_selector_ce(params["selector"], head, weight, a // at_once, told, tokens, previous))


def _head_of(target: Params) -> Array:
    """The head [V, H], constant."""
    head = head_weight(target)
    return jax.lax.stop_gradient(head.array if isinstance(head, Turned) else head)


def _asked(teacher: Array, blocks: Blocks) -> Array:
    """The target's hidden states [S, A, B−1, H] that rows 1 … B−1 stand for: one position before theirs."""
    s, a, b = blocks.positions.shape
    at = jnp.clip(blocks.positions[:, :, 1:] - 1, 0, teacher.shape[1] - 1).reshape(s, -1)
    return jnp.take_along_axis(teacher, at[..., None], axis=1).reshape(s, a, b - 1, -1)


def _blocks_at_once(blocks: int, rows_of_each: int, slice_rows: int) -> int:
    """The largest divisor of `blocks` whose rows are at most `slice_rows`; at least 1."""
    return max(n for n in range(1, blocks + 1) if blocks % n == 0 and (n == 1 or n * rows_of_each <= slice_rows))


def _selector_ce(
    p: Params, head: Head, weight: Array, slices: int, rows: Rows, candidates: Array, previous: Array
) -> tuple[Array, Array]:
    """Cross-entropy [...] of the selector among its candidates int32 [..., K], given the true token before each row,
    and bool [...]: would it choose the label?  Its target is that of the head, the teacher's share among candidates.

    A label that is not among them takes the place of the last one, so that there is always something to learn.
    """
    hidden, labels, teacher = rows
    among = candidates == labels[..., None]
    found = among.any(axis=-1)
    place = jnp.where(found, among.argmax(axis=-1), head.best - 1)
    is_last = _only_last(head.best, candidates.ndim) & ~found[..., None]
    candidates = jnp.where(is_last, labels[..., None], candidates)
    unary = functools.partial(_unary, head, weight[candidates])
    pair = pair_scores(slices, p["predecessor"], p["successor"], dot(hidden, p["hidden"]), previous, candidates)
    scores = unary(hidden) + pair
    own = jnp.take_along_axis(scores, place[..., None], axis=-1)[..., 0]
    hit = found & (jax.lax.stop_gradient(scores).argmax(axis=-1) == place)
    if teacher is not None:
        shares = jax.nn.softmax(unary(teacher), axis=-1)
        own = (1 - head.soft) * own + head.soft * (shares * scores).sum(axis=-1)
    return jax.nn.logsumexp(scores, axis=-1) - own, hit


def _unary(head: Head, heads: Array, hidden: Array) -> Array:
    """Logits float32 [..., K] of hidden [..., H] for tokens whose rows of the head are `heads` [..., K, H]."""
    products = jnp.einsum(
        "...h,...kh->...k", hidden, heads, precision=precision(hidden.dtype), preferred_element_type=jnp.float32
    )
    return capped(head, products)[0]


def _only_last(size: int, ndim: int) -> np.ndarray:
    """bool [1, …, size], true at the last place."""
    return (np.arange(size) == size - 1).reshape((1,) * (ndim - 1) + (size,))


def loss_sums(config: LossConfig, blocks: Blocks, scored: Scored) -> tuple[Array, Sums]:
    """(Σ w · (CE + λ · selector's CE), sums) over the rows that count; the loss of a step is Σ of these / Σ w."""
    rows = blocks.rows[:, :, 1:]
    if config.weighting == "dpace":
        weights = dpace_weights(scored.ce, rows, config.dpace_alpha)
    else:
        weights = jnp.where(rows, decay_weights(blocks.rows.shape[-1], config.gamma)[None, None], 0.0)
    ce, selector = (weights * scored.ce).sum(), (weights * scored.selector_ce).sum()
    hit = (scored.hit & rows).astype(jnp.float32)
    counted, whole = rows.astype(jnp.float32), rows.all(axis=-1).astype(jnp.float32)
    sums = Sums(
        weights.sum(), ce, selector, hit.sum(axis=(0, 1)), counted.sum(axis=(0, 1)),
        (jnp.cumprod(hit, axis=-1).sum(axis=-1) * whole).sum(), whole.sum(),
    )  # fmt: skip
    return ce + config.selector_weight * selector, jax.lax.stop_gradient(sums)


def metrics(config: LossConfig, sums: Sums) -> dict[str, Any]:
    """loss, ce and selector_ce (weighted means), accuracy [B−1] of rows given right tokens before, accept_length.

    accept_length is simulated: rows right from the first on, and the bonus token, over whole blocks; NaN without any.
    Decoding begins more of its blocks in hard places than random anchors do, so its mean is lower.
    """
    weight, rows = jnp.maximum(sums.weight, 1e-9), jnp.maximum(sums.rows, 1.0)
    ce, selector = sums.ce / weight, sums.selector / weight
    return {
        "loss": ce + config.selector_weight * selector,
        "ce": ce,
        "selector_ce": selector,
        "accuracy": sums.hits / rows,
        "accept_length": 1.0 + sums.accepted / sums.blocks,
    }
