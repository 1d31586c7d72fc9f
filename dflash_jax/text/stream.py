"""The text of one request as its tokens arrive: half characters and possible stop strings are held back."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_jax.text.detokenize import IncrementalDetokenizer
from dflash_jax.text.tokenizer import Tokenizer


class TextStream:
    """Feeds tokens one by one, so that what stops where does not depend on how many come at a time.

    `text` is everything certain so far, without a stop string unless include_stop; `released` of it may be shown: the
    rest could still become the beginning of a stop string.  min_tokens: stop strings that these first tokens complete
    count for nothing.  Of several at once the first in the text counts, of those that begin together the shortest.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ):
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._include_stop = include_stop
        self._ignored = min_tokens  # tokens left to come that cannot stop
        self.text = ""
        self.stopped = False
        self._finished = False

    def add(self, tokens: Sequence[int]) -> int | None:
        """Take tokens in order.  Returns how many were used when a stop string was completed, else None."""
        for used, token in enumerate(tokens, 1):
            self._append(self._detokenizer.add([token]), may_stop=self._ignored <= 0)
            self._ignored -= 1
            if self.stopped:
                return used
        return None

    def finish(self) -> None:
        """No more tokens come: what was held back for a half character becomes text.  Further calls change nothing."""
        if not self.stopped and not self._finished:
            self._append(self._detokenizer.finish(), may_stop=self._ignored < 0)
        self._finished = True

    @property
    def released(self) -> str:
        """The part of `text` that no later token can take back."""
        if self.stopped or self._finished or self._include_stop:
            return self.text
        sizes = range(min(self._longest - 1, len(self.text)), 0, -1)
        held = next((size for size in sizes if self._may_begin_stop(self.text[-size:])), 0)
        return self.text[: len(self.text) - held]

    def _may_begin_stop(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stop)

    def _append(self, new: str, may_stop: bool) -> None:
        """Add text and cut it at the first stop string that it completes, which may have begun in earlier text."""
        old = len(self.text)
        self.text += new
        if not may_stop:
            return
        places = [(self.text.find(stop, max(0, old - len(stop) + 1)), len(stop)) for stop in self._stop]
        if found := [place for place in places if place[0] >= 0]:
            start, length = min(found)
            self.text = self.text[: start + length * self._include_stop]
            self.stopped = True
