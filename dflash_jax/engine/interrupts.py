"""Ctrl-C at a safe moment: an exception in the middle of a step would lose the device's state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

Handler = Callable[[int, FrameType | None], object]


class HeldInterrupts:
    """`with HeldInterrupts() as held:` SIGINT and SIGTERM wait for the end of the block.

    There the handler that was in place before runs (Python's own raises KeyboardInterrupt), unless the block ends with
    an exception anyway.  `held.arrived` is the number of the signal that waits, or None.  A second signal is not held
    back, not even by blocks around this one.  Only the main thread receives signals: elsewhere nothing changes.
    """

    def __init__(self) -> None:
        self.arrived: int | None = None
        self._before: dict[int, Handler] = {}
        self._outermost: dict[int, Handler] = {}

    def __enter__(self) -> HeldInterrupts:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            self._before = {number: handler for number, handler in handlers.items() if callable(handler)}
        for number, handler in self._before.items():
            around = getattr(handler, "__self__", None)
            self._outermost[number] = around._outermost[number] if isinstance(around, HeldInterrupts) else handler
            signal.signal(number, self._hold)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.arrived is not None and kind is None:
            self._before[self.arrived](self.arrived, None)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        again, self.arrived = self.arrived is not None, number
        if again:
            self._outermost[number](number, frame)
