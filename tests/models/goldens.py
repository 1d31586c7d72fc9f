"""The recorded models and pairs of tests/data, loaded; and rows of a forward pass over pages dealt in order."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.cache import Pool, make_pool
from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.models import Rows
from dflash_jax.ops import token_locations
from dflash_jax.params import Params
from dflash_jax.sharding import make_mesh
from dflash_jax.weights import load_draft, load_target, open_draft, open_target

DATA = Path(__file__).resolve().parents[1] / "data"
MODELS = sorted(path.name for path in (DATA / "models").iterdir())
PAIRS = sorted(path.name for path in (DATA / "pairs").iterdir())
PAGE = 8


@dataclasses.dataclass(frozen=True)
class Model:
    """A target with its parameters, and the arrays of its golden.npz."""

    config: TargetConfig
    params: Params
    golden: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and its draft with parameters, and the arrays of draft.npz."""

    target: TargetConfig
    draft: DraftConfig
    target_params: Params
    draft_params: Params
    golden: dict[str, np.ndarray]


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        return dict(stored)


@functools.cache
def model(name: str, dtype: str = "float32") -> Model:
    folder = DATA / "models" / name
    opened = open_target(folder)
    return Model(opened.config, load_target(opened, jnp.dtype(dtype), make_mesh()), arrays(folder / "golden.npz"))


@functools.cache
def pair(name: str) -> Pair:
    folder, mesh = DATA / "pairs" / name, make_mesh()
    target = open_target(folder / "target")
    draft = open_draft(folder / "draft", target.config)
    return Pair(
        target.config, draft.config, load_target(target, jnp.float32, mesh), load_draft(draft, jnp.float32, mesh),
        arrays(folder / "draft.npz"),
    )  # fmt: skip


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit`; compiling dominates these tests, and on CPU takes half as long without LLVM's optimiser."""
    light = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(function, compiler_options=light)


def ropes() -> list[dict[str, Any]]:
    return json.loads((DATA / "rope.json").read_text())


def rows(ids: np.ndarray, start: int = 0, capacity: int = 64) -> Rows:
    """Rows [S, B] that begin at position `start`; request s owns pages s·W+1 … of a table of W pages."""
    requests, width = len(ids), capacity // PAGE
    table = jnp.asarray(1 + np.arange(requests * width).reshape(requests, width), jnp.int32)
    positions = jnp.asarray(start + np.broadcast_to(np.arange(ids.shape[1]), ids.shape), jnp.int32)
    locations = token_locations(table, positions, jnp.ones(ids.shape, bool), PAGE)
    return Rows(jnp.asarray(ids, jnp.int32), positions, locations, table, jnp.full(requests, start, jnp.int32))


def poisoned_pool(config: TargetConfig | DraftConfig, requests: int, dtype: Any = jnp.float32) -> Pool:
    """A pool for `rows` of which every element is NaN."""
    pool = make_pool(config, requests * (64 // PAGE) + 1, PAGE, dtype, make_mesh())
    return tuple(layer * jnp.nan for layer in pool)
