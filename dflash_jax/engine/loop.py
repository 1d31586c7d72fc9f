"""The two loops: launch and read, or launch the next before reading the last. Both give the same tokens.

Not thread-safe: one thread calls `add`, `abort` and `step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.engine.metrics import EngineMetrics, MetricsRecorder
from dflash_jax.engine.protocol import Masked, Pending, PrefillRow, RowResult, Runner
from dflash_jax.engine.request import Request
from dflash_jax.engine.scheduler import DecodeBatch, PrefillBatch, Row, Scheduler, SchedulerConfig
from dflash_jax.errors import GrammarError

OnTokens = Callable[[Request, Sequence[int]], bool]
"""Sees every request's new tokens, already appended to its output; True stops the request (a stop string was found).

Before it returns True it may call `request.drop_tail(n)` to take back the n tokens after the one that completed the
stop string; then the output does not depend on the block size. It may be called for a request that has just finished
by itself: True then makes the reason "length" a "stop". If it raises, the request ends with reason "error" and keeps
the exception in `request.error`; nothing else is touched.
"""

ChooseBlock = Callable[[Sequence[Request]], int]
"""The width of the next round, 1 … runner.block_size, from the requests in it. Must not matter for the output."""


@dataclass(frozen=True, slots=True)
class Round:
    """A round that was read. committed: tokens of each request that was not finished before it.

    took_s: from its launch, or from the end of the launch before if that was later, until it was read. steady: the
    launches around it were rounds of the same shape, so that took_s is the time of such a round.
    """

    committed: list[int]
    took_s: float
    steady: bool


OnRound = Callable[[Round], None]
"""Hears of every round, in the order in which their widths were chosen."""


@dataclass(slots=True)  # not frozen: see RowResult
class Update:
    """A request's new tokens of one step; `finish_reason` is None until its last.

    An abort or an error may end a request without a token.
    """

    request: Request
    tokens: list[int]
    finish_reason: str | None


@dataclass(slots=True)
class Launch:
    """What is in flight. Rows name requests and seats, since a slot may have a new owner by the time they land.

    A round with grammars is `masked` until it has its masks, then `pending`.
    """

    rows: list[Row]
    pending: Pending | None
    block_size: int  # 0 for prefill
    launched_s: float
    masked: Masked | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.block_size


class Loop:
    """Drives a `Runner` by a `Scheduler`, one launch a step."""

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig | None = None,
        *,
        overlap: bool = True,
        on_tokens: OnTokens | None = None,
        choose_block: ChooseBlock | None = None,
        on_round: OnRound | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.runner = runner
        self.scheduler = Scheduler(config or SchedulerConfig.of(runner))
        self.overlap = overlap
        self.recorder = MetricsRecorder(runner.block_size)
        self._on_tokens = on_tokens
        self._choose_block = choose_block
        self._on_round = on_round
        self._clock = clock
        self._in_flight: Launch | None = None
        self._last_read: tuple[tuple[int, int], float] = (0, 0), 0.0  # its shape, and when
        self._failed: list[Update] = []  # of this step, by their grammar
        self._stopped: list[int] = []  # slots the host stopped since the last launch

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; UserError for one that could never be served."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request in any phase with reason "abort"; False if none of that id is waiting or running."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return False
        self._end(request, "abort")
        self.recorder.finished(request)
        return True

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or self.scheduler.has_work

    def metrics(self) -> EngineMetrics:
        return self.recorder.snapshot(self.scheduler)

    # -- the loops -----------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """One launch at most; returns the requests that got tokens or ended, in the order of their launch."""
        if not self.has_work:
            return []
        updates = self._step_overlapped() if self.overlap else self._step_plain()
        updates, self._failed = [*updates, *self._failed], []
        if not self.has_work:
            self.scheduler.integrity()
        return updates

    def _step_plain(self) -> list[Update]:
        launch = self._launch_next()
        self._allow(launch)
        return self._digest(launch)

    def _step_overlapped(self) -> list[Update]:
        """Masks come last: they depend on the tokens of the launch before."""
        last, self._in_flight = self._in_flight, self._launch_next()
        updates = self._digest(last)
        self._allow(self._in_flight)
        return updates

    # -- launch --------------------------------------------------------------------------------------------------

    def _launch_next(self) -> Launch | None:
        if self._stopped:  # before a new request is admitted to one of these slots
            self.runner.finish(self._stopped)
            self._stopped = []
        for request in self.scheduler.admit():
            self._admit(request)
        batch = self.scheduler.next_batch(idle=self._in_flight is None)
        if isinstance(batch, PrefillBatch):
            return self._launch_prefill(batch)
        if isinstance(batch, DecodeBatch):
            return self._launch_decode(batch)
        if self._in_flight is None and self.scheduler.has_work:
            raise RuntimeError(f"nothing can run: {self.metrics()}")
        return None

    def _admit(self, request: Request) -> None:
        seat = request.seat
        if seat is None:
            raise RuntimeError(f"request {request.request_id} was admitted without a seat")
        self.runner.admit(
            seat.slot,
            prompt_ids=request.prompt_ids,
            output_ids=request.output_ids,
            limit_tokens=request.limit_tokens,
            pages=tuple(seat.pages),
            stop_ids=request.stop_ids,
            sampling=request.sampling,
        )

    def _launch_prefill(self, batch: PrefillBatch) -> Launch:
        rows = [self._prefill_row(row) for row in batch.rows]
        start_s = self._now_s()
        return Launch(batch.rows, self.runner.prefill(rows), block_size=0, launched_s=start_s)

    def _prefill_row(self, row: Row) -> PrefillRow:
        tokens, end = row.seat.tokens, row.start + row.length
        after = tokens[end] if end < len(tokens) else 0
        masks = self._masks(row.request, ()) if row.last else None
        allowed = None if masks is None else masks[0]
        return PrefillRow(row.seat.slot, tokens[row.start : end], row.start, row.last, after, allowed)

    def _launch_decode(self, batch: DecodeBatch) -> Launch:
        if batch.new_pages:
            self.runner.extend(batch.new_pages)
        block_size = self._block_size([row.request for row in batch.rows])
        start_s = self._now_s()
        slots = [row.seat.slot for row in batch.rows]
        if any(row.request.grammar for row in batch.rows):
            return Launch(batch.rows, None, block_size, start_s, self.runner.decode_masked(slots, block_size))
        return Launch(batch.rows, self.runner.decode(slots, block_size), block_size, start_s)

    def _block_size(self, live: Sequence[Request]) -> int:
        if self._choose_block is None:
            return self.runner.block_size
        block_size = self._choose_block(live)
        if not 1 <= block_size <= self.runner.block_size:
            raise RuntimeError(f"choose_block returned {block_size}, not in 1 … {self.runner.block_size}")
        return block_size

    # -- grammars ------------------------------------------------------------------------------------------------

    def _allow(self, launch: Launch | None) -> None:
        """Give a round its masks, if it waits for them, while the device verifies it."""
        if launch is None or launch.masked is None:
            return
        blocks = zip(launch.rows, launch.masked.blocks(), strict=True)
        masks = [None if row.seat.closed else self._masks(row.request, block[1:]) for row, block in blocks]
        launch.pending, launch.masked = launch.masked.accept(masks), None

    def _masks(self, request: Request, drafts: Sequence[int]) -> Any:
        """What the request's grammar allows before, between and after these; None if it has none, or fails."""
        if request.grammar is None:
            return None
        try:
            return request.grammar.masks(drafts)
        except GrammarError as error:
            self._fail(request, error)
            self.recorder.finished(request)
            self._failed.append(Update(request, [], request.finish_reason))
            return None

    # -- digest --------------------------------------------------------------------------------------------------

    def _digest(self, launch: Launch | None) -> list[Update]:
        """Read a launch: first all bookkeeping, then the callbacks."""
        if launch is None:
            return []
        if launch.pending is None:
            raise RuntimeError("a round is read that was never given its masks")
        results = launch.pending.result()
        if len(results) != len(launch.rows):
            raise RuntimeError(f"the device returned {len(results)} rows for a launch of {len(launch.rows)}")
        if self._on_round:
            self._note_time(launch, results, self._on_round)
        self.recorder.launched(launch.block_size)
        pairs, now_s = zip(launch.rows, results, strict=True), self._clock()
        news = [(row.request, result.tokens) for row, result in pairs if self._digest_row(launch, row, result, now_s)]
        updates = [self._report(request, tokens) for request, tokens in news]
        self.recorder.generated(sum(len(update.tokens) for update in updates))
        return updates

    def _note_time(self, launch: Launch, results: list[RowResult], on_round: OnRound) -> None:
        """Tell of a round and how long it took: with overlap the next launch is in flight already."""
        (shape, before_s), now_s = self._last_read, self._now_s()
        self._last_read = launch.shape, now_s
        if not launch.block_size:
            return
        around = [shape, self._in_flight.shape if self._in_flight else (0, 0)] if self.overlap else [launch.shape]
        steady = all(other == launch.shape for other in around)
        committed = [len(result.tokens) for result in results if result.tokens]
        on_round(Round(committed, now_s - max(launch.launched_s, before_s), steady))

    def _now_s(self) -> float:
        """The time where somebody wants to know how long rounds take."""
        return self._clock() if self._on_round else 0.0

    def _digest_row(self, launch: Launch, row: Row, result: RowResult, now_s: float) -> bool:
        """Book one row; True if there is something to report. What a stopped request still produced is dropped."""
        if not self.scheduler.landed(row, broken=result.finish_reason == "error"):
            return False
        is_round = launch.block_size > 0
        told = bool(result.tokens or result.finish_reason)
        if told != (is_round or row.last):
            name = row.request.request_id
            raise RuntimeError(f"request {name}: {result} from {'a round' if is_round else f'prefill {row.last=}'}")
        if not is_round:
            self.recorder.prefilled(row.length)
            self.scheduler.prefilled(row)
            row.request.take_prompt_logprobs(row.start, result.prompt_logprobs[: row.length])
        if told:
            self._take(row.request, result, launch.block_size, now_s)
        return told

    def _take(self, request: Request, result: RowResult, block_size: int, now_s: float) -> None:
        if result.tokens:
            if request.first_token_s is None:
                self.recorder.first_token(now_s - request.arrival_s)
            request.take(result.tokens, is_round=block_size > 0, now_s=now_s)
            request.take_logprobs(result.logprobs)
            if block_size:
                self.recorder.round(block_size, len(result.tokens))
        if result.finish_reason:
            self.scheduler.finish(request, result.finish_reason, now_s)
        if request.grammar:
            self._advance(request, result.tokens)

    def _advance(self, request: Request, tokens: Sequence[int]) -> None:
        assert request.grammar is not None
        try:
            request.grammar.advance(tokens)
        except GrammarError as error:
            self._fail(request, error)

    def _report(self, request: Request, tokens: list[int]) -> Update:
        kept = self._show(request, tokens) if tokens else []
        if request.finished and request.finish_reason != "abort":
            self.recorder.finished(request)
        return Update(request, kept, request.finish_reason)

    def _show(self, request: Request, tokens: list[int]) -> list[int]:
        """The callback's turn; returns the tokens it left."""
        if self._on_tokens is None:
            return tokens
        try:
            stop = self._on_tokens(request, tokens)
        except Exception as error:  # whatever one request's own code does must not harm the others
            self._fail(request, error)
            return tokens[: request.newest]
        if stop and not request.finished:
            self._end(request, "stop")
        elif stop and request.finish_reason == "length":
            request.finish_reason = "stop"
        return tokens[: request.newest]

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = error
        if not request.finished:
            self._end(request, "error")
        elif request.finish_reason != "abort":
            request.finish_reason = "error"

    def _end(self, request: Request, reason: str) -> None:
        """The host's stop. The round in flight still runs; its surplus tokens are dropped when it lands."""
        slot = self.scheduler.finish(request, reason, self._clock())
        if slot is not None:
            self._stopped.append(slot)
