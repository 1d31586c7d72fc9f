"""Steps that are handed what they change of the state, apart from the rest."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax.state import DecodeState, Needs
from dflash_jax.steps.state_step import StateStep
from steps import fakes

donating = functools.partial(jax.jit, donate_argnums=0, static_argnames="needs")


def grown(state: DecodeState, by: int = 1) -> DecodeState:
    return dataclasses.replace(state, seq_len=state.seq_len + by)


def start() -> DecodeState:
    return fakes.plain_lab().state()


def test_what_a_step_changes_is_donated_and_the_rest_is_not_touched():
    before, step = start(), StateStep(grown, ("seq_len",), donating)
    after = step(before, 3)
    assert before.seq_len.is_deleted()
    np.testing.assert_array_equal(after.seq_len, 3)
    for name in (field.name for field in dataclasses.fields(before) if field.name != "seq_len"):
        for mine, theirs in zip(*(jax.tree.leaves(getattr(one, name)) for one in (after, before)), strict=True):
            assert mine is theirs


def test_a_step_that_changes_more_than_it_says_is_refused():
    def sly(state: DecodeState) -> DecodeState:
        return dataclasses.replace(grown(state), limit=state.limit + 1)

    with pytest.raises(RuntimeError, match="changes the state's limit, which is none of seq_len"):
        StateStep(sly, ("seq_len",), donating)(start())


def test_other_results_follow_the_state_and_it_may_stand_anywhere():
    def told(by: int, state: DecodeState) -> tuple[DecodeState, Any, Any]:
        return grown(state, by), state.limit + by, state.page_table

    state, limit, table = StateStep(told, ("seq_len",), donating)(2, start())
    np.testing.assert_array_equal(state.seq_len, limit)
    assert table.shape == state.page_table.shape


def test_edits_are_changed_by_a_step_that_needs_them():
    """Counts of emitted tokens."""
    seen = []

    def looking(changing: dict[str, Any], *args: Any, **options: Any) -> Any:
        seen.append(sorted(changing))
        return changing, []

    step = StateStep(lambda state, needs: state, ("seq_len",), lambda apart: looking)
    step(start(), needs=Needs())
    step(start(), needs=Needs(edits=True))
    assert seen == [["seq_len"], ["edits", "seq_len"]]


def test_a_compiled_program_is_run_like_the_step():
    step = StateStep(lambda state, needs: grown(state, 2 if needs.edits else 1), ("seq_len",), donating)
    for needs, by in ((Needs(), 1), (Needs(edits=True), 2)):
        program = step.lower(start(), needs=needs).compile()
        np.testing.assert_array_equal(step.run(program, start(), needs=needs).seq_len, by)
    assert step.cache_size() == 0


def test_a_state_is_given_by_position():
    with pytest.raises(TypeError, match="DecodeState by position"):
        StateStep(grown, ("seq_len",), donating)(state=start())
