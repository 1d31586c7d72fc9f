"""The export against the engine's own figures."""

from __future__ import annotations

import importlib

import prometheus_client
import pytest

from dflash_jax import UserError
from dflash_jax.engine.prometheus import export_metrics

from .fake_engine import make_engine, params
from .test_engine import settle


def test_the_export_says_what_metrics_says():
    engine = make_engine(num_slots=2)
    registry = prometheus_client.CollectorRegistry()
    export_metrics(engine, model_name="tiny", registry=registry)
    for i in range(3):
        engine.add_request([i, *range(12)], params([i, *range(12)], 9))
    engine.step()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value("dflash_jax:" + name, {"model_name": "tiny", **labels})

    assert (value("num_requests_running"), value("num_requests_waiting")) == (2, 1)
    settle(engine)
    found = engine.metrics()
    assert (value("num_requests_running"), value("kv_cache_usage")) == (0, 0)
    assert value("generation_tokens_total") == found.generation_tokens == 27
    assert value("request_success_total", finished_reason="length") == 3
    assert value("spec_decode_num_drafts_total") == found.num_drafts
    assert value("spec_decode_num_accepted_tokens_total") == found.num_accepted_tokens > 0
    per_position = [value("spec_decode_num_accepted_tokens_per_pos_total", position=str(k)) for k in range(3)]
    assert per_position == found.num_accepted_tokens_per_pos
    assert value("spec_decode_acceptance_length_sum") == 24
    assert value("spec_decode_acceptance_length_count") == found.num_drafts
    assert value("spec_decode_acceptance_length_bucket", le="1.0") == found.acceptance_histogram[1]
    assert value("time_to_first_token_seconds_count") == 3
    assert value("time_to_first_token_seconds_sum") == pytest.approx(found.time_to_first_token.sum_s)
    assert value("time_to_first_token_seconds_bucket", le="1000.0") == 3
    text = prometheus_client.generate_latest(registry).decode()
    assert 'dflash_jax:prefix_cache_hits_total{model_name="tiny"}' in text


def test_two_engines_in_one_registry_need_two_names():
    registry = prometheus_client.CollectorRegistry()
    first = export_metrics(make_engine(), model_name="a", registry=registry)
    export_metrics(make_engine(), model_name="b", registry=registry)
    text = prometheus_client.generate_latest(registry).decode()
    assert 'num_requests_running{model_name="a"}' in text and 'num_requests_running{model_name="b"}' in text
    registry.unregister(first)
    assert 'model_name="a"' not in prometheus_client.generate_latest(registry).decode()


def test_without_the_package_the_extra_is_named(monkeypatch):
    real = importlib.import_module

    def absent(name: str, *args: object):
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UserError, match=r"pip install 'dflash-jax\[metrics\]'"):
        export_metrics(make_engine())
