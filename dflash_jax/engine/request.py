"""A request and its seat: what the user asked for and got, and what it holds while it is served."""

from __future__ import annotations

import enum
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from dflash_jax.engine.prefix_cache import Node
from dflash_jax.engine.protocol import Grammar, TokenLogprobs


class Phase(enum.Enum):
    """A request moves down this list; preemption takes it back to WAITING."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Seat:
    """A slot and pages on the device, from admission until nothing in flight can write to the pages.

    A launch remembers seats, not slots: a slot may have a new owner while its last round is still in flight.
    """

    slot: int
    pages: list[int]
    chain: list[Node]  # held in the prefix cache: chain[i] stands for the tokens of pages[i]
    tokens: list[int]  # to prefill: the prompt, after a preemption with everything emitted so far
    sent: int  # tokens whose prefill is launched; starts at the prefix hit
    done: int  # tokens whose prefill is known to have run
    in_flight: int = 0  # launches that include the seat and are not digested
    closed: bool = False  # its request left: results are dropped, pages go once nothing is in flight
    broken: bool = False  # the device reported an error: the KV in these pages is not to be trusted


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and what came of it. Times are of one monotonic clock, in seconds."""

    request_id: str
    prompt_ids: Sequence[int]
    max_new_tokens: int
    stop_token_ids: Sequence[int] = ()
    eos_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    priority: int = 0  # lower goes first
    sampling: object = None  # for the device; the scheduler does not look inside
    cache_salt: Hashable = None  # requests share prefixes only under equal salts
    grammar: Grammar | None = None  # what its text may be; has seen `output_ids`
    num_logprobs: int | None = None  # alternatives with each token
    num_prompt_logprobs: int | None = None
    arrival_s: float = field(default_factory=time.perf_counter)

    output_ids: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)  # tokens committed by each round, bonus included
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of output_ids, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of prompt_ids[1:], if asked for
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    error: Exception | None = None  # with "error": what the host met (None: the logits were not finite)
    first_token_s: float | None = None
    finish_s: float | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    preemptions: int = 0

    phase: Phase = Phase.WAITING
    sequence: int = 0  # arrival rank, given by the scheduler
    limit_tokens: int = 0  # prompt and output together, given by the scheduler
    seat: Seat | None = None
    newest: int = 0  # how many of the last output tokens came with the last result

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first; the greatest is preempted first."""
        return self.priority, self.sequence

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end the request, the stop token included in the output."""
        return (*self.stop_token_ids, *(() if self.ignore_eos else self.eos_token_ids))

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def num_tokens(self) -> int:
        """Prompt and known output."""
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self) -> list[int]:
        return [*self.prompt_ids, *self.output_ids]

    @property
    def reads_prompt(self) -> bool:
        """Whether the whole prompt has to run, because something of it has not been reported yet."""
        return self.num_prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids) - 1

    def take_logprobs(self, found: Sequence[TokenLogprobs]) -> None:
        """Of the tokens just taken; there may be more alternatives than were asked for."""
        if self.num_logprobs is not None:
            self.logprobs.extend(_likeliest(one, self.num_logprobs) for one in found)

    def take_prompt_logprobs(self, start: int, found: Sequence[TokenLogprobs]) -> None:
        """Of the tokens at start + 1, …; a chunk may have been seen before, or reach into the output."""
        if self.num_prompt_logprobs is not None:
            new = found[len(self.prompt_logprobs) - start : len(self.prompt_ids) - 1 - start]
            self.prompt_logprobs.extend(_likeliest(one, self.num_prompt_logprobs) for one in new)

    def take(self, tokens: Sequence[int], *, is_round: bool, now_s: float) -> None:
        """Append newly emitted tokens. The token of a prefill, first or resumed, belongs to no round."""
        self.output_ids.extend(tokens)
        self.newest = len(tokens)
        if is_round:
            self.accept_lengths.append(len(tokens))
        if self.first_token_s is None:
            self.first_token_s = now_s

    def drop_tail(self, count: int) -> None:
        """Forget the newest `count` tokens, those after the one that completed a stop string.

        At least one token of the last result stays, so only a round can lose any.
        """
        if not 0 <= count < self.newest:
            raise ValueError(f"cannot drop {count} of the {self.newest} newest tokens of request {self.request_id}")
        if count:
            del self.output_ids[-count:]
            del self.logprobs[len(self.output_ids) :]
            self.accept_lengths[-1] -= count
            self.newest -= count


def _likeliest(found: TokenLogprobs, count: int) -> TokenLogprobs:
    return TokenLogprobs(found.logprob, found.rank, found.top_ids[:count], found.top_logprobs[:count])
