"""`train --elastic MIN:MAX`: workers of the mesh plane that start again from the last checkpoint, as many as there are.

What a death means is in supervisor.py. Besides:

    a machine is lost      the others go on with fewer workers, once it has been missed; MIN at least
    a machine comes        the workers save, and start again with more; MAX at most
    too many restarts      the run ends, and can be continued by hand

One launcher on every machine, each with its workers; how they agree is in rounds.py. The launcher never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from smolcluster.comm.elastic.membership.heartbeats import MembershipClient
from smolcluster.comm.elastic.transport.security import load_keyring
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import SmolclusterError, UserError, WorkerFailed
from smolcluster.launch.local.mesh import check_nothing_is_lost
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.local.processes import Child, last_lines, make_spec, refuse_inside_a_worker, tell, why_it_ended
from smolcluster.launch.local.supervisor import Policy, Slot, Supervisor, find_culprit
from smolcluster.launch.prepare import Prepared
from smolcluster.launch.restart.meeting import met
from smolcluster.launch.restart.plan import Elastic, ask_for_plans
from smolcluster.launch.restart.rounds import Decree, Over, Rounds, largest
from smolcluster.observe.events import Event, RunFinished, StepLogged
from smolcluster.observe.jsonl import truncate_metrics
from smolcluster.observe.observer import NoticesOnly, Sink

SETTLE_S = 0.5  # a worker lost another: so long the other has to be found dead
NEWS_S = 0.1  # what others said just before is heard first
DRAIN_S = 60.0  # workers that are asked to save and leave take so long at most
GATHER_S = 600.0  # a run with too few workers waits so long for more
PATIENCE_S = 10.0  # after that the launcher reports what it waits for
HOME_S = 3.0  # the others have heard that the run is over

_PROCESS = "smolcluster.engine.process.warm_mesh"


def run_restarting(run: Prepared, elastic: Elastic, *, sinks: list[Sink]) -> dict[str, Any]:
    """Train until the end, however often workers die. Returns the summary where the run is led, elsewhere only its status."""
    refuse_inside_a_worker()
    cluster = run.config.cluster
    keyring = None if elastic.endpoint is None else load_keyring(cluster.token, os.environ)
    with contextlib.ExitStack() as stack:
        client, leads = stack.enter_context(met(elastic.endpoint, within_s=cluster.join_timeout, keyring=keyring))
        if leads:
            check_nothing_is_lost(run.run_dir, run.resume)
            stack.enter_context(run.opened())
            stack.enter_context(run.run_dir.without_journal())
        shown = sinks if leads else map(NoticesOnly, sinks)
        supervisor = Supervisor(run.config, run.run_dir, shown, module=_PROCESS)
        return supervisor.run(RestartPolicy(supervisor, run, elastic, client=client, leads=leads))


class RestartPolicy(Policy):
    """One launcher's part in a run. The methods are in the order in which things happen."""

    def __init__(
        self,
        supervisor: Supervisor,
        run: Prepared,
        elastic: Elastic,
        *,
        client: MembershipClient | None,
        leads: bool,
    ) -> None:
        super().__init__(supervisor)
        self.elastic, self.client, self.leads = elastic, client, leads
        self.resume = None if run.resume is None else str(run.resume)
        self.host = socket.gethostname()
        place: dict[str, Any] = {"world_size": elastic.most, "local_world_size": elastic.here, "host": self.host}
        place["master_addr"] = "127.0.0.1" if elastic.endpoint is None else elastic.endpoint[0]
        specs = [make_spec(run, rank=number, **place) for number in range(elastic.here)]
        self.slots = [Slot(spec=spec) for spec in specs]  # each has a device, by its local rank
        self.warm: dict[int, Child] = {}  # by rank: started ahead, not told anything yet
        self.step = 0  # the latest that was logged here
        self.begun = False  # the run has checkpoints of its own to go on from
        self.deaths = 0
        self.last_lines = ""  # of the worker that died last
        self.told_port = self.told_to_wait = False
        self.leaving: float | None = None  # when workers that were asked to leave must have left
        self.over = False
        self.failure: SmolclusterError | None = None

    def begin(self) -> None:
        if self.leads:
            self._warm_up(range(min(self.elastic.here, self.elastic.most)))
        self.plans, refused = ask_for_plans(self.supervisor.config, self.elastic)
        for size, why in refused.items():
            self.supervisor.warn(f"{size} worker{'s' * (size != 1)} cannot run this: {why}")
        if not self.plans:
            raise UserError(f"--elastic {self.elastic}: none of these sizes can run; {next(iter(refused.values()))}")
        workers, sizes = len(self.slots), sorted(self.plans)
        self.rounds = Rounds(self.client, host=self.host, workers=workers, leads=self.leads, sizes=sizes)
        if self.client is not None:
            self.client.on_change = lambda: self.supervisor.inbox.put((None, None))

    def tick(self) -> bool:
        try:
            if self.crew and self._round_is_over() and not self.over:
                self._end_round()
            if not self.crew:
                self._look_for_next_round()
        except Over as over:
            self.failure, self.over = over.error, True
        except SmolclusterError as error:
            self.failure, self.over = error, True
        return self.over

    # Between rounds

    def _look_for_next_round(self) -> None:
        if self.supervisor.stopping:
            self._leave()
            return
        if self.rounds.waited_s > PATIENCE_S and not self.told_to_wait:
            self.told_to_wait = True
            here, needed = self.rounds.workers, min(self.rounds.sizes)
            waits = f"more: {here} workers are here, {needed} are needed" if self.leads else None
            self._note(f"waiting for {waits or 'a round that has room for this machine'}")
        if self.rounds.begins(self._words, within_s=GATHER_S):
            self._start(self.rounds.current)

    def _words(self) -> dict[str, Any]:
        """What the leader says of a round that begins: where the run is, and where it goes on from."""
        if self.rounds.current.number:
            self.supervisor.restarts += 1
            changes, deaths = self.rounds.reasons()
            self.deaths += bool(deaths)
            why = "; ".join([*changes, *deaths]) or "more workers are here"
            if self.deaths > self.elastic.max_restarts:
                raise WorkerFailed(
                    f"{why}; that was once more than --max-restarts {self.elastic.max_restarts}{self.last_lines}"
                )
            self.supervisor.warn(f"{why}; starting again")
        run_dir = self.supervisor.run_dir
        resume = str(run_dir.checkpoints) if self.begun and run_dir.has_checkpoints() else self.resume
        return {"run_dir": str(run_dir.path), "resume": resume}

    def _start(self, decree: Decree) -> None:
        """One process for each rank of this machine."""
        if not self.leads:
            self.supervisor.run_dir = RunDir(Path(decree.run_dir))
        if decree.number > 1 and decree.resume is None:
            truncate_metrics(self.supervisor.run_dir.metrics, after_step=0)
        ranks = decree.ranks(self.rounds.me)
        self.told_port, self.told_to_wait, self.leaving = False, False, None
        for rank, slot in zip(ranks, self.slots, strict=False):
            slot.spec = replace(
                slot.spec,  # one that is left out keeps its GPU
                rank=rank,
                first_rank=ranks[0],
                config=self.plans[decree.world_size],
                world_size=decree.world_size,
                local_world_size=len(ranks),
                run_dir=str(self.supervisor.run_dir.path),
                resume=decree.resume,
                again=decree.number > 1,
            )
            child = self.warm.pop(rank, None)
            if child is None or child.died is not None:
                child = self.supervisor.start(slot.spec, told=False)
            tell(child, slot.spec.to_json())
            self.crew.append(child)
        self.supervisor.end([*self.warm.values()])
        self.warm.clear()
        if not self.leads:
            those = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            self._note(f"round {decree.number}: this machine has {those} of {decree.world_size}")

    def _warm_up(self, ranks: range) -> None:
        """Start processes that import what they will need, while there is something else to wait for."""
        for rank in ranks:
            if rank not in self.warm:
                spec = replace(self.slots[0].spec, rank=rank)
                self.warm[rank] = self.supervisor.start(spec, told=False, standby=True)

    # While a round lasts

    def listens(self, child: Child, port: int) -> None:
        if child in self.crew:
            self.rounds.say(port=[self.rounds.current.number, port])

    def shown(self, child: Child, event: Event) -> Event | None:
        stopping = self.supervisor.stopping
        match event:
            case _ if child not in self.crew:
                return None
            case StepLogged():
                self.begun = True
                if event.step > self.step:
                    self.step = event.step
                    for slot in self.slots:
                        slot.progress = True
                if self.supervisor.config.cluster.standby and not stopping:
                    self._warm_up(self.rounds.current.ranks(self.rounds.me))
            case RunFinished():
                if event.summary["status"] != "finished" and not stopping:
                    return None  # they make room for others
                return self.supervisor.complete(event.summary, members_lost=self.deaths)
        return event

    def stop(self) -> None:
        if not self.leads:
            self.rounds.say(leaves=True)
        super().stop()

    def _round_is_over(self) -> bool:
        """Whether the present round has ended. If the run has too, `over` is set."""
        self._pass_on_port()
        dead = [child for child in self.crew if child.died is not None]
        fell = [child for child in self.crew if child.fell]
        all_dead = len(dead) == len(self.crew)
        if all_dead and all(c.finished and c.process.returncode != Interrupted.exit_code for c in self.crew):
            self._finish()
        elif self.supervisor.stopping and (fell or all_dead):
            self._leave()
        elif fell:
            culprit = find_culprit(fell)
            settle_s = SETTLE_S if culprit.victim and not all_dead else NEWS_S
            if time.monotonic() - min(c.died or 0.0 for c in fell) < settle_s:
                return self._is_broken()
            self._account_for(culprit)
        elif not all_dead:
            return self._is_broken()
        return True

    def _pass_on_port(self) -> None:
        port = self.rounds.port()
        if port is not None and not self.told_port:
            self.told_port = True
            for child in self.crew:
                tell(child, json.dumps({"op": "port", "port": port}))

    def _is_broken(self) -> bool:
        """Whether other machines have left the round, or wait for ours to leave it and that has taken too long."""
        found = self.rounds.broken()
        if found is not None and found.gently and self.leaving is None and not self.supervisor.stopping:
            super().stop()  # they save, and make room
            self.leaving = time.monotonic() + DRAIN_S
        abruptly = found is not None and not found.gently
        return abruptly or (self.leaving is not None and time.monotonic() > self.leaving)

    def _account_for(self, culprit: Child) -> None:
        """What this death means for the next round; raises when there is none."""
        summary = self.supervisor.outcome.summary
        if summary is not None and summary["status"] == "finished":
            return self._finish()  # one that fell after the last step has done its part
        self.supervisor.report(culprit)
        why = f"rank {culprit.rank} on {self.host} died: {why_it_ended(culprit).splitlines()[0]}"
        if culprit.mistake is not None:
            self.rounds.say(mistake=str(culprit.mistake))
            raise culprit.mistake
        self.last_lines = last_lines(culprit)
        slot = self.slots[self.crew.index(culprit)]
        if not culprit.victim and not slot.count_death():
            why = self._leave_out(slot, why)
        return self.rounds.say(why=why, victim=culprit.victim, asks=self.rounds.current.number + 1)

    def _leave_out(self, slot: Slot, why: str) -> str:
        """Go on without a slot that dies too often. Returns what is to be told."""
        often = f"{why}, {slot.deaths} times in a row without a new step"
        if len(self.slots) == 1 or not largest(self.rounds.sizes, self.rounds.workers - 1):
            raise WorkerFailed(f"{often}{self.last_lines}")
        self.slots.remove(slot)
        self.rounds.say(workers=len(self.slots))
        return f"{often}; going on without it"

    def _end_round(self) -> None:
        crew, self.crew = self.crew, []
        self._warm_up(self.rounds.current.ranks(self.rounds.me))  # they import while the former ones leave
        self.supervisor.end(crew)

    # The end

    def _finish(self) -> None:
        self.over = True
        self.rounds.say(done=True)

    def _leave(self) -> None:
        self.over = True
        if not self.leads:
            self.failure = Interrupted("interrupted; this machine has left, the others go on if they are enough")

    def conclude(self) -> dict[str, Any]:
        if not self.leads:
            if self.failure is not None:
                raise self.failure
            return {"status": "finished", "run_dir": str(self.supervisor.run_dir.path)}
        size = self.rounds.current.world_size or self.elastic.most
        try:
            summary = self.supervisor.conclude(self.failure, world_size=size, members_lost=self.deaths)
        except SmolclusterError as error:
            self._send_home({UserError: "user", Interrupted: "stopped"}.get(type(error), "failed"), str(error))
            raise
        self._send_home("finished")
        return summary

    def _send_home(self, kind: str, message: str = "") -> None:
        """Report the end of the run to the other machines."""
        self.rounds.say(over={"kind": kind, "message": message.partition("\n")[0]})
        deadline = time.monotonic() + HOME_S
        while len(self.rounds.agents) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    def _note(self, message: str) -> None:
        self.supervisor.observer.notice("INFO", message)
