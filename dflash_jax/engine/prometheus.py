"""The engine's metrics for Prometheus (extra `metrics`): read when scraped, so that serving pays nothing for them.

    from prometheus_client import start_http_server
    export_metrics(engine)
    start_http_server(8000)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Protocol

from dflash_jax.engine.metrics import EngineMetrics, Latency
from dflash_jax.errors import UserError

PREFIX = "dflash_jax:"
GAUGES = {
    "num_requests_running": "Requests in prefill or decoding.",
    "num_requests_waiting": "Requests that have no slot yet.",
    "kv_cache_usage": "Share of the KV pages that requests hold, 1 = all.",
}
COUNTERS = {
    "num_preemptions": "Times a request gave up its pages to others.",
    "prompt_tokens": "Tokens computed by prefill.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prefill_launches": "Prefill launches.",
    "rounds": "Decode rounds launched.",
}
SPECULATION = {
    "num_drafts": "Blocks drafted: rounds times the requests in them.",
    "num_draft_tokens": "Tokens drafted.",
    "num_accepted_tokens": "Drafted tokens that were kept.",
}
LATENCIES = {
    "time_to_first_token": "From submission to the first token.",
    "time_per_output_token": "A request's mean over the tokens after its first.",
    "e2e_request_latency": "From submission to the end.",
}


class HasMetrics(Protocol):
    """`Engine` or `AsyncEngine`."""

    def metrics(self) -> EngineMetrics: ...


def export_metrics(engine: HasMetrics, *, model_name: str = "", registry: Any = None) -> EngineCollector:
    """Register an engine with a `prometheus_client` registry, by default the global one.

    Every series gets the label `model_name`.  `registry.unregister` with the result takes it back.
    UserError without the package.
    """
    try:
        core = importlib.import_module("prometheus_client.core")
    except ModuleNotFoundError as error:
        raise UserError(
            "metrics for Prometheus need the package prometheus-client: pip install 'dflash-jax[metrics]'"
        ) from error
    collector = EngineCollector(engine, model_name, core)
    (registry or core.REGISTRY).register(collector)
    return collector


class EngineCollector:
    """What `prometheus_client` asks at each scrape.  Names are those of `EngineMetrics`, hence of vLLM."""

    def __init__(self, engine: HasMetrics, model_name: str, core: Any):
        self._engine = engine
        self._labels = [model_name]
        self._core = core

    def describe(self) -> list[Any]:
        """Nothing in advance: registering does not scrape."""
        return []

    def collect(self) -> Iterator[Any]:
        found = self._engine.metrics()
        for name, text in GAUGES.items():
            yield self._one(self._core.GaugeMetricFamily, name, text, getattr(found, name))
        for name, text in COUNTERS.items():
            yield self._one(self._core.CounterMetricFamily, name, text, getattr(found, name))
        for name, text in SPECULATION.items():
            yield self._one(self._core.CounterMetricFamily, "spec_decode_" + name, text, getattr(found, name))
        for name, text in LATENCIES.items():
            yield self._histogram(name + "_seconds", text, getattr(found, name))
        yield self._by_reason(found)
        yield self._by_position(found)
        yield self._acceptance(found)

    def _one(self, family: Any, name: str, text: str, value: float) -> Any:
        made = family(PREFIX + name, text, labels=["model_name"])
        made.add_metric(self._labels, value)
        return made

    def _histogram(self, name: str, text: str, latency: Latency) -> Any:
        made = self._core.HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        buckets = [(str(float(f"{bound:.6g}")), count) for bound, count in latency.upto]
        made.add_metric(self._labels, [*buckets, ("+Inf", latency.count)], sum_value=latency.sum_s)
        return made

    def _by_reason(self, found: EngineMetrics) -> Any:
        made = self._core.CounterMetricFamily(
            PREFIX + "request_success", "Finished requests.", labels=["model_name", "finished_reason"]
        )
        for reason, count in found.request_success.items():
            made.add_metric([*self._labels, reason], count)
        return made

    def _by_position(self, found: EngineMetrics) -> Any:
        made = self._core.CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens that were kept, by place in the block.",
            labels=["model_name", "position"],
        )  # fmt: skip
        for position, count in enumerate(found.num_accepted_tokens_per_pos):
            made.add_metric([*self._labels, str(position)], count)
        return made

    def _acceptance(self, found: EngineMetrics) -> Any:
        """Tokens a request committed in a round, bonus included, as a histogram."""
        made = self._core.HistogramMetricFamily(
            PREFIX + "spec_decode_acceptance_length", "Tokens of a request's round, bonus included.",
            labels=["model_name"],
        )  # fmt: skip
        counts = found.acceptance_histogram
        buckets = [(str(float(n)), sum(counts[: n + 1])) for n in range(1, len(counts))]
        total = sum(n * count for n, count in enumerate(counts))
        made.add_metric(self._labels, [*buckets, ("+Inf", sum(counts))], sum_value=total)
        return made
