"""`Engine`: submit, step, abort.  Token ids in, token ids out; several requests in flight."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from dflash_jax.engine.build import Loaded, load, make_runner, make_speculation, use_compilation_cache
from dflash_jax.engine.interrupts import HeldInterrupts
from dflash_jax.engine.loop import Loop, Update
from dflash_jax.engine.metrics import EngineMetrics
from dflash_jax.engine.packing import MODES
from dflash_jax.engine.protocol import Grammar
from dflash_jax.engine.request import Phase, Request
from dflash_jax.engine.runner import DeviceRunner, MemoryUse
from dflash_jax.engine.scheduler import SchedulerConfig
from dflash_jax.engine.settings import EngineSettings
from dflash_jax.engine.turn import Turn
from dflash_jax.errors import UserError
from dflash_jax.sampling import TOKEN_LISTS, SamplingParams, is_integer, known_params
from dflash_jax.state import MAX_STOP_IDS, Needs

log = logging.getLogger("dflash_jax")
OnTokens = Callable[[Request, Sequence[int]], bool]
OnUpdate = Callable[[Update], None]
Take = Callable[[Request], list[Update]]


class EngineStopped(RuntimeError):
    """The engine can serve no more: a step failed, for the reason in `__cause__`, or it was closed."""


@dataclass(frozen=True, slots=True)
class Client:
    """A request that has not ended, and who wants to hear of it."""

    request: Request
    on_tokens: OnTokens | None
    on_update: OnUpdate | None


class Engine:
    """A continuous-batching engine over one model.

        engine = Engine(EngineSettings(target="…", draft="…"))
        for update in engine.generate([1, 2, 3], SamplingParams(max_new_tokens=8)):
            print(update.tokens, update.finish_reason)

    or, for several requests at once, `add_request` each and `step` while `has_work`.  Any thread may call any method:
    requests and aborts are taken up by the next step, and of several threads that want to step one does, for all.
    What a step raises other than a request's own error is final: every request ends with it, and `EngineStopped` is
    all that later calls give.  Ctrl-C waits for the end of the step.
    """

    def __init__(self, settings: EngineSettings, loaded: Loaded | None = None, runner: DeviceRunner | None = None):
        """Load the model and make its device side, unless they are given."""
        use_compilation_cache()
        self.settings = settings
        self.loaded = loaded or load(settings)
        self.runner = runner or make_runner(self.loaded, settings)
        config = SchedulerConfig.of(
            self.runner,
            max_running_requests=min(settings.max_running_requests, self.runner.num_slots),
            max_model_len=min(
                settings.max_model_len or self.loaded.config.max_position,
                self.runner.pages_per_slot * self.runner.page_size,
            ),
            chunked_prefill_size=settings.chunked_prefill_size,
            enable_prefix_caching=settings.enable_prefix_caching,
        )
        self.speculation = make_speculation(settings, self.loaded, self.runner)
        waits = self.loaded.drafter.capabilities.needs_cpu_lengths
        if waits and settings.overlap:
            log.info("overlap: off, because draft %s needs lengths on the host", settings.draft)
        self._loop = Loop(
            self.runner,
            config,
            overlap=settings.overlap and not waits,
            on_tokens=self._on_tokens,
            choose_block=self.speculation.choose if self.speculation else None,
            on_round=self.speculation.observe if self.speculation else None,
        )
        self._names = itertools.count()
        self._turn = Turn()
        # For the three below; held for moments only.  Reentrant: a garbage collection within may end a stream, which
        # steps the engine once more (`LLM.serve`).
        self._lock = threading.RLock()
        self._clients: dict[str, Client] = {}
        self._inbox: deque[tuple[Take, Request]] = deque()
        self._failure: BaseException | None = None

    @property
    def max_model_len(self) -> int:
        return self._loop.scheduler.config.max_model_len

    @property
    def compile_s(self) -> float:
        """Seconds spent so far on first launches: tracing, and compiling or reading compiled steps."""
        return self.runner.compile_s

    @property
    def memory(self) -> MemoryUse:
        """Bytes of weights, pools and, as far as steps are compiled, scratch."""
        return self.runner.memory

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._failure is None and bool(self._inbox or self._loop.has_work)

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        on_tokens: OnTokens | None = None,
        on_update: OnUpdate | None = None,
        eos_token_ids: Sequence[int] | None = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """Queue a prompt.  UserError for one that could never be served; nothing else is touched by it.

        priority: lower goes first.  eos_token_ids: the ids that end a text, by default those of the model's
        configuration.  grammar: what the text may be, in place of params.structured_outputs, for which an engine has no
        tokenizer; used by no other request.  on_tokens sees new tokens as they come and ends the request by returning
        True (see `loop.OnTokens`).  on_update gets each of the request's updates; it must be quick and must not raise.
        The thread that steps calls both.
        """
        params = known_params(params)
        _check_types(request_id, priority)
        if params.structured_outputs is not None and grammar is None:
            raise UserError("structured_outputs need the tokenizer that LLM has: use LLM, or pass a grammar")
        request = self._make_request(prompt_ids, params, request_id, priority, eos_token_ids)
        request.grammar = grammar
        self._loop.scheduler.check(request)
        with self._lock:
            self._check_alive()
            if request.request_id in self._clients:
                raise UserError(f"request id {request.request_id!r} is in use by a request that has not finished")
            self._clients[request.request_id] = Client(request, on_tokens, on_update)
            self._inbox.append((self._take_in, request))  # last: from now on a step may tell the client
        return request

    def abort(self, request_id: str) -> bool:
        """End a request with reason "abort", at the next step; False if no unfinished one has that id."""
        with self._lock:  # so that the request is in the inbox before its abort
            client = self._clients.get(request_id)
        return client is not None and self.abort_request(client.request)

    def abort_request(self, request: Request) -> bool:
        """`abort` for this one, and not for a later request that was given its id."""
        if request.finished:
            return False
        self._inbox.append((self._take_out, request))
        return True

    def abort_all(self) -> None:
        """`abort` for every request that has not ended."""
        for name in list(self._clients):
            self.abort(name)

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> GeneratedTokens:
        """Submit a prompt at once and iterate over its updates; the last has a `finish_reason`.

        Whoever asks for the next update steps the engine if nobody else does, and every request advances with it.
        Leaving early (`close`, or dropping the iterator) aborts.  `options` are those of `add_request`.  Raises what
        the request's `on_tokens` raised, and EngineStopped.
        """
        return GeneratedTokens(self, prompt_ids, params, options)

    def _make_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        eos_token_ids: Sequence[int] | None,
    ) -> Request:
        config = self.loaded.config
        prompt_ids = check_ids("prompt", prompt_ids, config.vocab_size)
        for name in TOKEN_LISTS:
            check_ids(name, tuple(getattr(params, name) or ()), config.vocab_size)
        request = Request(
            request_id=request_id if request_id is not None else self._new_name(),
            prompt_ids=prompt_ids,
            max_new_tokens=params.max_new_tokens,
            stop_token_ids=tuple(params.stop_token_ids),
            eos_token_ids=config.eos_token_ids if eos_token_ids is None else _known_ends(eos_token_ids),
            ignore_eos=params.ignore_eos,
            priority=priority,
            sampling=params if params.greedy or params.seed is not None else replace(params, seed=random_seed()),
            num_logprobs=_at_most(params.logprobs, config.vocab_size),
            num_prompt_logprobs=_at_most(params.prompt_logprobs, config.vocab_size),
        )
        if params.n > 1:
            raise UserError(f"a request of the engine is one sample, and n is {params.n}: add a request for each")
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise UserError(f"{len(request.stop_ids)} stop tokens are more than the {MAX_STOP_IDS} a request may have")
        check_some_token_is_left(params, request.stop_ids, config.vocab_size)
        if params.edits_logits and not self.runner.has_edits:
            raise UserError("this engine was made without room for penalties, biases and token lists")
        return request

    def _new_name(self) -> str:
        """A request id that nobody uses."""
        return next(name for i in self._names if (name := f"request-{i}") not in self._clients)

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Launch the next piece of work and return what the one before gave (with overlap: one step late).

        Waits while another thread steps.  Raises what the `on_tokens` of a request raised, when everything else of the
        step is done; not for one with `on_update`, which is told.
        """
        with self._working():
            updates, errors = self._step()
        for error in errors:
            raise error
        return updates

    def advance(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Step as soon as nobody else does, unless `unless()` is true by then; for those who hear by `on_update`."""
        with self._working(unless) as mine:
            if mine:
                self._step()

    @contextmanager
    def _working(self, unless: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Alone with loop and device for the block, if that yields True; what the block raises is the engine's end."""
        with self._turn.taken(unless) as mine, HeldInterrupts():
            if mine:  # whoever has been served already may read on, even if the engine has stopped since
                self._check_alive()
            try:
                yield mine
            except BaseException as error:  # the device's state may be lost, or the books half written
                self._stop(error)
                raise

    def _step(self) -> tuple[list[Update], list[Exception]]:
        """Updates, and errors that nobody has been told."""
        updates = [*self._empty_inbox(), *self._loop.step()]
        return updates, [error for update in updates if (error := self._deliver(update))]

    def _empty_inbox(self) -> list[Update]:
        """Take up what came since the last step, in its order."""
        with self._lock:
            mail = [self._inbox.popleft() for _ in range(len(self._inbox))]
        return [update for take, request in mail for update in take(request)]

    def _take_in(self, request: Request) -> list[Update]:
        self._loop.add(request)
        return []

    def _take_out(self, request: Request) -> list[Update]:
        if request.finished:
            return []
        self._loop.abort(request.request_id)
        return [Update(request, [], request.finish_reason)]

    def _deliver(self, update: Update) -> Exception | None:
        """Tell the client; the error of one that does not listen."""
        name = update.request.request_id
        client = self._clients[name] if update.finish_reason is None else self._clients.pop(name)
        if client.on_update is None:
            return update.request.error
        client.on_update(update)
        return None

    def _on_tokens(self, request: Request, tokens: Sequence[int]) -> bool:
        callback = self._clients[request.request_id].on_tokens
        return callback is not None and callback(request, tokens)

    # -- the end -------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Serve no more: requests that have not finished end with EngineStopped(reason)."""
        with self._turn.taken():
            self._stop(EngineStopped(reason))

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            clients = list(self._clients.values())
            self._clients.clear()
            self._inbox.clear()
        for client in clients:
            request = client.request
            request.error, request.finish_reason = self._stopped(), "error"
            request.phase, request.finish_s = Phase.FINISHED, time.perf_counter()
            if client.on_update is not None:
                client.on_update(Update(request, [], "error"))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._stopped()

    def _stopped(self) -> EngineStopped:
        error = EngineStopped(f"the engine has stopped: {self._failure}")
        error.__cause__ = self._failure
        return error

    # -- figures -------------------------------------------------------------------------------------------------

    def metrics(self) -> EngineMetrics:
        """A snapshot; while another thread steps, its figures may be one request apart."""
        found = self._loop.metrics()
        with self._lock:
            arrived = sum(take == self._take_in for take, _ in self._inbox.copy())  # aborts come without the lock
        return replace(found, num_requests_waiting=found.num_requests_waiting + arrived)

    def warmup(self, progress: bool = True, sampling: bool = False) -> float:
        """Compile every bucket now instead of at its first use; returns the seconds it took.

        With speculation "auto" that is every width too, and how long a round of each takes is measured.
        sampling: also what requests with a temperature use, which triples the time.  What penalties, biases and
        log-probabilities use is compiled at their first use.
        """
        widths = self.speculation.widths if self.speculation else [self.runner.block_size]
        with self._working():
            before_s = self.runner.compile_s
            needs = [Needs(mode) for mode in (MODES if sampling else MODES[:1])]
            calls = list(self.runner.warmup_calls(widths, needs))
            for label, call in (bar := tqdm(calls, desc="compiling", disable=not progress)):
                bar.set_postfix_str(label)
                call()
            if self.speculation:
                self.speculation.measure(self.runner.decode, self.runner.spare_batches())
        log.info("%s", self.memory)
        return self.runner.compile_s - before_s


class GeneratedTokens(Iterator[Update]):
    """The updates of one request, the last with a `finish_reason`; see `Engine.generate`."""

    def __init__(self, engine: Engine, prompt_ids: Sequence[int], params: SamplingParams | None, options: Any):
        self._engine = engine
        self._box: deque[Update] = deque()
        self._ended = False
        self.request = engine.add_request(prompt_ids, params, on_update=self._box.append, **options)

    def __next__(self) -> Update:
        if self._ended:
            raise StopIteration
        while not self._box:
            self._engine.advance(unless=lambda: bool(self._box))
        update = self._box.popleft()
        if update.finish_reason is not None:
            self._ended = True
            if self.request.error is not None:
                raise self.request.error
        return update

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if not self._ended:
            self._ended = True
            self._engine.abort_request(self.request)

    def __del__(self) -> None:
        if hasattr(self, "request"):  # it was submitted
            self.close()


def random_seed() -> int:
    """A seed for a request that names none; reported with its output, so that it can be asked for again."""
    return secrets.randbits(63)


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> list[int]:
    """The ids as Python's integers; UserError unless they are integers within the vocabulary."""
    if not isinstance(ids, Iterable):
        raise UserError(f"{name} must be a list of token ids, not {ids!r:.60}")
    listed = list(ids)
    bad = [i for i in listed if not is_integer(i) or not 0 <= i < vocab_size]
    if bad:
        raise UserError(f"{name} holds {bad[0]!r}, which is not a token id from 0 to {vocab_size - 1}")
    return [int(i) for i in listed]


def _known_ends(ids: Iterable[int]) -> tuple[int, ...]:
    """Ids that end a text: the device has room for 32 bits, and a tokenizer may have more ids than its model."""
    return tuple(check_ids("eos_token_ids", ids, 2**31))


def _check_types(request_id: object, priority: object) -> None:
    """What is compared with that of others while it waits."""
    if request_id is not None and not isinstance(request_id, str):
        raise UserError(f"request_id must be a text, not {request_id!r:.60}")
    if not is_integer(priority):
        raise UserError(f"priority must be an integer, not {priority!r:.60}")


def _at_most(count: int | None, vocab_size: int) -> int | None:
    """There are no more alternatives than tokens."""
    return None if count is None else min(count, vocab_size)


def check_some_token_is_left(params: SamplingParams, stop_ids: Sequence[int], vocab_size: int) -> None:
    """UserError where a request forbids every token, at least before it may stop."""
    lists = params.bad_token_ids or params.allowed_token_ids is not None
    if not lists and (not params.min_tokens or len(stop_ids) < vocab_size):
        return
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    left = set(allowed) - set(params.bad_token_ids)
    if not left:
        raise UserError("bad_token_ids forbid every token of the vocabulary")
    if params.min_tokens and left <= set(stop_ids):
        raise UserError(f"min_tokens {params.min_tokens} forbids stop tokens, but no others are allowed")
