"""Parameters are declared once: shape, logical axes and initialisation.

Loading, sharding and random initialisation all derive from the same tree of `ParamSpec`; a parameter
tree is nested dicts (and tuples for layers) of the same structure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Params = Any  # nested dicts and tuples of arrays, in the structure of a spec tree


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, one logical axis name (or None) a dimension, and its initialiser.

    `init` is `normal` (scaled by the fan-in of the first axis), `ones` or `zeros`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"a parameter of shape {self.shape} cannot have axes {self.axes}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def is_spec(node: object) -> bool:
    return isinstance(node, ParamSpec)


def map_specs(function: Callable[..., Any], specs: Any, *rest: Any) -> Any:
    """`jax.tree.map` over a spec tree, whose leaves are the specs."""
    return jax.tree.map(function, specs, *rest, is_leaf=is_spec)


def walk(specs: Any, prefix: str = "") -> Iterator[tuple[str, ParamSpec]]:
    """(dotted path, spec) of every parameter, in declaration order."""
    if is_spec(specs):
        yield prefix, specs
        return
    items = specs.items() if isinstance(specs, dict) else enumerate(specs)
    for key, child in items:
        yield from walk(child, f"{prefix}.{key}" if prefix else str(key))


def build(specs: Any, leaf: Callable[[str, ParamSpec], Any], prefix: str = "") -> Any:
    """A tree of the specs' structure whose leaves are `leaf(path, spec)`, made one at a time in order."""
    if is_spec(specs):
        return leaf(prefix, specs)
    join = (lambda key: f"{prefix}.{key}") if prefix else str
    if isinstance(specs, dict):
        return {key: build(child, leaf, join(key)) for key, child in specs.items()}
    return tuple(build(child, leaf, join(i)) for i, child in enumerate(specs))


def count(specs: Any) -> int:
    """Number of scalar parameters."""
    return sum(spec.size for _, spec in walk(specs))


def device_bytes(tree: Any) -> int:
    """Bytes that each device holds of a tree's arrays; one that stands in two places counts once."""
    return sum({id(leaf): _device_bytes(leaf) for leaf in jax.tree.leaves(tree)}.values())


def _device_bytes(leaf: jax.Array) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def normal(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Standard normal numbers [*shape], drawn in float32: `jax.random` draws only 128 different ones in bfloat16."""
    return jax.random.normal(key, tuple(shape), jnp.float32).astype(dtype)


def random_params(specs: Any, key: jax.Array, dtype: jnp.dtype) -> Params:
    """Random parameters of the declared shapes (for tests, shape benchmarks and training from nothing)."""
    keys = iter(jax.random.split(key, max(1, len(list(walk(specs))))))

    def leaf(_: str, spec: ParamSpec) -> jax.Array:
        own = next(keys)
        if spec.init == "normal":
            return (jax.random.normal(own, spec.shape, jnp.float32) / math.sqrt(spec.shape[0])).astype(dtype)
        return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, dtype)

    return build(specs, leaf)
