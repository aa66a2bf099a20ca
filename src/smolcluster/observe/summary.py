"""Render the summary of a run: outcome, loss curve, sample, paths."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smolcluster.observe.events import VAL_FIELDS, Event, RunFinished, SampleText, restore
from smolcluster.observe.jsonl import read_metrics
from smolcluster.observe.plot import loss_plot
from smolcluster.observe.run_state import loss_curve
from smolcluster.observe.text import clock, encodable, number, printable, short, size

WIDTH = 72
_COUNTS = (
    ("stale_rejected", "stale gradient refused", "stale gradients refused"),
    ("skipped", "step skipped (NaN or infinite)", "steps skipped (NaN or infinite)"),
    ("members_lost", "worker lost", "workers lost"),
    ("restarts", "restart", "restarts"),
)


class SummarySink:
    """Prints the summary of a finished run when it is closed, after the live display."""

    def __init__(self) -> None:
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
        print("\n" + render_summary(summary, rows, self._sample), flush=True)


def render_summary(
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    sample: SampleText | None,
    *,
    unicode: bool | None = None,
) -> str:
    """Return the summary as plain text. `summary` is summary.json plus `run_dir`; missing fields are left out.

    `unicode` None: if the encoding of stdout has the characters.
    """
    facts = restore(dict(summary))
    blocks = [_headline(facts), _numbers(facts), _plot(rows, unicode=unicode)]
    if sample is not None:
        blocks.append(_sample(sample))
    blocks.append(_paths(facts))
    text = "\n\n".join(block for block in blocks if block)
    return encodable(text, sys.stdout) if unicode is None else text


def _headline(facts: Mapping[str, Any]) -> str:
    """`done: allreduce, 2 workers, 300 steps in 0:52, 12.3k tokens/s`."""
    parts = [str(facts["strategy"])] if facts.get("strategy") else []
    if (workers := facts.get("workers")) is not None:
        parts.append(f"{workers} worker{'s' * (workers != 1)}")
    if facts.get("steps") is not None:
        took = f" in {clock(facts['wall_s'])}" if facts.get("wall_s") is not None else ""
        parts.append(f"{facts['steps']} steps{took}")
    if facts.get("tokens_per_s"):
        parts.append(f"{short(facts['tokens_per_s'])} tokens/s")
    return f"{facts.get('status', 'unknown')}: " + ", ".join(parts) if parts else str(facts.get("status", ""))


def _numbers(facts: Mapping[str, Any]) -> str:
    """Return two lines: results, and costs without zeros."""
    results = []
    if facts.get("train_loss") is not None:
        results.append(f"train loss {number(facts['train_loss'])}")
    if facts.get("val_loss") is not None:
        results.append(f"val loss {number(facts['val_loss'])}")
    if facts.get("val_accuracy") is not None:
        results.append(f"val accuracy {facts['val_accuracy']:.2%}")
    for name in sorted(name for name in facts if name.startswith("val_") and name not in VAL_FIELDS):
        if isinstance(facts[name], int | float):
            results.append(f"val {printable(name.removeprefix('val_'))} {number(facts[name])}")
    cost = []
    if facts.get("bytes_sent") or facts.get("bytes_received"):
        cost.append(f"{size(facts.get('bytes_sent') or 0)} sent, {size(facts.get('bytes_received') or 0)} received")
    if facts.get("staleness_max"):
        mean = facts.get("staleness_mean") or 0.0
        cost.append(f"staleness {mean:.3g} mean, {facts['staleness_max']:g} max")
    for field, one, many in _COUNTS:
        if count := facts.get(field):
            cost.append(f"{count} {one if count == 1 else many}")
    if facts.get("peak_memory_bytes"):
        cost.append(f"{size(facts['peak_memory_bytes'])} peak memory")
    return "\n".join("   ".join(line) for line in (results, cost) if line)


def _plot(rows: Sequence[Mapping[str, Any]], *, unicode: bool | None) -> str:
    """Plot the loss over steps; empty for fewer than two logged steps."""
    steps, losses = loss_curve(rows)
    if len(steps) < 2 or not any(math.isfinite(loss) for loss in losses):
        return ""
    evaluated = {int(row["step"]): float(row["val_loss"]) for row in rows if row.get("val_loss") is not None}
    return loss_plot(steps, losses, width=WIDTH, val=sorted(evaluated.items()), unicode=unicode)


def _sample(sample: SampleText) -> str:
    """Return the sample with its line breaks and without control characters."""
    text = printable(sample.prompt + sample.text, keep="\n\t")
    # White space stays: models of code indent.
    wrapper = textwrap.TextWrapper(WIDTH - 2, drop_whitespace=False, replace_whitespace=False)
    wrapped = [piece for line in text.splitlines() for piece in wrapper.wrap(line) or [""]]
    return "sample\n" + "\n".join(("  " + line).rstrip() for line in wrapped)


def _paths(facts: Mapping[str, Any]) -> str:
    paths = (("checkpoint", facts.get("checkpoint")), ("run", facts.get("run_dir")))
    return "\n".join(f"{name:<11}{path}" for name, path in paths if path)
