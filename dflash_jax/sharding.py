"""Placing arrays on a mesh by their logical axis names.

One mesh axis, `tensor`, splits heads, feed-forward width and vocabulary; a mesh of one device places
everything there through the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax import axes
from dflash_jax.errors import UserError
from dflash_jax.params import ParamSpec, map_specs

TENSOR = "tensor"
# Logical axis -> mesh axis. Axes not listed are replicated.
RULES: dict[str, str] = {axes.KV_HEADS: TENSOR, axes.HEADS: TENSOR, axes.FFN: TENSOR, axes.VOCAB: TENSOR}


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A one-axis mesh over `devices` (default: the first device only)."""
    return Mesh(np.array(list(devices) if devices else jax.devices()[:1]), (TENSOR,))


def tensor_mesh(size: int) -> Mesh:
    """A mesh over the first `size` devices.  UserError where there are fewer."""
    found = jax.devices()
    if size > len(found):
        raise UserError(
            f"tensor_parallel_size {size} needs {size} devices, and there {_are(len(found))} ({found[0].device_kind})"
        )
    return make_mesh(found[:size])


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def sharding(mesh: Mesh, names: Sequence[str | None], shape: Sequence[int] | None = None) -> NamedSharding:
    """The sharding of an array with these logical axis names; `shape` checks that the split is even.

    A vocabulary that cannot be split evenly is whole on every device; UserError for other axes.
    """
    parts = [RULES.get(name) if name else None for name in names]
    for i, (name, size) in enumerate(zip(names, shape or (), strict=False)):
        part = parts[i]
        if part is None or size % mesh.shape[part] == 0:
            continue
        if name != axes.VOCAB:
            raise UserError(f"{name} of size {size} cannot be split evenly over {mesh.shape[part]} devices")
        parts[i] = None
    while parts and parts[-1] is None:  # as JAX names what a step returns: another name is another program
        parts.pop()
    return NamedSharding(mesh, PartitionSpec(*parts))


def spec_shardings(specs: Any, mesh: Mesh) -> Any:
    """A tree of shardings in the structure of a spec tree."""
    return map_specs(lambda spec: sharding(mesh, spec.axes, spec.shape), specs)


def place(array: Any, spec: ParamSpec, mesh: Mesh) -> jax.Array:
    """Put one parameter on its devices."""
    return jax.device_put(array, placement(spec, mesh))


def placement(spec: ParamSpec, mesh: Mesh) -> NamedSharding | Format:
    """Where a parameter lies: the devices and, on TPU, the order of its axes in memory."""
    where = sharding(mesh, spec.axes, spec.shape)
    order = memory_order(spec)
    if mesh.devices.flat[0].platform != "tpu" or order == tuple(range(len(order))):
        return where
    return Format(Layout(order), where)


def memory_order(spec: ParamSpec) -> tuple[int, ...]:
    """Axes from the outermost to the innermost as the TPU's matrix unit wants them.

    It reads tiles of the two innermost axes.  A projection [H, …, D] that sums over H is tiled over (H, D); in the
    order of its declaration a fused one has 2 or 6 in the place of H, and every step would copy it to another order.
    """
    last = len(spec.shape) - 1
    if last < 2 or spec.axes[0] != axes.EMBED:
        return tuple(range(last + 1))
    return (*range(1, last), 0, last)
