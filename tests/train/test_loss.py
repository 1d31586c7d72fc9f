"""The loss by its definition, in slices, and what it must not depend on."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import goldens

from dflash_jax.config import DraftConfig
from dflash_jax.errors import UserError
from dflash_jax.models.dflash import select_candidates
from dflash_jax.ops import top_tokens
from dflash_jax.train.blocks import Blocks, make_blocks
from dflash_jax.train.forward import draft_hidden, target_hidden, target_taps
from dflash_jax.train.loss import (
    LossConfig,
    Scored,
    decay_weights,
    default_gamma,
    dpace_weights,
    loss_sums,
    metrics,
    score_blocks,
)
from train.test_forward import bare, batch_of, blocks_at

close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5)
V2, V1 = "llama-v2-window", "qwen3-v1"


@functools.cache
def case(name: str):
    """Draft parameters and configuration, target parameters, random hidden states [2, 6, B, H], blocks."""
    pair = goldens.pair(name)
    batch = batch_of(pair)
    blocks = blocks_at(pair, batch, [11, 20, 9, 30, 33, 35])
    hidden = jax.random.normal(jax.random.key(0), (*blocks.ids.shape, pair.draft.hidden_size))
    return bare(pair.draft_params), pair.draft, pair.target_params, hidden, blocks


def logits_of(name: str) -> np.ndarray:
    _, config, target, hidden, _ = case(name)
    logits = np.asarray(hidden[:, :, 1:]) @ np.asarray(target.get("head", target["embed"])).T
    logits = logits * config.output_multiplier
    return logits if config.logit_softcap is None else np.tanh(logits / config.logit_softcap) * config.logit_softcap


def softmax_ce(scores: np.ndarray, label: np.ndarray) -> np.ndarray:
    top = scores.max(-1, keepdims=True)
    log_sum = np.log(np.exp(scores - top).sum(-1)) + top[..., 0]
    return log_sum - np.take_along_axis(scores, label[..., None], -1)[..., 0]


def scored(name: str, slice_rows: int = 2048) -> Scored:
    return jax.device_get(score_blocks(*case(name), LossConfig(slice_rows=slice_rows)))


@pytest.mark.parametrize("name", [V1, V2])
def test_cross_entropy_by_definition_in_any_slices(name: str):
    labels = np.asarray(case(name)[4].labels[:, :, 1:])
    whole, sliced = scored(name), scored(name, 1)
    close(whole.ce, softmax_ce(logits_of(name), labels))
    jax.tree.map(close, whole, sliced)
    if name == V1:
        np.testing.assert_array_equal(whole.hit, logits_of(name).argmax(-1) == labels)
        assert not whole.selector_ce.any()


def test_the_selector_among_its_candidates_with_the_label_forced_in():
    params, config, _, hidden, blocks = case(V2)
    assert config.selector is not None
    found, logits = scored(V2), logits_of(V2)
    p = jax.tree.map(np.asarray, params["selector"])
    projected = np.asarray(hidden[:, :, 1:]) @ p["hidden"]
    labels = np.asarray(blocks.labels)
    kinds = set()
    for at in np.ndindex(found.ce.shape):
        label, before = labels[*at[:2], at[2] + 1], labels[*at[:2], at[2]]
        chosen = np.argsort(-logits[at], kind="stable")[: config.selector.top_k]
        there = label in chosen
        kinds.add(there)
        chosen = chosen if there else np.append(chosen[:-1], label)
        scores = logits[at][chosen] + (p["predecessor"][before] * projected[at] * p["successor"][chosen]).sum(-1)
        place = np.flatnonzero(chosen == label)[0]
        close(found.selector_ce[at], softmax_ce(scores, np.array(place)), atol=1e-4)
        assert found.hit[at] == (there and scores.argmax() == place)
    assert kinds == {True, False}


def test_hits_follow_the_selectors_walk():
    """Rows right from the first on are those of the walk that decoding makes, where labels are what it walks."""
    params, config, _, hidden, blocks = case(V2)
    flat = hidden.reshape(-1, *hidden.shape[2:])[:, 1:]
    logits = jnp.asarray(logits_of(V2), jnp.float32).reshape(*flat.shape[:2], -1)
    assert config.selector
    likeliest = top_tokens(logits, config.selector.top_k)
    path = select_candidates(params, flat, likeliest, blocks.labels.reshape(-1, config.block_size)[:, 0])
    labels = blocks.labels.at[:, :, 1:].set(path.reshape(blocks.labels[:, :, 1:].shape))
    labels = labels.at[:, :, 4].add(1) % config.vocab_size  # all right but row 4
    told = dataclasses.replace(blocks, labels=labels)
    hit = np.asarray(score_blocks(*case(V2)[:4], told, LossConfig()).hit)
    assert hit[..., :3].all() and not hit[..., 3].any()


def test_soft_rows_ask_the_target_after_the_true_token_before_them():
    params, config, target, hidden, blocks = case(V1)
    pair = goldens.pair(V1)
    last = target_hidden(target, pair.target, batch_of(pair).tokens, config.taps).last
    found = score_blocks(params, config, target, hidden, blocks, LossConfig(soft=1.0), last).ce
    head = target.get("head", target["embed"])
    wanted = jax.nn.softmax(jnp.einsum("...h,vh->...v", last, head))
    said = jax.nn.log_softmax(jnp.asarray(logits_of(V1)))
    for s, a, k in np.ndindex(found.shape):
        close(found[s, a, k], -(wanted[s, blocks.positions[s, a, k + 1] - 1] * said[s, a, k]).sum(), rtol=1e-4)


def test_a_soft_selector_follows_the_target_among_its_candidates():
    """Half of what it is to say is the label, half the target's own distribution over the same candidates."""
    params, config, target, hidden, blocks = case(V2)
    assert config.selector is not None
    pair = goldens.pair(V2)
    last = target_hidden(target, pair.target, batch_of(pair).tokens, config.taps).last
    hard = score_blocks(params, config, target, hidden, blocks, LossConfig()).selector_ce
    half = score_blocks(params, config, target, hidden, blocks, LossConfig(soft=0.5), last).selector_ce
    head = np.asarray(target.get("head", target["embed"]))
    p, logits, labels = jax.device_get(params["selector"]), logits_of(V2), np.asarray(blocks.labels)
    projected = np.asarray(hidden[:, :, 1:]) @ p["hidden"]
    for at in np.ndindex(half.shape):
        label, before = labels[*at[:2], at[2] + 1], labels[*at[:2], at[2]]
        chosen = np.argsort(-logits[at], kind="stable")[: config.selector.top_k]
        chosen = chosen if label in chosen else np.append(chosen[:-1], label)
        scores = logits[at][chosen] + (p["predecessor"][before] * projected[at] * p["successor"][chosen]).sum(-1)
        before_it = min(blocks.positions[*at[:2], at[2] + 1] - 1, last.shape[1] - 1)  # rows past the end do not count
        asked = np.asarray(last)[at[0], before_it] @ head[chosen].T
        asked = asked * config.output_multiplier
        if config.logit_softcap is not None:
            asked = np.tanh(asked / config.logit_softcap) * config.logit_softcap
        shares = np.exp(asked - asked.max()) / np.exp(asked - asked.max()).sum()
        soft = softmax_ce(scores, np.array(0)) + scores[0] - (shares * scores).sum()
        close(half[at], 0.5 * np.asarray(hard)[at] + 0.5 * soft, atol=1e-4)
    assert np.abs(np.asarray(half - hard)).max() > 0.1


@pytest.mark.parametrize("name", [V1, V2])
def test_logits_of_all_rows_never_exist(name: str):
    """Neither forward nor in the gradient: no float32 array of V columns has more rows than a slice."""
    params, config, target, hidden, blocks = case(name)
    rows = hidden.shape[0] * (hidden.shape[2] - 1)

    def total(params, hidden, slice_rows):
        found = score_blocks(params, config, target, hidden, blocks, LossConfig(slice_rows=slice_rows))
        return found.ce.sum() + found.selector_ce.sum()

    def largest(slice_rows: int) -> int:
        traced = jax.make_jaxpr(jax.grad(functools.partial(total, slice_rows=slice_rows), argnums=(0, 1)))
        return max(rows_of_logits(traced(params, hidden).jaxpr, config.vocab_size))

    assert largest(1) == rows
    assert largest(10**6) == rows * hidden.shape[1]


def rows_of_logits(jaxpr, vocab: int):
    """Rows of every float32 array [..., vocab] that a program computes, those of programs inside it included."""
    yield 0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            shape = variable.aval.shape
            if len(shape) > 1 and shape[-1] == vocab and variable.aval.dtype == jnp.float32:
                yield int(np.prod(shape[:-1]))
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from rows_of_logits(inner, vocab)


# -- weights and sums ------------------------------------------------------------------------------------------------


def test_gamma_and_decay():
    assert [default_gamma(b) for b in (4, 8, 9, 10, 13, 16, 32)] == [4, 4, 4.5, 5, 6, 7, 7]
    close(decay_weights(4), [1, np.exp(-1 / 4), np.exp(-2 / 4)])
    close(decay_weights(3, 2.0), [1, np.exp(-0.5)])
    with pytest.raises(UserError, match="weighting 'none' is not one of decay, dpace"):
        LossConfig(weighting="none")


def test_dpace_weights_by_hand():
    """α = ½, q = (1, ½, ¼): q̃ = (1, ¾, ⅝), prefix products 1, ¾, 15/32."""
    ce = -jnp.log(jnp.asarray([[1.0, 0.5, 0.25]]))
    rows = jnp.asarray([[True, True, True]])
    close(dpace_weights(ce, rows, 0.5), [[1 + 3 / 4 + 15 / 32, 3 / 4 + 15 / 32, 15 / 32]])
    close(dpace_weights(ce, rows.at[0, 2].set(False), 0.5), [[1.75, 0.75, 0]])
    assert not jax.grad(lambda x: dpace_weights(x, rows, 0.5).sum())(ce).any()


def hand_blocks(rows: list[list[int]]) -> Blocks:
    mask = jnp.asarray([rows], bool)
    ints = jnp.zeros(mask.shape, jnp.int32)
    return Blocks(ints[..., 0], ints, ints, ints, mask)


def test_sums_and_metrics_by_hand():
    blocks = hand_blocks([[0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    ce = jnp.asarray([[[1.0, 2, 3], [4, 5, 99], [99, 99, 99]]])
    hit = jnp.asarray([[[1, 0, 1], [1, 1, 1], [1, 1, 1]]], bool)
    config = LossConfig(gamma=2.0, selector_weight=0.5)
    total, sums = loss_sums(config, blocks, Scored(ce, 2 * ce, hit))
    w = np.exp(-np.arange(3) / 2)
    weighted = w[0] * 5 + w[1] * 7 + w[2] * 3
    close(total, weighted * 2)
    close(sums.weight, 2 * w[0] + 2 * w[1] + w[2])
    found = metrics(config, sums)
    close(found["loss"], 2 * weighted / float(sums.weight))
    close(found["accuracy"], [1, 0.5, 1])
    close(found["accept_length"], 1 + 1)  # of the one block that is whole


@functools.cache
def losses_of(name: str):
    """Loss of each block [S, A], from taps and blocks, all together."""
    pair = goldens.pair(name)
    params, config = bare(pair.draft_params), LossConfig()

    def run(taps, blocks):
        hidden = draft_hidden(params, pair.draft, pair.target_params, taps, blocks)
        found = score_blocks(params, pair.draft, pair.target_params, hidden, blocks, LossConfig(slice_rows=64))
        rows = jnp.where(blocks.rows[:, :, 1:], decay_weights(pair.draft.block_size)[None, None], 0.0)
        assert loss_sums(config, blocks, found)[0].shape == ()
        return (rows * (found.ce + found.selector_ce)).sum(axis=-1)

    return goldens.jit(run), pair


@pytest.mark.parametrize("name", [V1, V2])
def test_losses_of_blocks_depend_on_what_is_before_them(name: str):
    run, pair = losses_of(name)
    batch = batch_of(pair)
    taps = target_taps(pair.target_params, pair.target, batch.tokens, pair.draft.taps)
    before = np.asarray(run(taps, blocks_at(pair, batch, [20, 12, 31])))
    after = np.asarray(run(taps.at[:, 20:].add(50.0), blocks_at(pair, batch, [20, 12, 31])))
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert (np.abs(before[:, 2] - after[:, 2]) > 1e-3).all()
    close(run(taps, blocks_at(pair, batch, [31, 20, 12])), before[:, [2, 0, 1]])


def test_labels_are_not_shifted():
    """Other tokens in rows 1 … change the loss of their own row alone (and the selector's of the next)."""
    params, config, target, hidden, blocks = case(V1)
    first = scored(V1).ce
    tokens = jnp.asarray(np.asarray(batch_of(goldens.pair(V1)).tokens))
    changed = batch_of(goldens.pair(V1))
    changed = dataclasses.replace(changed, tokens=tokens.at[:, 22].set((tokens[:, 22] + 1) % config.vocab_size))
    again = make_blocks(config, changed, blocks.anchors, blocks.anchors >= 0)
    second = np.asarray(score_blocks(params, config, target, hidden, again, LossConfig()).ce)
    assert isinstance(config, DraftConfig)
    differing = {(int(a), int(k) + 1) for _, a, k in np.argwhere(second != first)}
    assert differing == {(1, 2)}, "anchor 20: the token at 22 is the label of row 2"
