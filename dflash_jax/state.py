"""What lives on the device between rounds: a frozen pytree, whose changing fields are donated to every step.

There are S request slots and one more, the padding slot (index S): a round over a bucket larger than the
live requests points its spare rows there.  It is finished for ever and writes only to the padding page.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.cache import Pool
from dflash_jax.ops import GREEDY, EditRows, SamplingRows

EDIT_BYTES = 9  # of a request's `EditRows`, for each token of the vocabulary
MAX_STOP_IDS = 16  # stop tokens a request may name; unused entries are −1, which no token equals


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Per-slot arrays have a leading axis S + 1.

    bonus: newest emitted token, whose KV is not there yet; seq_len: tokens whose KV is committed, hence the
    position of the bonus; limit: tokens the request may hold in all; finished; stop_ids [S+1, MAX_STOP_IDS];
    sampling: how its tokens are chosen; page_table [S+1, W] (page 0 where nothing is reserved); kv: the target's
    pool; draft: the drafter's state; edits: what a request changes in the logits (None: no request may).
    """

    bonus: Array
    seq_len: Array
    limit: Array
    finished: Array
    stop_ids: Array
    sampling: SamplingRows
    page_table: Array
    kv: Pool
    draft: Any
    edits: EditRows | None = None

    @property
    def num_slots(self) -> int:
        """S: request slots, the padding slot not counted."""
        return self.bonus.shape[0] - 1


def greedy_rows(n: int) -> SamplingRows:
    """Sampling of n rows that do not sample."""
    return SamplingRows(
        temperature=jnp.zeros(n, jnp.float32),
        min_p=jnp.zeros(n, jnp.float32),
        top_k=jnp.zeros(n, jnp.int32),
        top_p=jnp.ones(n, jnp.float32),
        seed=jnp.zeros((n, 2), jnp.uint32),
    )


def no_edits(n: int, vocab_size: int) -> EditRows:
    """n rows that change nothing."""
    return EditRows(
        active=jnp.zeros(n, bool),
        bias=jnp.zeros((n, vocab_size), jnp.float32),
        emitted=jnp.zeros((n, vocab_size), jnp.int32),
        in_prompt=jnp.zeros((n, vocab_size), bool),
        repetition=jnp.ones(n, jnp.float32),
        presence=jnp.zeros(n, jnp.float32),
        frequency=jnp.zeros(n, jnp.float32),
        stops_from=jnp.zeros(n, jnp.int32),
    )


def init_state(num_slots: int, pages_per_slot: int, kv: Pool, draft: Any, vocab_size: int | None = None) -> DecodeState:
    """All slots empty and finished.  With the target's `vocab_size` they may change logits, EDIT_BYTES · V each."""
    n = num_slots + 1
    return DecodeState(
        bonus=jnp.zeros(n, jnp.int32),
        seq_len=jnp.zeros(n, jnp.int32),
        limit=jnp.zeros(n, jnp.int32),
        finished=jnp.ones(n, bool),
        stop_ids=jnp.full((n, MAX_STOP_IDS), -1, jnp.int32),
        sampling=greedy_rows(n),
        page_table=jnp.zeros((n, pages_per_slot), jnp.int32),
        kv=kv,
        draft=draft,
        edits=None if vocab_size is None else no_edits(n, vocab_size),
    )


@dataclasses.dataclass(frozen=True)
class Needs:
    """What any request of a launch asks for, static in its step; a row's tokens are the same under all that suffice.

    mode: GREEDY, SAMPLE or FILTER; edits: logits are changed before; logprobs: how many alternatives are reported
    with each token (None: no log-probabilities); prompt_logprobs: the same for the tokens of prompts.
    """

    mode: str = GREEDY
    edits: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __str__(self) -> str:
        parts = [self.mode, "edits" if self.edits else ""]
        parts += [f"{name} {n}" for name, n in (("logprobs", self.logprobs), ("prompt logprobs", self.prompt_logprobs))
                  if n is not None]  # fmt: skip
        return " + ".join(part for part in parts if part)


NOTHING = Needs()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Live:
    """The rows of one round, gathered from their slots: every array has a leading axis S = rows of the bucket.

    `seq_len` of a row that is not live is 0, so that it reads no committed token.
    """

    slots: Array
    bonus: Array
    seq_len: Array
    limit: Array
    live: Array
    stop_ids: Array
    sampling: SamplingRows
    page_table: Array
    edits: EditRows | None = None


def gather(state: DecodeState, slots: Array, edits: bool = False) -> Live:
    """The rows that `slots` int32 [S] name."""
    live = ~state.finished[slots]
    return Live(
        slots=slots,
        bonus=state.bonus[slots],
        seq_len=jnp.where(live, state.seq_len[slots], 0),
        limit=state.limit[slots],
        live=live,
        stop_ids=state.stop_ids[slots],
        sampling=jax.tree.map(lambda x: x[slots], state.sampling),
        page_table=state.page_table[slots],
        edits=jax.tree.map(lambda x: x[slots], state.edits) if edits else None,
    )


def count_emitted(state: DecodeState, slots: Array, tokens: Array, kept: Array) -> DecodeState:
    """Count tokens int32 [S, K] of `slots` int32 [S] as emitted, those `kept` bool [S, K]."""
    assert state.edits is not None
    emitted = state.edits.emitted.at[slots[:, None], tokens].add(kept.astype(jnp.int32))
    return dataclasses.replace(state, edits=dataclasses.replace(state.edits, emitted=emitted))
