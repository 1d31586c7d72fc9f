"""The draft against the method's reference, stage by stage, and its parts by their definitions."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DraftConfig, read_draft
from dflash_jax.drafters import DFlashDrafter, Weights
from dflash_jax.layers import rms_norm, rope_tables
from dflash_jax.models import FAMILIES, Rows, embed, head_weight
from dflash_jax.models.dflash import convolve, draft_rows, fuse_context, inject_context, select_candidates
from dflash_jax.ops import SAMPLE, XLA, apply_rope, top_tokens
from dflash_jax.state import greedy_rows, no_edits
from models import goldens
from models.goldens import DATA, PAIRS, Pair

close = functools.partial(np.testing.assert_allclose, atol=2e-4, rtol=2e-4)
each_pair = pytest.mark.parametrize("name", PAIRS)


def shallow(params: dict, depth: int) -> dict:
    """The draft cut after `depth` layers."""
    return {**params, "layers": params["layers"][:depth]}


def block_rows(pair: Pair, ids: np.ndarray) -> Rows:
    return goldens.rows(ids[None], start=len(pair.golden["prompt_ids"]))


def stages(pair: Pair, target_params, draft_params, target_pool, draft_pool) -> dict:
    """What draft.npz records of the first round, each stage from the recorded one before it."""
    draft, golden = pair.draft, pair.golden
    prompt, block = goldens.rows(golden["prompt_ids"][None]), block_rows(pair, golden["block_ids"])
    hidden = FAMILIES[pair.target.family].forward(target_params, pair.target, prompt, target_pool, draft.taps)
    embedded = embed(target_params, block.ids, draft.input_embedding_scale)
    recorded_taps = jnp.asarray(golden["taps"])[None]
    pool = inject_context(draft_params, draft, recorded_taps, prompt.positions, prompt.locations, draft_pool, XLA)
    layers = {
        f"layer_{i}": draft_rows(shallow(draft_params, i + 1), draft, embedded, block, pool)
        for i in range(draft.num_layers)
    }
    output, head = jnp.asarray(golden["output"])[None, 1:], head_weight(target_params)
    logits = XLA.head_logits(output, head, draft.output_multiplier, draft.logit_softcap)
    proposed = DFlashDrafter(draft).draft(Weights(target_params, draft_params), pool, block)
    context = fuse_context(draft_params, draft, recorded_taps)
    return {"taps": hidden.taps, "context": context, "block_input": embedded, "logits": logits, "draft_ids": proposed,
            **layers}  # fmt: skip


@functools.cache
def first_round(name: str) -> tuple[dict[str, np.ndarray], Pair]:
    pair = goldens.pair(name)
    run = goldens.jit(functools.partial(stages, pair))
    pools = goldens.poisoned_pool(pair.target, 1), goldens.poisoned_pool(pair.draft, 1)
    found = run(pair.target_params, pair.draft_params, *pools)
    return {key: np.asarray(value)[0] for key, value in found.items()}, pair


@each_pair
def test_taps_and_fused_context(name: str):
    found, pair = first_round(name)
    close(found["taps"], pair.golden["taps"])
    close(found["context"], pair.golden["context"])


@each_pair
def test_the_block_after_every_layer(name: str):
    """`draft_rows` ends with the last norm, so the recorded state of each depth is normed before they are compared."""
    found, pair = first_round(name)
    close(found["block_input"], pair.golden["block_input"], atol=1e-6)
    for i in range(pair.draft.num_layers):
        recorded = rms_norm(jnp.asarray(pair.golden[f"layer_{i}"]), pair.draft_params["norm"], pair.draft.rms_norm_eps)
        close(found[f"layer_{i}"], recorded, err_msg=f"after layer {i}")
    close(found[f"layer_{pair.draft.num_layers - 1}"], pair.golden["output"])


@each_pair
def test_head_and_proposed_tokens(name: str):
    found, pair = first_round(name)
    close(found["logits"], pair.golden["logits"])
    np.testing.assert_array_equal(found["draft_ids"], pair.golden["draft_ids"])


@pytest.mark.parametrize("name", [name for name in PAIRS if goldens.pair(name).draft.selector])
def test_the_selector_walks_the_recorded_path(name: str):
    """From the recorded hidden states and logits alone; without the walk another path would come out somewhere."""
    pair = goldens.pair(name)
    golden = {key: jnp.asarray(value)[None] for key, value in pair.golden.items()}
    assert pair.draft.selector
    likeliest = top_tokens(golden["logits"], pair.draft.selector.top_k)
    path = select_candidates(pair.draft_params, golden["output"][:, 1:], likeliest, golden["block_ids"][:, 0])
    np.testing.assert_array_equal(path, golden["draft_ids"])


def test_the_recorded_pairs_cover_what_matters():
    drafts = [goldens.pair(name).draft for name in PAIRS]
    assert {d.version for d in drafts} == {1, 2}
    assert {(c, w is not None) for d in drafts for c, w in zip(d.causal, d.windows, strict=True)} == {
        (True, True), (False, True), (True, False), (False, False),
    }  # fmt: skip
    assert {d.rope.kind for d in drafts} >= {"default", "linear", "yarn"}
    assert {goldens.pair(name).target.tied for name in PAIRS} == {True, False}
    assert any(len(set(d.taps)) < len(d.taps) for d in drafts) and any(list(d.taps) != sorted(d.taps) for d in drafts)
    assert any(goldens.pair(name).target.num_layers - 1 in goldens.pair(name).draft.taps for name in PAIRS)


# -- parts, by definition ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps, group_size", [(1, 2), (2, 4), (3, 1), (3, 12), (5, 3)])
def test_convolution_by_definition(taps: int, group_size: int):
    """y[i, c] = Σ_t (base[t, c] + δ[i, t, g(c)]) x[i − t, c], zero before the block."""
    rng = np.random.default_rng(0)
    x, base = rng.normal(size=(2, 4, 12)), rng.normal(size=(taps, 12))
    delta = rng.normal(size=(2, 4, taps, 12 // group_size))
    expected = np.zeros_like(x)
    for s, i, c in np.ndindex(*x.shape):
        for t in range(min(taps, i + 1)):
            expected[s, i, c] += (base[t, c] + delta[s, i, t, c // group_size]) * x[s, i - t, c]
    x32, base32, delta32 = (jnp.asarray(a, jnp.float32) for a in (x, base, delta))
    found = convolve(x32, base32, delta32, group_size)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def draft_config(**changes) -> DraftConfig:
    return dataclasses.replace(goldens.pair("qwen3-v2").draft, **changes)


@pytest.mark.parametrize("top_k", [1, 3, 30])
def test_the_selector_by_definition(top_k: int):
    """Left to right: the best of the top K by logit[b] + ⟨A[a] ⊙ (W·h), S[b]⟩, given the choice a before."""
    rng = np.random.default_rng(0)
    vocab, hidden, rank, rows = 30, 8, 4, 5
    p = {"predecessor": rng.normal(size=(vocab, rank)), "successor": rng.normal(size=(vocab, rank)),
         "hidden": rng.normal(size=(hidden, rank))}  # fmt: skip
    h, logits, anchor = rng.normal(size=(3, rows, hidden)), rng.normal(size=(3, rows, vocab)), np.array([4, 0, 29])
    expected = []
    for s in range(3):
        previous, path = anchor[s], []
        for k in range(rows):
            pair = p["successor"] @ (p["predecessor"][previous] * (h[s, k] @ p["hidden"]))
            candidates = np.argsort(-logits[s, k], kind="stable")[:top_k]
            previous = candidates[np.argmax((logits[s, k] + pair)[candidates])]
            path.append(previous)
        expected.append(path)
    params = {"selector": {key: jnp.asarray(value, jnp.float32) for key, value in p.items()}}
    likeliest = top_tokens(jnp.asarray(logits, jnp.float32), top_k)
    found = select_candidates(params, jnp.asarray(h, jnp.float32), likeliest, jnp.asarray(anchor, jnp.int32))
    np.testing.assert_array_equal(found, expected)
    if top_k == 1:
        np.testing.assert_array_equal(found, logits.argmax(-1))


# -- rotary settings of the draft ----------------------------------------------------------------------------------

SCALED = {
    "default": {"rope_type": "default"},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


def draft_with(**changes) -> DraftConfig:
    raw = json.loads((DATA / "pairs" / "qwen3-v1" / "draft" / "config.json").read_text())
    raw.pop("rope_parameters")
    return read_draft("draft", {**raw, **changes}, goldens.pair("qwen3-v1").target)


@pytest.mark.parametrize("theta", [5e5, 1e6, 1e7])
@pytest.mark.parametrize("kind", SCALED)
def test_both_config_forms_give_identical_tables(theta: float, kind: str):
    """CASE 2: and not the target's, whose theta is 1e4."""
    positions = jnp.asarray([0, 1, 63, 500])
    tables = [
        rope_tables(draft_with(**form).rope, 16, positions)
        for form in (
            {"rope_theta": theta, "rope_scaling": SCALED[kind]},
            {"rope_parameters": {**SCALED[kind], "rope_theta": theta}},
        )
    ]
    np.testing.assert_array_equal(tables[0], tables[1])
    target = rope_tables(goldens.pair("qwen3-v1").target.rope, 16, positions)
    assert np.abs(np.asarray(tables[0]) - np.asarray(target)).max() > 0.5


def test_positions_far_past_the_drafts_maximum():
    """CASE 23: nothing in the draft depends on its maximum, and tables are computed, so none runs out."""
    short = draft_with(max_position_embeddings=64, rope_theta=1e4)
    assert short == draft_with(max_position_embeddings=4096, rope_theta=1e4)
    positions = np.array([63, 64, 100, 5000])
    cos, sin = rope_tables(short.rope, 16, jnp.asarray(positions))
    angle = positions[:, None] * 1e4 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(cos, np.cos(angle), atol=1e-3)
    np.testing.assert_allclose(sin, np.sin(angle), atol=1e-3)


def test_tables_are_computed_once_for_all_layers():
    """XLA on CPU would fuse their cosines into every layer."""
    rope = draft_with(rope_theta=1e4).rope

    def layers(x, positions):
        for _ in range(3):
            x = jnp.sort(apply_rope(x, *rope_tables(rope, 16, positions)), axis=1)
        return x

    text = jax.jit(layers).lower(jnp.zeros((1, 8, 3, 16)), jnp.arange(8)[None]).compile().as_text() or ""
    assert text.count(" cosine(") == 1


class Asked:
    """XLA's ops, and the names of those that were asked for."""

    def __init__(self) -> None:
        self.ops: set[str] = set()

    def __getattr__(self, op: str) -> Any:
        self.ops.add(op)
        return getattr(XLA, op)


@pytest.mark.parametrize(
    ("name", "asks", "op"),
    [("x-noncausal-window", "nothing", "argmax_head"), ("x-noncausal-window", "samples", "head_logits"),
     ("x-noncausal-window", "edits", "head_logits"), ("x-v2-one-layer", "nothing", "head_logits")],
)  # fmt: skip
def test_logits_are_made_where_something_is_done_with_them(name: str, asks: str, op: str):
    """A sample, an edit or DFlash 2's selector needs them; the likeliest token does not."""
    pair, kernels = goldens.pair(name), Asked()
    rows: Any = dataclasses.replace(block_rows(pair, pair.golden["block_ids"]), kernels=kernels)
    if asks == "samples":
        rows = dataclasses.replace(rows, sampling=greedy_rows(1), mode=SAMPLE)
    if asks == "edits":
        edits = no_edits(1, pair.target.vocab_size)
        rows = dataclasses.replace(rows, edits=edits, stop_ids=jnp.full((1, 4), -1, jnp.int32))
    propose = functools.partial(DFlashDrafter(pair.draft).draft, Weights(pair.target_params, pair.draft_params))
    jax.eval_shape(propose, goldens.poisoned_pool(pair.draft, 1), rows)
    assert kernels.ops & {"argmax_head", "head_logits"} == {op}
