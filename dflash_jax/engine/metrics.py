"""What the engine did, counted in constant memory. Names as vLLM's where it has one (without its prefixes)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_jax.engine.request import Request
    from dflash_jax.engine.scheduler import Scheduler

_LOWEST_S = 1e-5
_PER_DECADE = 40
_BUCKETS = 10 * _PER_DECADE  # 10 µs to 100,000 s


@dataclass(frozen=True)
class Latency:
    """Seconds. Percentiles come from a histogram with 6 % wide buckets; `upto`: (bound, values below it), coarser."""

    count: int
    sum_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    upto: list[tuple[float, int]]

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.count if self.count else 0.0


class LatencyHistogram:
    """Logarithmic buckets; the two at the ends also take what lies beyond them."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self._buckets = [0] * _BUCKETS

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds
        bucket = math.floor(math.log10(max(seconds, _LOWEST_S) / _LOWEST_S) * _PER_DECADE)
        self._buckets[min(bucket, _BUCKETS - 1)] += 1

    def percentile(self, share: float) -> float:
        """The middle of the bucket in which `share` of the values is reached; 0 without values."""
        rank, seen = share * self.count, 0
        for bucket, number in enumerate(self._buckets):
            seen += number
            if number and seen >= rank:
                return _LOWEST_S * 10 ** ((bucket + 0.5) / _PER_DECADE)
        return 0.0

    def snapshot(self) -> Latency:
        percentiles = (self.percentile(share) for share in (0.5, 0.9, 0.99))
        return Latency(self.count, self.sum_s, *percentiles, upto=self._upto())

    def _upto(self) -> list[tuple[float, int]]:
        """Four bounds a decade from 100 µs to 1,000 s, which are bounds of the fine buckets too."""
        fine = _PER_DECADE // 4
        ends = range(_PER_DECADE, _PER_DECADE * 8 + 1, fine)
        return [(_LOWEST_S * 10 ** (end / _PER_DECADE), sum(self._buckets[:end])) for end in ends]


@dataclass(frozen=True)
class EngineMetrics:
    """A snapshot. Counters run from the engine's start."""

    num_requests_running: int  # prefilling or decoding
    num_requests_waiting: int
    num_preemptions: int
    request_success: dict[str, int]  # finished requests by reason
    num_pages: int  # padding page not counted: free + held + cached
    num_pages_free: int
    num_pages_held: int
    num_pages_cached: int  # kept for later hits, held by nobody
    prefix_cache_queries: int  # prompt tokens looked up
    prefix_cache_hits: int  # prompt tokens found
    prompt_tokens: int  # computed by prefill, resumed requests' output included
    generation_tokens: int
    prefill_launches: int
    rounds: int  # decode launches
    num_drafts: int  # rounds times the requests in them
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: list[int]  # [n]: requests' rounds that committed n tokens, bonus included
    num_drafts_per_pos: list[int]  # [k]: drafts proposed at block position k + 1
    num_accepted_tokens_per_pos: list[int]
    acceptance_by_width: dict[int, list[int]]  # [b][n]: of the rounds of width b, those that committed n tokens
    time_to_first_token: Latency
    time_per_output_token: Latency  # a request's mean over the tokens after its first
    e2e_request_latency: Latency

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pages that requests hold."""
        return self.num_pages_held / self.num_pages

    @property
    def prefix_cache_hit_rate(self) -> float:
        return _share(self.prefix_cache_hits, self.prefix_cache_queries)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a request commits per round, bonus included; 0 before the first round."""
        return _share(self.num_drafts + self.num_accepted_tokens, self.num_drafts)

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """[k]: share of the drafts at block position k + 1 that were committed."""
        return [_share(*pair) for pair in zip(self.num_accepted_tokens_per_pos, self.num_drafts_per_pos, strict=True)]


@dataclass
class MetricsRecorder:
    """The counters behind `EngineMetrics`, fed by the loop. A round cut by a stop counts what it committed."""

    block_size: int
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefill_launches: int = 0
    rounds: int = 0
    success: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))
    by_width: dict[int, list[int]] = field(default_factory=dict)  # [b][n]: rows of width b that committed n tokens
    ttft: LatencyHistogram = field(default_factory=LatencyHistogram)
    tpot: LatencyHistogram = field(default_factory=LatencyHistogram)
    e2e: LatencyHistogram = field(default_factory=LatencyHistogram)

    def launched(self, block_size: int) -> None:
        """A launch was read; block_size 0 is prefill."""
        self.rounds += block_size > 0
        self.prefill_launches += block_size == 0

    def prefilled(self, tokens: int) -> None:
        self.prompt_tokens += tokens

    def first_token(self, seconds: float) -> None:
        self.ttft.add(seconds)

    def round(self, block_size: int, committed: int) -> None:
        """One request's round."""
        if block_size not in self.by_width:
            self.by_width[block_size] = [0] * (block_size + 1)
        self.by_width[block_size][committed] += 1

    def generated(self, tokens: int) -> None:
        self.generation_tokens += tokens

    def finished(self, request: Request) -> None:
        """Count a finished request; one aborted before its first token has no time per token."""
        if request.finish_s is None or request.finish_reason is None:
            raise RuntimeError(f"request {request.request_id} is {request.phase.value}, not finished")
        self.success[request.finish_reason] += 1
        self.e2e.add(request.finish_s - request.arrival_s)
        if request.first_token_s is not None and len(request.output_ids) > 1:
            self.tpot.add((request.finish_s - request.first_token_s) / (len(request.output_ids) - 1))

    def snapshot(self, scheduler: Scheduler) -> EngineMetrics:
        pool, widths, committed = scheduler.pool, [0] * (self.block_size + 1), [0] * (self.block_size + 1)
        for width, counts in list(self.by_width.items()):
            widths[width] = sum(counts)
            committed[: width + 1] = [a + b for a, b in zip(committed, counts, strict=False)]
        proposed, accepted = _tails(widths), _tails(committed)
        return EngineMetrics(
            num_requests_running=len(scheduler.live),
            num_requests_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            request_success=dict(self.success),
            num_pages=pool.total,
            num_pages_free=pool.num_free,
            num_pages_held=pool.num_held,
            num_pages_cached=pool.num_cached,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            prefill_launches=self.prefill_launches,
            rounds=self.rounds,
            num_drafts=sum(widths),
            num_draft_tokens=sum(proposed),
            num_accepted_tokens=sum(accepted),
            acceptance_histogram=committed,
            num_drafts_per_pos=proposed,
            num_accepted_tokens_per_pos=accepted,
            acceptance_by_width={width: list(counts) for width, counts in list(self.by_width.items())},
            time_to_first_token=self.ttft.snapshot(),
            time_per_output_token=self.tpot.snapshot(),
            e2e_request_latency=self.e2e.snapshot(),
        )


def _tails(counts: Sequence[int]) -> list[int]:
    """[k]: how many rows counted in `counts` reach beyond k + 1, i.e. have a draft at block position k + 1."""
    return [sum(counts[position + 2 :]) for position in range(len(counts) - 2)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
