"""The curve of the whole run out of the rows of its ranks."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from smolcluster.dashboard.machines import SILENT_PAUSES
from smolcluster.dashboard.thin import Curve, finite
from smolcluster.observe.board import BatchWeights, weighted_mean
from smolcluster.observe.events import VAL_FIELDS

OPEN_STEPS = 64  # a step waits for the rows of all ranks, but not longer than so many steps
OPEN_S = 10.0  # and not for a rank that has said nothing for so long, and for several of the pauses between rows

RECENT = 20

JOINED_FIELDS = ("loss", "tokens_per_s", "samples_per_s", "grad_norm", "lr", "staleness")
MOST_METRICS = 16  # of a task's own
METRIC_POINTS = 240


class Joined:
    """The curve of the whole run, by the rules of `observe.board.loss_curve`, row by row and in bounded memory.

    The server's rows, or else the mean over the ranks of a step, weighted by samples. A step is drawn when every rank that is
    alive has gone beyond it.
    """

    def __init__(self) -> None:
        self.curve = Curve(JOINED_FIELDS)
        self.val = Curve(VAL_FIELDS)
        self.metrics: dict[str, Curve] = {}  # of a task's own, by name
        self.served = False
        self._weights = BatchWeights()
        self._open: dict[int, dict[int, tuple[dict[str, Any], float]]] = {}
        self._reached: dict[int, int] = {}  # by rank: its latest step
        self._pauses: dict[int, float] = {}  # and how far apart its rows are
        self._latest: dict[int, dict[str, Any]] = {}
        self._closed = -1
        self._began = math.inf  # when the first row came: a rank without one is not waited for without end
        self.last: dict[str, Any] = {}  # the latest step that is drawn, and the latest evaluation
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)  # steps as drawn: a point may stand for thousands
        self.last_val: dict[str, Any] = {}

    def add(self, row: dict[str, Any], *, num_workers: int | None, pause_s: float = 0.0) -> None:
        """`pause_s`: the longest between two of the latest rows of this rank."""
        step, rank, when = row["step"], row["rank"], row["time"]
        if any(name.startswith("val_") and value is not None for name, value in row.items()):  # NaN leaves a gap
            self.val.add(row, step=step, time=when)
            self._add_metrics(row)
            self.last_val = row if step >= self.last_val.get("step", step) else self.last_val
        if row.get("role") == "server":
            if not self.served:  # rows of workers that came before do not count
                self.served, self.curve = True, Curve(JOINED_FIELDS, limit=self.curve.limit)
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
        self._close_what_is_complete(row, num_workers)

    def _add_metrics(self, row: dict[str, Any]) -> None:
        for field in own_metrics(row):
            name = field.removeprefix("val_")
            if name not in self.metrics and len(self.metrics) < MOST_METRICS:
                self.metrics[name] = Curve((field,), limit=METRIC_POINTS)
            if name in self.metrics:
                self.metrics[name].add(row, step=row["step"], time=row["time"])

    def flush(self) -> None:
        """The run has ended: draw what is open."""
        for step in sorted(self._open):
            self._close(step)

    def _close_what_is_complete(self, newest: dict[str, Any], num_workers: int | None) -> None:
        alive = [self._reached[rank] for rank in self._alive(newest)]
        waited_s = newest["time"] - self._began
        all_here = len(self._reached) >= (num_workers or 1) or not is_here(
            waited_s, pause_s=self._pauses[newest["rank"]]
        )
        complete = min(alive, default=-1) if all_here else -1
        for step in sorted(self._open):
            if step <= complete or len(self._open) > OPEN_STEPS:
                self._close(step)

    def _close(self, step: int) -> None:
        rows = self._open.pop(step)
        self._closed = max(self._closed, step)
        last = max((row for row, _ in rows.values()), key=lambda row: row["time"])
        running = {rank: self._latest[rank] for rank in self._alive(last)}
        running |= {rank: row for rank, (row, _) in rows.items()}
        whole = last | {
            "step": step,
            "loss": weighted_mean((_number(row.get("loss")), weight) for row, weight in rows.values()),
            "tokens_per_s": sum(finite(row.get("tokens_per_s")) or 0.0 for row in running.values()),
            "samples_per_s": sum(finite(row.get("samples_per_s")) or 0.0 for row in running.values()),
            "staleness": statistics.fmean(finite(row.get("staleness")) or 0.0 for row, _ in rows.values()),
        }
        self._draw(whole)

    def _alive(self, newest: dict[str, Any]) -> list[int]:
        """The ranks that had not fallen silent when this row was written."""
        pauses, now = self._pauses, newest["time"]
        return [
            rank
            for rank, row in self._latest.items()
            if is_here(now - row["time"], pause_s=max(pauses[rank], pauses[newest["rank"]]))
        ]

    def _draw(self, row: dict[str, Any]) -> None:
        self.curve.add(row, step=row["step"], time=row["time"])
        self.recent.append(row)
        self.last = row if row["time"] >= self.last.get("time", row["time"]) else self.last


def own_metrics(row: dict[str, Any]) -> list[str]:
    """The fields of an evaluation that only some tasks have."""
    return sorted(name for name in row if name.startswith("val_") and name not in VAL_FIELDS)


def is_here(silence_s: float, *, pause_s: float) -> bool:
    """Whether a rank that has said nothing for so long will send another row, as far as one can tell where they come so far
    apart."""
    return silence_s < max(OPEN_S, SILENT_PAUSES * pause_s)


def _number(value: Any) -> float:
    found = finite(value)
    return math.nan if found is None else found
