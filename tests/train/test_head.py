"""Cross-entropy under the head: values and gradients as by definition, whatever the head does to its products."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.train.head import Head, Rows, head_ce

V, H, M, N = 200, 16, 3, 5
rng = np.random.default_rng(0)
WEIGHT = jnp.asarray(rng.standard_normal((V, H)), jnp.float32)
HIDDEN = jnp.asarray(rng.standard_normal((M, N, H)), jnp.float32)
TEACHER = jnp.asarray(rng.standard_normal((M, N, H)), jnp.float32)
LABELS = jnp.asarray(rng.integers(0, V, (M, N)), jnp.int32)
SCALE = jnp.asarray(rng.standard_normal((M, N)), jnp.float32)
HEADS = [Head(1, 1.0, None), Head(3, 0.5, None), Head(2, 1.0, 4.0), Head(1, 0.7, 3.0, 0.4), Head(1, 1.0, None, 1.0)]
close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4)


def logits_of(head: Head, hidden):
    logits = jnp.einsum("...h,vh->...v", hidden, WEIGHT) * head.multiplier
    return logits if head.softcap is None else jnp.tanh(logits / head.softcap) * head.softcap


def defined(head: Head, hidden):
    """Cross-entropy of (1 − soft) · label + soft · the teacher's distribution."""
    wanted = jax.nn.one_hot(LABELS, V) * (1 - head.soft) + head.soft * jax.nn.softmax(logits_of(head, TEACHER))
    return -(wanted * jax.nn.log_softmax(logits_of(head, hidden))).sum(-1)


def found(head: Head, hidden: jax.Array, weight: Any = WEIGHT, teacher: Any = TEACHER) -> tuple[jax.Array, jax.Array]:
    both: Any = head_ce(head, weight, Rows(hidden, LABELS, teacher if head.soft else None))
    return both


@pytest.mark.parametrize("head", HEADS)
def test_by_definition(head: Head):
    ce, best = jax.jit(found, static_argnums=0)(head, HIDDEN)
    close(ce, defined(head, HIDDEN))
    np.testing.assert_array_equal(best, jax.lax.top_k(logits_of(head, HIDDEN), head.best)[1])


@pytest.mark.parametrize("head", HEADS)
def test_gradients_by_definition(head: Head):
    """Of a sum in which each row counts differently, as the rows of a block do."""
    value, gradient = jax.value_and_grad(lambda x: (SCALE * found(head, x)[0]).sum())(HIDDEN)
    wanted, own = jax.value_and_grad(lambda x: (SCALE * defined(head, x)).sum())(HIDDEN)
    close(value, wanted)
    close(gradient, own)


def test_no_gradient_reaches_head_labels_or_teacher():
    head = Head(1, 1.0, None, 0.5)

    def total(weight, teacher):
        return found(head, HIDDEN, weight, teacher)[0].sum()

    for gradient in jax.grad(total, argnums=(0, 1))(WEIGHT, TEACHER):
        assert not np.asarray(gradient).any()
