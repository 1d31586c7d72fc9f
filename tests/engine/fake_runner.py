"""A device that can be worked out by hand, and that checks what the host asks of it.

Model: the "KV" of a position is a number that depends on all tokens up to it, and the next token on that number.
Pages hold these numbers, target and draft apart. Before it computes, a launch compares every row below `seq_len` with
what the tokens say, so one stale, stolen or unwritten row is found at once. Every write is checked against the pool:
the page must have exactly one holder and be unknown to the prefix cache.

Work is queued and runs in order of launch, as late as possible or at times drawn from `rng`: a page released while a
launch that writes to it is in flight is caught.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_jax.engine.loop import Loop
from dflash_jax.engine.pages import PagePool
from dflash_jax.engine.protocol import PrefillRow, RowResult
from dflash_jax.engine.request import Request
from dflash_jax.engine.scheduler import SchedulerConfig

VOCAB = 40
POISON = -1


def mix(state: int, token: int) -> int:
    return (state * 1000003 ^ (token + 1) * 7919) % 2147483647


def next_token(state: int) -> int:
    return (state >> 5) % VOCAB


class Truth:
    """A prompt and its continuation, with the KV number of each position, as far as anyone asked."""

    def __init__(self, prompt: Sequence[int]):
        self.tokens = list(prompt)
        self.kv: list[int] = []

    def upto(self, length: int) -> Truth:
        """Make `length` + 1 tokens and `length` KV numbers known."""
        while len(self.kv) < length:
            state = mix(self.kv[-1] if self.kv else 17, self.tokens[len(self.kv)])
            self.kv.append(state)
            if len(self.kv) == len(self.tokens):
                self.tokens.append(next_token(state))
        return self


@dataclass
class Script:
    """Stands where sampling parameters stand: the fake's own knowledge of a request.

    right: drafts in a round at seq_len p agree with the target for right[p % len(right)] tokens.
    breaks_at: the launch that computes the token at this position ends with an error instead.
    """

    prompt: Sequence[int]
    right: Sequence[int] = (3,)
    breaks_at: int | None = None
    truth: Truth = field(init=False)

    def __post_init__(self) -> None:
        self.truth = Truth(self.prompt)


@dataclass
class Solo:
    tokens: list[int]
    accept_lengths: list[int]
    finish_reason: str


def solo_run(
    script: Script,
    max_new_tokens: int,
    *,
    block_size: int,
    stop_ids: Sequence[int] = (),
    max_model_len: int = 10**6,
    stop_pair: tuple[int, int] | None = None,
) -> Solo:
    """What a request gives alone, token by token; stop_pair stands for a stop string of two tokens."""
    length = min(max_new_tokens, max_model_len - len(script.prompt))
    start = len(script.prompt)
    out = script.truth.upto(start + length).tokens[start : start + length]
    reason = "length"
    for count in range(1, length + 1):
        if out[count - 1] in stop_ids or (stop_pair and tuple(out[:count][-2:]) == stop_pair):
            out, reason = out[:count], "stop"
            break
    accept, done = [], 1
    while done < len(out):
        right = script.right[(start + done - 1) % len(script.right)]
        accept.append(min(right + 1, block_size, len(out) - done))
        done += accept[-1]
    return Solo(out, accept, reason)


@dataclass
class SlotState:
    script: Script
    limit: int
    stop_ids: Sequence[int]
    table: list[int]
    seq_len: int | None = None  # unknown until the first row after admission
    finished: bool = False


class FakePending:
    def __init__(self, runner: FakeRunner):
        self._runner = runner
        runner.launches += 1
        self._number = runner.launches
        self.rows: list[RowResult] | None = None
        runner.log.append(("launch", self._number))

    def result(self) -> list[RowResult]:
        self._runner.log.append(("read", self._number))
        while self.rows is None:
            self._runner.run_one()
        return self.rows


class FakeRunner:
    """See the module's docstring. `pool` is the scheduler's, set by whoever builds the loop."""

    def __init__(
        self,
        *,
        num_slots: int = 4,
        page_size: int = 4,
        num_pages: int = 65,
        pages_per_slot: int = 16,
        block_size: int = 4,
        prefill_chunk: int = 16,
        max_prefill_rows: int = 4,
        rng: random.Random | None = None,
    ):
        self.num_slots, self.page_size, self.num_pages = num_slots, page_size, num_pages
        self.pages_per_slot, self.block_size = pages_per_slot, block_size
        self.prefill_chunk, self.max_prefill_rows = prefill_chunk, max_prefill_rows
        self.pool: PagePool | None = None
        self.target = [[POISON] * page_size for _ in range(num_pages)]
        self.draft = [[POISON] * page_size for _ in range(num_pages)]
        self.slots: dict[int, SlotState] = {}
        self.log: list[tuple[str, Any]] = []  # every call in order: what a test asserts about interleaving
        self.launches = 0
        self._rng = rng
        self._queue: list[Callable[[], None]] = []

    # -- the contract --------------------------------------------------------------------------------------------

    def admit(self, slot: int, *, prompt_ids: Any, output_ids: Any, limit_tokens: int, pages: Any,
              stop_ids: Any, sampling: Any) -> None:  # fmt: skip
        assert 0 <= slot < self.num_slots
        script = sampling if isinstance(sampling, Script) else sampling.script
        assert isinstance(script, Script) and list(prompt_ids) == list(script.prompt)
        assert len(prompt_ids) + len(output_ids) < limit_tokens
        assert 0 < len(pages) <= self.pages_per_slot and len(set(pages)) == len(pages) and 0 not in pages
        table = [*pages, *[0] * (self.pages_per_slot - len(pages))]
        state = SlotState(script, limit_tokens, tuple(stop_ids), table)
        self.log.append(("admit", slot))
        self._enqueue(lambda: self.slots.__setitem__(slot, state))

    def extend(self, updates: Sequence[tuple[int, int, int]]) -> None:
        assert updates
        for update in updates:
            self._enqueue(lambda update=update: self._run_extend(*update))

    def prefill(self, rows: Sequence[PrefillRow]) -> FakePending:
        assert 0 < len(rows) <= self.max_prefill_rows
        assert all(0 < len(row.tokens) <= self.prefill_chunk for row in rows)
        assert len({row.slot for row in rows}) == len(rows)
        self.log.append(("prefill", [(row.slot, row.start, len(row.tokens), row.last) for row in rows]))
        return self._launch(lambda: [self._run_prefill(row) for row in rows])

    def decode(self, slots: Sequence[int], block_size: int) -> FakePending:
        assert 1 <= block_size <= self.block_size and slots and len(set(slots)) == len(slots)
        self.log.append(("decode", list(slots)))
        return self._launch(lambda: [self._run_decode(self.slots[slot], block_size) for slot in slots])

    def finish(self, slots: Sequence[int]) -> None:
        assert slots
        self.log.append(("finish", list(slots)))
        for slot in slots:
            self._enqueue(lambda slot=slot: setattr(self.slots[slot], "finished", True))

    def calls(self, *names: str) -> list[tuple[str, Any]]:
        """The log, reduced to these names."""
        return [entry for entry in self.log if entry[0] in names]

    # -- the queue -----------------------------------------------------------------------------------------------

    def _launch(self, work: Callable[[], list[RowResult]]) -> FakePending:
        pending = FakePending(self)
        self._enqueue(lambda: setattr(pending, "rows", work()))
        return pending

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        while self._rng and self._queue and self._rng.random() < 0.3:
            self.run_one()

    def run_one(self) -> None:
        self._queue.pop(0)()

    # -- the device ----------------------------------------------------------------------------------------------

    def _run_extend(self, slot: int, index: int, page: int) -> None:
        table = self.slots[slot].table
        assert page and table[index] == 0 and table[index - 1] != 0, f"slot {slot}: page {page} at {index} of {table}"
        table[index] = page

    def _run_prefill(self, row: PrefillRow) -> RowResult:
        state = self.slots[row.slot]
        if state.finished:
            return RowResult([], None)
        assert state.seq_len in (None, row.start), f"chunk at {row.start}, slot has {state.seq_len}"
        end = row.start + len(row.tokens)
        truth = state.script.truth.upto(end)
        assert list(row.tokens) == truth.tokens[row.start : end], "prefill of tokens that are not the request's"
        state.seq_len = row.start
        self._check_cache(state)
        self._write(state, self.target, row.start, truth.kv[row.start : end], must_exist=True)
        self._write(state, self.draft, row.start, truth.kv[row.start : end], must_exist=True)
        state.seq_len = end
        return self._emit(state, truth.tokens[end : end + 1], end) if row.last else RowResult([], None)

    def _run_decode(self, state: SlotState, block_size: int) -> RowResult:
        if state.finished:
            return RowResult([], None)
        self._check_cache(state)
        start = state.seq_len
        assert start is not None
        truth = state.script.truth.upto(start + block_size)
        right = min(state.script.right[start % len(state.script.right)], block_size - 1)
        block = truth.kv[start : start + right + 1] + [POISON] * (block_size - 1 - right)
        self._write(state, self.target, start, block)
        result = self._emit(state, truth.tokens[start + 1 : start + right + 2], start + 1)
        state.seq_len = start + len(result.tokens)
        self._write(state, self.draft, start, truth.kv[start : state.seq_len], must_exist=True)
        return result

    def _emit(self, state: SlotState, tokens: list[int], known: int) -> RowResult:
        """Cut by stop ids and limit; `known` tokens of the request existed before."""
        for count, token in enumerate(tokens, 1):
            if known + count - 1 == state.script.breaks_at:
                state.finished = True
                return RowResult([], "error")
            reason = "stop" if token in state.stop_ids else "length" if known + count == state.limit else None
            if reason:
                state.finished = True
                return RowResult(tokens[:count], reason)
        return RowResult(tokens, None)

    def _check_cache(self, state: SlotState) -> None:
        """Target and draft KV below seq_len are those of the request's tokens."""
        assert state.seq_len is not None
        size = self.page_size
        kv = state.script.truth.upto(state.seq_len).kv
        for index, start in enumerate(range(0, state.seq_len, size)):
            want = kv[start : min(start + size, state.seq_len)]
            page = state.table[index]
            assert page, f"position {start} < seq_len {state.seq_len} is on the padding page"
            assert self.target[page][: len(want)] == want, f"target KV of page {page} is not that of its tokens"
            assert self.draft[page][: len(want)] == want, f"draft KV of page {page} is not that of its tokens"

    def _write(self, state: SlotState, pool: list[list[int]], start: int, values: list[int], must_exist: bool = False):
        for position, value in enumerate(values, start):
            index, offset = divmod(position, self.page_size)
            page = state.table[index] if index < self.pages_per_slot else 0
            assert page or not must_exist, f"position {position} is committed but has no page"
            if page:
                self._check_writable(page)
                pool[page][offset] = value

    def _check_writable(self, page: int) -> None:
        assert self.pool is not None
        holders, known = self.pool.holders(page), self.pool.is_marked(page)
        assert holders == 1 and not known, f"write to page {page}: {holders} holders, {known=} to the prefix cache"


def make_request(name: str, script: Script, max_new_tokens: int = 8, **options: Any) -> Request:
    return Request(name, script.prompt, max_new_tokens, sampling=script, **options)


def make_loop(runner: FakeRunner, *, limits: dict[str, Any] | None = None, **options: Any) -> Loop:
    """A loop over the fake, which from now on checks every write against the loop's page pool."""
    loop = Loop(runner, SchedulerConfig.of(runner, **(limits or {})), **options)
    runner.pool = loop.scheduler.pool
    return loop


def run(loop: Loop, *requests: Request, most_steps: int = 2000) -> None:
    """Serve to the end, checking all books after every step."""
    for request in requests:
        loop.add(request)
    for _ in range(most_steps):
        loop.step()
        loop.scheduler.integrity()
        if not loop.has_work:
            return
    raise AssertionError(f"not done after {most_steps} steps: {loop.metrics()}")


def assert_nothing_leaks(loop: Loop) -> None:
    scheduler = loop.scheduler
    assert not (scheduler.requests or scheduler.waiting or scheduler.live or scheduler.seats)
    assert scheduler.pool.num_held == 0
    scheduler.cache.clear()
    scheduler.integrity()
    assert scheduler.pool.num_free == scheduler.pool.total and len(scheduler.cache) == 0
