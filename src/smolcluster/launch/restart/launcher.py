"""`train --elastic MIN:MAX`: restart the workers of the mesh plane from the last checkpoint, at the world size available.

supervisor.py has the table of worker deaths. In addition:

    a machine is lost      its heartbeat times out and the others restart with fewer workers, at least MIN
    a machine joins        the workers save and restart with more, at most MAX
    too many restarts      the run fails; it can be resumed by hand

One launcher on every machine starts that machine's workers; rendezvous.py decides which machines take part. No launcher imports
torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smolcluster.comm.elastic.transport.security import load_keyring
from smolcluster.comm.mesh.heartbeats import MembershipClient
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import SmolclusterError, UserError, WorkerFailed
from smolcluster.launch.local.mesh import check_no_lost_commits
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.local.processes import Child, check_not_in_worker, exit_reason, log_tail, make_spec, send_line
from smolcluster.launch.local.supervisor import Policy, Slot, Supervisor, first_failure
from smolcluster.launch.prepare import Prepared
from smolcluster.launch.restart.endpoint import join_endpoint
from smolcluster.launch.restart.plan import ElasticRange, plan_world_sizes
from smolcluster.launch.restart.rendezvous import Rendezvous, RoundPlan, RunOver, largest_world
from smolcluster.observe.events import Event, RunFinished, StepLogged
from smolcluster.observe.jsonl import truncate_metrics
from smolcluster.observe.observer import NoticesOnly, Sink

SETTLE_S = 0.5  # after a worker lost a peer: time to find the peer that died
REPORTS_S = 0.1  # time for reports of other launchers to arrive
DRAIN_S = 60.0  # limit for workers to save and leave
WAIT_FOR_WORKERS_S = 600.0  # limit for a run with fewer than MIN workers
NOTICE_AFTER_S = 10.0  # before the launcher reports that it waits
END_REPORT_S = 3.0  # limit for the other launchers to receive the end of the run

_PROCESS = "smolcluster.engine.process.warm_mesh"


def run_restarting(run: Prepared, elastic: ElasticRange, *, sinks: Sequence[Sink]) -> dict[str, Any]:
    """Train to the end across restarts. Return the summary on the leader, elsewhere only status and run directory."""
    check_not_in_worker()
    cluster = run.config.cluster
    keyring = None if elastic.endpoint is None else load_keyring(cluster.token, os.environ)
    with contextlib.ExitStack() as stack:
        client, leads = stack.enter_context(
            join_endpoint(elastic.endpoint, timeout_s=cluster.join_timeout, keyring=keyring)
        )
        if leads:
            check_no_lost_commits(run.run_dir, run.resume)
            stack.enter_context(run.opened())
            stack.enter_context(run.run_dir.without_journal())
        shown = sinks if leads else map(NoticesOnly, sinks)
        supervisor = Supervisor(run.config, run.run_dir, shown, module=_PROCESS)
        return supervisor.run(RestartPolicy(supervisor, run, elastic, client=client, leads=leads))


class RestartPolicy(Policy):
    """Restart all ranks of this machine in rounds. The methods are in the order of a run."""

    def __init__(
        self,
        supervisor: Supervisor,
        run: Prepared,
        elastic: ElasticRange,
        *,
        client: MembershipClient | None,
        leads: bool,
    ) -> None:
        super().__init__(supervisor)
        self.elastic, self.client, self.leads = elastic, client, leads
        self.resume = None if run.resume is None else str(run.resume)
        self.host = socket.gethostname()
        place: dict[str, Any] = {
            "world_size": elastic.max_workers,
            "local_world_size": elastic.local_workers,
            "host": self.host,
        }
        place["master_addr"] = "127.0.0.1" if elastic.endpoint is None else elastic.endpoint[0]
        specs = [make_spec(run, rank=number, **place) for number in range(elastic.local_workers)]
        self.slots = [Slot(spec=spec) for spec in specs]  # each has a device, by its local rank
        self.warm: dict[int, Child] = {}  # by rank: started ahead, without a spec yet
        self.step = 0  # the latest logged here
        self.begun = False  # the run may have written checkpoints
        self.deaths = 0
        self.log_tail = ""  # log of the worker that died last
        self.port_sent = self.wait_noticed = False
        self.drain_until: float | None = None  # deadline of workers that were requested to save and leave
        self.over = False
        self.failure: SmolclusterError | None = None

    def begin(self) -> None:
        if self.leads:
            self._start_ahead(range(min(self.elastic.local_workers, self.elastic.max_workers)))
        self.plans, refused = plan_world_sizes(self.supervisor.config, self.elastic)
        for size, why in refused.items():
            self.supervisor.warn(f"{size} worker{'s' * (size != 1)} cannot run this: {why}")
        if not self.plans:
            raise UserError(f"--elastic {self.elastic}: none of these sizes can run; {next(iter(refused.values()))}")
        workers, sizes = len(self.slots), sorted(self.plans)
        self.rendezvous = Rendezvous(self.client, host=self.host, workers=workers, leads=self.leads, sizes=sizes)
        if self.client is not None:
            self.client.on_change = lambda: self.supervisor.inbox.put((None, None))

    def tick(self) -> bool:
        try:
            if self.group and self._round_is_over() and not self.over:
                self._end_round()
            if not self.group:
                self._try_next_round()
        except RunOver as over:
            self.failure, self.over = over.error, True
        except SmolclusterError as error:
            self.failure, self.over = error, True
        return self.over

    # Between rounds

    def _try_next_round(self) -> None:
        if self.supervisor.stopping:
            self._leave()
            return
        if self.rendezvous.waited_s > NOTICE_AFTER_S and not self.wait_noticed:
            self.wait_noticed = True
            available, needed = self.rendezvous.workers, min(self.rendezvous.sizes)
            waits = "a rendezvous round that needs this machine's workers"
            if self.leads:
                waits = f"workers: {available} available, at least {needed} needed"
            self._note(f"waiting for {waits}")
        if self.rendezvous.begins(self._round_fields, timeout_s=WAIT_FOR_WORKERS_S):
            self._start(self.rendezvous.current)

    def _round_fields(self) -> dict[str, Any]:
        """Return the leader's fields of a new round: the run directory and the checkpoint to resume from."""
        if self.rendezvous.current.number:
            self.supervisor.restarts += 1
            changes, deaths = self.rendezvous.reasons()
            self.deaths += bool(deaths)
            why = "; ".join([*changes, *deaths]) or "more workers have joined"
            if self.deaths > self.elastic.max_restarts:
                raise WorkerFailed(f"{why}; exceeded --max-restarts {self.elastic.max_restarts}{self.log_tail}")
            self.supervisor.warn(f"{why}; restarting all workers")
        run_dir = self.supervisor.run_dir
        resume = str(run_dir.checkpoints) if self.begun and run_dir.has_checkpoints() else self.resume
        return {"run_dir": str(run_dir.path), "resume": resume}

    def _start(self, plan: RoundPlan) -> None:
        """Start one process for each rank of this machine in the round."""
        if not self.leads:
            self.supervisor.run_dir = RunDir(Path(plan.run_dir))
        if plan.number > 1 and plan.resume is None:
            truncate_metrics(self.supervisor.run_dir.metrics, after_step=0)
        ranks = plan.ranks(self.rendezvous.me)
        self.port_sent, self.wait_noticed, self.drain_until = False, False, None
        for rank, slot in zip(ranks, self.slots, strict=False):
            slot.spec = replace(
                slot.spec,  # keeps its local_rank, and so its GPU, when another slot is dropped
                rank=rank,
                first_rank=ranks[0],
                config=self.plans[plan.world_size],
                world_size=plan.world_size,
                local_world_size=len(ranks),
                run_dir=str(self.supervisor.run_dir.path),
                resume=plan.resume,
                again=plan.number > 1,
            )
            child = self.warm.pop(rank, None)
            if child is None or child.died is not None:
                child = self.supervisor.start(slot.spec, send_spec=False)
            send_line(child, slot.spec.to_json())
            self.group.append(child)
        self.supervisor.end([*self.warm.values()])
        self.warm.clear()
        if not self.leads:
            those = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            self._note(f"round {plan.number}: this machine runs {those} of {plan.world_size}")

    def _start_ahead(self, ranks: range) -> None:
        """Start processes that import torch while the launcher waits for something else."""
        for rank in ranks:
            if rank not in self.warm:
                spec = replace(self.slots[0].spec, rank=rank)
                self.warm[rank] = self.supervisor.start(spec, send_spec=False, standby=True)

    # During a round

    def on_port(self, child: Child, port: int) -> None:
        if child in self.group:
            self.rendezvous.report(port=[self.rendezvous.current.number, port])

    def on_event(self, child: Child, event: Event) -> Event | None:
        stopping = self.supervisor.stopping
        match event:
            case _ if child not in self.group:
                return None
            case StepLogged():
                self.begun = True
                if event.step > self.step:
                    self.step = event.step
                    for slot in self.slots:
                        slot.progress = True
                if self.supervisor.config.cluster.standby and not stopping:
                    self._start_ahead(self.rendezvous.current.ranks(self.rendezvous.me))
            case RunFinished():
                if event.summary["status"] != "finished" and not stopping:
                    return None  # the workers left to restart with more machines
                return self.supervisor.complete(event.summary, members_lost=self.deaths)
        return event

    def stop(self) -> None:
        if not self.leads:
            self.rendezvous.report(leaves=True)
        super().stop()

    def _round_is_over(self) -> bool:
        """Return whether the current round has ended. Sets `over` if the run has, too."""
        self._send_port()
        dead = [child for child in self.group if child.died is not None]
        crashed = [child for child in self.group if child.crashed]
        all_dead = len(dead) == len(self.group)
        if all_dead and all(c.finished and c.process.returncode != Interrupted.exit_code for c in self.group):
            self._finish()
        elif self.supervisor.stopping and (crashed or all_dead):
            self._leave()
        elif crashed:
            failed = first_failure(crashed)
            settle_s = SETTLE_S if failed.lost_peer and not all_dead else REPORTS_S
            if time.monotonic() - min(c.died or 0.0 for c in crashed) < settle_s:
                return self._others_left()
            self._handle_death(failed)
        elif not all_dead:
            return self._others_left()
        return True

    def _send_port(self) -> None:
        port = self.rendezvous.port()
        if port is not None and not self.port_sent:
            self.port_sent = True
            for child in self.group:
                send_line(child, json.dumps({"op": "port", "port": port}))

    def _others_left(self) -> bool:
        """Return whether another machine broke the round, or requested a new one and the drain here timed out."""
        found = self.rendezvous.broken()
        if found is not None and found.graceful and self.drain_until is None and not self.supervisor.stopping:
            super().stop()  # save and leave
            self.drain_until = time.monotonic() + DRAIN_S
        abruptly = found is not None and not found.graceful
        return abruptly or (self.drain_until is not None and time.monotonic() > self.drain_until)

    def _handle_death(self, failed: Child) -> None:
        """Report this death to the other launchers and request the next round. Raises when the run cannot continue."""
        summary = self.supervisor.outcome.summary
        if summary is not None and summary["status"] == "finished":
            return self._finish()  # it died after the last step
        self.supervisor.report(failed)
        why = f"rank {failed.rank} on {self.host} died: {exit_reason(failed).splitlines()[0]}"
        if failed.user_error is not None:
            self.rendezvous.report(user_error=str(failed.user_error))
            raise failed.user_error
        self.log_tail = log_tail(failed)
        slot = self.slots[self.group.index(failed)]
        if not failed.lost_peer and not slot.count_death():
            why = self._leave_out(slot, why)
        return self.rendezvous.report(why=why, victim=failed.lost_peer, asks=self.rendezvous.current.number + 1)

    def _leave_out(self, slot: Slot, why: str) -> str:
        """Drop a slot that dies too often. Return the reason for the other launchers."""
        often = f"{why}, {slot.deaths} times in a row without a new step"
        if len(self.slots) == 1 or not largest_world(self.rendezvous.sizes, self.rendezvous.workers - 1):
            raise WorkerFailed(f"{often}{self.log_tail}")
        self.slots.remove(slot)
        self.rendezvous.report(workers=len(self.slots))
        return f"{often}; continuing without it"

    def _end_round(self) -> None:
        group, self.group = self.group, []
        self._start_ahead(self.rendezvous.current.ranks(self.rendezvous.me))  # imports overlap with the exits below
        self.supervisor.end(group)

    # The end

    def _finish(self) -> None:
        self.over = True
        self.rendezvous.report(done=True)

    def _leave(self) -> None:
        self.over = True
        if not self.leads:
            self.failure = Interrupted("interrupted; this machine has left, the others continue if they are enough")

    def conclude(self) -> dict[str, Any]:
        if not self.leads:
            if self.failure is not None:
                raise self.failure
            return {"status": "finished", "run_dir": str(self.supervisor.run_dir.path)}
        size = self.rendezvous.current.world_size or self.elastic.max_workers
        try:
            summary = self.supervisor.conclude(self.failure, world_size=size, members_lost=self.deaths)
        except SmolclusterError as error:
            self._announce_end({UserError: "user", Interrupted: "stopped"}.get(type(error), "failed"), str(error))
            raise
        self._announce_end("finished")
        return summary

    def _announce_end(self, kind: str, message: str = "") -> None:
        """Report the end of the run to the other launchers and wait until they have left."""
        self.rendezvous.report(over={"kind": kind, "message": message.partition("\n")[0]})
        deadline = time.monotonic() + END_REPORT_S
        while len(self.rendezvous.launchers) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    def _note(self, message: str) -> None:
        self.supervisor.observer.notice("INFO", message)
