"""One optimiser step: gradients of all parts of a batch, on all devices of a mesh, with float32 masters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.errors import UserError
from dflash_jax.params import Params
from dflash_jax.train.blocks import Batch, make_blocks, sample_anchors
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.forward import draft_hidden, target_hidden
from dflash_jax.train.loss import Sums, loss_sums, metrics, score_blocks
from dflash_jax.train.optimizer import global_norm, make_optimizer, schedule

DATA = "data"
Anchors = tuple[Array, Array]
"""What `sample_anchors` gives."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step int32: steps done; params: float32 masters of the draft; optimizer: optax's state."""

    step: Array
    params: Params
    optimizer: Any


def init_state(config: TrainConfig, params: Params, mesh: Mesh) -> TrainState:
    """Nothing learnt yet: float32 copies of `params` (without `inject`) on every device of `mesh`."""
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32), {k: v for k, v in params.items() if k != "inject"})
    state = TrainState(jnp.zeros((), jnp.int32), masters, make_optimizer(config).init(masters))
    return jax.device_put(state, NamedSharding(mesh, PartitionSpec()))


def data_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh whose one axis splits sequences over `devices` (default: all)."""
    return Mesh(np.array(list(devices) if devices else jax.devices()), (DATA,))


def part_sums(
    config: TrainConfig, params: Params, target: Params, batch: Batch, anchors: Anchors
) -> tuple[Array, Sums]:
    """(Σ w · CE, sums) of the blocks at `anchors` in a batch of S sequences."""
    cast = jax.tree.map(lambda x: x.astype(config.dtype), params)
    own = target_hidden(target, config.target, batch.tokens, config.draft.taps)
    blocks = make_blocks(config.draft, batch, *anchors)
    hidden = draft_hidden(cast, config.draft, target, own.taps, blocks)
    teacher = own.last if config.loss.soft else None
    scored = score_blocks(cast, config.draft, target, hidden, blocks, config.loss, teacher)
    return loss_sums(config.loss, blocks, scored)


def train_step(
    config: TrainConfig, mesh: Mesh, target: Params, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, Array]]:
    """One step over batch [M, S, …]: M parts, one after another, whose gradients are summed.

    The loss is Σ w·CE / Σ w over the whole step, so it does not matter how sequences are dealt to parts and devices.
    Returns the state and `metrics`, with the gradient's norm before clipping and the learning rate.
    """
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    anchors = jax.vmap(lambda part, i: sample_anchors(jax.random.fold_in(key, i), part, config.anchors))(
        batch, jnp.arange(batch.tokens.shape[0])
    )
    dealt = PartitionSpec(None, mesh.axis_names[0])
    gradients, sums = _on_each(mesh, functools.partial(_device_sums, config, mesh.axis_names[0]), dealt)(
        target, state.params, (batch, anchors)
    )
    gradients = jax.tree.map(lambda g: g / jnp.maximum(sums.weight, 1e-9), gradients)
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers and multiplies floats by them
        updates, inner = make_optimizer(config).update(gradients, state.optimizer, state.params)
        rate = schedule(config)(state.step)
    new = TrainState(state.step + 1, optax.apply_updates(state.params, updates), inner)
    more = {"gradient_norm": global_norm(gradients), "learning_rate": rate}
    return new, {**metrics(config.loss, sums), **more}


def _device_sums(
    config: TrainConfig, axis: str, target: Params, params: Params, parts: tuple[Batch, Anchors]
) -> tuple[Params, Sums]:
    """Gradients and sums over this device's sequences of all parts, summed over devices."""
    gradient = jax.grad(functools.partial(part_sums, config), has_aux=True)

    def add(total: Any, part: tuple[Batch, Anchors]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(params, target, *part)), None

    nothing = jax.tree.map(jnp.zeros_like, params), _no_sums(config.draft.block_size)
    return jax.lax.psum(jax.lax.scan(add, nothing, parts)[0], axis)


def _on_each(mesh: Mesh, function: Any, dealt: PartitionSpec) -> Any:
    """`function(target, params, inputs)` run by every device with its share of the inputs.

    Left to itself the partitioner gathers the logits of all devices on each, for it does not split top-k and argmax.
    """
    everywhere = PartitionSpec()
    return jax.shard_map(
        function, mesh=mesh, in_specs=(everywhere, everywhere, dealt), out_specs=everywhere, check_vma=False
    )


def _no_sums(block_size: int) -> Sums:
    zero, rows = jnp.zeros(()), jnp.zeros(block_size - 1)
    return Sums(zero, zero, zero, rows, rows, zero, zero)


def held_out(config: TrainConfig, mesh: Mesh, target: Params, params: Params, batch: Batch) -> Sums:
    """Sums over a batch [S, …] that is not learnt from, always with the same anchors."""
    anchors = sample_anchors(jax.random.key(config.seed), batch, config.anchors)
    axis = mesh.axis_names[0]

    def device_sums(target: Params, params: Params, part: tuple[Batch, Anchors]) -> Sums:
        return jax.lax.psum(part_sums(config, params, target, *part)[1], axis)

    return _on_each(mesh, device_sums, PartitionSpec(axis))(target, params, (batch, anchors))


class Trainer:
    """The step compiled for one configuration and mesh: sequences are split over the mesh's first axis.

    `step(state, batch)` donates the state.  `target` is the frozen target's parameters in the dtype of compute.
    """

    def __init__(
        self, config: TrainConfig, target: Params, mesh: Mesh, compiler_options: dict[str, Any] | None = None
    ):
        self.config, self.mesh = config, mesh
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.target = jax.device_put(target, self.everywhere)
        jit = functools.partial(jax.jit, out_shardings=self.everywhere, compiler_options=compiler_options)
        self._step = jit(functools.partial(train_step, config, mesh), donate_argnums=1)
        self._held_out = jit(functools.partial(held_out, config, mesh))

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        """`train_step` of a batch [M, S, …] on the host."""
        return self._step(self.target, state, self._dealt(batch, 1))

    def compiled_text(self, state: TrainState, batch: Batch) -> str:
        """What the compiler made of a step, as HLO text."""
        return self._step.lower(self.target, state, self._dealt(batch, 1)).compile().as_text() or ""

    def held_out(self, params: Params, batch: Batch) -> dict[str, Array]:
        """`metrics` of a batch [S, …] on the host."""
        return metrics(self.config.loss, self._held_out(self.target, params, self._dealt(batch, 0)))

    def _dealt(self, batch: Batch, axis: int) -> Batch:
        """On the devices, axis `axis` of every array split."""
        first = self.mesh.axis_names[0]
        sequences, devices = batch.tokens.shape[axis], self.mesh.shape[first]
        if sequences % devices:
            raise UserError(f"{sequences} sequences cannot be split evenly over {devices} devices")
        return jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec(*[None] * axis, first)))
