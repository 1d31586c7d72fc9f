"""Log-probabilities behind a step's results, where a request asks for them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.drafters import Weights
from dflash_jax.models import Rows, head_weight
from dflash_jax.ops import FILTER, GREEDY, packed_logprobs, processed_logits, token_logprobs
from dflash_jax.steps.config import StepConfig

PROMPT_LOGPROB_ROWS = 16  # at most, of a chunk at a time


def with_logprobs(
    config: StepConfig, rows: Rows, logits: Array, tokens: Array, packed: Array, n: int | None, edited: Array
) -> Array:
    """`packed` int32 [S, K] with what `packed_logprobs` makes of tokens int32 [S, B] after it (n None: as it is).

    logits float32 [S, B, V] are the target's own, `edited` those changed by requests.
    """
    if n is None:
        return packed
    of, kind = config.logprobs_mode.split("_")
    if of == "processed":
        logits = edited
        if rows.sampling is not None and rows.mode != GREEDY:
            logits = processed_logits(edited, rows.sampling, rows.mode == FILTER)
    found = token_logprobs(logits, tokens, n, normalise=kind == "logprobs")
    return jnp.concatenate([packed, packed_logprobs(found)], axis=1)


def packed_width(block: int, n: int | None) -> int:
    """Columns of a round's packed result: count, finish and tokens, then what `with_logprobs` adds for `n`."""
    return 2 + block + (0 if n is None else block * (2 + 2 * n))


def with_prompt_logprobs(
    config: StepConfig, weights: Weights, last: Array, following: Array, packed: Array, n: int
) -> Array:
    """`packed` int32 [S, K] with raw log-probabilities of the tokens `following` int32 [S, T] hidden states [S, T, H].

    Only some rows of a chunk at a time, so that never more of their logits exist.
    """
    rows, width = following.shape
    size = math.gcd(width, PROMPT_LOGPROB_ROWS)

    def part(inputs: tuple[Array, Array]) -> Array:
        logits = config.kernels.head_logits(inputs[0], head_weight(weights.target))
        return packed_logprobs(token_logprobs(logits, inputs[1], n))

    split = [jnp.moveaxis(a.reshape(rows, width // size, size, *a.shape[2:]), 1, 0) for a in (last, following)]
    found = jax.lax.map(part, tuple(split))  # [parts, S, …]
    return jnp.concatenate([packed, jnp.moveaxis(found, 0, 1).reshape(rows, -1)], axis=1)
