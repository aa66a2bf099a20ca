"""Fold the events of all ranks into the current state of the run.

Ranks report independently, in any order. A step is closed when the rows of all workers have arrived, or when a row of a later
step arrives. With a server, the server's row closes a step: its workers have local step counts, and join and leave. Nothing
here prints or reads a clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from smolcluster.config.strategies import find_record
from smolcluster.observe.events import (
    VAL_FIELDS,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    Failed,
    Notice,
    Phase,
    Progress,
    RunStarted,
    StepLogged,
    evaluation_of,
)
from smolcluster.observe.text import number, printable, short, size

_GONE = ("finished", "failed")


def counts_own_steps(strategy: str) -> bool:
    """Return whether the workers of this strategy have local step counts."""
    record = find_record(strategy)
    return record is not None and record.own_steps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One step of the run, over all its ranks."""

    step: int
    steps: int | None  # of the run; None: not known yet
    loss: float  # mean over the ranks of this step, weighted by samples
    evaluation: Mapping[str, float]  # `val_<name>` of each result; empty without an evaluation
    tokens_per_s: float  # sum over ranks
    samples_per_s: float
    eta_s: float | None  # until the slowest rank is done
    late: bool = False  # a later step was closed before: a server evaluates in parallel with training
    is_local: bool = False  # a local step of one worker, not a step of the run

    @property
    def label(self) -> str:
        """`step 50/300`, or `own step 50`."""
        return "own " * self.is_local + f"step {self.step}" + (f"/{self.steps}" if self.steps else "")


@dataclasses.dataclass(slots=True)
class RankStatus:
    """One rank, with its first and last row."""

    rank: int
    host: str = ""
    role: str = "worker"
    device: str = ""
    state: str = "starting"
    steps: int | None = None
    first: StepLogged | None = None
    last: StepLogged | None = None

    def eta_s(self) -> float | None:
        if self.first is None or self.last is None:
            return None
        first, last = ((row.step, row.time) for row in (self.first, self.last))
        return remaining_s(self.steps, first=first, last=last, step_s=self.last.step_time_s)


def remaining_s(steps: int | None, *, first: tuple[int, float], last: tuple[int, float], step_s: float) -> float | None:
    """Return the time for the remaining steps at this rank's mean step time; None if `steps` is not known.

    The mean is taken between its first and last row (step, time), so it includes evaluations; `step_s` if there is one row.
    """
    if steps is None:
        return None
    num_steps = last[0] - first[0]
    mean_s = (last[1] - first[1]) / num_steps if num_steps > 0 else step_s
    return max(0, steps - last[0]) * mean_s


class BatchWeights:
    """Samples of a rank in one step, from its cumulative count of samples."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def add(self, rank: int, step: int, samples: int) -> float:
        last_step, last_samples = self._seen.get(rank, (0, 0))
        if step <= last_step or samples < last_samples:  # resumed from a checkpoint
            last_step, last_samples = 0, 0
        self._seen[rank] = (step, samples)
        return (samples - last_samples) / max(1, step - last_step)


def weighted_mean(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the mean of (value, weight) pairs; unweighted when no weight is positive; NaN without pairs."""
    pairs = list(pairs)
    if not any(weight > 0 for _, weight in pairs):
        pairs = [(value, 1.0) for value, _ in pairs]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs if weight > 0) / total if total else math.nan


def loss_curve(rows: Iterable[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    """Return steps and losses of the run from the rows of metrics.jsonl: the server's, or else those of all workers.

    If a rank repeated a step after a restart, its last row is used.
    """
    weights = BatchWeights()
    by_step: dict[int, dict[int, tuple[float, float]]] = {}
    known = [row for row in rows if row.get("loss") is not None]
    for row in [row for row in known if row.get("role") == "server"] or known:
        step, rank = int(row["step"]), int(row.get("rank", 0))
        weight = weights.add(rank, step, int(row.get("samples", 0)))
        by_step.setdefault(step, {})[rank] = (float(row["loss"]), weight)
    steps = sorted(by_step)
    return steps, [weighted_mean(by_step[step].values()) for step in steps]


class RunState:
    """The state that a display shows. `alone`: only the events of one worker of several arrive."""

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone
        self.ranks: dict[int, RankStatus] = {}
        self.started: dict[int, RunStarted] = {}
        self.progress: dict[str, Progress] = {}  # work before training that is not done yet
        self.evaluation: Mapping[str, float] = {}  # the last one
        self._val_step = -1
        self._val_is_new = False
        self._open: dict[int, dict[int, tuple[StepLogged, float]]] = {}
        self._closed_step = -1
        self._weights = BatchWeights()

    def apply(self, event: Event) -> list[StepLine]:
        """Apply an event. Return the steps that it closes, in order."""
        match event:
            case RunStarted():
                self._start(event)
            case StepLogged():
                return self._row(event)
            case Progress():
                if event.total is not None and event.done >= event.total:
                    self.progress.pop(event.name, None)
                else:
                    self.progress[event.name] = event
            case Phase():
                self._rank(event.rank).state = event.name
            case Failed():
                self._rank(event.rank).state = "failed"
        return []

    def flush(self) -> list[StepLine]:
        """Close the open steps: no more events arrive."""
        return [self._close(step) for step in sorted(self._open)]

    @property
    def workers(self) -> list[RankStatus]:
        return [status for _, status in sorted(self.ranks.items()) if status.role != "server"]

    @property
    def server(self) -> RunStarted | None:
        """The start of the server, if there is one. Its world size is the number of workers."""
        return next((started for started in self.started.values() if started.role == "server"), None)

    @property
    def num_workers(self) -> int | None:
        """Number of workers, also those that have not started yet; None before the first start."""
        if self._alone and self.started:
            return 1
        if self.server is not None:
            return self.server.world_size
        return max((started.world_size for started in self.started.values()), default=None)

    @property
    def all_started(self) -> bool:
        return self.server is not None or len(self.started) >= (self.num_workers or 1)

    def header(self) -> str:
        """`gpt | allreduce | 2 workers on 2 x cpu | 4.83M parameters | 300 steps`."""
        if not self.started:
            return ""
        first = self.server or self.started[min(self.started)]
        local_steps = first.config.get("strategy", {}).get("inner_steps")  # "auto" if machines have different numbers
        return " | ".join(
            [
                first.task,
                first.strategy,
                self._workers_text(first),
                f"{short(first.parameters)} parameters",
                f"{first.steps} steps"
                + (f" from {first.first_step}" if first.first_step else "")
                + (f", exchanged every {local_steps}" if isinstance(local_steps, int) else ""),
            ]
        )

    def _workers_text(self, first: RunStarted) -> str:
        """`2 workers on 2 x cpu`, `3 workers + server on cpu`, or `worker 1 of 3 on mps`."""
        if self._alone:
            return f"worker {first.rank} of {first.world_size} on {first.device}"
        num_workers = self.num_workers or 0
        text = f"{num_workers} worker{'s' * (num_workers != 1)}"
        if self.server is not None:
            return f"{text} + server on {self.server.device}"
        devices = Counter(status.device for status in self.workers if status.device)
        where = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in sorted(devices.items()))
        return text + (f" on {where}" if where else "")

    def _counts_own(self, started: RunStarted) -> bool:
        """Return whether this rank has a local step count and no row of the server gives the step of the run."""
        return self._alone and started.role != "server" and counts_own_steps(started.strategy)

    def _rank(self, rank: int) -> RankStatus:
        return self.ranks.setdefault(rank, RankStatus(rank))

    def _start(self, event: RunStarted) -> None:
        if event.role != "server" and self.server is None:  # restarted with fewer workers
            for rank in [r for r in self.ranks if r >= event.world_size]:
                del self.ranks[rank]
                self.started.pop(rank, None)
        self.started[event.rank] = event
        steps = None if self._counts_own(event) else event.steps
        self.ranks[event.rank] = RankStatus(event.rank, event.host, event.role, event.device, "training", steps)
        # When all workers have resumed from a checkpoint, the steps after it are closed again.
        resumed = all(status.last is None or status.last.step <= event.first_step for status in self.workers)
        if event.role == "server" or (resumed and self.server is None):
            self._closed_step = min(self._closed_step, event.first_step)
            self._val_step = min(self._val_step, event.first_step)

    def _row(self, row: StepLogged) -> list[StepLine]:
        status = self._rank(row.rank)
        status.host, status.role, status.state = row.host, row.role, "training"
        late = row.step <= self._closed_step
        if not (late and row.role == "server"):
            status.first, status.last = status.first or row, row
        self.progress.clear()  # the work before training is done
        if row.role == "server":
            self._evaluated(row)
            self._open[row.step] = {row.rank: (row, 1.0)}
            return [self._close(row.step)]
        # A row of a closed step is too late to change it.
        if late or self.server is not None:
            self._evaluated(row)
            return []
        closed = [self._close(step) for step in sorted(self._open) if step < row.step]
        self._evaluated(row)
        weight = self._weights.add(row.rank, row.step, row.samples)
        self._open.setdefault(row.step, {})[row.rank] = (row, weight)
        missing = [w for w in self.workers if w.state not in _GONE and w.rank not in self._open[row.step]]
        if not missing and self.num_workers is not None and len(self.workers) >= self.num_workers:
            closed.append(self._close(row.step))
        return closed

    def _evaluated(self, row: StepLogged) -> None:
        """Keep an evaluation of any rank for the line of its step, or for the next line if it is late."""
        evaluation = evaluation_of(row)
        if evaluation and row.step > self._val_step:
            self.evaluation, self._val_step, self._val_is_new = evaluation, row.step, True

    def _close(self, step: int) -> StepLine:
        rows, late = self._open.pop(step), step <= self._closed_step
        self._closed_step = max(step, self._closed_step)
        evaluated, self._val_is_new = self._val_is_new, False
        counted = self.workers if self.server is None else [self._rank(self.server.rank)]
        live = [status for status in counted if status.last is not None and status.state not in _GONE]
        latest = {status.rank: status.last for status in live if status.last} | {
            rank: row for rank, (row, _) in rows.items()
        }
        etas = [eta for status in live if (eta := status.eta_s()) is not None]
        return StepLine(
            step=step,
            steps=max((status.steps for status in counted if status.steps is not None), default=None),
            loss=weighted_mean((row.loss, weight) for row, weight in rows.values()),
            evaluation=self.evaluation if evaluated else {},
            tokens_per_s=sum(row.tokens_per_s for row in latest.values()),
            samples_per_s=sum(row.samples_per_s for row in latest.values()),
            eta_s=max(etas, default=None),
            late=late,
            is_local=any(map(self._counts_own, self.started.values())),
        )


# Text


def message(event: Event) -> str:
    """Return the line for an event that has one; empty for the others."""
    match event:
        case Notice(level=level, message=text, rank=rank):
            label = "" if level in ("INFO", "PRINT") else f"{level.lower()}: "
            return label + ("" if rank is None else f"rank {rank}: ") + text
        case CheckpointSaved():
            best = ", the best so far" if event.best else ""
            return f"checkpoint of step {event.step} saved ({size(event.size_bytes)}{best}): {event.path}"
        case CheckpointFailed():
            return f"error: the checkpoint of step {event.step} could not be saved: {event.reason}"
    return ""


def evaluation_parts(evaluation: Mapping[str, float]) -> list[str]:
    """Return `val 2.4012`, `acc 97.1%` and other metrics of the task, if present."""
    parts = [f"val {number(evaluation['val_loss'])}"] if "val_loss" in evaluation else []
    parts += [f"acc {evaluation['val_accuracy']:.1%}"] if "val_accuracy" in evaluation else []
    others = {name.removeprefix("val_"): value for name, value in evaluation.items() if name not in VAL_FIELDS}
    return parts + [f"{printable(name)} {number(value)}" for name, value in others.items()]


def rate(line: StepLine | StepLogged) -> list[str]:
    """Return tokens per second, or samples per second for data without tokens; empty if the rank reads no data."""
    if line.tokens_per_s:
        return [f"{short(line.tokens_per_s)} tok/s"]
    return [f"{short(line.samples_per_s)} samples/s"] if line.samples_per_s else []


def quantity(count: int, unit: str) -> str:
    return size(count) if unit == "B" else f"{short(count)} {unit}"
