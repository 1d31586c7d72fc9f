"""`AsyncEngine`: the engine for asyncio, stepped by a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from dflash_jax.engine.engine import Engine, EngineStopped
from dflash_jax.engine.loop import Update
from dflash_jax.engine.metrics import EngineMetrics
from dflash_jax.engine.settings import EngineSettings
from dflash_jax.sampling import SamplingParams

log = logging.getLogger("dflash_jax")


class AsyncEngine:
    """Many tasks generate, one thread steps.

        async with AsyncEngine(EngineSettings(target="…", draft="…")) as engine:
            async for update in engine.generate([1, 2, 3], SamplingParams(max_new_tokens=8)):
                print(update.tokens, update.finish_reason)

    Cancelling the task, or leaving the loop, aborts the request.  When a step fails, every task gets EngineStopped with
    the reason as its cause.  Loading the model blocks, as does `Engine`; nothing else here does.
    """

    def __init__(self, engine: Engine | EngineSettings):
        self.engine = engine if isinstance(engine, Engine) else Engine(engine)
        self._wanted = threading.Event()  # something was submitted, aborted or closed since the thread last looked
        self._closing = False
        self._posts: Posts | None = None
        self._thread = threading.Thread(target=self._serve, name="dflash_jax engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a daemon thread inside JAX would be killed with the interpreter

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Update, None]:
        """The updates of one request; the last has a `finish_reason`.  `options` are those of `Engine.add_request`.

        UserError for a bad request; what its `on_tokens` raised; EngineStopped.
        """
        if self._closing:
            raise EngineStopped("the engine has been closed")
        inbox: asyncio.Queue[Update] = asyncio.Queue()
        posts = self._posts_to(asyncio.get_running_loop())
        request = self.engine.add_request(
            prompt_ids, params, on_update=lambda update: posts.post(inbox, update), **options
        )
        self._wanted.set()
        try:
            while True:
                update = await inbox.get()
                if update.finish_reason is not None and request.error is not None:
                    raise request.error
                yield update
                if update.finish_reason is not None:
                    return
        finally:
            self.engine.abort_request(request)  # which an ended request does not mind
            self._wanted.set()

    def abort(self, request_id: str) -> bool:
        """End a request with reason "abort", at the next step; False if no unfinished one has that id."""
        found = self.engine.abort(request_id)
        self._wanted.set()
        return found

    def metrics(self) -> EngineMetrics:
        return self.engine.metrics()

    def close(self) -> None:
        """Abort what has not finished and end the thread; blocks until the step it is in has ended."""
        atexit.unregister(self.close)
        self._closing = True
        self._wanted.set()
        self._thread.join()

    async def aclose(self) -> None:
        """`close` that lets other tasks run: they see their requests end with reason "abort"."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def _posts_to(self, loop: asyncio.AbstractEventLoop) -> Posts:
        if self._posts is None or self._posts.loop is not loop:
            self._posts = Posts(loop)
        return self._posts

    # -- the thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._wanted.wait()
                self._wanted.clear()
                while self.engine.has_work and not self._closing:
                    self.engine.advance()
            while self.engine.has_work:
                self.engine.abort_all()
                self.engine.advance()
        except Exception:  # whoever waits has been told, and has it as the cause
            log.exception("the engine has stopped")
        else:
            self.engine.stop("it was closed")


class Posts:
    """From the stepping thread to the tasks of one event loop: the loop is woken once for all that has gathered."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._gathered: deque[tuple[asyncio.Queue[Update], Update]] = deque()
        self._lock = threading.RLock()  # reentrant as the engine's is
        self._due = False

    def post(self, inbox: asyncio.Queue[Update], update: Update) -> None:
        """From any thread."""
        with self._lock:
            self._gathered.append((inbox, update))
            wake, self._due = not self._due, True
        if wake:
            self._wake()

    def _wake(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self._hand_out)
        except RuntimeError:
            if not self.loop.is_closed():  # nobody is left in a closed one
                raise

    def _hand_out(self) -> None:
        with self._lock:
            self._due = False
            gathered, self._gathered = self._gathered, deque()
        for inbox, update in gathered:
            inbox.put_nowait(update)
