"""From responses to figures, under the names that the benchmarks of vLLM and SGLang use.

Latencies in milliseconds, throughput in tokens (or requests) a second.  ITL is the time between two streamed pieces,
which hold as many tokens as the round gave; TPOT is a response's mean over the tokens after its first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_jax.benchmark.contender import Counters, Response

LATENCIES = ("ttft", "tpot", "itl", "e2el")


def run_figures(responses: Sequence[Response], duration_s: float) -> dict[str, float]:
    """Throughput of one run."""
    outputs = sum(one.output_tokens for one in responses)
    inputs = sum(one.prompt_tokens for one in responses)
    return {
        "duration_s": duration_s,
        "completed": len(responses),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(responses) / duration_s,
        "output_throughput": outputs / duration_s,
        "total_token_throughput": (inputs + outputs) / duration_s,
    }


def level_figures(
    runs: Sequence[tuple[Sequence[Response], float]], counters: Sequence[Counters | None]
) -> dict[str, Any]:
    """Figures of the repeats (responses, seconds) of a level: medians of throughput, latencies of all together."""
    each = [run_figures(*run) for run in runs]
    responses = [one for found, _ in runs for one in found]
    medians = {name: statistics.median(run[name] for run in each) for name in each[0]}
    speeds = [run["output_throughput"] for run in each]
    return {
        **medians,
        "output_throughput_runs": speeds,
        **latencies(responses),
        "mean_input_len": statistics.fmean(one.prompt_tokens for one in responses),
        "mean_output_len": statistics.fmean(one.output_tokens for one in responses),
        "accept_length": accept_length(responses, counters),
        **acceptance(responses, [one for one in counters if one]),
    }


def latencies(responses: Sequence[Response]) -> dict[str, float | None]:
    """mean_, median_, p99_ of ttft, tpot, itl and e2el, in ms; None where there is nothing to measure."""
    values = {
        "ttft": [one.ttft_s for one in responses],
        "tpot": [one.tpot_s for one in responses if one.tpot_s is not None],
        "itl": [gap for one in responses for gap in one.itl_s],
        "e2el": [one.e2e_s for one in responses],
    }
    return {f"{kind}_{name}_ms": value for name in LATENCIES for kind, value in _spread(values[name]).items()}


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
    if not seconds:
        return dict.fromkeys(("mean", "median", "p99"))
    ms = np.asarray(seconds) * 1e3
    return {"mean": float(ms.mean()), "median": float(np.median(ms)), "p99": float(np.percentile(ms, 99))}


def accept_length(responses: Sequence[Response], counters: Sequence[Counters | None]) -> float | None:
    """Tokens per round: the mean over responses of the response's mean.

    Where responses do not tell (a vLLM server), it is that of all rounds together.
    """
    means = [mean for one in responses if (mean := one.mean_accept_length) is not None]
    if means:
        return statistics.fmean(means)
    drafts = sum(one.drafts for one in counters if one)
    return 1 + sum(one.accepted_tokens for one in counters if one) / drafts if drafts else None


def acceptance(responses: Sequence[Response], counters: Sequence[Counters]) -> dict[str, Any]:
    """Shares: rounds that committed n tokens ([0] is n = 0), and drafts at position k + 1 that were accepted.

    From the contender's own counters where it has them, otherwise from the rounds of the responses.
    """
    proposed = _total([one.proposed_per_pos for one in counters])
    accepted = _total([one.accepted_per_pos for one in counters])
    histogram = _total([one.histogram for one in counters])
    lengths = [n for one in responses for n in one.accept_lengths or ()]
    if not histogram and lengths:
        histogram = [lengths.count(n) for n in range(max(lengths) + 1)]
    if not proposed and lengths:
        accepted = [sum(n > k + 1 for n in lengths) for k in range(max(lengths) - 1)]
        proposed = [len(lengths)] * len(accepted)
    return {
        "acceptance_histogram": _shares(histogram, [sum(histogram)] * len(histogram)),
        "acceptance_rate_per_pos": _shares(accepted, proposed),
        "rounds_by_width": _widths(counters),
    }


def _total(lists: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, lists), default=0)
    return [sum(one[i] for one in lists if i < len(one)) for i in range(longest)]


def _shares(parts: Sequence[int], wholes: Sequence[int]) -> list[float]:
    return [part / whole if whole else 0.0 for part, whole in zip(parts, wholes, strict=False)]


def _widths(counters: Sequence[Counters]) -> dict[int, int]:
    found: dict[int, int] = {}
    for one in counters:
        for width, n in one.by_width.items():
            found[width] = found.get(width, 0) + n
    return dict(sorted(found.items()))
