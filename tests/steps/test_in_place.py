"""Rounds in place: the same results as other rounds, in buffers that stay where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax.state import NOTHING, DecodeState, Needs, no_edits
from dflash_jax.steps import Steps
from dflash_jax.steps.compiled import RoundInPlace
from steps import fakes
from steps.lab import Lab, Request, Run

ROUNDS = 4


def started(lab: Lab) -> tuple[DecodeState, jax.Array]:
    """Two requests after their prefill, and their slots."""
    requests = [Request(0, [3, 5, 7], 200), Request(1, [2, 11], 200)]
    run = Run(lab, requests).prefill()
    return run.state, lab.where([0, 1])


def rounds(lab: Lab, steps: Steps, needs: Needs) -> list[np.ndarray]:
    """What rounds return, each read after the next was launched, as an engine that runs ahead does."""
    (state, slots), found = started(lab), []
    if needs.edits:
        edits = no_edits(state.num_slots + 1, lab.config.target.vocab_size)
        state = dataclasses.replace(state, edits=dataclasses.replace(edits, active=edits.active.at[slots].set(True)))
    state, last = steps.decode_round(lab.block, lab.weights, state, slots, needs=needs)
    for _ in range(ROUNDS):
        state, packed = steps.decode_round(lab.block, lab.weights, state, slots, needs=needs)
        found.append(np.array(last)[: len(slots)])
        last = packed
    return found


@pytest.mark.parametrize(
    "lab, needs",
    ((fakes.plain_lab, NOTHING), (fakes.dflash_lab, Needs(logprobs=2)), (fakes.plain_lab, Needs(edits=True))),
    ids=("plain", "dflash", "edits"),
)
def test_a_round_in_place_returns_what_a_round_does(lab: Callable[[], Lab], needs: Needs):
    mine, theirs = (rounds(lab(), steps, needs) for steps in (Steps(lab().config, in_place=True), lab().steps))
    np.testing.assert_array_equal(mine, theirs)


def addresses(tree: Any) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def test_nothing_that_a_round_writes_moves_and_it_is_compiled_once():
    lab = fakes.plain_lab()
    (state, slots), steps = started(lab), Steps(lab.config, in_place=True)
    assert isinstance(steps.decode_round, RoundInPlace)
    states, results = [], []
    for _ in range(ROUNDS):
        state, packed = steps.decode_round(1, lab.weights, state, slots)
        steps.decode_round.lower(1, lab.weights, state, slots)
        states.append(addresses(state))
        results.append(addresses(packed))
    assert states == [states[0]] * ROUNDS
    assert packed.shape[0] == len(slots) + 1, "or XLA lets its bytes serve other values before"
    assert results == results[:2] * (ROUNDS // 2) and results[0] != results[1]
    assert steps.traces["decode_round"] == 1 and steps.decode_round._round.cache_size() == 1


def test_a_result_is_gone_when_the_next_but_one_is_launched():
    """Rather than that it silently is another round's."""
    lab = fakes.plain_lab()
    (state, slots), steps = started(lab), Steps(lab.config, in_place=True)
    state, first = steps.decode_round(1, lab.weights, state, slots)
    state, _ = steps.decode_round(1, lab.weights, state, slots)
    steps.decode_round(1, lab.weights, state, slots)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(first)
