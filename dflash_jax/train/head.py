"""Cross-entropy under the target's head, whose logits are the largest arrays of a training step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.ops import dot, top_tokens


class Head(NamedTuple):
    """Static: tokens to name for each row; the head's multiplier and softcap; how much the teacher counts (0 to 1)."""

    best: int
    multiplier: float
    softcap: float | None
    soft: float = 0.0


class Rows(NamedTuple):
    """hidden [N, H] of the draft; labels int32 [N]; teacher [N, H]: the target's hidden states, or None."""

    hidden: Array
    labels: Array
    teacher: Array | None


class Found(NamedTuple):
    """ce float32 [N]; best int32 [N, K]: the likeliest tokens in order; gradient [N, H]: of ce by hidden, or None."""

    ce: Array
    best: Array
    gradient: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def head_ce(head: Head, weight: Array, slices: Rows) -> tuple[Array, Array]:
    """ce float32 [M, N] and best int32 [M, N, K] of M slices [M, N, …], one slice of logits [N, V] at a time.

    The target of a row is its label, and with `soft` that share of it the teacher's distribution.  Gradients reach
    `hidden` alone: with them at hand each row's is the sum over V that the logits were made for, so it is taken at once
    and scaled later, and no logits are kept or made a second time.
    """
    found = jax.lax.map(functools.partial(_slice, head, weight, False), slices)
    return found.ce, found.best


def _forward(head: Head, weight: Array, slices: Rows) -> tuple[tuple[Array, Array], Any]:
    found = jax.lax.map(functools.partial(_slice, head, weight, True), slices)
    return (found.ce, found.best), (found.gradient, weight, slices)


def _backward(head: Head, kept: Any, cotangents: tuple[Array, Any]) -> tuple[None, Rows]:
    gradient, weight, slices = kept
    scaled = (cotangents[0][..., None] * gradient).astype(slices.hidden.dtype)
    return None, Rows(scaled, None, None)  # type: ignore[arg-type]


head_ce.defvjp(_forward, _backward)


def _slice(head: Head, weight: Array, differentiate: bool, rows: Rows) -> Found:
    products = dot(rows.hidden, weight, contract=(1,), out=jnp.float32)
    logits, slope = capped(head, products)
    largest, best = top_tokens(logits, head.best)
    total = _logsumexp(logits, largest[:, :1])
    ce = (total - jnp.take_along_axis(logits, rows.labels[:, None], axis=-1))[:, 0]
    wanted = None if rows.teacher is None else jax.nn.softmax(teacher_logits(head, weight, rows.teacher), axis=-1)
    if wanted is not None:
        ce = (1 - head.soft) * ce + head.soft * (total[:, 0] - (wanted * logits).sum(axis=-1))
    if not differentiate:
        return Found(ce, best, None)
    push = jnp.exp(logits - total)
    if wanted is not None:
        push = push - head.soft * wanted
    label = (1 - head.soft) * weight[rows.labels].astype(jnp.float32)
    if slope is not None:
        push, label = push * slope, label * jnp.take_along_axis(slope, rows.labels[:, None], axis=-1)
    return Found(ce, best, dot(push.astype(weight.dtype), weight, out=jnp.float32) - label)


def _logsumexp(x: Array, largest: Array) -> Array:
    """log Σ exp x over the last axis of x [N, V], which is kept; `largest` [N, 1] saves looking for it once more."""
    return largest + jnp.log(jnp.exp(x - largest).sum(axis=-1, keepdims=True))


def teacher_logits(head: Head, weight: Array, hidden: Array) -> Array:
    return capped(head, dot(hidden, weight, contract=(1,), out=jnp.float32))[0]


def capped(head: Head, products: Array) -> tuple[Array, Array | None]:
    """The head's logits of its products, and their derivative (None: 1 everywhere)."""
    if head.multiplier == 1.0 and head.softcap is None:
        return products, None
    logits = products * head.multiplier
    if head.softcap is None:
        return logits, jnp.full_like(logits, head.multiplier)
    bent = jnp.tanh(logits / head.softcap)
    return bent * head.softcap, head.multiplier * (1 - bent * bent)
