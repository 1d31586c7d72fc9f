"""Who runs next: admission by slots and pages, prefill against decode, growth and preemption. Plain Python ints.

The host knows results one launch late, so plans use upper bounds: reserve early, release late. At most one launch is
in flight when the next is planned.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from dflash_jax.engine.pages import PagePool, pages_for, reserve_tokens
from dflash_jax.engine.prefix_cache import PrefixCache
from dflash_jax.engine.protocol import Runner
from dflash_jax.engine.request import Phase, Request, Seat
from dflash_jax.errors import UserError


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes of the device state and the limits of the service; tokens, pages, slots."""

    page_size: int
    num_pages: int  # padding page included
    block_size: int  # the widest round
    max_prefill_rows: int
    prefill_chunk: int  # widest row of a prefill launch
    max_running_requests: int
    max_model_len: int
    chunked_prefill_size: int  # rows times widest row of a prefill launch
    enable_prefix_caching: bool = True

    @classmethod
    def of(
        cls,
        runner: Runner,
        *,
        max_running_requests: int | None = None,
        max_model_len: int | None = None,
        chunked_prefill_size: int | None = None,
        enable_prefix_caching: bool = True,
    ) -> SchedulerConfig:
        """The runner's sizes under the user's limits; None takes all the runner has. UserError for a bad limit."""
        slots, capacity = runner.num_slots, runner.pages_per_slot * runner.page_size
        return cls(
            page_size=runner.page_size,
            num_pages=runner.num_pages,
            block_size=runner.block_size,
            max_prefill_rows=runner.max_prefill_rows,
            prefill_chunk=runner.prefill_chunk,
            max_running_requests=_limit("max_running_requests", max_running_requests, slots, slots),
            max_model_len=_limit("max_model_len", max_model_len, capacity, capacity),
            chunked_prefill_size=_limit("chunked_prefill_size", chunked_prefill_size, runner.prefill_chunk),
            enable_prefix_caching=enable_prefix_caching,
        )


@dataclass(slots=True)  # not frozen: see RowResult
class Row:
    """A request's part in a launch. Prefill: tokens[start : start + length] of the seat."""

    request: Request
    seat: Seat
    start: int = 0
    length: int = 0
    last: bool = False


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    rows: list[Row]
    new_pages: list[tuple[int, int, int]]  # (slot, index in its table, page)


class Scheduler:
    """Queues, slots and pages. `live` = prefilling + running; a closed seat may outlive its request's stay there."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.cache = PrefixCache(self.pool, config.page_size, enabled=config.enable_prefix_caching)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # by Request.order
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.seats: set[Seat] = set()
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._free_slots = list(range(config.max_running_requests))
        self._arrivals = 0
        self._prefilled_last = False
        self._blocked: tuple[Request, int] | None = None

    # -- queue ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; UserError for one that could never be served, and nothing changes."""
        self.check(request)
        self._arrivals += 1
        request.sequence = self._arrivals
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_order)

    def check(self, request: Request) -> None:
        """Set the request's limit; UserError for one that could never be served.  Any thread may call it."""
        self._check(request)
        request.limit_tokens = min(len(request.prompt_ids) + request.max_new_tokens, self.config.max_model_len)
        self._check_fits(request)

    @property
    def live(self) -> list[Request]:
        return self.prefilling + self.running

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or pages of one that left are still in flight."""
        return bool(self.requests or self.seats)

    def admit(self) -> list[Request]:
        """Give slots and pages to waiting requests, first come first served; the device must be told of each."""
        admitted = []
        while self.waiting and self._free_slots and self._try_seat(self.waiting[0]):
            request = self.waiting.pop(0)
            request.phase = Phase.PREFILLING
            self.prefilling.append(request)
            admitted.append(request)
        return admitted

    # -- the next launch -----------------------------------------------------------------------------------------

    def next_batch(self, *, idle: bool) -> PrefillBatch | DecodeBatch | None:
        """What to launch now. Prefill and decode take turns, so running requests wait for one chunk at most.

        idle: nothing is in flight. None: nothing to launch, or pages are short while a launch is in flight whose
        result may free some; read it and ask again.
        """
        ready = [request for request in self.running if _may_go_on(request)]
        if ready and (self._prefilled_last or not self.prefilling):
            return self._decode_batch(ready, idle)
        return self._prefill_batch() if self.prefilling else None

    def _prefill_batch(self) -> PrefillBatch:
        """First comes the oldest request's chunk; others join whole while rows times width stays in the budget."""
        rows: list[Row] = []
        width = 0
        for request in sorted(self.prefilling, key=_order):
            row = self._next_chunk(request)
            width = max(width, row.length)
            full = len(rows) == self.config.max_prefill_rows
            if rows and (full or width * (len(rows) + 1) > self.config.chunked_prefill_size):
                break
            rows.append(row)
        for row in rows:
            self._send_chunk(row)
        self._prefilled_last = True
        return PrefillBatch(rows)

    def _next_chunk(self, request: Request) -> Row:
        seat = _seat(request)
        left = len(seat.tokens) - seat.sent
        length = min(left, self.config.prefill_chunk, self.config.chunked_prefill_size)
        return Row(request, seat, seat.sent, length, last=length == left)

    def _send_chunk(self, row: Row) -> None:
        row.seat.sent += row.length
        row.seat.in_flight += 1
        if row.last:
            self.prefilling.remove(row.request)
            self.running.append(row.request)
            row.request.phase = Phase.RUNNING

    def _decode_batch(self, ready: list[Request], idle: bool) -> PrefillBatch | DecodeBatch | None:
        """A round of `ready`, every one of them with pages for it; the youngest are retracted if that takes it."""
        while sum(missing := [self._missing_pages(request) for request in ready]) > self.cache.available:
            if not idle:
                return None
            self._preempt(max(self.live, key=_order))
            ready = [request for request in ready if request.seat]
        self._prefilled_last = False
        if not ready:
            return self._prefill_batch() if self.prefilling else None
        rows = [Row(request, _seat(request)) for request in ready]
        new_pages = [update for row, count in zip(rows, missing, strict=True) for update in self._grow(row.seat, count)]
        for row in rows:
            row.seat.in_flight += 1
        return DecodeBatch(rows, new_pages)

    # -- results -------------------------------------------------------------------------------------------------

    def landed(self, row: Row, *, broken: bool = False) -> bool:
        """A launch with this row was read. False: the request has left the seat and the result must be dropped.

        broken: the device reported an error. Nobody knows since when the KV of the seat is bad, nor in which of the
        pages that it shares, so the whole cache is forgotten at once, before anybody else finds them.
        """
        seat = row.seat
        seat.in_flight -= 1
        if broken:
            seat.broken = True
            self.cache.clear()
        if seat.closed and not seat.in_flight:
            self._release(row.request, seat)
        return not seat.closed

    def prefilled(self, row: Row) -> None:
        """The chunk of a landed prefill row is committed: its full pages can be found from now on."""
        seat = row.seat
        seat.done = row.start + row.length
        if not seat.broken:
            self.cache.insert(seat.tokens, seat.pages, seat.chain, seat.done, row.request.cache_salt)

    def finish(self, request: Request, reason: str, now_s: float) -> int | None:
        """End a request in any phase. Returns the slot it leaves, None if it had none.

        The slot is free at once; the pages when nothing in flight can write to them.
        """
        slot = request.seat.slot if request.seat else None
        if request.seat:
            self._leave_seat(request)
        else:
            self.waiting.remove(request)
        request.phase = Phase.FINISHED
        request.finish_reason = reason
        request.finish_s = now_s
        del self.requests[request.request_id]
        return slot

    # -- checks --------------------------------------------------------------------------------------------------

    def integrity(self) -> None:
        """RuntimeError unless pages, cache, seats and slots add up."""
        self.pool.integrity()
        self.cache.integrity()
        held = {page for seat in self.seats for page in seat.pages}
        if len(held) != self.pool.num_held:
            raise RuntimeError(f"seats hold {len(held)} pages, the pool says {self.pool.num_held}")
        used = {_seat(request).slot for request in self.live}
        if len(used) != len(self.live) or len(used) + len(self._free_slots) != self.config.max_running_requests:
            raise RuntimeError(f"{len(self.live)} live requests in slots {sorted(used)}, free {self._free_slots}")

    def _check(self, request: Request) -> None:
        name = request.request_id
        if name in self.requests:
            raise UserError(f"request id {name!r} is in use by a request that has not finished")
        if request.finished or request.output_ids:
            raise UserError(f"request {name!r} has been served already; make a new one")
        if request.max_new_tokens < 1:
            raise UserError(f"max_new_tokens of request {name!r} is {request.max_new_tokens}, must be at least 1")
        check_length(f"the prompt of request {name!r}", len(request.prompt_ids), self.config.max_model_len)

    def _check_fits(self, request: Request) -> None:
        need = self._reserved_pages(request.limit_tokens, request)
        if need > self.pool.total:
            raise UserError(
                f"request {request.request_id!r} may reach {request.limit_tokens} tokens = {need} pages of "
                f"{self.config.page_size}, but the KV pool has {self.pool.total}"
            )

    # -- seats and pages -----------------------------------------------------------------------------------------

    def _try_seat(self, request: Request) -> bool:
        """Take a slot and the pages for all tokens so far and two blocks, beside what live requests need next."""
        if self._blocked == (request, self.pool.releases):
            return False
        tokens = request.tokens()
        chain = [] if request.reads_prompt else self.cache.lookup(tokens, request.cache_salt)
        need = self._reserved_pages(len(tokens), request) - len(chain)
        if need + self._headroom() > self.cache.available_beside(chain):
            self._blocked = (request, self.pool.releases)
            return False
        self.cache.hold(chain)
        pages = [node.page for node in chain] + self.cache.allocate(need)
        hit = len(chain) * self.config.page_size
        request.seat = Seat(self._free_slots.pop(), pages, chain, tokens, sent=hit, done=hit)
        self.seats.add(request.seat)
        self._count_hit(request, hit)
        return True

    def _count_hit(self, request: Request, hit_tokens: int) -> None:
        """A resumed request meets its own pages again; that is no hit worth reporting."""
        if request.preemptions or not self.cache.enabled:
            return
        request.cached_tokens = hit_tokens
        self.prefix_cache_queries += len(request.prompt_ids)
        self.prefix_cache_hits += hit_tokens

    def _reserved_pages(self, committed: int, request: Request) -> int:
        tokens = reserve_tokens(committed, self.config.block_size, request.limit_tokens)
        return pages_for(tokens, self.config.page_size)

    def _headroom(self) -> int:
        """Pages that live requests ask for within one more round: an admission must not cause a preemption."""
        return sum(self._missing_pages(request, ahead=self.config.block_size) for request in self.live)

    def _missing_pages(self, request: Request, ahead: int = 0) -> int:
        seat = _seat(request)
        committed = max(len(seat.tokens), request.num_tokens - 1) + ahead
        if committed + 2 * self.config.block_size <= len(seat.pages) * self.config.page_size:
            return 0  # as in most rounds; the rest only says how many
        return max(0, self._reserved_pages(committed, request) - len(seat.pages))

    def _grow(self, seat: Seat, count: int) -> list[tuple[int, int, int]]:
        """`count` pages more for the seat, as updates of its table."""
        if not count:
            return []
        first = len(seat.pages)
        seat.pages += self.cache.allocate(count)
        return [(seat.slot, index, seat.pages[index]) for index in range(first, first + count)]

    def _preempt(self, request: Request) -> None:
        """Retract a request: it keeps its tokens, gives up its pages and will prefill prompt and output again."""
        if _seat(request).in_flight:
            raise RuntimeError(f"request {request.request_id} is preempted with a launch in flight")
        self._leave_seat(request)
        request.phase = Phase.WAITING
        request.preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=_order)

    def _leave_seat(self, request: Request) -> None:
        seat = _seat(request)
        (self.running if request.phase is Phase.RUNNING else self.prefilling).remove(request)
        request.seat = None
        seat.closed = True
        self._free_slots.append(seat.slot)
        if not seat.in_flight:
            self._release(request, seat)

    def _release(self, request: Request, seat: Seat) -> None:
        """Committed full pages stay in the cache, unless they are not to be trusted; the rest is free."""
        if not seat.broken:
            committed = seat.done if seat.done < len(seat.tokens) else request.num_tokens - 1
            self.cache.insert(request.tokens(), seat.pages, seat.chain, committed, request.cache_salt, leaving=True)
        for index, page in enumerate(seat.pages):
            if index >= len(seat.chain) or seat.chain[index].page != page:
                self.pool.release(page)
        self.cache.drop(seat.chain)
        self.seats.remove(seat)


def check_length(name: str, prompt_tokens: int, max_model_len: int) -> None:
    """UserError unless a prompt has tokens and leaves room for one more."""
    if not prompt_tokens:
        raise UserError(f"{name} is empty")
    if prompt_tokens >= max_model_len:
        raise UserError(
            f"{name} has {prompt_tokens} tokens, which leaves no room for a new one in the {max_model_len} of"
            " max_model_len"
        )


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _seat(request: Request) -> Seat:
    if request.seat is None:
        raise RuntimeError(f"request {request.request_id} is {request.phase.value} and has no seat")
    return request.seat


def _may_go_on(request: Request) -> bool:
    """False once the launches in flight, each worth a token at least, reach the limit for certain."""
    return request.num_tokens + _seat(request).in_flight < request.limit_tokens


def _limit(name: str, value: int | None, default: int, most: int | None = None) -> int:
    """The user's limit, or the default for None; UserError outside 1 … most."""
    if value is None:
        return default
    if value < 1 or (most is not None and value > most):
        raise UserError(f"{name} is {value}, must be at least 1" + (f" and at most {most}" if most else ""))
    return value
