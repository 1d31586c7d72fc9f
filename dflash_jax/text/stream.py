"""The text of one request as its tokens arrive: half characters and possible stop strings are held back."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_jax.text.detokenize import IncrementalDetokenizer
from dflash_jax.text.tokenizer import Tokenizer


class TextStream:
    """Feeds tokens one by one, so that what stops where does not depend on how many come at a time.

    `text` is everything certain so far, without a stop string; `released` of it may be shown: the rest could
    still become the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self.text = ""
        self.stopped = False
        self._finished = False

    def add(self, tokens: Sequence[int]) -> int | None:
        """Take tokens in order.  Returns how many were used when a stop string was completed, else None."""
        for used, token in enumerate(tokens, 1):
            self._append(self._detokenizer.add([token]))
            if self.stopped:
                return used
        return None

    def finish(self) -> None:
        """No more tokens come: what was held back for a half character becomes text.  Further calls change nothing."""
        if not self.stopped and not self._finished:
            self._append(self._detokenizer.finish())
        self._finished = True

    @property
    def released(self) -> str:
        """The part of `text` that no later token can take back."""
        if self.stopped or self._finished:
            return self.text
        sizes = range(min(self._longest - 1, len(self.text)), 0, -1)
        held = next((size for size in sizes if self._may_begin_stop(self.text[-size:])), 0)
        return self.text[: len(self.text) - held]

    def _may_begin_stop(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stop)

    def _append(self, new: str) -> None:
        """Add text and cut it at the first stop string, which may have begun in earlier text."""
        start = max(0, len(self.text) - self._longest + 1)
        self.text += new
        found = [at for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
