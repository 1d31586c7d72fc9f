"""From settings to a running device side: checkpoints, kernels, pools that fit, compiled steps."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax.cache import make_pool, page_bytes
from dflash_jax.config import TargetConfig
from dflash_jax.drafters import DraftContext, Drafter, Weights, make_drafter
from dflash_jax.drafters.token_map import map_size, with_heads
from dflash_jax.engine.round_times import FORMAT, RoundTimes
from dflash_jax.engine.runner import DeviceRunner, RunnerSizes
from dflash_jax.engine.settings import CPU_KV_CACHE_BYTES, DEVICE_MEMORY_SHARE, EngineSettings
from dflash_jax.engine.speculation import Speculation
from dflash_jax.errors import UserError
from dflash_jax.ops import Kernels, native, select
from dflash_jax.params import device_bytes
from dflash_jax.places import cache_folder
from dflash_jax.sharding import sharding, tensor_mesh
from dflash_jax.state import EDIT_BYTES, DecodeState, init_state
from dflash_jax.steps import StepConfig, Steps
from dflash_jax.weights import TargetCheckpoint, load_target, open_target
from dflash_jax.weights.turned import lay_out, served_by

log = logging.getLogger("dflash_jax")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model ready to run: what was opened, its weights, and how it drafts."""

    checkpoint: TargetCheckpoint
    drafter: Drafter
    weights: Weights
    dtype: Any
    platform: str
    mesh: Mesh

    @property
    def config(self) -> TargetConfig:
        return self.checkpoint.config


def load(settings: EngineSettings) -> Loaded:
    """Open and load target and draft.  What can be refused is refused before the target's weights are read."""
    mesh = tensor_mesh(settings.tensor_parallel_size)
    platform = mesh.devices.flat[0].platform
    dtype = choose_dtype(settings.dtype, platform)
    checkpoint = open_target(settings.target)
    cache = Path(settings.weights_cache).expanduser() if settings.weights_cache else None
    context = DraftContext(
        "", checkpoint, dtype, mesh, settings.block_size, settings.speculative_token_map, cache, settings.progress
    )  # fmt: skip
    drafter, draft_params = make_drafter("none" if settings.speculation == "never" else settings.draft, context)
    target_params = lay_out(load_target(checkpoint, dtype, mesh, settings.progress, cache), mesh, dtype)
    weights = with_heads(Weights(target_params, draft_params))
    return Loaded(checkpoint, drafter, weights, dtype, platform, mesh)


def choose_dtype(name: str, platform: str) -> Any:
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def make_runner(loaded: Loaded, settings: EngineSettings, kernels: Kernels | None = None) -> DeviceRunner:
    """Size the pools, make the state and prepare the compiled steps.  kernels: others than those of the settings."""
    sizes = plan_sizes(loaded, settings)
    kernels = kernels or choose_kernels(settings.kernels, loaded)
    log.info("%s", kernels.reason)
    config = StepConfig(
        loaded.config, loaded.drafter, sizes.page_size, kernels, settings.draft_sampling, settings.draft_temperature,
        settings.logprobs_mode,
    )  # fmt: skip
    state = make_state(loaded, sizes)
    steps = Steps(config, rounds_in_place(loaded), layout_of(state, loaded.mesh))
    runner = DeviceRunner(steps, served_by(loaded.weights, kernels), state, sizes)
    log.info("%s; %d pages of %d tokens", runner.memory, sizes.num_pages - 1, sizes.page_size)
    return runner


def choose_kernels(choice: str, loaded: Loaded) -> Kernels:
    """`select` for a pair.  UserError for kernels that have nothing for its type."""
    kernels = select(choice, loaded.platform, loaded.mesh)
    if kernels.backend != native.NAME or loaded.dtype == jnp.float32:
        return kernels
    if choice == native.NAME:
        raise UserError(f"kernels 'native' are for float32, and dtype is {loaded.dtype}")
    return select("xla", loaded.platform, loaded.mesh)


def rounds_in_place(loaded: Loaded) -> bool:
    """Only there are rounds CUDA graphs; elsewhere a result need not be read before the next but one is launched."""
    return loaded.platform == "gpu"


def make_state(loaded: Loaded, sizes: RunnerSizes) -> DecodeState:
    """Pools and slots; UserError where the memory does not suffice."""
    try:
        kv = make_pool(loaded.config, sizes.num_pages, sizes.page_size, loaded.dtype, loaded.mesh)
        draft = loaded.drafter.init_cache(sizes.num_pages, sizes.page_size, loaded.dtype, loaded.mesh)
        state = init_state(sizes.num_slots, sizes.pages_per_slot, kv, draft, loaded.config.vocab_size)
        return on_mesh(state, loaded.mesh)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"no memory for {sizes.num_pages} pages of {sizes.page_size} tokens and {sizes.num_slots} requests:"
            " lower kv_cache_bytes or max_running_requests"
        ) from error


def on_mesh(state: DecodeState, mesh: Mesh) -> DecodeState:
    """Arrays that name no devices go to the mesh, as every step leaves them; else the first step is compiled twice."""

    def put(x: jax.Array) -> jax.Array:
        return x if x.committed else jax.device_put(x, sharding(mesh, (None,) * x.ndim))

    return jax.tree.map(put, state)


def layout_of(state: DecodeState, mesh: Mesh) -> DecodeState | None:
    """How the state lies on several devices, which every step must leave as it is; None on one."""
    return jax.tree.map(lambda x: x.sharding, state) if mesh.size > 1 else None


def plan_sizes(loaded: Loaded, settings: EngineSettings) -> RunnerSizes:
    """Pages that fit the budget; max_model_len is the model's own, or as much of it as the pool holds."""
    per_page = bytes_of_a_page(loaded, settings.page_size)
    budget = settings.kv_cache_bytes or default_kv_bytes(loaded)
    check_slots(settings.max_running_requests, loaded.config.vocab_size, max(budget, CPU_KV_CACHE_BYTES))
    fit = budget // per_page - 1  # page 0 is padding
    longest = settings.max_model_len or loaded.config.max_position
    want = -(-longest // settings.page_size)
    if fit < want and (settings.max_model_len or fit < 2):
        raise UserError(
            f"kv_cache_bytes {budget} holds {max(fit, 0)} pages of {settings.page_size} tokens ({per_page} bytes each),"
            f" and max_model_len {longest} needs {want}: raise kv_cache_bytes or lower max_model_len"
        )
    if longest > loaded.config.max_position:
        log.warning("max_model_len: %d, though the model is made for %d", longest, loaded.config.max_position)
    per_slot = min(want, fit)
    if fit < want:
        log.info("max_model_len: %d of the model's %d (what the KV pool holds)", per_slot * settings.page_size, longest)
    return RunnerSizes(
        num_slots=settings.max_running_requests,
        page_size=settings.page_size,
        num_pages=min(fit, per_slot * settings.max_running_requests) + 1,
        pages_per_slot=per_slot,
        block_size=settings.block_size or loaded.drafter.max_block,
        prefill_chunk=settings.chunked_prefill_size,
        max_prefill_rows=min(8, settings.max_running_requests),
        min_batch=settings.min_decode_batch,
    )


def bytes_of_a_page(loaded: Loaded, page_size: int) -> int:
    """What a page of both pools takes on each device."""
    target = page_bytes(loaded.config, page_size, loaded.dtype) // loaded.mesh.size
    return target + draft_bytes_of_a_page(loaded, page_size)


def draft_bytes_of_a_page(loaded: Loaded, page_size: int) -> int:
    """What the drafter keeps of a page on each device, by what it makes for one: not all of it may be divided."""
    return device_bytes(loaded.drafter.init_cache(1, page_size, loaded.dtype, loaded.mesh))


def check_slots(requests: int, vocab_size: int, most_bytes: int) -> None:
    """UserError where what requests may change in their logits needs more than `most_bytes`."""
    each = EDIT_BYTES * vocab_size
    if requests * each > most_bytes:
        raise UserError(
            f"max_running_requests {requests} needs {requests * each / 1e9:.1f} GB for penalties and biases"
            f" ({each / 1e6:.1f} MB a request), more than the {most_bytes / 1e9:.1f} GB there are: {most_bytes // each}"
            " at most"
        )


def default_kv_bytes(loaded: Loaded) -> int:
    """Bytes for both pools on each device: a share of the memory that is free with the weights in it, or CPU's fixed
    amount."""
    stats = loaded.mesh.devices.flat[0].memory_stats() if loaded.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return CPU_KV_CACHE_BYTES
    return int((stats["bytes_limit"] - stats.get("bytes_in_use", 0)) * DEVICE_MEMORY_SHARE)


def make_speculation(settings: EngineSettings, loaded: Loaded, runner: DeviceRunner) -> Speculation | None:
    """Who chooses the width of each round; None where it is the same for all."""
    if settings.speculation != "auto" or settings.block_size is not None or loaded.drafter.max_block == 1:
        return None
    times = RoundTimes(round_times_path(runner.steps.config, loaded))
    return Speculation(runner.block_size, runner.decode_key, runner.is_compiled, times)


def round_times_path(config: StepConfig, loaded: Loaded) -> Path | None:
    """Where round times are kept: beside the compiled steps, a file for each model, machine and version."""
    folder: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if folder is None:
        return None
    devices = loaded.mesh.devices.flatten()
    machine = len(devices), devices[0].device_kind, os.cpu_count(), jax.__version__
    facts = FORMAT, config, loaded.dtype, machine, map_size(loaded.weights.draft)
    return Path(folder) / "round_times" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.json"


def use_compilation_cache() -> None:
    """Keep compiled steps in the user's cache folder, unless JAX has been told of another place."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
