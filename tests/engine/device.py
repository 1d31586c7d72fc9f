"""Real models under the engine, opened once: compiling is what takes time, so all tests share the compiled steps.

A `Device` is a pair's weights and one `DeviceRunner`.  Engines come and go over it; the state stays on the device from
one to the next, with whatever the last one left there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import Engine, EngineSettings, SamplingParams
from dflash_jax.cache import make_pool
from dflash_jax.drafters import Weights
from dflash_jax.engine.build import Loaded, load, make_runner
from dflash_jax.engine.request import Request
from dflash_jax.engine.runner import DeviceRunner, RunnerSizes
from dflash_jax.models import FAMILIES, Rows, head_weight
from dflash_jax.ops import XLA

from .fake_runner import assert_nothing_leaks

PAIRS = Path(__file__).resolve().parents[1] / "data" / "pairs"
V1, V2 = "x-noncausal-window", "x-v2-one-layer"  # blocks of 6 and 12, all of whose lengths occur as acceptance
SMALL = {"max_running_requests": 4, "page_size": 8, "max_model_len": 704, "chunked_prefill_size": 32}


@dataclasses.dataclass(eq=False)
class Device:
    """A pair ready to serve."""

    loaded: Loaded
    settings: EngineSettings
    runner: DeviceRunner
    sizes: RunnerSizes

    @property
    def vocab_size(self) -> int:
        return self.loaded.config.vocab_size

    @property
    def weights(self) -> Weights:
        return self.loaded.weights

    def engine(self, *, num_pages: int | None = None, **settings: Any) -> Engine:
        """A new engine; it may be given fewer pages than the device has."""
        self.runner.sizes = dataclasses.replace(self.sizes, num_pages=num_pages or self.sizes.num_pages)
        return Engine(dataclasses.replace(self.settings, **settings), self.loaded, self.runner)

    @contextmanager
    def weighing(self, weights: Weights) -> Iterator[None]:
        """With other weights for the block."""
        self.runner.weights = weights
        try:
            yield
        finally:
            self.runner.weights = self.weights


@functools.cache
def open_device(pair: str, draft: str | None = None, **settings: Any) -> Device:
    """The pair in float32, compiled lightly; `draft` instead of its own if given, "none" for none."""
    folder = PAIRS / pair
    options = EngineSettings(
        str(folder / "target"),
        draft or str(folder / "draft"),
        dtype="float32",
        speculation="always",
        **{**SMALL, **settings},
    )
    loaded = load(options)
    with mock.patch.object(jax, "jit", functools.partial(jax.jit, compiler_options=light_options())):
        runner = make_runner(loaded, options)
    return Device(loaded, options, runner, runner.sizes)


def light_options() -> dict[str, Any]:
    """Without LLVM's optimiser, compiling takes half as long on CPU."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


# -- serving -----------------------------------------------------------------------------------------------------------


def greedy(new: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, **options)


def serve(engine: Engine, *, most_steps: int = 20_000) -> None:
    """Step to the end; nothing may be left."""
    for _ in range(most_steps):
        if not engine.has_work:
            assert_nothing_leaks(engine._loop)
            return
        engine.step()
    raise AssertionError(f"not done after {most_steps} steps: {engine.metrics()}")


def serve_prompts(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    serve(engine)
    return requests


def solo(device: Device, prompt: Sequence[int], params: SamplingParams) -> Request:
    """The request alone, without overlap and without the prefix cache."""
    engine = device.engine(overlap=False, enable_prefix_caching=False)
    return serve_prompts(engine, [prompt], params)[0]


def outcome(request: Request) -> tuple[list[int], list[int], str | None]:
    return request.output_ids, request.accept_lengths, request.finish_reason


def random_prompt(device: Device, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, device.vocab_size, length).tolist()


# -- how sure a model is -----------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0, compiler_options=light_options())
def _logits(config: Any, params: Any, ids: jax.Array, pool: Any) -> jax.Array:
    """float32 [T, V] of a text [1, T], all at once and without the engine."""
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    table, none = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
    rows = Rows(ids, positions, jnp.zeros_like(positions), table, none, XLA, prefill=True)
    hidden = FAMILIES[config.family].forward(params, config, rows, pool, ())
    return XLA.head_logits(hidden.last, head_weight(params))[0]


def target_logits(device: Device, tokens: Sequence[int]) -> np.ndarray:
    """float32 [len(tokens), V]: what the target alone says after each of them."""
    config = device.loaded.config
    width = device.sizes.pages_per_slot * device.sizes.page_size  # one for all texts: compiled once
    ids = jnp.asarray([[*tokens, *[0] * (width - len(tokens))]], jnp.int32)
    pool = make_pool(config, 1, 8, jnp.float32, device.loaded.mesh)
    return np.asarray(_logits(config, device.weights.target, ids, pool))[: len(tokens)]


def preference(logits: np.ndarray) -> np.ndarray:
    """By how much the best token of each row is preferred to the second best."""
    best = np.partition(logits, -2, axis=-1)
    return best[:, -1] - best[:, -2]


def explain(device: Device, prompt: Sequence[int], want: Sequence[int], got: Sequence[int]) -> str:
    """Where two outputs part, and how close the target's choice was there."""
    at = next((i for i, pair in enumerate(zip(want, got, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"{len(got)} tokens instead of {len(want)}, equal as far as both go"
    gap = preference(target_logits(device, [*prompt, *want[:at]]))[-1]
    return f"output token {at} is {got[at]}, not {want[at]}, which the target prefers by {gap:.2e}"


def perturbed(weights: Weights, seed: int, share: float = 1e-5) -> Weights:
    """Every number changed by up to `share` of itself: rounding, exaggerated about a hundred times."""
    rng = np.random.default_rng(seed)

    def shake(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        noise = 1 + share * rng.uniform(-1, 1, leaf.shape)
        return jax.device_put((np.asarray(leaf) * noise).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(shake, weights)
