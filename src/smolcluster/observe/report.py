"""The last words on the console: how the run went, its curve, a sample, and where everything is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from smolcluster.observe.events import Event, RunFinished, SampleText
from smolcluster.observe.jsonl import read_metrics
from smolcluster.observe.summary import render_summary


class EndReport:
    """Waits for the end of the run and prints the summary when it is closed, after the live display has gone."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._sample: SampleText | None = None
        self._finished: RunFinished | None = None

    def handle(self, event: Event) -> None:
        if isinstance(event, SampleText):
            self._sample = event
        elif isinstance(event, RunFinished):
            self._finished = event

    def close(self) -> None:
        if self._finished is None:
            return
        summary = self._finished.summary
        rows = read_metrics(Path(summary["run_dir"]) / "metrics.jsonl")
        self._stream.write("\n" + render_summary(summary, rows, self._sample) + "\n")
        self._stream.flush()
