"""What takes part: a request as everybody gets it, the response as everybody gives it, and the contenders' protocol."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from dflash_jax.errors import UserError

T = TypeVar("T")
Message = Mapping[str, Any]
Prompt = str | list[int] | list[Message]
"""Text that is continued as it stands, token ids, or chat messages."""


class ContenderError(UserError):
    """A contender cannot go on; what the others and its own earlier runs gave is kept."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request.  `key` names the prompt: responses of different contenders to the same key are comparable."""

    key: str
    prompt: Prompt
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclasses.dataclass
class Response:
    """One answer.  Seconds are of one monotonic clock.

    piece_s: when each streamed piece came, at least one.  token_ids, text: as far as the contender tells.
    accept_lengths: tokens committed by each round, bonus included; the first token belongs to no round.
    accept_length: their mean, where a contender tells only that.
    """

    key: str
    prompt_tokens: int
    output_tokens: int
    sent_s: float
    piece_s: list[float]
    token_ids: list[int] | None = None
    text: str | None = None
    finish_reason: str | None = None
    accept_lengths: list[int] | None = None
    accept_length: float | None = None
    streamed: bool = True

    @property
    def ttft_s(self) -> float:
        """Time to the first token, from when the request was sent."""
        return self.piece_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.piece_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where there is no other."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Times between streamed pieces, each of one or several tokens; none where an answer comes as a whole."""
        if not self.streamed:
            return []
        return [after - before for before, after in zip(self.piece_s, self.piece_s[1:], strict=False)]

    @property
    def mean_accept_length(self) -> float | None:
        """Tokens per round; None where there was no round or nothing is told."""
        if self.accept_lengths:
            return sum(self.accept_lengths) / len(self.accept_lengths)
        return self.accept_length


@dataclasses.dataclass(frozen=True)
class Counters:
    """Running totals of a contender, of which a run's share is the difference.

    drafts: rounds times the requests in them.  per_pos[k]: drafts at block position k + 1 that were proposed, and
    accepted.  histogram[n]: requests' rounds that committed n tokens.  by_width[b]: requests' rounds of b rows.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    proposed_per_pos: Sequence[int] = ()
    accepted_per_pos: Sequence[int] = ()
    histogram: Sequence[int] = ()
    by_width: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def since(self, before: Counters) -> Counters:
        widths = {width: n - before.by_width.get(width, 0) for width, n in self.by_width.items()}
        return Counters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            _less(self.proposed_per_pos, before.proposed_per_pos),
            _less(self.accepted_per_pos, before.accepted_per_pos),
            _less(self.histogram, before.histogram),
            {width: n for width, n in widths.items() if n},
        )


def _less(after: Sequence[int], before: Sequence[int]) -> list[int]:
    padded = [*before, *[0] * (len(after) - len(before))]
    return [a - b for a, b in zip(after, padded, strict=False)]


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order; the first error cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in coroutines]
    except BaseExceptionGroup as errors:
        raise first_of(errors) from errors
    return [task.result() for task in tasks]


def first_of(errors: BaseExceptionGroup[Any]) -> BaseException:
    found = errors.exceptions[0]
    return first_of(found) if isinstance(found, BaseExceptionGroup) else found


class Contender(Protocol):
    """Opened, warmed up, run level by level, closed; others may be open meanwhile.

    All but `open` and `close` are called between them only.  ContenderError from any method ends its part in the run.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_concurrency(self) -> int | None:
        """Requests at once, None for as many as wanted."""
        ...

    async def open(self) -> None: ...

    async def warm_up(self, asks: Sequence[Ask], concurrency: int) -> None:
        """Whatever makes later requests as fast as they will ever be."""
        ...

    async def generate(self, ask: Ask) -> Response: ...

    def compile_s(self) -> float:
        """Seconds spent on compiling so far, as far as it is known; a run in which they grow is run again."""
        ...

    async def counters(self) -> Counters | None:
        """Totals so far; None where nothing is counted."""
        ...

    def facts(self) -> dict[str, Any]:
        """What a reader of the results must know of it."""
        ...

    async def close(self) -> None: ...
