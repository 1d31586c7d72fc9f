"""The arguments of the steps as shapes with places: no array is made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax import axes
from dflash_jax.cache import POOL_AXES, pool_shape
from dflash_jax.config import AttentionShape, DraftConfig, TargetConfig, read_draft, read_target
from dflash_jax.drafters import DFlashDrafter, Weights
from dflash_jax.models import FAMILIES
from dflash_jax.models.dflash import draft_specs, with_injection
from dflash_jax.ops.dispatch import Kernels
from dflash_jax.params import ParamSpec, map_specs
from dflash_jax.presets import load_preset
from dflash_jax.sharding import placement, sharding
from dflash_jax.state import DecodeState, init_state
from dflash_jax.steps import PrefillBatch, StepConfig

INJECTION_AXES = {
    "weight": (axes.EMBED, None, None, axes.KV_HEADS, axes.HEAD_DIM),
    "k_norm": (None, axes.HEAD_DIM),
    "bias": (None, None, axes.KV_HEADS, axes.HEAD_DIM),
}


@dataclass(frozen=True)
class Work:
    """What is compiled: `requests` requests with `committed` tokens each, rounds of `block` rows, prompts in chunks of
    `chunk` tokens, `chunk_rows` of them at a time; pages of `page_size` tokens, and room for two blocks more."""

    requests: int
    committed: int
    block: int
    chunk: int
    chunk_rows: int
    page_size: int
    dtype: Any

    @property
    def pages_per_slot(self) -> int:
        return -(-(self.committed + 2 * self.block) // self.page_size)

    @property
    def before_chunk(self) -> int:
        """Committed tokens before the chunk that is compiled: the last one of a prompt of `committed` tokens."""
        return max(0, self.committed - self.chunk)

    @property
    def num_pages(self) -> int:
        return self.requests * self.pages_per_slot + 1


@dataclass(frozen=True)
class Pair:
    """A preset's target and draft."""

    target: TargetConfig
    draft: DraftConfig

    @classmethod
    def of(cls, preset: str) -> Pair:
        found = load_preset(preset)
        target = read_target(f"{preset} target", found["target"])
        return cls(target, read_draft(f"{preset} draft", found["draft"], target))

    def steps(self, work: Work, kernels: Kernels) -> StepConfig:
        return StepConfig(self.target, DFlashDrafter(self.draft), work.page_size, kernels)


def weights(pair: Pair, mesh: Mesh, dtype: Any) -> Weights:
    """Target and draft as the loader places them."""

    def one(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=placement(spec, mesh))

    target = map_specs(one, FAMILIES[pair.target.family].specs(pair.target))
    draft = map_specs(one, draft_specs(pair.draft))
    derived = jax.eval_shape(lambda params: with_injection(params, pair.draft)["inject"], draft)
    inject = {name: one(ParamSpec(x.shape, INJECTION_AXES[name])) for name, x in derived.items()}
    return Weights(target, {**draft, "inject": inject})


def state(pair: Pair, work: Work, mesh: Mesh) -> DecodeState:
    """Pools split by heads; all that is small is everywhere."""
    kv, draft = _pool(pair.target, work, mesh), _pool(pair.draft, work, mesh)
    shapes = jax.eval_shape(lambda: init_state(work.requests, work.pages_per_slot, (), ()))
    small = jax.tree.map(lambda x: everywhere(mesh, x.shape, x.dtype), shapes)
    return dataclasses.replace(small, kv=kv, draft=draft)


def _pool(config: AttentionShape, work: Work, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = pool_shape(config, work.num_pages, work.page_size)
    one = jax.ShapeDtypeStruct(shape, work.dtype, sharding=sharding(mesh, POOL_AXES, shape))
    return (one,) * config.num_layers


def everywhere(mesh: Mesh, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, (None,) * len(shape)))


def batch(work: Work, mesh: Mesh) -> PrefillBatch:
    rows = work.chunk_rows
    one: Any = everywhere(mesh, (rows,))
    tokens: Any
    last: Any
    tokens, last = everywhere(mesh, (rows, work.chunk)), everywhere(mesh, (rows,), jnp.bool_)
    return PrefillBatch(tokens, one, one, one, last)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of shapes on one device."""
    return sum(_local_bytes(x) for x in jax.tree.leaves(tree))


def _local_bytes(x: jax.ShapeDtypeStruct) -> int:
    place = x.sharding
    local = x.shape if place is None else place.shard_shape(x.shape)
    size = x.dtype.itemsize
    for n in local:
        size *= n
    return size
