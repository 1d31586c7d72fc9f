"""Shapes whose weights are not at hand: random weights, and an acceptance that is forced to a given mean.

Text and acceptance mean nothing here, only time does.  Acceptance is forced by kernels of this module's own, which no
option of the engine can name: `accept_bonus` gets drafts that agree with the target's tokens as often as wanted.
Draft, verification and commit run as ever.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from dflash_jax.benchmark.engine_contender import Served
from dflash_jax.config import DraftConfig, read_draft, read_target
from dflash_jax.drafters import DFlashDrafter, Drafter, NoDrafter, Weights
from dflash_jax.drafters.registry import check_block_size
from dflash_jax.engine.build import Loaded, choose_dtype, make_runner, use_compilation_cache
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.settings import EngineSettings
from dflash_jax.errors import UserError
from dflash_jax.llm import use_platform
from dflash_jax.models import FAMILIES
from dflash_jax.models.dflash import draft_specs, with_injection
from dflash_jax.ops import Accepted, Kernels, select
from dflash_jax.params import Params, random_params
from dflash_jax.presets import load_preset
from dflash_jax.sharding import spec_shardings, tensor_mesh
from dflash_jax.weights import TargetCheckpoint
from dflash_jax.weights.turned import lay_out

WHERE = "random weights of shape "


@dataclasses.dataclass(frozen=True)
class ForcedAcceptance(Kernels):
    """The kernels of a backend, except that a draft agrees with the target with probability `rate`, if all before did.

    The choice is a hash of the request's length, bonus and row, hence the same in every run.
    """

    rate: float = 0.0

    def accept_bonus(
        self, block_ids: Array, target_tokens: Array, broken: Array, seq_len: Array, limit: Array, stop_ids: Array,
        live: Array,
    ) -> Accepted:  # fmt: skip
        """As the op of that name, with forced drafts in block_ids int32 [S, B]."""
        rows, block = block_ids.shape
        uniform = hashed(seq_len, block_ids[:, 0], jnp.arange(rows, dtype=jnp.int32))
        reach = jnp.asarray(self.rate ** np.arange(1, block), jnp.float32)  # that so many drafts are accepted
        agree = uniform[:, None] < reach[None]
        drafts = jnp.where(agree, target_tokens[:, :-1], target_tokens[:, :-1] + 1)
        forced = jnp.concatenate([block_ids[:, :1], drafts], axis=1)
        accept = super().__getattr__("accept_bonus")
        return accept(forced, target_tokens, broken, seq_len, limit, stop_ids, live)


def hashed(*parts: Array) -> Array:
    """float32 [S] in 0 … 1 from int32 [S] each: a few rounds of multiply and shift."""
    x = jnp.zeros_like(parts[0]).astype(jnp.uint32)
    for part in parts:
        x = (x ^ part.astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
        x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x85EBCA77)
        x = x ^ (x >> jnp.uint32(13))
    return (x >> jnp.uint32(8)).astype(jnp.float32) / jnp.float32(1 << 24)


def acceptance_rate(mean: float, block: int) -> float:
    """The probability p with 1 + p + … + p^(block − 1) = mean tokens of a round."""
    if not 1 <= mean <= block:
        raise UserError(f"--synthetic-acceptance {mean:g} is outside 1 … {block}, the tokens of a block")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**k for k in range(block)) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def random_pair(
    preset: str, dtype_name: str, drafted: bool, block_size: int | None = None, devices: int = 1
) -> Loaded:
    """A target of the preset's shape with random weights, and its draft if `drafted`, divided among `devices`."""
    shape = load_preset(preset)
    if "target" not in shape:
        raise UserError(f"preset {preset!r} is a machine, not a pair of models")
    config = read_target(f"preset {preset}", shape["target"])
    draft = read_draft(f"preset {preset}", shape["draft"], config) if drafted else None
    if draft is not None:
        check_block_size(block_size, draft.block_size, "dflash")
    mesh = tensor_mesh(devices)
    platform = mesh.devices.flat[0].platform
    dtype = choose_dtype(dtype_name, platform)
    drafter, draft_params = random_draft(draft, dtype, mesh)
    target = random_on(mesh, FAMILIES[config.family].specs(config), 0, dtype)
    target, draft_params = lay_out(target, mesh, dtype), draft_params and lay_out(draft_params, mesh, dtype)
    nothing: Any = None  # no file stands behind these weights
    checkpoint = TargetCheckpoint(config, nothing, nothing, nothing, WHERE + preset)
    return Loaded(checkpoint, drafter, Weights(target, draft_params), dtype, platform, mesh)


def random_draft(config: DraftConfig | None, dtype: Any, mesh: Mesh) -> tuple[Drafter, Params]:
    if config is None:
        return NoDrafter(), None
    return DFlashDrafter(config), with_injection(random_on(mesh, draft_specs(config), 1, dtype), config)


def random_on(mesh: Mesh, specs: Any, seed: int, dtype: Any) -> Params:
    """Random parameters on their devices."""
    make = functools.partial(random_params, specs, jax.random.key(seed), dtype)
    # Divided at once, where one device might not hold them.
    return jax.jit(make, out_shardings=spec_shardings(specs, mesh))() if mesh.size > 1 else make()


def make_settings(preset: str, drafted: bool, options: dict[str, Any]) -> EngineSettings:
    return EngineSettings(target=WHERE + preset, draft="random DFlash" if drafted else "none", **options)


def serve_preset(
    preset: str, mean: float | None, drafted: bool, platform: str | None, options: dict[str, Any]
) -> Served:
    """An engine over random weights; with a draft, of rounds that commit `mean` tokens on average."""
    use_platform(platform)
    use_compilation_cache()
    settings = make_settings(preset, drafted, options)
    loaded = random_pair(preset, settings.dtype, drafted, settings.block_size, settings.tensor_parallel_size)
    kernels = select(settings.kernels, loaded.platform, loaded.mesh)
    if mean is not None:
        rate = acceptance_rate(mean, settings.block_size or loaded.drafter.max_block) if drafted else 0.0
        own = {field.name: getattr(kernels, field.name) for field in dataclasses.fields(kernels)}
        kernels = ForcedAcceptance(**own, rate=rate)
    return Served(Engine(settings, loaded, make_runner(loaded, settings, kernels)))
