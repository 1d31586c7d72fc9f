"""A target whose next-token logits depend on the last token alone, thousands of seeds at once, and what must come out.

The draws go through the compiled steps of the engine, a slot for each seed.  The expectation is the definition, in
float64 numpy, of all texts of three tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from steps.fakes import random_tree

from dflash_jax import Engine, EngineSettings, SamplingParams
from dflash_jax.cache import make_pool
from dflash_jax.config import ConvConfig, DraftConfig, RopeConfig, SelectorConfig, TargetConfig
from dflash_jax.drafters import DFlashDrafter, Drafter, NgramDrafter, NoDrafter, Weights
from dflash_jax.engine.build import Loaded
from dflash_jax.engine.packing import Arrival, edit_row, needs_of, sampling_rows
from dflash_jax.models import FAMILIES, Rows
from dflash_jax.models.dflash import draft_specs, with_injection
from dflash_jax.params import build
from dflash_jax.sharding import make_mesh
from dflash_jax.state import MAX_STOP_IDS, Needs, init_state
from dflash_jax.steps import Admission, PrefillBatch, StepConfig, Steps
from dflash_jax.weights import TargetCheckpoint

from .cycles import light_compilation

NEW = 3  # tokens of a text: the first comes from prefill
PAGE, WIDTH = 4, 3  # tokens of a page, pages of a slot
PROMPT = [0, 1, 2, 1]
DRAWS = 20_000


@functools.cache
def bigram_logits(vocab: int) -> np.ndarray:
    """float32 [V, V]: row t is what the target says after token t.  All rows hold the same numbers, moved a little.

    Of four, top-p 0.75 leaves two tokens at temperature 0.5, and three if it were to come before the temperature.
    """
    rng = np.random.default_rng(vocab)
    ladder = 0.5 - 1.6 * np.linspace(0, 1, vocab) ** 1.5
    return np.stack([rng.permutation(ladder) + rng.uniform(-0.05, 0.05) for _ in range(vocab)]).astype(np.float32)


# -- the models --------------------------------------------------------------------------------------------------------

ROPE = RopeConfig(theta=1e4)


def target_config(vocab: int) -> TargetConfig:
    return TargetConfig(
        family="qwen3", vocab_size=vocab, hidden_size=vocab, intermediate_size=4, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=4, rms_norm_eps=1e-6, rope=ROPE, max_position=64, tied=False,
    )  # fmt: skip


def target_params(vocab: int, logits: np.ndarray | None = None) -> Any:
    """Its only layer adds nothing; the norm makes √V of the one in an embedding, and the head takes that back.

    logits: others than `bigram_logits`.
    """
    logits = bigram_logits(vocab) if logits is None else logits

    def leaf(path: str, spec: Any) -> Array:
        if path == "embed":
            return jnp.eye(vocab, dtype=jnp.float32)
        if path == "head":
            return jnp.asarray(logits.T / np.sqrt(np.float32(vocab)), jnp.float32)
        return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.0, jnp.float32)

    return build(FAMILIES["qwen3"].specs(target_config(vocab)), leaf)


def draft_config(vocab: int, version: int) -> DraftConfig:
    second = {"conv": ConvConfig(2, 4), "selector": SelectorConfig(4, 3)} if version == 2 else {}
    return DraftConfig(
        version=version, vocab_size=vocab, hidden_size=vocab, intermediate_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=4, rms_norm_eps=1e-6, rope=ROPE, taps=(0,), block_size=3 if version == 2 else 4,
        mask_token_id=1, windows=(None,), causal=(False,), **second,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ByPage(NgramDrafter):
    """Is told what to propose: weights.draft["texts"] int32 [slots, L], by absolute position; `off` is added."""

    max_block: int = 4
    vocab: int = 2

    def draft(self, weights: Weights, cache: Any, rows: Rows) -> Array:
        texts = weights.draft["texts"][(rows.page_table[:, 0] - 1) // WIDTH]
        at = jnp.minimum(rows.positions[:, 1:], texts.shape[1] - 1)
        return (jnp.take_along_axis(texts, at, axis=1) + weights.draft["off"]) % self.vocab


def make_drafter(name: str, vocab: int) -> tuple[Drafter, Any]:
    """The drafter of that name and its parameters; the texts of right and wrong ones are given with the draws."""
    if name.startswith("v"):
        config = draft_config(vocab, int(name[1]))
        return DFlashDrafter(config), with_injection(random_tree(draft_specs(config), seed=3), config)
    told = ByPage(vocab=vocab)
    drafters = {"none": NoDrafter(), "ngram": NgramDrafter(3), "right": told, "wrong": told}
    return drafters[name], None


def make_engine(
    drafter: Drafter, draft_params: Any = None, vocab: int = 16, logits: np.ndarray | None = None, **settings: Any
) -> Engine:
    """An engine over the target, compiled lightly; four slots, pages of four tokens, prompts in chunks of eight."""
    config = target_config(vocab)
    checkpoint = TargetCheckpoint(config, None, None, Path("bigram"), "bigram")  # type: ignore[arg-type]
    weights = Weights(target_params(vocab, logits), draft_params)
    loaded = Loaded(checkpoint, drafter, weights, jnp.dtype("float32"), "cpu", make_mesh())
    sizes = {"page_size": PAGE, "max_running_requests": 4, "max_model_len": 64, "chunked_prefill_size": 8}
    options = EngineSettings("bigram", "bigram", **(sizes | {"speculation": "always"} | settings))
    with light_compilation():
        return Engine(options, loaded)


@functools.cache
def compiled(config: StepConfig) -> Steps:
    return Steps(config)


# -- draws -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Draws:
    """texts int32 [N, 3]: V where a text had ended before; first: tokens that the first round committed, int32 [N]."""

    texts: np.ndarray
    first: np.ndarray

    @property
    def acceptance(self) -> float:
        """Mean of the first rounds that committed anything."""
        return float(self.first[self.first > 0].mean())


def draw(
    name: str, vocab: int, params: SamplingParams, told: np.ndarray | None = None, needs: Needs | None = None
) -> Draws:
    """`name` is a drafter's, for DFlash with "-argmax" or "-coupled" behind it; told: the texts it is told.

    needs: what the steps are compiled for, by default what `params` ask for.
    """
    short, _, how = name.partition("-")
    drafter, draft_params = make_drafter(short, vocab)
    config = StepConfig(target_config(vocab), drafter, PAGE, draft_sampling=how or "coupled")
    if told is not None:
        texts = np.concatenate([np.tile(np.int32(PROMPT), (DRAWS, 1)), told], axis=1)
        draft_params = {"texts": jnp.asarray(texts), "off": jnp.int32(short == "wrong")}
    weights = Weights(target_params(vocab), draft_params)
    return run(compiled(config), weights, params, needs or needs_of(params))


def run(steps: Steps, weights: Weights, params: SamplingParams, needs: Needs) -> Draws:
    """A prefill and the two rounds that are enough, a slot for each of the seeds 0 … DRAWS − 1."""
    vocab, block = steps.config.target.vocab_size, steps.config.drafter.max_block
    slots = np.arange(DRAWS, dtype=np.int32)
    state = admitted(steps, params)
    state, packed = steps.prefill(weights, state, prompts(slots), needs=needs)
    columns = [np.asarray(packed)[:, 2:3]]
    counts = [np.asarray(packed)[:, 0]]
    for _ in range(NEW - 1):
        state, packed = steps.decode_round(block, weights, state, jnp.asarray(slots), needs=needs)
        counts.append(np.asarray(packed)[:, 0])
        columns.append(np.asarray(packed)[:, 2 : 2 + block])
    texts = np.full((DRAWS, NEW), vocab, np.int32)
    at = np.zeros(DRAWS, np.int32)
    for count, tokens in zip(counts, columns, strict=True):
        for k in range(tokens.shape[1]):
            rows = np.flatnonzero(k < count)
            texts[rows, at[rows] + k] = tokens[rows, k]
        at += count
    assert np.asarray(state.finished)[:-1].all(), "a round emits a token at least"
    return Draws(texts, counts[1])


def admitted(steps: Steps, params: SamplingParams) -> Any:
    """All slots given to requests that differ in their seed alone."""
    config, mesh = steps.config, make_mesh()
    vocab, num_pages = config.target.vocab_size, 1 + DRAWS * WIDTH
    kv = make_pool(config.target, num_pages, PAGE, jnp.float32, mesh)
    draft = config.drafter.init_cache(num_pages, PAGE, jnp.float32, mesh)
    state = init_state(DRAWS, WIDTH, kv, draft, vocab)
    slots = np.arange(DRAWS, dtype=np.int32)
    sampling = _repeated(sampling_rows([params]))
    sampling = dataclasses.replace(sampling, seed=np.stack([slots, np.full(DRAWS, 7)], axis=1).astype(np.uint32))
    stops = np.full((DRAWS, MAX_STOP_IDS), -1, np.int32)
    stops[:, : len(params.stop_token_ids)] = params.stop_token_ids
    tables = 1 + np.arange(DRAWS * WIDTH, dtype=np.int32).reshape(DRAWS, WIDTH)
    limit = np.full(DRAWS, len(PROMPT) + NEW, np.int32)
    state = steps.admit(state, Admission(slots, limit, stops, tables, sampling))
    if not params.edits_logits:
        return state
    row = edit_row(Arrival(0, 0, (), params.stop_token_ids, params, PROMPT), vocab)
    return steps.edit(state, slots, _repeated(row))


def _repeated(rows: Any) -> Any:
    """One row as DRAWS equal ones."""
    return jax.tree.map(lambda a: np.repeat(a, DRAWS, axis=0), rows)


def prompts(slots: np.ndarray) -> PrefillBatch:
    n = len(slots)
    tokens = np.tile(np.int32(PROMPT), (n, 1))
    return PrefillBatch(tokens, slots, np.zeros(n, np.int32), np.full(n, len(PROMPT), np.int32), np.ones(n, bool))


# -- what must come out ------------------------------------------------------------------------------------------------


def enumerated(vocab: int, params: SamplingParams) -> np.ndarray:
    """float64 [V + 1, V + 1, V + 1]: the probability of every text; index V stands for no token after an end."""
    joint = np.zeros((vocab + 1,) * NEW)
    grow(joint, bigram_logits(vocab).astype(np.float64), params, (), 1.0)
    return joint


def grow(joint: np.ndarray, logits: np.ndarray, params: SamplingParams, text: tuple[int, ...], share: float) -> None:
    """Add the probabilities of all texts that begin with `text`, which together have that `share`."""
    if len(text) == NEW or (text and text[-1] in params.stop_token_ids):
        joint[(*text, *[len(logits)] * (NEW - len(text)))] += share
        return
    changed = changed_logits(logits[[*PROMPT, *text][-1]], params, PROMPT, text)
    chances = filtered(np.exp((changed - changed.max()) / params.temperature), params)
    for token in np.flatnonzero(chances):
        grow(joint, logits, params, (*text, int(token)), share * chances[token])


def changed_logits(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], text: Sequence[int]
) -> np.ndarray:
    """Logits [V] after prompt and `text`, changed by lists and bias, early stops and penalties."""
    x = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if params.allowed_token_ids is not None:
        x[[token for token in range(x.size) if token not in params.allowed_token_ids]] = -np.inf
    x[list(params.bad_token_ids)] = -np.inf
    if len(text) < params.min_tokens:
        x[list(params.stop_token_ids)] = -np.inf
    for token in range(x.size):
        often = list(text).count(token)
        if often or token in prompt:
            x[token] *= params.repetition_penalty ** (-1 if x[token] > 0 else 1)
        x[token] -= often * params.frequency_penalty + (often > 0) * params.presence_penalty
    return x


def filtered(p: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities of weights p whose largest is 1, cut by min-p, top-k and top-p; ties stay together."""
    p = np.where(p >= params.min_p, p, 0)
    if params.top_k:
        p = np.where(p >= np.sort(p)[::-1][min(params.top_k, p.size) - 1], p, 0)
    p /= p.sum()
    above = np.array([p[p > one].sum() for one in p])
    p = np.where(above < params.top_p, p, 0)
    return p / p.sum()


def p_values(texts: np.ndarray, joint: np.ndarray) -> list[float]:
    """Of the whole texts, and of their first, second and third tokens."""
    counts = np.zeros(joint.shape)
    np.add.at(counts, tuple(texts.T), 1)
    found = [chi_square_p(counts, joint)]
    for place in range(NEW):
        others = tuple(axis for axis in range(NEW) if axis != place)
        found.append(chi_square_p(counts.sum(axis=others), joint.sum(axis=others)))
    return found


def chi_square_p(counts: np.ndarray, chances: np.ndarray) -> float:
    """The p-value of `counts`; 0 where something came that cannot.  Cells that expect under 5 are one cell."""
    counts, expected = counts.ravel(), chances.ravel() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    pairs = [*zip(counts[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() >= 5:
        pairs.append((counts[rare].sum(), expected[rare].sum()))
    statistic = sum((count - want) ** 2 / want for count, want in pairs)
    return float(jax.scipy.special.gammaincc((len(pairs) - 1) / 2, statistic / 2)) if len(pairs) > 1 else 1.0
