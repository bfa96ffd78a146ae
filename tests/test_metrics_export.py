"""Prometheus text of an engine's metrics, from a stand-in dataclass."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from sparse_compile.metrics_export import COUNTERS, GAUGES, EngineCollector, prometheus_text


@dataclass
class Metrics:
    requests_waiting: int = 2
    requests_finished: int = 7
    tokens_generated: int = 2**53
    pages_free: int = 5
    pages_total: int = 9
    hit_rate: float = 0.25
    note: str = "no number"
    time_per_token_s: float | None = None
    time_to_first_token_s: list[float] = field(default_factory=lambda: [0.3, 0.1, 0.2, 0.4])


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_text() -> None:
    text = prometheus_text(Metrics, model="ouro")
    label = ("model", "ouro")
    name = "sparse_compile_time_to_first_token_seconds"
    assert samples(text) == {
        ("sparse_compile_requests_waiting", (label,)): 2,
        ("sparse_compile_requests_finished_total", (label,)): 7,
        ("sparse_compile_tokens_generated_total", (label,)): 2**53,
        ("sparse_compile_pages_free", (label,)): 5,
        ("sparse_compile_pages", (label,)): 9,
        ("sparse_compile_hit_rate", (label,)): 0.25,
        (name, (label, ("quantile", "0.5"))): 0.2,
        (name, (label, ("quantile", "0.9"))): 0.4,
        (name, (label, ("quantile", "0.99"))): 0.4,
    }
    assert "# TYPE sparse_compile_requests_finished_total counter" in text
    assert "# TYPE sparse_compile_requests_waiting gauge" in text
    assert f"# HELP sparse_compile_pages_free {GAUGES['pages_free']}" in text
    assert "# HELP sparse_compile_hit_rate Hit rate." in text


def test_the_metrics_are_read_anew() -> None:
    metrics = Metrics()
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: metrics))
    assert registry.get_sample_value("sparse_compile_requests_waiting") == 2
    metrics.requests_waiting, metrics.time_to_first_token_s = 0, []
    assert registry.get_sample_value("sparse_compile_requests_waiting") == 0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_quantiles_are_values_that_cover_their_share(times: list[float]) -> None:
    found = samples(prometheus_text(lambda: Metrics(time_to_first_token_s=times)))
    for share in (0.5, 0.9, 0.99):
        value = found["sparse_compile_time_to_first_token_seconds", (("quantile", str(share)),)]
        assert any(abs(value - time) <= 1e-9 for time in times)
        assert sum(time <= value + 1e-9 for time in times) >= share * len(times)


def test_every_field_is_counter_or_gauge() -> None:
    assert not set(COUNTERS) & set(GAUGES)
    assert all(text.endswith(".") for text in (*COUNTERS.values(), *GAUGES.values()))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="must be a dataclass, got dict"):
        prometheus_text(dict)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"sparse-compile\[metrics\]"):
        EngineCollector(Metrics)
