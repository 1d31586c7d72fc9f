"""The functional steps inside a serving loop of one's own: no `Engine`, no `LLM`.

A serving stack that has its own scheduler, pages and sampling keeps them.  It gives each request a slot and pages,
prefills, and then runs rounds: either `decode_round`, which is everything in one compiled program, or its own program
put together from `prepare`, `draft`, `verify`, `accept`, `publish` and `commit`.  Both are shown; the second one bans
some tokens between `verify` and `accept`, as a stack with its own logits processors would.

    python examples/embed_steps.py
    python examples/embed_steps.py --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.cache import make_pool
from dflash_jax.drafters import DraftContext, Weights, make_drafter
from dflash_jax.sharding import make_mesh
from dflash_jax.state import MAX_STOP_IDS, DecodeState, gather, init_state
from dflash_jax.steps import (
    Admission,
    PrefillBatch,
    StepConfig,
    Steps,
    accept,
    commit,
    draft,
    prepare,
    publish,
    verify,
)
from dflash_jax.weights import load_target, open_target

PAIR = Path(__file__).resolve().parents[1] / "tests" / "data" / "pairs" / "x-default-taps"
PAGE_SIZE, PAGES_PER_REQUEST, CHUNK = 16, 8, 32

Round = Callable[[Weights, DecodeState, jax.Array], tuple[DecodeState, jax.Array]]


def open_pair(target: str, draft_name: str) -> tuple[StepConfig, Weights]:
    """What the steps are compiled for, and the weights, in float32."""
    mesh, dtype = make_mesh(), jnp.dtype("float32")
    checkpoint = open_target(target)
    drafter, draft_params = make_drafter(draft_name, DraftContext("", checkpoint, dtype, mesh))
    weights = Weights(load_target(checkpoint, dtype, mesh), draft_params)
    return StepConfig(checkpoint.config, drafter, PAGE_SIZE), weights


def own_round(config: StepConfig, banned: Sequence[int], weights: Weights, state: DecodeState, slots: jax.Array):
    """`decode_round` in its parts, with tokens that must not be said (the first token comes from `prefill`, though).

    Returns the state and int32 [S, B+2], as `decode_round` does.
    """
    live = gather(state, slots)
    rows = draft(config, weights, state, prepare(config, live, config.drafter.max_block))
    logits, hidden = verify(config, weights, state, rows)  # float32 [S, B, V]
    logits = logits.at[..., jnp.array(banned, jnp.int32)].set(-jnp.inf)
    state = dataclasses.replace(state, kv=hidden.pool)
    accepted = accept(config, live, rows, logits)
    state, packed = publish(state, live, accepted)
    return commit(config, weights, state, rows, hidden.taps, accepted.commit_len), packed


class Loop:
    """A serving loop at its smallest: request i has slot i and pages of its own, and all start together."""

    def __init__(self, config: StepConfig, weights: Weights, prompts: Sequence[Sequence[int]], max_new_tokens: int):
        self.config, self.weights, self.prompts = config, weights, prompts
        self.steps = Steps(config)
        self.slots = jnp.arange(len(prompts), dtype=jnp.int32)
        self.state = self.steps.admit(self._empty(), self._admission(max_new_tokens))
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.accepted: list[list[int]] = [[] for _ in prompts]

    def _empty(self) -> DecodeState:
        """Pools for target and drafter under one page table; page 0 is nobody's."""
        pages = 1 + len(self.prompts) * PAGES_PER_REQUEST
        mesh, dtype = make_mesh(), self.weights.target["embed"].dtype
        kv = make_pool(self.config.target, pages, PAGE_SIZE, dtype, mesh)
        draft_cache = self.config.drafter.init_cache(pages, PAGE_SIZE, dtype, mesh)
        return init_state(len(self.prompts), PAGES_PER_REQUEST, kv, draft_cache)

    def _admission(self, max_new_tokens: int) -> Admission:
        """`limit` counts prompt and output.  What a block has beyond the table goes to page 0 and is never kept."""
        count = len(self.prompts)
        limits = [min(len(prompt) + max_new_tokens, PAGE_SIZE * PAGES_PER_REQUEST) for prompt in self.prompts]
        stops = np.full((count, MAX_STOP_IDS), -1, np.int32)
        table = 1 + np.arange(count * PAGES_PER_REQUEST, dtype=np.int32).reshape(count, PAGES_PER_REQUEST)
        return Admission(self.slots, jnp.asarray(limits, jnp.int32), jnp.asarray(stops), jnp.asarray(table))

    def prefill(self) -> None:
        """Chunks of CHUNK tokens of every prompt; the last one of each yields its first token."""
        for start in range(0, max(map(len, self.prompts)), CHUNK):
            parts = [prompt[start : start + CHUNK] for prompt in self.prompts]
            tokens = np.zeros((len(parts), CHUNK), np.int32)
            for row, part in zip(tokens, parts, strict=True):
                row[: len(part)] = part
            ends = [bool(part) and start + len(part) == len(p) for part, p in zip(parts, self.prompts, strict=True)]
            batch = PrefillBatch(
                jnp.asarray(tokens), self.slots, jnp.full(len(parts), start, jnp.int32),
                jnp.asarray([len(part) for part in parts], jnp.int32), jnp.asarray(ends),
            )  # fmt: skip
            self.state, packed = self.steps.prefill(self.weights, self.state, batch)
            self._take(np.asarray(packed), rounds=False)

    def _take(self, packed: np.ndarray, rounds: bool) -> None:
        """A row is (number of tokens, why it ended or 0, tokens …); finished rows have no more tokens."""
        for output, accepted, (count, _, *tokens) in zip(self.outputs, self.accepted, packed.tolist(), strict=True):
            output += tokens[:count]
            if rounds and count:
                accepted.append(count)

    def run(self, round_: Round) -> list[list[int]]:
        """Prefill, then rounds until every request has ended.

        The device keeps all that a round needs, so a loop may launch the next one before it reads this one's tokens.
        """
        self.prefill()
        while not np.asarray(self.state.finished[: len(self.prompts)]).all():
            self.state, packed = round_(self.weights, self.state, self.slots)
            self._take(np.asarray(packed), rounds=True)
        return self.outputs


def main(argv: Sequence[str] | None = None) -> tuple[Loop, Loop]:
    """Two loops over the same prompts: the fused round, and one's own with the commonest token of the first banned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default=str(PAIR / "target"))
    parser.add_argument("--draft", default=str(PAIR / "draft"))
    parser.add_argument("--prompt-ids", metavar="1,2,3", action="append", help="a prompt as token ids; may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    args = parser.parse_args(argv)
    config, weights = open_pair(args.target, args.draft)
    given = args.prompt_ids or ["5,17,40,3", "20,21,22,23,24,25,26"]
    prompts = [[int(token) for token in ids.split(",")] for ids in given]

    fused = Loop(config, weights, prompts, args.max_new_tokens)
    block = config.drafter.max_block
    fused.run(functools.partial(fused.steps.decode_round, block))
    banned = max(set(fused.outputs[0]), key=fused.outputs[0].count)
    own = Loop(config, weights, prompts, args.max_new_tokens)
    own.run(jax.jit(functools.partial(own_round, config, (banned,)), donate_argnums=1))
    for name, loop in (("decode_round", fused), (f"own round, without token {banned}", own)):
        for output, accepted in zip(loop.outputs, loop.accepted, strict=True):
            print(f"{name}: {len(output)} tokens, accepted {accepted}: {output}")
    return fused, own


if __name__ == "__main__":
    main()
