"""The steps under `jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from dflash_jax.drafters import Weights
from dflash_jax.state import NOTHING, DecodeState, Needs
from dflash_jax.steps.chunks import prefill
from dflash_jax.steps.config import StepConfig
from dflash_jax.steps.report import packed_width
from dflash_jax.steps.rounds import accept_block, decode_round, propose, verify_block
from dflash_jax.steps.slots import admit, edit, extend, finish
from dflash_jax.steps.state_step import StateStep

COMMIT = ("bonus", "seq_len", "finished", "kv", "draft")  # what tokens that are committed change
ADMIT = ("bonus", "seq_len", "finished", "limit", "stop_ids", "sampling", "page_table", "edits")


class Steps:
    """The steps compiled for one `StepConfig`: what they change of the state is donated, and updated in place.

    `decode_round(block, weights, state, slots, needs=…)`, `prefill(weights, state, batch, needs=…)`,
    `admit(state, new)`, `edit(state, slots, new)`, `extend(state, updates)`, `finish(state, slots)`.  A round in three
    parts is `propose(block, weights, state, slots, needs=…)`, which donates nothing, `verify_block(weights, state,
    slots, ids)` and `accept_block(weights, state, slots, verified, allowed, needs=…)`.  Each is traced once for each
    shape of its arguments; `traces` counts by name.  in_place: rounds are launched by `RoundInPlace`, whose
    results have a row more and are there for a while only.  layout: shardings of a state, which they leave as they are
    (XLA might choose others for what is split over devices, and steps would be compiled again for them).
    """

    def __init__(self, config: StepConfig, in_place: bool = False, layout: DecodeState | None = None):
        self.config = config
        self._layout = layout
        self.traces: dict[str, int] = {}
        self.decode_round = self._in_place() if in_place else self._of_config(decode_round, COMMIT, static=(1,))
        self.propose = self._jit("propose", functools.partial(propose, config), static=(0,))
        self.verify_block = self._of_config(verify_block, ("kv",))
        self.accept_block = self._of_config(accept_block, COMMIT)
        self.prefill = self._of_config(prefill, COMMIT)
        self.admit = self._step("admit", admit, ADMIT)
        self.edit = self._step("edit", edit, ("edits",))
        self.extend = self._step("extend", extend, ("page_table",))
        self.finish = self._step("finish", finish, ("finished",))

    def _of_config(self, step: Any, changes: tuple[str, ...], **options: Any) -> StateStep:
        return self._step(step.__name__, functools.partial(step, self.config), changes, **options)

    def _in_place(self) -> RoundInPlace:
        round_ = functools.partial(round_into, self.config, self._layout and self._layout.page_table)
        return RoundInPlace(self._step("decode_round", round_, COMMIT, static=(1,), donate=(0, 4)))

    def _step(
        self, name: str, step: Callable[..., Any], changes: tuple[str, ...], static: tuple[int, ...] = (),
        donate: tuple[int, ...] = (0,),
    ) -> StateStep:  # fmt: skip
        """static, donate: places among the arguments, of which the first is what changes."""
        return StateStep(step, changes, lambda apart: self._jit(name, apart, static, donate), self._layout)

    def _jit(self, name: str, function: Any, static: tuple[int, ...] = (), donate: tuple[int, ...] = ()) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.traces[name] = self.traces.get(name, 0) + 1
            return function(*args, **options)

        counted.__name__ = name  # the name that profiles and compiled text show
        return jax.jit(counted, static_argnums=static, static_argnames="needs", donate_argnums=donate)


class RoundInPlace:
    """`decode_round` whose every output takes the place of a donated buffer.

    For GPUs: XLA replays a round's kernels as a CUDA graph, and records those anew that touch a buffer which is not
    where it was: all of them, 0.7 ms, once anything allocated between two rounds has moved the next one's scratch.  So
    nothing is: two results take turns, and a round's can be read until the next but one of its shape is launched.  They
    have a row more than the round, which stays: bytes that are written whole XLA lets serve other values before, and a
    tenth of the kernels then touch them.
    """

    def __init__(self, round_: StateStep):
        self._round = round_
        self._results: dict[tuple[int, int, Needs], tuple[Array, Array]] = {}  # the older first

    def __call__(
        self, block: int, weights: Weights, state: DecodeState, slots: Array, needs: Needs = NOTHING
    ) -> tuple[DecodeState, Array]:
        oldest, last = self._results_of(block, state, slots, needs)
        state, packed = self._round(block, weights, state, oldest, slots, needs=needs)
        self._results[len(slots), block, needs] = last, packed
        return state, packed

    def lower(self, block: int, weights: Weights, state: DecodeState, slots: Array, needs: Needs = NOTHING) -> Any:
        """As of a jitted function."""
        result = self._results_of(block, state, slots, needs)[0]
        return self._round.lower(block, weights, state, result, slots, needs=needs)

    def cache_size(self) -> int:
        """How many programs there are."""
        return self._round.cache_size()

    def _results_of(self, block: int, state: DecodeState, slots: Array, needs: Needs) -> tuple[Array, Array]:
        """The last two results of this shape, or two that are placed as a step leaves its outputs."""
        key = len(slots), block, needs
        if key not in self._results:
            nothing = np.zeros((len(slots) + 1, packed_width(block, needs.logprobs)), np.int32)
            first, second = (jax.device_put(nothing, state.page_table.sharding) for _ in range(2))
            self._results[key] = first, second
        return self._results[key]


def round_into(
    config: StepConfig,
    where: Any,
    block: int,
    weights: Weights,
    state: DecodeState,
    result: Array,
    slots: Array,
    needs: Needs = NOTHING,
) -> tuple[DecodeState, Array]:
    """`decode_round` whose packed result is written over the first rows of `result`; where: its sharding on several
    devices, else None."""
    state, packed = decode_round(config, block, weights, state, slots, needs)
    written = jax.lax.dynamic_update_slice(result, packed, (0, 0))
    return state, written if where is None else jax.lax.with_sharding_constraint(written, where)
