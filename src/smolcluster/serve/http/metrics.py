"""Metrics of the inference service, in Prometheus' text format.

smolcluster_serve_requests_total{route, status}          responses; 499: the client disconnected first
smolcluster_serve_prompt_tokens_total, _generated_tokens_total
smolcluster_serve_running, _waiting                       sequences, from the engine's state
smolcluster_serve_first_token_seconds                     histogram: from the request to its first token
smolcluster_serve_token_seconds                           histogram: between one token and the next of its sequence
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import Metric

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_PREFIX = "smolcluster_serve_"


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = (*bounds, float("inf"))
        self._counts, self.sum = [0] * len(self._bounds), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound with the number of values up to it."""
        names = (*map(str, self._bounds[:-1]), "+Inf")
        return list(zip(names, itertools.accumulate(self._counts), strict=True))


class Metrics:
    """Counters and histograms. Only `collect` needs prometheus_client. `state` returns the engine's state."""

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self._state = state
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.prompt_tokens = self.generated_tokens = 0
        self.first_token, self.token = Histogram(FIRST_TOKEN_S), Histogram(TOKEN_S)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, for `prometheus_client.generate_latest`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        about = "Responses, by route and status; 499: the client disconnected before."
        requests = CounterMetricFamily(_PREFIX + "requests", about, labels=["route", "status"])
        for (route, status), count in sorted(self.requests.items()):
            requests.add_metric([route, str(status)], count)
        yield requests
        yield CounterMetricFamily(_PREFIX + "prompt_tokens", "Tokens of prompts.", self.prompt_tokens)
        yield CounterMetricFamily(_PREFIX + "generated_tokens", "Tokens that were generated.", self.generated_tokens)
        state = self._state()
        for name, about in (
            ("ready", "1 while every layer is held."),
            ("running", "Running sequences."),
            ("waiting", "Queued sequences."),
        ):
            yield GaugeMetricFamily(_PREFIX + name, about, int(state.get(name) or 0))
        for name, about, histogram in (
            ("first_token_seconds", "From a sequence's request to its first token.", self.first_token),
            ("token_seconds", "Between one token of a sequence and the next.", self.token),
        ):
            yield HistogramMetricFamily(_PREFIX + name, about, buckets=histogram.buckets(), sum_value=histogram.sum)
