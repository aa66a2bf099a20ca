"""Metrics of the inference service, in Prometheus' text format.

smolcluster_serve_requests_total{route, status}          responses; 499: disconnected before
smolcluster_serve_prompt_tokens_total, _generated_tokens_total
smolcluster_serve_running, _waiting                       sequences, from the engine's state
smolcluster_serve_first_token_seconds                     histogram: from the request to its first token
smolcluster_serve_token_seconds                           histogram: between one token and the next of its sequence
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from smolcluster.observe.prometheus import format_value, label_text, metric_lines

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_PREFIX = "smolcluster_serve_"


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = itertools.accumulate(self._counts)
        for bound, count in zip((*self._bounds, float("inf")), total, strict=True):
            yield f"{name}_bucket{{{label_text({'le': format_value(bound)})}}} {count}"
        yield f"{name}_sum {format_value(self._sum)}"
        yield f"{name}_count {sum(self._counts)}"


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.prompt_tokens = self.generated_tokens = 0
        self.first_token, self.token = Histogram(FIRST_TOKEN_S), Histogram(TOKEN_S)

    def text(self, state: Mapping[str, Any]) -> str:
        """Return the exposition. `state` is the engine's."""
        answers = [
            ({"route": route, "status": str(status)}, count) for (route, status), count in sorted(self.requests.items())
        ]
        about = "Responses, by route and status; 499: the client disconnected before."
        lines = metric_lines(f"{_PREFIX}requests_total", "counter", about, answers)
        for name, kind, about, value in (
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("generated_tokens_total", "counter", "Tokens that were generated.", self.generated_tokens),
            ("ready", "gauge", "1 while every layer is held.", state.get("ready")),
            ("running", "gauge", "Running sequences.", state.get("running")),
            ("waiting", "gauge", "Queued sequences.", state.get("waiting")),
        ):
            lines += metric_lines(_PREFIX + name, kind, about, [({}, int(value or 0))])
        for name, about, histogram in (
            ("first_token_seconds", "From a sequence's request to its first token.", self.first_token),
            ("token_seconds", "Between one token of a sequence and the next.", self.token),
        ):
            lines += [*metric_lines(_PREFIX + name, "histogram", about, ()), *histogram.lines(_PREFIX + name)]
        return "\n".join(lines) + "\n"
