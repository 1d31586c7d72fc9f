"""The steps under `jit`."""

from __future__ import annotations

import functools
from typing import Any

import jax

from dflash_jax.steps.chunks import prefill
from dflash_jax.steps.config import StepConfig
from dflash_jax.steps.rounds import accept_block, decode_round, propose, verify_block
from dflash_jax.steps.slots import admit, edit, extend, finish


class Steps:
    """The steps compiled for one `StepConfig`: the state is donated, so its buffers are updated in place.

    `decode_round(block, weights, state, slots, needs=…)`, `prefill(weights, state, batch, needs=…)`,
    `admit(state, new)`, `edit(state, slots, new)`, `extend(state, updates)`, `finish(state, slots)`.  A round in three
    parts is `propose(block, weights, state, slots, needs=…)`, which donates nothing, `verify_block(weights, state,
    slots, ids)` and `accept_block(weights, state, slots, verified, allowed, needs=…)`.  Each is traced once for each
    shape of its arguments; `traces` counts by name.
    """

    def __init__(self, config: StepConfig):
        self.config = config
        self.traces: dict[str, int] = {}
        self.decode_round = self._jit(functools.partial(decode_round, config), "decode_round", static=(0,), donate=2)
        self.propose = self._jit(functools.partial(propose, config), "propose", static=(0,))
        self.verify_block = self._jit(functools.partial(verify_block, config), "verify_block", donate=1)
        self.accept_block = self._jit(functools.partial(accept_block, config), "accept_block", donate=1)
        self.prefill = self._jit(functools.partial(prefill, config), "prefill", donate=1)
        self.admit = self._jit(admit, "admit", donate=0)
        self.edit = self._jit(edit, "edit", donate=0)
        self.extend = self._jit(extend, "extend", donate=0)
        self.finish = self._jit(finish, "finish", donate=0)

    def _jit(self, function: Any, name: str, *, donate: int | None = None, static: tuple[int, ...] = ()) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.traces[name] = self.traces.get(name, 0) + 1
            return function(*args, **options)

        counted.__name__ = name  # the name that profiles and compiled text show
        donated = () if donate is None else (donate,)
        return jax.jit(counted, static_argnums=static, static_argnames="needs", donate_argnums=donated)
