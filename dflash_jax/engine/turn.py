"""Several threads, one step at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turn:
    """Whose turn it is to step.  Unlike with a lock, all that wait look up when a turn ends: it may have served them.

        with turn.taken(unless=served) as mine:
            if mine:
                step()
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None

    @contextmanager
    def taken(self, unless: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Wait for the turn and hold it for the block; False without the turn once `unless()` is true.

        RuntimeError for the thread that has it already: that is a callback of a step asking for another step.
        """
        mine = self._take(unless)
        try:
            yield mine
        finally:
            if mine:
                self._give()

    def _take(self, unless: Callable[[], bool]) -> bool:
        me = threading.get_ident()
        with self._changed:
            if self._owner == me:
                raise RuntimeError("a callback of the engine's step asks the engine for another step")
            self._changed.wait_for(lambda: self._owner is None or unless())
            if unless():
                return False
            self._owner = me
            return True

    def _give(self) -> None:
        with self._changed:
            self._owner = None
            self._changed.notify_all()
