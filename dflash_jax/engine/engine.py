"""`Engine`: submit, step, abort.  Token ids in, token ids out; several requests in flight."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

from tqdm import tqdm

from dflash_jax.engine.build import Loaded, load, make_runner
from dflash_jax.engine.loop import Loop, Update
from dflash_jax.engine.metrics import EngineMetrics
from dflash_jax.engine.request import Request
from dflash_jax.engine.scheduler import SchedulerConfig
from dflash_jax.engine.settings import EngineSettings
from dflash_jax.errors import UserError
from dflash_jax.sampling import SamplingParams
from dflash_jax.state import MAX_STOP_IDS

log = logging.getLogger("dflash_jax")
OnTokens = Callable[[Request, Sequence[int]], bool]


class Engine:
    """A continuous-batching engine over one model.

    Not thread-safe: one thread submits, steps and aborts.

        engine = Engine(EngineSettings(target="…", draft="…"))
        engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=8))
        while engine.has_work:
            for update in engine.step():
                print(update.request.request_id, update.tokens)
    """

    def __init__(self, settings: EngineSettings, loaded: Loaded | None = None):
        self.settings = settings
        self.loaded = loaded or load(settings)
        self.runner = make_runner(self.loaded, settings)
        config = SchedulerConfig.of(
            self.runner,
            max_model_len=min(
                settings.max_model_len or self.loaded.config.max_position,
                self.runner.pages_per_slot * self.runner.page_size,
            ),
            chunked_prefill_size=settings.chunked_prefill_size,
            enable_prefix_caching=settings.enable_prefix_caching,
        )
        self._callbacks: dict[str, OnTokens] = {}
        self._loop = Loop(self.runner, config, overlap=settings.overlap, on_tokens=self._on_tokens)
        self._names = itertools.count()

    @property
    def max_model_len(self) -> int:
        return self._loop.scheduler.config.max_model_len

    @property
    def compile_s(self) -> float:
        """Seconds spent so far on first launches: tracing, and compiling or reading compiled steps."""
        return self.runner.compile_s

    @property
    def has_work(self) -> bool:
        return self._loop.has_work

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        on_tokens: OnTokens | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> Request:
        """Queue a prompt.  UserError for one that could never be served; nothing else is touched by it.

        on_tokens sees new tokens as they come and ends the request by returning True (see `loop.OnTokens`).
        eos_token_ids: the ids that end a text, by default those of the model's configuration.
        """
        params = params or SamplingParams()
        vocab = self.loaded.config.vocab_size
        check_ids("prompt", prompt_ids, vocab)
        check_ids("stop_token_ids", params.stop_token_ids, vocab)
        request = Request(
            request_id=request_id if request_id is not None else f"request-{next(self._names)}",
            prompt_ids=list(prompt_ids),
            max_new_tokens=params.max_new_tokens,
            stop_token_ids=tuple(params.stop_token_ids),
            eos_token_ids=self.loaded.config.eos_token_ids if eos_token_ids is None else tuple(eos_token_ids),
            ignore_eos=params.ignore_eos,
            priority=priority,
            sampling=params,
        )
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise UserError(f"{len(request.stop_ids)} stop tokens are more than the {MAX_STOP_IDS} a request may have")
        self._loop.add(request)
        if on_tokens is not None:
            self._callbacks[request.request_id] = on_tokens
        return request

    def step(self) -> list[Update]:
        """Launch the next piece of work and return what the one before gave (with overlap: one step late)."""
        updates = self._loop.step()
        for update in updates:
            if update.request.finished:
                self._callbacks.pop(update.request.request_id, None)
        return updates

    def abort(self, request_id: str) -> bool:
        """End a request with reason "abort"; False if there is none of that id."""
        self._callbacks.pop(request_id, None)
        return self._loop.abort(request_id)

    def metrics(self) -> EngineMetrics:
        return self._loop.metrics()

    def warmup(self, progress: bool = True) -> float:
        """Compile every bucket now instead of at its first use; returns the seconds it took."""
        before_s = self.runner.compile_s
        calls = list(self.runner.warmup_calls([self.runner.block_size]))
        for label, call in (bar := tqdm(calls, desc="compiling", disable=not progress)):
            bar.set_postfix_str(label)
            call().result()
        return self.runner.compile_s - before_s

    def _on_tokens(self, request: Request, tokens: Sequence[int]) -> bool:
        callback = self._callbacks.get(request.request_id)
        return callback is not None and callback(request, tokens)


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """UserError unless all `ids` are integers within the vocabulary."""
    bad = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size]
    if bad:
        raise UserError(f"{name} holds {bad[0]!r}, which is not a token id from 0 to {vocab_size - 1}")
