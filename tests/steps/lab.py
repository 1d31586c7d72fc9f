"""Requests through compiled steps without an engine: what the engine does, in the plainest way."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.cache import make_pool
from dflash_jax.drafters import DFlashDrafter, Drafter, Weights
from dflash_jax.engine.build import on_mesh
from dflash_jax.ops import RUNNING
from dflash_jax.sharding import make_mesh
from dflash_jax.state import MAX_STOP_IDS, DecodeState, init_state
from dflash_jax.steps import Admission, PrefillBatch, StepConfig, Steps
from dflash_jax.steps.state_step import StateStep
from dflash_jax.weights import load_draft, load_target, open_draft, open_target

PAIRS = Path(__file__).resolve().parents[1] / "data" / "pairs"


def padded(rows: Sequence[Sequence[int]], shape: tuple[int, ...], fill: int) -> Any:
    """int32 of that shape, row i beginning with rows[i]; on the host, as the engine hands it over."""
    out = np.full(shape, fill, np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def int32(values: Sequence[int]) -> Any:
    return np.array(values, np.int32)


@functools.cache
def compiled(config: StepConfig) -> Steps:
    """One for all labs of the same configuration: compiled once a session."""
    return Steps(config)


@functools.cache
def lightly(steps: Steps) -> dict[Any, Any]:
    """Launches of `steps` compiled with little optimisation, by name and shapes."""
    return {}


def light_options() -> dict[str, Any]:
    """Compiling dominates these tests; on CPU it takes half as long without LLVM's optimiser."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


@dataclasses.dataclass
class Lab:
    """The steps of one pair, with the shapes that all its tests share.

    bucket: rows of a launch; chunk: tokens of a prefill row; slots, width: request slots, and pages of each.
    """

    config: StepConfig
    weights: Weights
    bucket: int
    chunk: int
    slots: int
    width: int
    light: bool = False

    @property
    def steps(self) -> Steps:
        return compiled(self.config)

    def prefill(self, weights: Weights, state: DecodeState, batch: PrefillBatch) -> tuple[DecodeState, jax.Array]:
        if not self.light:
            return self.steps.prefill(weights, state, batch)
        key = "prefill", *batch.tokens.shape, self.slots, self.width
        program = self._lightly(key, lambda: self.steps.prefill.lower(weights, state, batch))
        return self.steps.prefill.run(program, weights, state, batch)

    def decode_round(
        self, block: int, weights: Weights, state: DecodeState, slots: jax.Array
    ) -> tuple[DecodeState, jax.Array]:
        if not self.light:
            return self.steps.decode_round(block, weights, state, slots)
        assert isinstance(self.steps.decode_round, StateStep)
        key = "decode_round", block, len(slots), self.slots, self.width
        lower = functools.partial(self.steps.decode_round.lower, block, weights, state, slots)
        return self.steps.decode_round.run(self._lightly(key, lower), weights, state, slots)

    def _lightly(self, key: tuple[Any, ...], lower: Callable[[], Any]) -> Any:
        """The launch of that name and shapes, compiled at its first use."""
        known = lightly(self.steps)
        if key not in known:
            known[key] = lower().compile(compiler_options=light_options())
        return known[key]

    @property
    def page_size(self) -> int:
        return self.config.page_size

    @property
    def num_pages(self) -> int:
        return self.slots * self.width + 2  # page 0, and one that nobody owns

    @property
    def block(self) -> int:
        return self.config.drafter.max_block

    def state(self) -> DecodeState:
        """Nothing admitted, pools of zeros."""
        mesh, size, dtype = make_mesh(), self.page_size, self.weights.target["embed"].dtype
        kv = make_pool(self.config.target, self.num_pages, size, dtype, mesh)
        draft = self.config.drafter.init_cache(self.num_pages, size, dtype, mesh)
        return on_mesh(init_state(self.slots, self.width, kv, draft), mesh)

    def table(self, slot: int) -> list[int]:
        """Its pages, in an order that is not the pool's."""
        return [1 + slot + self.slots * i for i in range(self.width)][::-1]

    def where(self, slots: Sequence[int], bucket: int | None = None) -> jax.Array:
        """`slots` padded with the padding slot to the bucket, on the device."""
        bucket = bucket or self.bucket
        return jnp.asarray([*slots, *[self.slots] * (bucket - len(slots))], jnp.int32)


@dataclasses.dataclass
class Request:
    """One request and what came of it; `limit` counts prompt and output."""

    slot: int
    prompt: list[int]
    limit: int
    stop: tuple[int, ...] = ()
    table: list[int] | None = None
    shared: int = 0  # tokens at the start of the prompt whose KV is in the table's pages already
    tokens: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    finish: int = RUNNING

    @property
    def seq_len(self) -> int:
        """Tokens whose KV is committed: all but the newest."""
        return len(self.prompt) + len(self.tokens) - 1


class Run:
    """Requests over one state, launched together.  `decode` goes on until all are finished."""

    def __init__(
        self, lab: Lab, requests: Sequence[Request], state: DecodeState | None = None, admit: bool = True
    ):
        self.lab, self.requests = lab, list(requests)
        self.state = lab.state() if state is None else state
        for request in self.requests:
            request.table = lab.table(request.slot) if request.table is None else request.table
        if admit and self.requests:
            self.admit()

    def admit(self) -> None:
        n = len(self.requests)
        new = Admission(
            int32([r.slot for r in self.requests]),
            int32([r.limit for r in self.requests]),
            padded([r.stop for r in self.requests], (n, MAX_STOP_IDS), -1),
            padded([r.table or [] for r in self.requests], (n, self.lab.width), 0),
        )
        self.state = self.lab.steps.admit(self.state, new)

    def prefill(self, chunk: int | None = None) -> Run:
        """All prompts, `chunk` tokens of each at a time."""
        chunk = chunk or self.lab.chunk
        done = {r.slot: r.shared for r in self.requests}
        while pending := [r for r in self.requests if done[r.slot] < len(r.prompt)]:
            self._chunk(pending, [done[r.slot] for r in pending], chunk)
            done.update({r.slot: min(done[r.slot] + chunk, len(r.prompt)) for r in pending})
        return self

    def _chunk(self, requests: list[Request], starts: list[int], chunk: int) -> None:
        lab, parts = self.lab, []
        for request, start in zip(requests, starts, strict=True):
            parts.append(request.prompt[start : start + chunk])
        spare = lab.bucket - len(requests)
        ends: Any = [s + len(p) == len(r.prompt) for r, s, p in zip(requests, starts, parts, strict=True)]
        batch = PrefillBatch(
            padded(parts, (lab.bucket, lab.chunk), 0),
            int32([*[r.slot for r in requests], *[lab.slots] * spare]),
            int32([*starts, *[0] * spare]),
            int32([*map(len, parts), *[0] * spare]),
            jnp.asarray([*ends, *[False] * spare]),
        )
        self.state, packed = lab.prefill(lab.weights, self.state, batch)
        self._take(requests, np.asarray(packed))

    def _take(self, requests: list[Request], packed: np.ndarray) -> None:
        for request, (count, finish, *tokens) in zip(requests, packed.tolist(), strict=False):
            assert not any(tokens[count:]), "tokens behind the count"
            request.tokens += tokens[:count]
            request.finish = finish or request.finish

    @property
    def live(self) -> list[Request]:
        return [r for r in self.requests if r.finish == RUNNING]

    def round(self, block: int | None = None, weights: Weights | None = None) -> Run:
        """One round of the requests that are not finished."""
        lab, live = self.lab, self.live
        slots = lab.where([r.slot for r in live])
        self.state, packed = lab.decode_round(block or lab.block, weights or lab.weights, self.state, slots)
        packed = np.asarray(packed)
        for request, count in zip(live, packed[:, 0].tolist(), strict=False):
            request.accepted.append(count)
        self._take(live, packed)
        return self

    def decode(self, block: int | None = None) -> Run:
        while self.live:
            self.round(block)
        return self


def solo(lab: Lab, prompt: Sequence[int], new: int, block: int | None = None, **how: Any) -> Request:
    """One request alone in slot 0 of a new state."""
    request = Request(0, list(prompt), len(prompt) + new, **how)
    Run(lab, [request]).prefill().decode(block)
    return request


def pools(state: DecodeState) -> list[np.ndarray]:
    """Every pool of target and drafter on the host, whatever the drafter keeps."""
    return [np.asarray(x) for x in jax.tree.leaves((state.kv, state.draft))]


def owned_rows(lab: Lab, requests: Sequence[Request]) -> np.ndarray:
    """bool [P, C]: rows that hold a committed token of one of the requests."""
    owned = np.zeros((lab.num_pages, lab.page_size), bool)
    for request in requests:
        for position in range(request.seq_len):
            page, offset = divmod(position, lab.page_size)
            owned[(request.table or [])[page], offset] = True
    return owned


def poisoned(lab: Lab, state: DecodeState, requests: Sequence[Request]) -> DecodeState:
    """NaN in every pool row that holds no committed token of the requests, those of the padding page included."""
    owned = owned_rows(lab, requests)[:, None, None, :, None]

    def poison(leaf: jax.Array) -> jax.Array:
        return jnp.where(owned, leaf, jnp.nan).astype(leaf.dtype) if leaf.ndim == 5 else leaf

    return dataclasses.replace(state, kv=tuple(map(poison, state.kv)), draft=jax.tree.map(poison, state.draft))


def drafter_of(name: str) -> tuple[StepConfig, Weights]:
    """The pair of that name in float32, in pages of 16."""
    mesh = make_mesh()
    target = open_target(PAIRS / name / "target")
    draft = open_draft(PAIRS / name / "draft", target.config)
    weights = Weights(load_target(target, jnp.float32, mesh), load_draft(draft, jnp.float32, mesh))
    drafter: Drafter = DFlashDrafter(draft.config)
    return StepConfig(target.config, drafter, 16), weights


@functools.cache
def oracle_lab(name: str) -> Lab:
    """All six whole-block cases of a pair fit into one launch."""
    config, weights = drafter_of(name)
    return Lab(config, weights, bucket=6, chunk=40, slots=6, width=9, light=True)


@functools.cache
def oracle_cases(name: str) -> list[dict[str, Any]]:
    """expected.json with what rounds.json adds."""
    expected = json.loads((PAIRS / name / "expected.json").read_text())
    rounds = json.loads((PAIRS / name / "rounds.json").read_text())
    return [{**case, **more} for case, more in zip(expected, rounds, strict=True)]
