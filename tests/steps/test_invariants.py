"""What must hold of every round: what it writes, what it compiles to, and that it never waits for the host."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import TargetConfig
from dflash_jax.drafters import Drafter, NoDrafter
from dflash_jax.ops.reference import write_rows
from dflash_jax.state import gather
from dflash_jax.steps import PrefillBatch, StepConfig, Steps, accept, commit, draft, prepare, publish, verify
from dflash_jax.steps.compiled import COMMIT
from steps import fakes
from steps.fakes import BLOCK, PAGE, prompt_of, scripted, scripted_lab, truth
from steps.lab import Lab, Request, Run, oracle_cases, oracle_lab, owned_rows, poisoned, pools

PROMPTS = [prompt_of(n) for n in (5, 12, 1, 20)]


def requests(new: int) -> list[Request]:
    return [Request(i, prompt, len(prompt) + new) for i, prompt in enumerate(PROMPTS)]


# -- 4: the caches hold the committed tokens and nothing else counts -----------------------------------------------


@pytest.mark.parametrize("right", range(BLOCK))
def test_poison_in_every_other_row_changes_nothing(right: int):
    """Invariant 4, CASE 6: accepted counts 0 to B−1; after each round the draft holds exactly the committed tokens."""
    lab, new = scripted_lab(), 1 + 3 * (right + 1)
    run = scripted(right, requests(new))
    check_log(lab, run)
    while run.live:
        run.state = poisoned(lab, run.state, run.requests)
        run.round()
        check_log(lab, run)
    for request in run.requests:
        assert request.tokens == truth(request.prompt, new)
        assert request.accepted == [right + 1] * 3


def check_log(lab: Lab, run: Run) -> None:
    """The scripted drafter's log: each committed token where it belongs, nothing anywhere else but on page 0."""
    log = np.asarray(run.state.draft["log"]).reshape(lab.num_pages, lab.page_size)
    for request in run.requests:
        text = [*request.prompt, *request.tokens]
        assert int(run.state.seq_len[request.slot]) == request.seq_len
        for position in range(request.seq_len):
            page, offset = divmod(position, lab.page_size)
            assert log[(request.table or [])[page], offset] == text[position]
    assert (log[1:][~owned_rows(lab, run.requests)[1:]] == -1).all()


def test_poison_changes_nothing_for_a_real_draft():
    """Text and acceptance of a recorded pair, with windows, every uncommitted row NaN all the time."""
    name = "x-noncausal-window"
    lab = oracle_lab(name)
    cases = [case for case in oracle_cases(name) if case["block_size"] == lab.block]
    asked = [Request(i, c["prompt_ids"], len(c["prompt_ids"]) + c["max_new_tokens"]) for i, c in enumerate(cases)]
    run = Run(lab, asked).prefill()
    while run.live:
        run.state = poisoned(lab, run.state, run.requests)
        run.round()
    for request, case in zip(run.requests, cases, strict=True):
        assert request.tokens == case["token_ids"]
        count = case["comparable_rounds"]
        assert request.accepted[:count] == case["accept_lengths"][:count]


@pytest.mark.parametrize("right", [0, 3, BLOCK - 1])
def test_rounds_leave_what_a_prefill_of_the_whole_text_leaves(right: int):
    """Both pools, every committed row: written block by block, or as one prompt."""
    lab = scripted_lab()
    run = scripted(right, requests(26)).decode()
    texts = [Request(r.slot, [*r.prompt, *r.tokens][: r.seq_len], 256) for r in run.requests]
    whole = scripted(right, texts)
    owned = owned_rows(lab, run.requests)
    for mine, theirs in zip(pools(run.state), pools(whole.state), strict=True):
        if mine.ndim == 5:
            mine, theirs = (np.moveaxis(pool, 3, 1)[owned] for pool in (mine, theirs))
            np.testing.assert_allclose(mine, theirs, atol=2e-4)


# -- 5: traced once, no transfer -----------------------------------------------------------------------------------


def test_a_bucket_is_traced_once(no_retrace):
    """CASE 33: after the first round and prefill nothing is traced, whoever comes and goes."""
    lab = fakes.dflash_lab()
    Run(lab, requests(12)).prefill().decode()
    counts = dict(lab.steps.traces)
    with no_retrace(names=["decode_round", "prefill", "admit"]):
        run = Run(lab, requests(20)).prefill(7).round()
        run.state = lab.steps.finish(run.state, lab.where([1], 6))
        run.requests[1].finish = 1
        run.decode()
    grown = {name: n for name, n in lab.steps.traces.items() if n != counts.get(name)}
    assert grown in ({}, {"finish": 1})  # `finish` has a bucket of its own


def test_a_second_bucket_is_a_second_trace():
    """So the test above can fail."""
    steps = Steps(StepConfig(fakes.TARGET, NoDrafter(), PAGE))
    lab = dataclasses.replace(fakes.plain_lab())
    state = lab.state()
    for rows in (1, 1, 2):
        jax.eval_shape(lambda s, w, r=rows: steps.decode_round(1, w, s, jnp.zeros(r, jnp.int32)), state, lab.weights)
    assert steps.traces["decode_round"] == 2


def test_a_round_makes_no_transfer():
    lab = fakes.dflash_lab()
    run = Run(lab, requests(30)).prefill().round()
    slots = lab.where([0, 1, 2, 3])
    with jax.transfer_guard("disallow"):
        state = run.state
        for _ in range(3):
            state, packed = lab.steps.decode_round(BLOCK, lab.weights, state, slots)
    assert np.asarray(packed).shape == (4, BLOCK + 2)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="[Dd]isallowed"):  # the guard can fail
        lab.steps.decode_round(BLOCK, lab.weights, state, np.array([0, 1, 2, 3], np.int32))


# -- 6: pools are updated in place ---------------------------------------------------------------------------------

PAGES = 4099  # so many that a pool outweighs all else, and no other array has a prime like it
HUGE_LAB_ROWS = 2


def lowered(which: str, target: TargetConfig, drafter: Drafter, weights):
    """`decode_round` or `prefill` compiled over abstract pools of PAGES pages, and one pool's bytes."""
    steps = Steps(StepConfig(target, drafter, PAGE))
    lab = Lab(steps.config, weights, bucket=HUGE_LAB_ROWS, chunk=16, slots=3, width=4)

    def widen(leaf: jax.Array):
        shape = (PAGES, *leaf.shape[1:]) if leaf.ndim == 5 else leaf.shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    state = jax.tree.map(widen, lab.state())
    number, flag = (jax.ShapeDtypeStruct((HUGE_LAB_ROWS,), dtype) for dtype in (jnp.int32, bool))
    if which == "prefill":
        tokens = jax.ShapeDtypeStruct((HUGE_LAB_ROWS, 16), jnp.int32)
        text = steps.prefill.lower(weights, state, PrefillBatch(tokens, number, number, number, flag))  # type: ignore[arg-type]
    else:
        text = steps.decode_round.lower(drafter.max_block, weights, state, number)
    biggest = [leaf for leaf in jax.tree.leaves((state.kv, state.draft)) if leaf.ndim == 5]
    return text.compile(), biggest


def pool_copies(text: str) -> list[str]:
    """Instructions of compiled text that make another array of a pool's size (fusions that scatter do not)."""
    whole = re.compile(rf"= \(?\w+\[{PAGES},[\d,]+\]\S* (copy|copy-start|transpose|convert|broadcast|select)\(")
    return [line.strip() for line in text.splitlines() if whole.search(line)]


@pytest.mark.parametrize("which", ["decode_round", "prefill"])
def test_compiled_steps_hold_no_copy_of_a_pool(which: str):
    """DFlash 2 with a window: every pool argument is aliased to its result, and no memory of its size is used."""
    compiled, leaves = lowered(which, fakes.TARGET, fakes.dflash_lab().config.drafter, fakes.toy_weights())
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert pool_copies(text) == []
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    smallest = min(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert memory.temp_size_in_bytes < smallest / 2
    assert memory.alias_size_in_bytes >= total
    aliased = text.split("input_output_alias={", 1)[1].split("}, entry_computation_layout", 1)[0]
    state = fakes.dflash_lab().state()
    assert aliased.count("-alias)") == len(jax.tree.leaves([getattr(state, name) for name in COMMIT]))


def test_a_copy_of_a_pool_would_be_found():
    """The same write without donation."""
    pool = jax.ShapeDtypeStruct((PAGES, 2, 2, 8, 8), jnp.float32)
    rows, at = jax.ShapeDtypeStruct((1, 4, 2, 2, 8), jnp.float32), jax.ShapeDtypeStruct((1, 4), jnp.int32)
    kept = jax.jit(write_rows).lower(pool, rows, at).compile()
    donated = jax.jit(write_rows, donate_argnums=0).lower(pool, rows, at).compile()
    assert pool_copies(str(kept.as_text())) and not pool_copies(str(donated.as_text()))


def test_a_round_calls_nothing_outside_the_device():
    compiled, _ = lowered("decode_round", fakes.TARGET, NoDrafter(), fakes.plain_lab().weights)
    found = re.findall(r"\b(infeed|outfeed|send|recv|host-\w+|\w*callback\w*)\b", compiled.as_text())
    assert found == []


def test_the_state_given_to_a_step_is_gone():
    """Donated: a second use is an error and not a silent copy."""
    lab = fakes.dflash_lab()
    run = Run(lab, requests(12)).prefill()
    old = run.state
    run.round()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old.kv, old.draft)))


# -- the steps one by one ------------------------------------------------------------------------------------------


def test_the_public_steps_make_a_round():
    """prepare, draft, verify, accept, publish, commit: called alone they do what `decode_round` does."""
    lab = fakes.dflash_lab()
    config, slots = lab.config, lab.where([0, 1, 2, 3])
    first, second = (Run(lab, requests(30)).prefill() for _ in range(2))

    def by_hand(weights, state):
        live = gather(state, slots)
        rows = draft(config, weights, state, prepare(config, live, BLOCK))
        logits, hidden = verify(config, weights, state, rows)
        accepted = accept(config, live, rows, logits)
        state, packed = publish(dataclasses.replace(state, kv=hidden.pool), live, accepted)
        return commit(config, weights, state, rows, hidden.taps, accepted.commit_len), packed

    mine = jax.jit(by_hand)(lab.weights, first.state)
    theirs = lab.steps.decode_round(BLOCK, lab.weights, second.state, slots)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
