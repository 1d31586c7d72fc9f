"""How long a round takes, by what is compiled for it: measured, and kept between runs beside the compiled steps.

Plain Python, no JAX.  A key names a compiled round: its bucket of rows and its width, among other things.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections import deque
from collections.abc import Hashable
from pathlib import Path

log = logging.getLogger("dflash_jax")

Key = tuple[Hashable, ...]
FORMAT = 1  # of the files; raised when the steps change so much that times of earlier versions mislead
SAMPLES = 9  # the newest, whose median counts: one slow round in four does not show
SAVE_EVERY = 2000  # samples


class RoundTimes:
    """Seconds of a round by key, as the median of its newest samples.

    With a `path` the medians of earlier runs are the first samples of this one.  A file that cannot be read or written
    is reported, and then measured again or left.
    """

    def __init__(self, path: Path | None = None):
        self._path = path
        self._samples: dict[str, deque[float]] = {}
        self._medians: dict[str, float] = {}
        self._unsaved = 0
        for name, seconds in _read(path).items() if path else ():
            self._keep(name, [seconds])

    def seconds(self, key: Key) -> float | None:
        """That of the round, else of the one that has a beginning of its key (which lacks a refinement), else None."""
        for end in range(len(key), 0, -1):
            if seconds := self._medians.get(_name(key[:end])):
                return seconds
        return None

    def add(self, key: Key, seconds: float) -> None:
        name = _name(key)
        self._keep(name, [*self._samples.get(name, ()), seconds])
        self._unsaved += 1
        if self._unsaved == SAVE_EVERY:
            self.save()

    def distrust(self, key: Key, keep: int) -> None:
        """Forget all but the newest `keep` samples, because they are old."""
        if samples := self._samples.get(_name(key)):
            self._keep(_name(key), list(samples)[-keep:])

    def _keep(self, name: str, samples: list[float]) -> None:
        self._samples[name] = deque(samples, SAMPLES)
        self._medians[name] = sorted(self._samples[name])[len(self._samples[name]) // 2]

    def all(self) -> dict[str, float]:
        """Seconds by key, written as in the file: its parts with spaces between them."""
        return dict(self._medians)

    def save(self) -> None:
        """Write the medians, in one move: another engine may do the same."""
        self._unsaved = 0
        if self._path is None:
            return
        part = self._path.with_suffix(f".{os.getpid()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self.all(), indent=1, sort_keys=True), encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            log.warning("%s: measured round times cannot be kept there: %s", self._path, error.strerror)
            self._path = None


@functools.cache  # there are as many as compiled rounds
def _name(key: Key) -> str:
    return " ".join(map(str, key))


def _read(path: Path) -> dict[str, float]:
    """The file's times; none if it is missing or not what `save` writes."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): _positive(seconds) for name, seconds in dict(found).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s: not the round times of an earlier run (%s): they are measured again", path, error)
        return {}


def _positive(seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise ValueError(f"{seconds!r} seconds")
    return float(seconds)
