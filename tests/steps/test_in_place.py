"""Rounds in place: the same results as other rounds, in buffers that stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax.engine.build import on_mesh
from dflash_jax.sharding import make_mesh
from dflash_jax.state import NOTHING, DecodeState, Needs
from dflash_jax.steps import Steps
from steps import fakes
from steps.lab import Lab, Request, Run

ROUNDS = 4


def started(lab: Lab) -> tuple[DecodeState, jax.Array]:
    """Two requests after their prefill, and their slots."""
    requests = [Request(0, [3, 5, 7], 200), Request(1, [2, 11], 200)]
    run = Run(lab, requests, on_mesh(lab.state(), make_mesh())).prefill()
    return run.state, lab.where([0, 1])


def rounds(lab: Lab, steps: Steps, needs: Needs) -> list[np.ndarray]:
    """What rounds return, read only after the last was launched, as an engine that runs ahead does."""
    (state, slots), found = started(lab), []
    for _ in range(ROUNDS):
        state, packed = steps.decode_round(lab.block, lab.weights, state, slots, needs=needs)
        found.append(packed)
    return [np.asarray(packed) for packed in found]


@pytest.mark.parametrize(
    "lab, needs", ((fakes.plain_lab, NOTHING), (fakes.dflash_lab, Needs(logprobs=2))), ids=("plain", "dflash")
)
def test_a_round_in_place_returns_what_a_round_does(lab: Callable[[], Lab], needs: Needs):
    mine, theirs = (rounds(lab(), steps, needs) for steps in (Steps(lab().config, in_place=True), lab().steps))
    np.testing.assert_array_equal(mine, theirs)


def addresses(tree: Any) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def test_nothing_that_a_round_writes_moves_and_it_is_compiled_once():
    """Though nobody lets go of the results, which are copies."""
    lab = fakes.plain_lab()
    (state, slots), steps = started(lab), Steps(lab.config, in_place=True)
    seen, kept = [], []
    for _ in range(ROUNDS):
        state, packed = steps.decode_round(1, lab.weights, state, slots)
        steps.decode_round.lower(1, lab.weights, state, slots)
        seen.append(addresses((state, list(steps.decode_round._results.values()))))
        kept.append(packed)
    assert seen == [seen[0]] * ROUNDS
    assert len(set(addresses(kept))) == ROUNDS
    assert steps.traces["decode_round"] == 1 and steps.decode_round._round._cache_size() == 1
