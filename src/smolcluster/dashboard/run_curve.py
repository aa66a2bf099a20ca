"""The curves of a run, from the rows of its ranks."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

from smolcluster.dashboard.downsample import Curve, finite
from smolcluster.dashboard.ranks import SILENT_PAUSES
from smolcluster.observe.events import VAL_FIELDS
from smolcluster.observe.run_state import BatchWeights, weighted_mean

OPEN_STEPS = 64  # maximum of steps that wait for rows of other ranks
OPEN_S = 10.0  # a rank without a row for this time (and for SILENT_PAUSES of its intervals) is not waited for
RECENT = 20

RUN_FIELDS = ("loss", "tokens_per_s", "samples_per_s", "grad_norm", "lr", "staleness")
WORKER_MEANS = ("step_time_s", "compute_s", "comm_s", "wait_s", "staleness")
WORKER_SUMS = ("sent_per_s", "received_per_s")
MAX_METRICS = 16  # of a task
METRIC_POINTS = 240


class RunCurve:
    """The loss curve, by the rules of `observe.run_state.loss_curve`, row by row and in bounded memory.

    It has the server's rows, or else the mean over the ranks of a step, weighted by samples. A step is added to the curve when
    every live rank has passed it.
    """

    def __init__(self) -> None:
        self.curve = Curve(RUN_FIELDS)
        self.val = Curve(VAL_FIELDS)
        self.metrics: dict[str, Curve] = {}  # of the task, by name
        self.served = False
        self._weights = BatchWeights()
        self._open: dict[int, dict[int, tuple[dict[str, Any], float]]] = {}
        self._reached: dict[int, int] = {}  # by rank: its latest step
        self._pauses: dict[int, float] = {}  # by rank: the time between its rows
        self._latest: dict[int, dict[str, Any]] = {}
        self._closed = -1
        self._began = math.inf  # time of the first row: ranks without one are waited for from then on
        self.last: dict[str, Any] = {}  # the latest step of the curve
        self.recent: deque[dict[str, Any]] = deque(
            maxlen=RECENT
        )  # the latest steps: a point may be the mean of thousands
        self.last_val: dict[str, Any] = {}

    def add(self, row: dict[str, Any], *, num_workers: int | None, pause_s: float = 0.0) -> None:
        """Add a row. `pause_s`: the longest time between the latest rows of its rank."""
        step, rank, when = row["step"], row["rank"], row["time"]
        if any(name.startswith("val_") and value is not None for name, value in row.items()):  # NaN leaves a gap
            self.val.add(row, step=step, time=when)
            self._add_metrics(row)
            self.last_val = row if step >= self.last_val.get("step", step) else self.last_val
        if row.get("role") == "server":
            if not self.served:  # earlier rows of workers do not count
                self.served, self.curve = True, Curve(RUN_FIELDS, limit=self.curve.limit)
                self._open.clear()
                self.recent.clear()
            self._draw(row)
            return
        if self.served or "loss" not in row or step <= self._closed:
            return
        weight = self._weights.add(rank, step, int(finite(row.get("samples")) or 0))
        self._open.setdefault(step, {})[rank] = (row, weight)
        self._reached[rank], self._pauses[rank] = step, pause_s
        self._latest[rank] = row
        self._began = min(self._began, when)
        self._close_complete_steps(row, num_workers)

    def _add_metrics(self, row: dict[str, Any]) -> None:
        for field in task_metrics(row):
            name = field.removeprefix("val_")
            if name not in self.metrics and len(self.metrics) < MAX_METRICS:
                self.metrics[name] = Curve((field,), limit=METRIC_POINTS)
            if name in self.metrics:
                self.metrics[name].add(row, step=row["step"], time=row["time"])

    def flush(self) -> None:
        """Add the open steps to the curve: the run has ended."""
        for step in sorted(self._open):
            self._close(step)

    def _close_complete_steps(self, newest: dict[str, Any], num_workers: int | None) -> None:
        alive = [self._reached[rank] for rank in self._alive(newest)]
        waited_s = newest["time"] - self._began
        all_started = len(self._reached) >= (num_workers or 1) or not is_alive(
            waited_s, pause_s=self._pauses[newest["rank"]]
        )
        complete = min(alive, default=-1) if all_started else -1
        for step in sorted(self._open):
            if step <= complete or len(self._open) > OPEN_STEPS:
                self._close(step)

    def _close(self, step: int) -> None:
        rows = self._open.pop(step)
        self._closed = max(self._closed, step)
        last = max((row for row, _ in rows.values()), key=lambda row: row["time"])
        running = {rank: self._latest[rank] for rank in self._alive(last)}
        running |= {rank: row for rank, (row, _) in rows.items()}
        combined = last | {
            "step": step,
            "loss": weighted_mean((_or_nan(row.get("loss")), weight) for row, weight in rows.values()),
            "tokens_per_s": sum(finite(row.get("tokens_per_s")) or 0.0 for row in running.values()),
            "samples_per_s": sum(finite(row.get("samples_per_s")) or 0.0 for row in running.values()),
            "staleness": statistics.fmean(finite(row.get("staleness")) or 0.0 for row, _ in rows.values()),
        }
        self._draw(combined)

    def _alive(self, newest: dict[str, Any]) -> list[int]:
        """Return the ranks that were alive when this row was written."""
        pauses, now = self._pauses, newest["time"]
        return [
            rank
            for rank, row in self._latest.items()
            if is_alive(now - row["time"], pause_s=max(pauses[rank], pauses[newest["rank"]]))
        ]

    def _draw(self, row: dict[str, Any]) -> None:
        self.curve.add(row, step=row["step"], time=row["time"])
        self.recent.append(row)
        self.last = row if row["time"] >= self.last.get("time", row["time"]) else self.last


class WorkerMeans:
    """The curve of step times, averaged over the workers, and of the traffic of all workers."""

    def __init__(self) -> None:
        self.curve = Curve(WORKER_MEANS + WORKER_SUMS)
        self.latest: dict[str, float] = {}  # a point may be the mean of thousands of rows
        self._rows: dict[int, dict[str, Any]] = {}  # the latest by rank
        self._num_new = self._num_alive = 0

    def add(self, row: dict[str, Any], *, step: float, alive: Callable[[int], bool]) -> None:
        """Add a row. A point is added when about all live workers have a new row."""
        self._rows[row["rank"]] = row
        self._num_new += 1
        if self._num_new < self._num_alive:
            return
        rows = [other for rank, other in self._rows.items() if alive(rank)]
        self._num_new, self._num_alive = 0, len(rows)
        means = {
            name: statistics.fmean(found)
            for name in WORKER_MEANS
            if (found := [value for other in rows if (value := finite(other.get(name))) is not None])
        }
        sums = {name: sum(finite(other.get(name)) or 0.0 for other in rows) for name in WORKER_SUMS}
        self.latest = means | sums
        self.curve.add(self.latest, step=step, time=row["time"])


def task_metrics(row: dict[str, Any]) -> list[str]:
    """Return the fields of an evaluation that only this task has."""
    return sorted(name for name in row if name.startswith("val_") and name not in VAL_FIELDS)


def is_alive(silence_s: float, *, pause_s: float) -> bool:
    """Return whether a rank without a row for `silence_s` is considered alive, if `pause_s` is the time between its rows."""
    return silence_s < max(OPEN_S, SILENT_PAUSES * pause_s)


def _or_nan(value: Any) -> float:
    found = finite(value)
    return math.nan if found is None else found
