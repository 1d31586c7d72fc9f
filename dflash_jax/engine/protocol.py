"""What the host side asks of the device: the one seam between plain Python and JAX.

Everything handed to a `Runner` runs on the device in the order of the calls. Words: `seq_len` counts the tokens of
a slot whose KV is committed; the newest emitted token (the bonus) has no KV yet and sits at position `seq_len`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One slot's share of a prefill launch: `tokens` stand at positions start, start+1, …

    After the row `seq_len` is start + len(tokens). Rows before `start` are either from an earlier chunk or from shared
    pages of a prefix hit, so the first row of a slot may have start > 0. `last` yields the next token, one of those
    that `allowed` (a row of a `Grammar`'s masks) allows. `after`: the prompt's token after these, if there is one.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    last: bool
    after: int = 0
    allowed: Any = None


@dataclass(slots=True)
class TokenLogprobs:
    """A token's log-probability and rank (1: the likeliest), and the likeliest tokens with theirs, falling."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)  # not frozen: a frozen one takes four times as long to make, and there is one a row
class RowResult:
    """What one row of a launch emitted.

    Prefill: one token for a last chunk, none otherwise. Decode: accepted drafts, then the bonus, cut by stop ids and
    limit. A row that was finished before the launch has no tokens. `finish_reason` is "stop", "length", None, or
    "error" where the logits are not finite: then there may be no token, and the row's KV is not to be trusted.
    logprobs: of each token, where the slot asked for it; prompt_logprobs: of the token after each one of the chunk,
    perhaps followed by those of padding.
    """

    tokens: list[int]
    finish_reason: str | None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class Pending(Protocol):
    """The results of a launch, on their way to the host."""

    def result(self) -> list[RowResult]:
        """Wait for the copy that the launch started; rows in the order of the launch."""
        ...


class Masked(Protocol):
    """A round in flight whose tokens are chosen once the host has said which are allowed."""

    def blocks(self) -> list[list[int]]:
        """Wait for the drafts; for each row of the launch [bonus, drafts]."""
        ...

    def accept(self, masks: Sequence[Any]) -> Pending:
        """Go on with uint32 [B, ⌈V / 32⌉] for each row, bit v of k: token v may follow draft k (None: any may)."""
        ...


class Runner(Protocol):
    """Device state of `num_slots` slots over `num_pages` pages, page 0 being padding.

    block_size: the widest round; prefill_chunk: tokens of the widest prefill row; max_prefill_rows: rows of a launch.
    """

    @property
    def num_slots(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def pages_per_slot(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def prefill_chunk(self) -> int: ...

    @property
    def max_prefill_rows(self) -> int: ...

    def admit(
        self,
        slot: int,
        *,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        limit_tokens: int,
        pages: Sequence[int],
        stop_ids: Sequence[int],
        sampling: object,
    ) -> None:
        """Initialise a slot, whatever it held before: its table is `pages`, then the padding page.

        output_ids: what a resumed request has emitted; it prefills that, too.
        limit_tokens: prompt and output together; the token that reaches it ends the request with "length".
        """
        ...

    def extend(self, updates: Sequence[tuple[int, int, int]]) -> None:
        """Put pages into tables: (slot, index in its table, page)."""
        ...

    def prefill(self, rows: Sequence[PrefillRow]) -> Pending:
        """Write target and draft KV of the rows' tokens; at most `max_prefill_rows` rows of `prefill_chunk` tokens."""
        ...

    def decode(self, slots: Sequence[int], block_size: int) -> Pending:
        """One round of the slots. Writes target KV at seq_len … seq_len+block_size−1, past the table to page 0.

        The round that finishes a row still writes the target and draft KV of the tokens it commits: the host
        caches full pages of committed tokens. Rows finished before the launch write to page 0 only.
        """
        ...

    def decode_masked(self, slots: Sequence[int], block_size: int) -> Masked:
        """As `decode`, up to the choice of tokens."""
        ...

    def finish(self, slots: Sequence[int]) -> None:
        """The host stopped these slots: their rows count as finished from the next launch on."""
        ...


class Grammar(Protocol):
    """What one request's text may be, as bits over the V ids of the model's vocabulary; bit i of word w is id 32w + i.

    Both methods raise GrammarError where the grammar cannot be followed any further; only this request is to blame.
    """

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """uint32 [len(drafts) + 1, ⌈V / 32⌉]: row k is what may come after the tokens so far and drafts[:k].

        Rows after a draft that is not allowed allow every id. Once the text is complete only end-of-text ids are
        allowed; where it may end they are allowed beside the others. The state stays as it was.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """These were emitted, the last of them perhaps an end-of-text id."""
        ...
