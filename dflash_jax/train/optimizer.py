"""Learning rate and optimiser of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from optax import contrib

from dflash_jax.params import Params
from dflash_jax.train.config import TrainConfig

_LIKE_ADAM = 0.2  # root mean square of Muon's updates, so that AdamW's learning rates serve (arXiv:2502.16982)
# Axes that a product sums over and that it gives, by the names of `draft_specs`; others are separate matrices.
_MATRICES = {
    "qkv": ((0,), (1, 2, 3)), "o": ((0, 1), (2,)), "gate_up": ((0,), (2,)), "down": ((0,), (1,)), "fc": ((0,), (1,)),
    "hidden": ((0,), (1,)),
}  # fmt: skip
_MOMENTUM, _EPS, _ITERATIONS = 0.95, 1e-8, 5
_QUINTIC = (3.4445, -4.7750, 2.0315)  # Keller Jordan's, as in `optax.contrib.muon`


def schedule(config: TrainConfig) -> optax.Schedule:
    """Learning rate by step."""
    rise = max(1, round(config.warmup * config.steps))
    return optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, rise, max(config.steps, rise + 1))


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping, then AdamW, or Muon for the layers' matrices and AdamW for the rest; decay of matrices only."""
    (b1, b2), rate, decay = config.betas, schedule(config), config.weight_decay
    if config.optimizer == "muon":
        muon = optax.chain(_orthogonal(), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate))
        adam = optax.adamw(rate, b1, b2, _EPS, weight_decay=0.0, nesterov=True)
        own = optax.partition({"muon": muon, "adam": adam}, _muon_or_adam)
    else:
        own = optax.adamw(rate, b1, b2, weight_decay=decay, mask=_is_matrix)
    return optax.chain(_clipped(config.clip), own)


def global_norm(tree: Any) -> Array:
    """√Σx² over all arrays of a tree; arrays of one shape are summed together, for each sum alone is a launch."""
    alike: dict[tuple[int, ...], list[Array]] = {}
    for x in jax.tree.leaves(tree):
        alike.setdefault(x.shape, []).append(x)
    return jnp.sqrt(sum((jnp.square(jnp.stack(xs)).sum() for xs in alike.values()), jnp.zeros(())))


def _clipped(most: float) -> optax.GradientTransformation:
    """As `optax.clip_by_global_norm`."""

    def init(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = global_norm(updates)
        return jax.tree.map(lambda g: jnp.where(norm < most, g, g / norm * most), updates), state

    return optax.GradientTransformation(init, update)


def _is_matrix(params: Params) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _muon_or_adam(params: Params) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if _name(path) in _MATRICES else "adam", params)


def _name(path: tuple[Any, ...]) -> str:
    return str(getattr(path[-1], "key", ""))


def _orthogonal() -> optax.GradientTransformation:
    """As `optax.contrib.scale_by_muon` and `scale_by_shape` for the arrays of `_MATRICES`, and with the same state.

    Theirs takes one matrix after another: 440 launches of a few µs each for a draft of four layers, here 170.
    """

    def init(params: Any) -> contrib.MuonState:
        return contrib.MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), jnp.asarray(_QUINTIC))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, contrib.MuonState]:
        count = jnp.asarray(state.count) + 1
        mean = jax.tree.map(lambda m, g: _MOMENTUM * m + (1 - _MOMENTUM) * g, state.mu, updates)
        ahead, now = _MOMENTUM / (1 - _MOMENTUM ** (count + 1)), (1 - _MOMENTUM) / (1 - _MOMENTUM**count)
        nesterov = jax.tree.map(lambda m, g: ahead * m + now * g, mean, updates)
        mean, nesterov = jax.lax.optimization_barrier((mean, nesterov))  # or each is computed where it is used, twice
        return _orthogonalised(nesterov), contrib.MuonState(count, mean, state.ns_coeffs)

    return optax.GradientTransformation(init, update)


class _Matrices(NamedTuple):
    """How an array of `shape` holds matrices [rows, columns]: one, or as many as axis `counted` is long."""

    shape: tuple[int, ...]
    counted: int | None
    rows: int
    columns: int

    def split(self, x: Array) -> list[Array]:
        """The matrices.  Slices, for a transposed layout would spread to all that the array is computed from."""
        parts = [x] if self.counted is None else jnp.unstack(x, axis=self.counted)
        return [part.reshape(self.rows, self.columns) for part in parts]

    def joined(self, parts: Sequence[Array]) -> Array:
        if self.counted is None:
            return parts[0].reshape(self.shape)
        inner = self.shape[: self.counted] + self.shape[self.counted + 1 :]
        return jnp.stack([part.reshape(inner) for part in parts], axis=self.counted)


def _matrices(path: tuple[Any, ...], x: Array) -> _Matrices:
    summed, given = _MATRICES[_name(path)]
    counted = next((i for i in range(x.ndim) if i not in summed + given), None)
    return _Matrices(x.shape, counted, math.prod(x.shape[i] for i in summed), math.prod(x.shape[i] for i in given))


def _orthogonalised(tree: Any) -> Any:
    """Every matrix of a tree made orthogonal, of root mean square `_LIKE_ADAM`: all of one shape at once."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    seen = [_matrices(path, x) for path, x in flat]
    parts = [matrices.split(x) for matrices, (_, x) in zip(seen, flat, strict=True)]
    done = iter(_by_shape(_newton_schulz, [part for found in parts for part in found]))
    joined = [matrices.joined([next(done) for _ in found]) for matrices, found in zip(seen, parts, strict=True)]
    return structure.unflatten(joined)


def _by_shape(function: Callable[[Array], Array], parts: Sequence[Array]) -> list[Array]:
    """`function` of each of `parts`, called with all of one shape stacked."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, x in enumerate(parts):
        alike.setdefault(x.shape, []).append(i)
    found: dict[int, Array] = {}
    for which in alike.values():
        found |= dict(zip(which, jnp.unstack(function(jnp.stack([parts[i] for i in which]))), strict=True))
    return [found[i] for i in range(len(parts))]


def _newton_schulz(x: Array) -> Array:
    """x [n, rows, columns] with singular values near 1, times `_LIKE_ADAM` · √(the longer side)."""
    first, second, third = _QUINTIC
    tall = x.shape[1] > x.shape[2]
    straight = first * jnp.eye(min(x.shape[1:]), dtype=x.dtype)[None]  # in the product: to add first · x is a pass more
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + _EPS)
    for _ in range(_ITERATIONS):
        square = x.mT @ x if tall else x @ x.mT
        bent = straight + second * square + third * (square @ square)
        x = x @ bent if tall else bent @ x
    return _LIKE_ADAM * math.sqrt(max(x.shape[1:])) * x
