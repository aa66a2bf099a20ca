"""Accumulate step reports and wall time until a row is logged. Tensors are read only then."""

from __future__ import annotations

import time
from typing import Any

import torch

from smolcluster.compute.timing import Span
from smolcluster.strategies.base import StepReport


class StepClock:
    """Means since the last row, totals since the start."""

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type != "cpu"
        self.samples = 0
        self.tokens = 0
        self.steps = 0
        self.busy_s = 0.0  # wall time of steps, without evaluation and saving
        self.staleness_sum = 0
        self.staleness_max = 0
        self.last_loss = float("nan")
        self._reset()

    def _reset(self) -> None:
        self._rows = 0
        self._wall_s = self._step_s = 0.0
        self._comm: list[Span] = []
        self._row_samples = self._row_tokens = self._row_staleness = 0
        self._norm: torch.Tensor | None = None
        self._report: StepReport | None = None

    @property
    def unlogged(self) -> bool:
        """Whether steps were taken since the last row."""
        return self._rows > 0

    def start(self) -> None:
        """Start the clock; the time since `stop` does not count."""
        self._began = time.perf_counter()

    def add(self, report: StepReport, *, step_s: float, steps: int = 1) -> None:
        """`steps`: the number of steps of the run that this report covers; several for a round of local steps."""
        self._report = report
        if report.grad_norm is not None:
            self._norm = report.grad_norm
        self._rows += steps
        self._step_s += step_s
        if report.comm is not None:
            self._comm.append(report.comm)
        self._row_samples += report.samples
        self._row_tokens += report.tokens
        self._row_staleness += report.staleness
        self.steps += steps
        self.samples += report.samples
        self.tokens += report.tokens
        self.staleness_sum += report.staleness
        self.staleness_max = max(self.staleness_max, report.staleness)

    def stop(self, *, before_row: bool) -> None:
        """Stop the clock, before evaluation and saving. Before a row wait for the GPU: its work belongs to the steps."""
        if before_row and self._report is not None:
            float(self._report.loss)
        elapsed = time.perf_counter() - self._began
        self._wall_s += elapsed
        self.busy_s += elapsed

    def row(self) -> dict[str, Any]:
        """Return the numbers of a row of metrics.jsonl, and reset."""
        report, n = self._report, max(1, self._rows)
        assert report is not None
        self.last_loss = float(report.loss)
        wall_s = max(self._wall_s, 1e-9)
        comm_s = sum(span.seconds() for span in self._comm) / n
        row = {
            "loss": self.last_loss,
            "lr": float(f"{report.learning_rate:.12g}"),  # 6e-05, not 5.9999999999999995e-05
            "grad_norm": float("nan") if self._norm is None else float(self._norm),
            "samples": self.samples,
            "tokens": self.tokens,
            "tokens_per_s": self._row_tokens / wall_s,
            "samples_per_s": self._row_samples / wall_s,
            "step_time_s": wall_s / n,
            "compute_s": max(0.0, (wall_s if self._asynchronous else self._step_s) / n - comm_s),
            "comm_s": comm_s,
            "staleness": self._row_staleness / n,
        }
        self._reset()
        return row
