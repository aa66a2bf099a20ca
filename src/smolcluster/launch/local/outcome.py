"""Collect the outcome of a run from its events. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from smolcluster.config.schema import Config
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.summary import failed_summary, write_summary
from smolcluster.errors import SmolclusterError
from smolcluster.observe.events import Event, Failed, Notice, RunFinished, StepLogged, evaluation_of, plain
from smolcluster.observe.observer import Sink

_SUMMED = ("samples", "tokens", "bytes_sent", "bytes_received", "stale_rejected", "tokens_per_s", "samples_per_s")
_GREATEST = ("step", "staleness_max", "skipped")


class Interrupted(SmolclusterError):
    """The user stopped the run."""

    exit_code = 130


@dataclass(slots=True)
class Outcome(Sink):
    """A sink that collects what summary.json and the last message need. `command`: the subcommand that resumes the run."""

    command: str = "train"
    summary: dict[str, Any] | None = None
    failed: Failed | None = None
    last_rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # of each rank, or of the server
    evaluation: dict[str, float] = field(default_factory=dict)  # the last one
    served: bool = False
    started: float = field(default_factory=time.time)

    def handle(self, event: Event) -> None:
        match event:
            case RunFinished():
                self.summary = event.summary
            case Failed():
                self.failed = event
            case StepLogged() if event.role == "server" or not self.served:
                if event.role == "server" and not self.served:  # the server's rows replace the workers'
                    self.served, self.last_rows = True, {}
                self.last_rows[event.rank] = {name: getattr(event, name) for name in (*_SUMMED, *_GREATEST, "loss")}
                self.evaluation = evaluation_of(event) or self.evaluation
            case _:
                pass

    @property
    def last_row(self) -> dict[str, Any] | None:
        """Return the last rows of all ranks merged; the loss is that of the global batch."""
        rows = [self.last_rows[rank] for rank in sorted(self.last_rows)]
        if not rows:
            return None
        joined = {"loss": rows[0]["loss"]}
        joined |= {name: sum(row[name] for row in rows) for name in _SUMMED}
        joined |= {name: max(row[name] for row in rows) for name in _GREATEST}
        if joined["samples"]:
            joined["loss"] = sum(row["loss"] * row["samples"] for row in rows) / joined["samples"]
        return dict(plain(joined))

    def interrupted(self, run_dir: RunDir) -> Interrupted:
        """Return the error of an interrupted run, with the command that resumes it if it was saved."""
        if run_dir.can_continue():
            return Interrupted(f"interrupted; continue with: smolcluster {self.command} --resume {run_dir.path}")
        return Interrupted("interrupted; nothing was saved")

    @staticmethod
    def flush_loki(run_dir: RunDir, config: Config, tell: Callable[[Notice], None]) -> None:
        """Push to Loki what the exited processes could not. Takes a few seconds at most."""
        if config.logging.loki_url is not None:
            from smolcluster.observe.loki import push_after_run

            if problem := push_after_run(run_dir.path, config.logging.loki_url):
                tell(Notice(level="WARNING", message=problem))

    def write_summary(self, run_dir: RunDir, config: Config, *, world_size: int, **fields: Any) -> None:
        """Write summary.json of a run that did not finish. A full disk must not hide the reason."""
        summary = failed_summary(
            strategy=config.strategy.name,
            world_size=world_size,
            last_row=self.last_row,
            evaluation=self.evaluation,
            wall_s=time.time() - self.started,
            run_dir=str(run_dir.path),
            **fields,
        )
        with contextlib.suppress(OSError):
            write_summary(run_dir.summary, summary)
