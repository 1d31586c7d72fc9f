"""Steps under `jit` that are handed of the state what they change, apart from what they only read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from dflash_jax.state import NOTHING, DecodeState


class StateStep:
    """`step(…, state, …)`, which returns a new state or a tuple that begins with one.

    What a program returns costs the host some microseconds an array, also where it passes through: pools, tables and
    parameters that a step leaves as they are do not go through it.  changes: fields of the state that it may change,
    which are donated; with `needs.edits`, `edits` is one more.  jit(function): compiles one whose first argument is
    donated.  layout: shardings that the state keeps; None: XLA chooses.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        changes: tuple[str, ...],
        jit: Callable[[Any], Any],
        layout: DecodeState | None = None,
    ):
        self._step = step
        self._changes = changes
        self._layout = layout
        self._jit = jit(self._apart)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _joined(args, self._jit(*self._split(args, options), **options))

    def run(self, program: Any, *args: Any, **options: Any) -> Any:
        """A call of `program`, which `lower(…).compile()` made: without static arguments, but with the same `needs`."""
        return _joined(args, program(*self._split(args, options)))

    def lower(self, *args: Any, **options: Any) -> Any:
        """As of a jitted function."""
        return self._jit.lower(*self._split(args, options), **options)

    def trace(self, *args: Any, **options: Any) -> Any:
        """As of a jitted function."""
        return self._jit.trace(*self._split(args, options), **options)

    def cache_size(self) -> int:
        """How many programs there are."""
        return self._jit._cache_size()

    def _split(self, args: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
        state = _state(args)
        names = (*self._changes, "edits") if options.get("needs", NOTHING).edits else self._changes
        rest = dataclasses.replace(state, **dict.fromkeys(names))
        return [{name: getattr(state, name) for name in names}, *(rest if arg is state else arg for arg in args)]

    def _apart(self, changing: dict[str, Any], *args: Any, **options: Any) -> tuple[dict[str, Any], list[Any]]:
        rest = _state(args)
        state = dataclasses.replace(rest, **changing)
        made = self._step(*(state if arg is rest else arg for arg in args), **options)
        new, *others = made if isinstance(made, tuple) else (made,)
        _check_kept(state, new, changing)
        return self._kept({name: getattr(new, name) for name in changing}), others

    def _kept(self, changed: dict[str, Any]) -> dict[str, Any]:
        """`changed` on the devices where it was."""
        if self._layout is None:
            return changed
        return jax.lax.with_sharding_constraint(changed, {name: getattr(self._layout, name) for name in changed})


def _check_kept(old: DecodeState, new: DecodeState, changing: dict[str, Any]) -> None:
    """RuntimeError for a step that changes more than it says: when it is traced."""
    for name in (field.name for field in dataclasses.fields(old) if field.name not in changing):
        before, after = (jax.tree.leaves(getattr(state, name)) for state in (old, new))
        if any(a is not b for a, b in zip(before, after, strict=True)):
            raise RuntimeError(f"a step changes the state's {name}, which is none of {', '.join(changing)}")


def _joined(args: tuple[Any, ...], made: tuple[dict[str, Any], list[Any]]) -> Any:
    changed, others = made
    state = dataclasses.replace(_state(args), **changed)
    return (state, *others) if others else state


def _state(args: tuple[Any, ...]) -> DecodeState:
    for arg in args:
        if isinstance(arg, DecodeState):
            return arg
    raise TypeError("a step takes its DecodeState by position")
