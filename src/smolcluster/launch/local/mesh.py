"""Run several workers on this machine, on the mesh plane. The run ends when one dies (supervisor.py).

The launcher starts one process per rank and never imports torch. When a worker dies the others are stopped within seconds, and
one message gives the rank, the reason and its last log lines.
"""

from __future__ import annotations

import functools
import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smolcluster.engine.elastic import history
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.spec import WorkerSpec
from smolcluster.errors import SmolclusterError, UserError, WorkerFailed
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.local.processes import Child, check_not_in_worker, exit_reason, log_tail, make_spec, send_line
from smolcluster.launch.local.supervisor import Policy, Supervisor, first_failure
from smolcluster.launch.prepare import Prepared
from smolcluster.observe.observer import Sink

SETTLE_S = 0.5  # after the first death: time to see which rank died first

_PROCESS = "smolcluster.engine.process.main"


def run_local(run: Prepared, *, sinks: Sequence[Sink]) -> dict[str, Any]:
    """Train on `run.workers` processes of this machine. Return the summary; raise when the run fails or is interrupted."""
    check_not_in_worker()
    check_no_lost_commits(run.run_dir, run.resume)
    with run.opened(), run.run_dir.without_journal():
        hosts = [*run.config.cluster.workers, *[socket.gethostname()] * run.workers]
        spec = functools.partial(make_spec, run, world_size=run.workers, resume=run.resume)
        specs = [spec(rank=rank, host=hosts[rank]) for rank in range(run.workers)]
        supervisor = Supervisor(run.config, run.run_dir, sinks, module=_PROCESS)
        return supervisor.run(MeshPolicy(supervisor, specs))


def check_no_lost_commits(run_dir: RunDir, resume: Path | None) -> None:
    """Refuse to resume an elastic run whose journal is ahead of its checkpoints: this plane reads no journal."""
    if resume is None or resume.resolve() != run_dir.checkpoints.resolve() or not run_dir.journal.is_dir():
        return
    committed = history.last_commit(run_dir.history)
    saved = max(
        (int(path.name[5:]) for path in run_dir.checkpoints.glob("step-*") if path.name[5:].isdigit()), default=0
    )
    if committed > saved:
        back = f", or go back on purpose with --resume {run_dir.checkpoints / f'step-{saved:08d}'}" if saved else ""
        raise UserError(
            f"this run has committed {committed} steps on the elastic plane, but its last checkpoint is of step {saved}; "
            f"continue it with --plane elastic and its strategy{back}"
        )


class MeshPolicy(Policy):
    """Start all ranks together; end all when one dies."""

    def __init__(self, supervisor: Supervisor, specs: list[WorkerSpec]) -> None:
        super().__init__(supervisor)
        self.specs = specs

    def begin(self) -> None:
        for spec in self.specs:
            self.group.append(self.supervisor.start(spec))

    def on_port(self, child: Child, port: int) -> None:
        for other in self.group:
            if other is not child:
                send_line(other, json.dumps({"op": "port", "port": port}))

    def tick(self) -> bool:
        fell = [child.died or 0.0 for child in self.group if child.crashed]
        settled = bool(fell) and time.monotonic() > min(fell) + SETTLE_S
        return settled or all(child.died is not None for child in self.group)

    def conclude(self) -> dict[str, Any]:
        return self.supervisor.conclude(self._failure(), world_size=len(self.group))

    def _failure(self) -> SmolclusterError | None:
        statuses = {child.process.returncode for child in self.group}
        finished = statuses == {0} and self.supervisor.outcome.summary is not None
        left = Interrupted.exit_code in statuses and statuses <= {0, Interrupted.exit_code}
        if finished or left or len(self.supervisor.interrupts) > 1:
            return None
        user_error = next((child.user_error for child in self.group if child.user_error is not None), None)
        failed = first_failure(self.group)
        return user_error or WorkerFailed(f"{failed.name} failed: {exit_reason(failed)}{log_tail(failed)}")
