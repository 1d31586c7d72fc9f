"""Checkpoints of a training run, from which it goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax import checkpoint as orbax

from dflash_jax.errors import UserError
from dflash_jax.train.step import TrainState

_STATE, _RUN = "state", "run"


class Checkpoints:
    """The newest `keep` states of a run in `folder`.

    `run` is what must not change between start and resumption (configuration, data): anything JSON can hold.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any], keep: int = 2):
        self.folder, self.run = folder.resolve(), dict(run)
        options = orbax.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False, create=True)
        self._manager = orbax.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def newest(self) -> int | None:
        """The step of the newest state; None before the first."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Keep `state`, whole and under its step; a run killed meanwhile goes on from the one before."""
        parts = orbax.args.Composite(**{_STATE: orbax.args.StandardSave(_tree(state)),
                                        _RUN: orbax.args.JsonSave(self.run)})  # fmt: skip
        self._manager.save(int(state.step), args=parts)

    def restore(self, like: TrainState) -> TrainState:
        """The newest state, placed as `like` is; UserError if there is none or it is of another run."""
        if self.newest is None:
            raise UserError(f"{self.folder} has no checkpoint to go on from")
        found = self._manager.restore(self.newest, args=orbax.args.Composite(**{_RUN: orbax.args.JsonRestore()}))
        self._check(found[_RUN])
        wanted = jax.tree.map(_described, _tree(like))
        parts = orbax.args.Composite(**{_STATE: orbax.args.StandardRestore(wanted)})
        restored = self._manager.restore(self.newest, args=parts)[_STATE]
        return jax.tree.unflatten(jax.tree.structure(like), [restored[key] for key in _tree(like)])

    def _check(self, found: Mapping[str, Any]) -> None:
        keys = sorted(set(found) | set(self.run))
        differing = [f"{key} {found.get(key)!r}, now {self.run.get(key)!r}" for key in keys
                     if found.get(key) != self.run.get(key)]  # fmt: skip
        if differing:
            raise UserError(f"{self.folder} belongs to another run: {'; '.join(differing)}")


def _tree(state: TrainState) -> dict[str, Any]:
    """Leaves by number, so that what is stored does not depend on the classes of optax."""
    return {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=leaf.sharding)
