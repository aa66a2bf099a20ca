"""Several workers on this machine: the mesh plane. When one dies the run ends (supervisor.py).

The launcher starts one process per rank. It never imports torch, so the workers' imports are all there is to wait for. When one
worker dies the others are stopped within seconds, and one message says which rank it was, of what, and its last log lines.
"""

from __future__ import annotations

import functools
import json
import socket
import time
from pathlib import Path
from typing import Any

from smolcluster.engine.elastic import history
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.spec import WorkerSpec
from smolcluster.errors import SmolclusterError, UserError, WorkerFailed
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.local.processes import Child, last_lines, make_spec, refuse_inside_a_worker, tell, why_it_ended
from smolcluster.launch.local.supervisor import Policy, Supervisor, find_culprit
from smolcluster.launch.prepare import Prepared
from smolcluster.observe.observer import Sink

SETTLE_S = 0.5  # after the first death: others may have died of the same cause a moment earlier

_PROCESS = "smolcluster.engine.process.main"


def run_local(run: Prepared, *, sinks: list[Sink]) -> dict[str, Any]:
    """Train on `run.workers` processes of this machine. Returns the summary; raises when the run fails or is interrupted."""
    refuse_inside_a_worker()
    check_nothing_is_lost(run.run_dir, run.resume)
    with run.opened(), run.run_dir.without_journal():
        hosts = [*run.config.cluster.workers, *[socket.gethostname()] * run.workers]
        spec = functools.partial(make_spec, run, world_size=run.workers, resume=run.resume)
        specs = [spec(rank=rank, host=hosts[rank]) for rank in range(run.workers)]
        supervisor = Supervisor(run.config, run.run_dir, sinks, module=_PROCESS)
        return supervisor.run(MeshPolicy(supervisor, specs))


def check_nothing_is_lost(run_dir: RunDir, resume: Path | None) -> None:
    """The journal of an elastic run is of no use here, and may be ahead of its checkpoints."""
    if resume is None or resume.resolve() != run_dir.checkpoints.resolve() or not run_dir.journal.is_dir():
        return
    committed = history.last_commit(run_dir.history)
    saved = max(
        (int(path.name[5:]) for path in run_dir.checkpoints.glob("step-*") if path.name[5:].isdigit()), default=0
    )
    if committed > saved:
        back = f", or go back on purpose with --resume {run_dir.checkpoints / f'step-{saved:08d}'}" if saved else ""
        raise UserError(
            f"this run has committed {committed} steps on the elastic plane, and its last checkpoint is of step {saved}; "
            f"continue it there with --plane elastic and its own strategy{back}"
        )


class MeshPolicy(Policy):
    """All ranks start together, and end together."""

    def __init__(self, supervisor: Supervisor, specs: list[WorkerSpec]) -> None:
        super().__init__(supervisor)
        self.specs = specs

    def begin(self) -> None:
        for spec in self.specs:
            self.crew.append(self.supervisor.start(spec))

    def listens(self, child: Child, port: int) -> None:
        for other in self.crew:
            if other is not child:
                tell(other, json.dumps({"op": "port", "port": port}))

    def tick(self) -> bool:
        fell = [child.died or 0.0 for child in self.crew if child.fell]
        settled = bool(fell) and time.monotonic() > min(fell) + SETTLE_S
        return settled or all(child.died is not None for child in self.crew)

    def conclude(self) -> dict[str, Any]:
        return self.supervisor.conclude(self._failure(), world_size=len(self.crew))

    def _failure(self) -> SmolclusterError | None:
        statuses = {child.process.returncode for child in self.crew}
        finished = statuses == {0} and self.supervisor.outcome.summary is not None
        left = Interrupted.exit_code in statuses and statuses <= {0, Interrupted.exit_code}
        if finished or left or len(self.supervisor.interrupts) > 1:
            return None
        mistake = next((child.mistake for child in self.crew if child.mistake is not None), None)
        culprit = find_culprit(self.crew)
        return mistake or WorkerFailed(f"{culprit.name} failed: {why_it_ended(culprit)}{last_lines(culprit)}")
