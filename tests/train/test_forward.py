"""The training forward is the inference draft; blocks see what they may and nothing else."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import goldens
from models.goldens import PAIRS, Pair

from dflash_jax.drafters import DFlashDrafter
from dflash_jax.models import FAMILIES, embed
from dflash_jax.models.dflash import draft_rows, inject_context
from dflash_jax.ops import XLA
from dflash_jax.train.blocks import Batch, make_blocks, sample_anchors
from dflash_jax.train.dense import context_mask
from dflash_jax.train.forward import draft_hidden, target_taps

LENGTH = 40
close = functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)
QUICK = ("qwen3-v1", "llama-v2-window", "x-noncausal-window")  # both versions, full and sliding, one and two ways
each_pair = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in PAIRS]
)


def batch_of(pair: Pair, sequences: int = 2, seed: int = 0) -> Batch:
    """Random sequences of different lengths, answers included."""
    tokens = np.random.default_rng(seed).integers(0, pair.target.vocab_size, (sequences, LENGTH))
    start, length = np.arange(sequences) + 9, LENGTH - 3 * np.arange(sequences)
    return Batch(*(jnp.asarray(x, jnp.int32) for x in (tokens, start, length)))


def bare(params: dict) -> dict:
    return {key: value for key, value in params.items() if key != "inject"}


@functools.cache
def compiled(name: str):
    """(taps of tokens, hidden states of blocks over taps)."""
    pair = goldens.pair(name)
    taps = goldens.jit(lambda p, tokens: target_taps(p, pair.target, tokens, pair.draft.taps))
    hidden = goldens.jit(lambda p, target, taps, blocks: draft_hidden(p, pair.draft, target, taps, blocks))
    return taps, lambda taps, blocks: hidden(bare(pair.draft_params), pair.target_params, taps, blocks)


def blocks_at(pair: Pair, batch: Batch, anchors: list[int]):
    at = jnp.asarray([anchors] * batch.tokens.shape[0], jnp.int32)
    return make_blocks(pair.draft, batch, at, at >= 0)


def inference(pair: Pair, batch: Batch, anchor: int) -> tuple[np.ndarray, np.ndarray]:
    """Taps [S, anchor, K·H] and block [S, B, H] as decoding computes them: in pages, from what is committed alone."""
    tokens = np.asarray(batch.tokens)
    prompt = goldens.rows(tokens[:, :anchor])
    pools = goldens.poisoned_pool(pair.target, len(tokens)), goldens.poisoned_pool(pair.draft, len(tokens))
    block = np.full((len(tokens), pair.draft.block_size), pair.draft.mask_token_id)
    block[:, 0] = tokens[:, anchor]
    rows = goldens.rows(block, start=anchor)

    def run(target_params, draft_params, target_pool, draft_pool):
        hidden = FAMILIES[pair.target.family].forward(
            target_params, pair.target, prompt, target_pool, DFlashDrafter(pair.draft).taps
        )
        pool = inject_context(
            draft_params, pair.draft, hidden.taps, prompt.positions, prompt.locations, draft_pool, XLA
        )
        embedded = embed(target_params, rows.ids, pair.draft.input_embedding_scale)
        return hidden.taps, draft_rows(draft_params, pair.draft, embedded, rows, pool)

    return jax.device_get(goldens.jit(run)(pair.target_params, pair.draft_params, *pools))


@each_pair
def test_one_anchor_is_the_inference_draft(name: str):
    """v1 and DFlash 2, full and sliding layers, one and two ways, in float32 to 1e-5."""
    pair, (run_taps, run_hidden) = goldens.pair(name), compiled(name)
    batch = batch_of(pair)
    taps = run_taps(pair.target_params, batch.tokens)
    expected_taps, expected = inference(pair, batch, 17)
    close(taps[:, :17], expected_taps, atol=1e-5 * np.abs(expected_taps).max())  # sums of numbers as large as those
    close(run_hidden(taps, blocks_at(pair, batch, [17, 21, 9]))[:, 0], expected)


@each_pair
def test_taps_at_or_after_an_anchor_do_not_count(name: str):
    pair, (run_taps, run_hidden) = goldens.pair(name), compiled(name)
    batch = batch_of(pair)
    taps, blocks = run_taps(pair.target_params, batch.tokens), blocks_at(pair, batch, [20, 12, 31])
    before = run_hidden(taps, blocks)
    after = run_hidden(taps.at[:, 20:].add(100.0), blocks)
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert (np.abs(before[:, 2] - after[:, 2]) > 1e-3).any(), "the later block does read those rows"
    assert (np.abs(before[:, 0] - run_hidden(taps.at[:, 19].add(1.0), blocks)[:, 0]) > 1e-4).any()


@each_pair
def test_blocks_do_not_see_each_other(name: str):
    pair, (run_taps, run_hidden) = goldens.pair(name), compiled(name)
    batch = batch_of(pair)
    taps = run_taps(pair.target_params, batch.tokens)
    found = run_hidden(taps, blocks_at(pair, batch, [11, 12, 25]))
    turned = run_hidden(taps, blocks_at(pair, batch, [25, 11, 12]))
    close(found, turned[:, np.array([1, 2, 0])], atol=1e-6)


def test_all_draft_parameters_learn_and_the_target_does_not():
    pair = goldens.pair("llama-v2-window")
    batch = batch_of(pair)
    blocks = blocks_at(pair, batch, [11, 20])

    def total(draft, target):
        taps = target_taps(target, pair.target, batch.tokens, pair.draft.taps)
        return (draft_hidden(draft, pair.draft, target, taps, blocks) ** 2).sum()

    draft, target = jax.grad(total, argnums=(0, 1))(bare(pair.draft_params), pair.target_params)
    draft.pop("selector")  # which reads the hidden states and does not make them
    assert all((np.abs(x) > 0).any() for x in jax.tree.leaves(draft))
    assert not any(np.any(x) for x in jax.tree.leaves(target))


# -- blocks ----------------------------------------------------------------------------------------------------------


def test_a_block_by_hand():
    pair = goldens.pair("qwen3-v1")
    config = dataclasses.replace(pair.draft, block_size=4, mask_token_id=9)
    batch = Batch(jnp.asarray([[10, 11, 12, 13, 14, 15, 0]], jnp.int32), jnp.asarray([2]), jnp.asarray([6]))
    blocks = make_blocks(config, batch, jnp.asarray([[2, 4]], jnp.int32), jnp.asarray([[True, True]]))
    np.testing.assert_array_equal(blocks.ids[0], [[12, 9, 9, 9], [14, 9, 9, 9]])
    np.testing.assert_array_equal(blocks.positions[0], [[2, 3, 4, 5], [4, 5, 6, 7]])
    np.testing.assert_array_equal(blocks.labels[0, 0], [12, 13, 14, 15])  # no shift: row k is the token at anchor + k
    np.testing.assert_array_equal(blocks.rows[0].astype(int), [[0, 1, 1, 1], [0, 1, 0, 0]])
    none = make_blocks(config, batch, jnp.asarray([[2]], jnp.int32), jnp.asarray([[False]]))
    assert not none.rows.any()


@pytest.mark.parametrize(("window", "expected"), [
    (None, [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]),
    (3, [[0, 1, 1, 0, 0], [0, 0, 1, 0, 0]]),
])  # fmt: skip
def test_the_context_mask_drawn(window, expected):
    mask = context_mask(jnp.asarray([[3]]), 5, 2, window)
    np.testing.assert_array_equal(mask[0, 0].astype(int), expected)


def test_anchors_are_answer_tokens_that_another_follows():
    batch = Batch(jnp.zeros((3, 12), jnp.int32), jnp.asarray([4, 9, 3]), jnp.asarray([10, 12, 4]))
    for seed in range(20):
        anchors, real = jax.device_get(sample_anchors(jax.random.key(seed), batch, 5))
        assert sorted(anchors[0]) == [4, 5, 6, 7, 8] and real[0].all()
        assert sorted(anchors[1][real[1]]) == [9, 10]
        assert not real[2].any()
    some = {tuple(np.asarray(sample_anchors(jax.random.key(s), batch, 2)[0][0]).tolist()) for s in range(40)}
    assert len(some) > 10, "they are random"
