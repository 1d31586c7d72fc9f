"""A target whose every token follows from the one before, so that text and acceptance can be written down by hand."""

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
from jax import Array
from steps.lab import Lab, light_options

from dflash_jax import Engine, EngineSettings
from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.drafters import Drafter, NgramDrafter, Weights
from dflash_jax.engine.build import Loaded
from dflash_jax.models import FAMILIES
from dflash_jax.params import build
from dflash_jax.sharding import make_mesh
from dflash_jax.steps import StepConfig
from dflash_jax.weights import TargetCheckpoint

VOCAB = 32
PAGE = 4
TARGET = TargetConfig(
    family="qwen3", vocab_size=VOCAB, hidden_size=VOCAB, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=8, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e4), max_position=512, tied=False,
)  # fmt: skip
FIVE = [1, 2, 3, 4, 0, *range(6, VOCAB), 5]  # 0 → 1 → 2 → 3 → 4 → 0, and 5 → 6 → … → 31 → 5


def cycle_target(following: Sequence[int]) -> Any:
    """A target that says following[t] after token t: its only layer adds nothing to the embedding."""

    def leaf(path: str, spec: Any) -> Array:
        if path == "embed":
            return jnp.eye(VOCAB, dtype=jnp.float32)
        if path == "head":
            return jnp.asarray(np.eye(VOCAB, dtype=np.float32)[np.argsort(following)])
        return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, jnp.float32)

    return build(FAMILIES["qwen3"].specs(TARGET), leaf)


@functools.cache
def cycle_lab(drafter: Drafter, following: tuple[int, ...] = tuple(FIVE)) -> Lab:
    """Five slots, launches of four rows."""
    weights = Weights(cycle_target(following), None)
    return Lab(StepConfig(TARGET, drafter, PAGE), weights, bucket=4, chunk=32, slots=5, width=32, light=True)


def ngram_lab(**how: Any) -> Lab:
    return cycle_lab(NgramDrafter(**how))


def says(prompt: Sequence[int], count: int, following: Sequence[int] = FIVE) -> list[int]:
    """What the target says after the prompt."""
    said: list[int] = []
    while len(said) < count:
        said.append(following[said[-1] if said else prompt[-1]])
    return said


@contextmanager
def light_compilation() -> Iterator[None]:
    """What is jitted inside compiles in half the time, without LLVM's optimiser (on CPU)."""
    with mock.patch.object(jax, "jit", functools.partial(jax.jit, compiler_options=light_options())):
        yield


def make_engine(settings: EngineSettings, drafter: Drafter) -> Engine:
    """An engine over the target and that drafter, compiled lightly."""
    with light_compilation():
        return Engine(settings, loaded(drafter))


def loaded(drafter: Drafter, draft_params: Any = None, following: Sequence[int] = FIVE) -> Loaded:
    """The target and a drafter as an engine takes them."""
    checkpoint = TargetCheckpoint(TARGET, None, None, Path("cycles"), "cycles")  # type: ignore[arg-type]
    weights = Weights(cycle_target(following), draft_params)
    return Loaded(checkpoint, drafter, weights, jnp.dtype("float32"), "cpu", make_mesh())


@dataclasses.dataclass(frozen=True)
class EchoDrafter(NgramDrafter):
    """Proposes the bonus again and again, which is wrong where no token follows itself; `cost` makes that slow."""

    cost: int = 0

    def draft(self, weights: Weights, cache: Any, rows: Any) -> Array:
        echo = jnp.repeat(rows.ids[:, :1], rows.ids.shape[1] - 1, axis=1)
        if not self.cost:
            return echo
        work = jnp.full((self.cost, self.cost), rows.lengths[0].astype(jnp.float32) + 1)
        return jnp.where((work @ work).sum() < 0, echo + 1, echo)  # never, but the compiler does not know
