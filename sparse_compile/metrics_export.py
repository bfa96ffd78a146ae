"""Engine metrics for Prometheus, through prometheus-client (`pip install sparse-compile[metrics]`).

    prometheus_client.REGISTRY.register(EngineCollector(engine.metrics, model="ouro"))
    prometheus_client.start_http_server(9000)

or, for a server of your own, `prometheus_text(engine.metrics)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIX = "sparse_compile_"
QUANTILES = (0.5, 0.9, 0.99)

# Fields that only grow: exported as counters, whose names end in _total.
COUNTERS = {
    "requests_finished": "Requests that have ended, for any reason.",
    "tokens_generated": "Tokens that were generated.",
    "prompt_tokens": "Prompt tokens that were computed.",
    "cached_tokens": "Prompt tokens that were found in cached pages.",
    "steps": "Steps that were run.",
    "rounds": "Rounds of speculation, summed over requests.",
    "waiting_rounds": "Rounds that were read before the next step, with asynchronous steps.",
    "drafted_tokens": "Tokens that were drafted.",
    "accepted_tokens": "Drafted tokens that were accepted.",
    "round_tokens": "Tokens that came out of rounds of speculation.",
    "keys_read": "Keys that were attended, over query heads, layers and loops.",
    "keys_dense": "Keys that dense attention would have attended.",
    "preemptions": "Requests that were pushed out by memory pressure or priority.",
    "failed_runs": "Runs of the model that raised, and were repeated one request at a time.",
    "resumed": "Requests that were taken up again after they had been pushed out.",
}
GAUGES = {
    "requests_waiting": "Requests that wait to be admitted.",
    "requests_running": "Requests that are being computed.",
    "requests_suspended": "Requests that were pushed out and will continue.",
    "pages_free": "Free pages of the KV pool.",
    "pages_total": "Pages of the KV pool.",
    "slots_free": "Free slots of the reference store.",
    "slots_total": "Slots of the reference store.",
    "time_to_first_token_s": "Time from arrival to the first token, over the last finished requests.",
    "time_per_token_s": "Mean time per token after the first, over the last finished requests.",
}
# Prometheus keeps names that end in _total for counters.
_NAMES = {"pages_total": "pages", "slots_total": "slots"}


class EngineCollector:
    """Reads a dataclass of metrics whenever Prometheus asks.

    read: gives the dataclass, such as `engine.metrics`. labels: put on every sample.

    A number is a gauge, or a counter if it only grows (`COUNTERS`); a list of numbers, such as the times of the last
    requests, is a gauge per quantile. Fields without a number (None, text, an empty list) are left out.

    Raises ImportError where prometheus-client is not installed.
    """

    def __init__(self, read: Callable[[], Any], **labels: str) -> None:
        _client()
        self._read, self._labels = read, labels

    def collect(self) -> Iterator[Metric]:
        metrics = self._read()
        if not is_dataclass(metrics):
            raise TypeError(f"metrics must be a dataclass, got {type(metrics).__name__}")
        for field in fields(metrics):
            value = getattr(metrics, field.name)
            if isinstance(value, int | float):
                yield self._family(field.name, [({}, float(value))])
            elif isinstance(value, Sequence) and not isinstance(value, str) and value:
                yield self._family(field.name, _quantiles(value))

    def _family(self, name: str, samples: list[tuple[dict[str, str], float]]) -> Metric:
        core = _client().core
        kind = core.CounterMetricFamily if name in COUNTERS else core.GaugeMetricFamily
        text = COUNTERS.get(name) or GAUGES.get(name) or f"{name.replace('_', ' ').capitalize()}."
        family = kind(_exported_name(name), text, labels=[*self._labels, *samples[0][0]])
        for labels, value in samples:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        return family


def prometheus_text(read: Callable[[], Any], **labels: str) -> str:
    """The metrics in Prometheus's text format."""
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(EngineCollector(read, **labels))
    return client.generate_latest(registry).decode()


def _exported_name(name: str) -> str:
    name = _NAMES.get(name, name)
    return PREFIX + (f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name)


def _quantiles(values: Sequence[float]) -> list[tuple[dict[str, str], float]]:
    """The smallest value that so large a share of the values does not exceed."""
    ordered = sorted(values)
    return [
        ({"quantile": str(share)}, float(ordered[math.ceil(share * len(ordered)) - 1])) for share in QUANTILES
    ]


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise ImportError(
            "metrics for Prometheus need prometheus-client; pip install 'sparse-compile[metrics]'"
        ) from error
    return prometheus_client
