"""The steps under `jit`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dflash_jax.drafters import Weights
from dflash_jax.state import NOTHING, DecodeState, Needs
from dflash_jax.steps.chunks import prefill
from dflash_jax.steps.config import StepConfig
from dflash_jax.steps.report import packed_width
from dflash_jax.steps.rounds import accept_block, decode_round, propose, verify_block
from dflash_jax.steps.slots import admit, edit, extend, finish


class Steps:
    """The steps compiled for one `StepConfig`: the state is donated, so its buffers are updated in place.

    `decode_round(block, weights, state, slots, needs=…)`, `prefill(weights, state, batch, needs=…)`,
    `admit(state, new)`, `edit(state, slots, new)`, `extend(state, updates)`, `finish(state, slots)`.  A round in three
    parts is `propose(block, weights, state, slots, needs=…)`, which donates nothing, `verify_block(weights, state,
    slots, ids)` and `accept_block(weights, state, slots, verified, allowed, needs=…)`.  Each is traced once for each
    shape of its arguments; `traces` counts by name.  in_place: rounds are launched by `RoundInPlace`.
    """

    def __init__(self, config: StepConfig, in_place: bool = False):
        self.config = config
        self.traces: dict[str, int] = {}
        self.decode_round = self._in_place() if in_place else self._round()
        self.propose = self._jit(functools.partial(propose, config), "propose", static=(0,))
        self.verify_block = self._jit(functools.partial(verify_block, config), "verify_block", donate=1)
        self.accept_block = self._jit(functools.partial(accept_block, config), "accept_block", donate=1)
        self.prefill = self._jit(functools.partial(prefill, config), "prefill", donate=1)
        self.admit = self._jit(admit, "admit", donate=0)
        self.edit = self._jit(edit, "edit", donate=0)
        self.extend = self._jit(extend, "extend", donate=0)
        self.finish = self._jit(finish, "finish", donate=0)

    def _round(self) -> Any:
        return self._jit(functools.partial(decode_round, self.config), "decode_round", static=(0,), donate=2)

    def _in_place(self) -> RoundInPlace:
        round_ = functools.partial(round_into, self.config)
        return RoundInPlace(self._jit(round_, "decode_round", static=(0,), donate=(2, 3)))

    def _jit(
        self, function: Any, name: str, *, donate: int | tuple[int, ...] = (), static: tuple[int, ...] = ()
    ) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.traces[name] = self.traces.get(name, 0) + 1
            return function(*args, **options)

        counted.__name__ = name  # the name that profiles and compiled text show
        return jax.jit(counted, static_argnums=static, static_argnames="needs", donate_argnums=donate)


class RoundInPlace:
    """`decode_round` whose every output takes the place of a donated buffer, and a copy of what the host reads.

    For GPUs: XLA replays a round's kernels as a CUDA graph, and records those anew that touch a buffer which is not
    where it was.  A new `packed` never is; and as its bytes serve other values before, a tenth of the kernels touch it.
    """

    def __init__(self, round_: Any):
        self._round = round_
        self._copy = jax.jit(jnp.copy)
        self._results: dict[tuple[int, int, Needs], Array] = {}

    def __call__(
        self, block: int, weights: Weights, state: DecodeState, slots: Array, needs: Needs = NOTHING
    ) -> tuple[DecodeState, Array]:
        result = self._result(block, state, slots, needs)
        state, result = self._round(block, weights, state, result, slots, needs=needs)
        self._results[len(slots), block, needs] = result
        return state, self._copy(result)

    def lower(self, block: int, weights: Weights, state: DecodeState, slots: Array, needs: Needs = NOTHING) -> Any:
        """What `jit` calls so, of the round without the copy."""
        return self._round.lower(block, weights, state, self._result(block, state, slots, needs), slots, needs=needs)

    def _result(self, block: int, state: DecodeState, slots: Array, needs: Needs) -> Array:
        """The last round's result of this shape, or one that is placed as a step leaves its outputs."""
        last = self._results.get((len(slots), block, needs))
        if last is not None:
            return last
        shape = len(slots), packed_width(block, needs.logprobs)
        return jax.device_put(np.zeros(shape, np.int32), state.page_table.sharding)


def round_into(
    config: StepConfig,
    block: int,
    weights: Weights,
    state: DecodeState,
    result: Array,
    slots: Array,
    needs: Needs = NOTHING,
) -> tuple[DecodeState, Array]:
    """`decode_round` whose packed result is written over `result`, of the same shape."""
    state, packed = decode_round(config, block, weights, state, slots, needs)
    return state, jax.lax.dynamic_update_slice(result, packed, (0, 0))
