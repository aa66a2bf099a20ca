"""Curves of at most `limit` points, however long a run is.

A point is made of `stride` rows: the mean of every field, and the minimum and maximum of the first field, so that a spike of
one step in a million stays visible. When the curve is full, neighbours are merged in pairs and the stride doubles. Means are
exact.

    stride 1     o o o o o o o o          limit 8
    stride 2     o   o   o   o   o ...    room for 4 more points, of 2 rows each
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

MIN_POINTS = 60
MAX_POINTS = 480
ALL_POINTS = 12_000
_LARGEST = 1e100  # no sum or product of numbers up to this overflows
_LATEST = 2.0**35  # seconds: the year 3058, valid in every calendar library


def limit_for(num_curves: int) -> int:
    """Return the maximum of points per curve, about ALL_POINTS in total. Even: points are merged in pairs."""
    return max(MIN_POINTS, min(MAX_POINTS, ALL_POINTS // max(1, num_curves))) // 2 * 2


class CurvePoint:
    """The sums and extremes of one or more rows."""

    __slots__ = ("counts", "highest", "lowest", "rows", "step", "sums", "time")

    def __init__(self, step: float, time: float, values: Sequence[float | None]) -> None:
        self.step, self.time, self.rows = step, time, 1  # step and time of its last row
        self.sums = [0.0 if value is None else value for value in values]
        self.counts = [0 if value is None else 1 for value in values]
        self.lowest = self.highest = values[0]

    def add(self, step: float, time: float, values: Sequence[float | None]) -> None:
        """Add the latest row."""
        self.step, self.time = step, time
        self.rows += 1
        sums, counts = self.sums, self.counts
        for index, value in enumerate(values):
            if value is not None:
                sums[index] += value
                counts[index] += 1
        first = values[0]
        if first is not None:
            self.lowest = first if self.lowest is None or first < self.lowest else self.lowest
            self.highest = first if self.highest is None or first > self.highest else self.highest

    def merge(self, other: CurvePoint) -> None:
        if other.time >= self.time:
            self.step, self.time = other.step, other.time
        self.rows += other.rows
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.lowest = _either(min, self.lowest, other.lowest)
        self.highest = _either(max, self.highest, other.highest)

    def means(self) -> list[float | None]:
        return [total / count if count else None for total, count in zip(self.sums, self.counts, strict=True)]


class Curve:
    """The points of one rank, or of the run. Minimum and maximum are kept of the first of `fields`.

    `changed` is the index of the first point that changed since the last `forget_changes`.
    """

    def __init__(self, fields: Sequence[str], *, limit: int = MAX_POINTS) -> None:
        self.fields, self.limit, self.stride = tuple(fields), limit, 1
        self.points: list[CurvePoint] = []
        self.num_rows = 0
        self.changed = 0

    def add(self, row: Mapping[str, Any], *, step: float, time: float) -> None:
        """Add a row. One with an earlier time is inserted by its time."""
        values = [finite(value) for value in map(row.get, self.fields)]
        self.num_rows += 1
        last = self.points[-1] if self.points else None
        if last is not None and last.rows < self.stride and time >= last.time:
            last.add(step, time, values)
            self._touch(len(self.points) - 1)
        else:
            self._insert(CurvePoint(step, time, values))
            if len(self.points) > self.limit:
                self._merge_pairs()

    def set_limit(self, limit: int) -> None:
        self.limit = limit
        while len(self.points) > limit:
            self._merge_pairs()

    def forget_changes(self) -> None:
        self.changed = len(self.points)

    def columns(self, start: int = 0) -> dict[str, list[float | None]]:
        """Return the points from `start` on as columns: `step`, `time`, the fields, `lowest` and `highest` of the first."""
        points = self.points[start:]
        means = [point.means() for point in points]
        columns: dict[str, list[float | None]] = {
            "step": [round(point.step, 2) for point in points],
            "time": [round(point.time, 2) for point in points],
        }
        for index, name in enumerate(self.fields):
            columns[name] = [tidy(mean[index]) for mean in means]
        columns["lowest"] = [tidy(point.lowest) for point in points]
        columns["highest"] = [tidy(point.highest) for point in points]
        return columns

    def _insert(self, point: CurvePoint) -> None:
        points = self.points
        if not points or point.time >= points[-1].time:
            points.append(point)
            self._touch(len(points) - 1)
            return
        index = bisect.bisect_left([other.time for other in points], point.time)
        if self.stride == 1:
            points.insert(index, point)
        else:
            points[index].merge(point)
        self._touch(index)

    def _merge_pairs(self) -> None:
        self.stride *= 2
        joined = []
        for index in range(0, len(self.points), 2):
            point = self.points[index]
            if index + 1 < len(self.points):
                point.merge(self.points[index + 1])
            joined.append(point)
        self.points = joined
        self._touch(0)

    def _touch(self, index: int) -> None:
        self.changed = min(self.changed, index)


def finite(value: Any) -> float | None:
    """Return a number that can be drawn. NaN, infinity, their names, and huge numbers of damaged rows are None: a gap."""
    kind = value.__class__
    if kind is float:
        return value if -_LARGEST <= value <= _LARGEST else None
    return float(value) if kind is int and -_LARGEST <= value <= _LARGEST else None


def moment(value: Any) -> float | None:
    """Return a valid time in seconds since 1970, else None."""
    found = finite(value)
    return found if found is not None and 1.0 <= found < _LATEST else None


def tidy(value: float | None) -> float | None:
    """Round to eight digits, which halves the bytes. A screen shows five, and rounding twice must not change the fifth."""
    return None if value is None else float(f"{value:.8g}")


def _either(choose: Any, a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else choose(a, b)
