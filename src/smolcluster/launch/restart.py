"""`train --elastic MIN:MAX`: workers of the mesh plane that are started again from the last checkpoint, as many as there are.

    a worker dies          all workers start again, here and on the other machines, and go on from the newest good checkpoint
    the same one dies      three times in a row without a new step between: it is left out, if enough others remain
    a machine is lost      the others go on with fewer workers, once it has been missed; MIN at least
    a machine comes        the workers save, and start again with more; MAX at most
    a user's mistake       starting again would not mend it: the run ends at once. A machine that came later only leaves
    too many restarts      the run ends, and can be continued by hand
    Ctrl-C                 where the run is led: everybody saves and leaves. Elsewhere: that machine leaves, the others go on

One launcher on every machine, each with its workers; how they agree is in rounds.py. The launcher never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smolcluster.comm.elastic.security import load_keyring
from smolcluster.comm.rollcall import Member
from smolcluster.config.schema import Config
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.spec import WorkerSpec
from smolcluster.engine.summary import write_summary
from smolcluster.errors import SmolclusterError, UserError, WorkerFailed
from smolcluster.launch.local import check_nothing_is_lost, find_culprit
from smolcluster.launch.meeting import met
from smolcluster.launch.outcome import Interrupted, Outcome
from smolcluster.launch.plan import Elastic, ask_for_plans
from smolcluster.launch.prepare import recorded
from smolcluster.launch.processes import (
    GRACE_S,
    STOP,
    Child,
    Inbox,
    Stopped,
    end_all,
    last_lines,
    refuse_inside_a_worker,
    signals,
    spawn,
    tell,
    wake,
    why_it_ended,
)
from smolcluster.launch.rounds import TICK_S, Decree, Over, Rounds, largest
from smolcluster.observe.events import Event, Failed, Notice, Phase, RunFinished, StepLogged
from smolcluster.observe.jsonl import truncate_metrics
from smolcluster.observe.observer import Observer, OnlyNotices, Sink

MOST_DEATHS = 3  # of one worker in a row, without a new step between them
SETTLE_S = 0.5  # a worker lost another: so long the other has to be found dead
NEWS_S = 0.1  # what others said just before is heard first
DRAIN_S = 60.0  # workers that are asked to save and leave take so long at most
GATHER_S = 600.0  # a run with too few workers waits so long for more
PATIENCE_S = 10.0  # after that a user is told what is waited for
HOME_S = 3.0  # the others have heard that the run is over

_PROCESS = "smolcluster.engine.ready"


def run_restarting(
    config: Config,
    elastic: Elastic,
    *,
    run_dir: RunDir,
    resume: Path | None,
    backend: str | None,
    sinks: list[Sink],
    anew: bool = False,
) -> dict[str, Any]:
    """Train until the end, however often workers die. Returns the summary where the run is led, elsewhere only its status."""
    refuse_inside_a_worker()
    keyring = None if elastic.endpoint is None else load_keyring(config.cluster.token, os.environ)
    with met(elastic.endpoint, within_s=config.cluster.join_timeout, keyring=keyring) as (member, leads):
        run = _Run(config, elastic, run_dir=run_dir, resume=resume, backend=backend, sinks=sinks)
        if not leads:
            return run.run(member, leads=False)
        check_nothing_is_lost(run_dir, resume)
        with (
            run_dir.opened(*recorded(config, run_dir), resume=resume is not None, anew=anew),
            run_dir.without_journal(),
        ):
            return run.run(member, leads=True)


@dataclass(slots=True)
class _Slot:
    """A place for a worker on this machine: its number chooses the device."""

    number: int
    deaths: int = 0  # in a row, without a new step between them
    step: int = 0  # reached at the last of them


class _Run:
    """One launcher's part in a run. `run` is its life; the rest is in the order in which it happens."""

    def __init__(
        self,
        config: Config,
        elastic: Elastic,
        *,
        run_dir: RunDir,
        resume: Path | None,
        backend: str | None,
        sinks: list[Sink],
    ) -> None:
        self.config, self.elastic, self.run_dir, self.backend = config, elastic, run_dir, backend
        self.resume = None if resume is None else str(resume)
        self.host = socket.gethostname()
        self.outcome = Outcome()
        self.sinks = sinks
        self.inbox = Inbox()
        self.children: list[Child] = []  # all that are alive
        self.crew: list[Child] = []  # of the present round
        self.warm: dict[int, Child] = {}  # by rank: started ahead, not told anything yet
        self.slots = [_Slot(number) for number in range(elastic.here)]
        self.step = 0  # the latest that was logged here
        self.begun = False  # the run has checkpoints of its own to go on from
        self.restarts = 0
        self.deaths = 0
        self.stopping = False
        self.stopped = Stopped()
        self.told_port = False
        self.last_lines = ""  # of the worker that died last

    def run(self, member: Member | None, *, leads: bool) -> dict[str, Any]:
        self.leads = leads
        self.observer = Observer([self.outcome, *(self.sinks if leads else map(OnlyNotices, self.sinks))])
        try:
            with signals(lambda: self.children, self.inbox):
                if leads:
                    self._warm_up(range(min(self.elastic.here, self.elastic.most)))
                self.plans = self._plan()
                self.rounds = Rounds(
                    member, host=self.host, workers=len(self.slots), leads=leads, sizes=sorted(self.plans)
                )
                return self._rounds()
        except Over as over:
            if over.error is not None:
                raise over.error from None
            return {"status": "finished", "run_dir": str(self.run_dir.path)}
        finally:
            end_all(self.children, grace_s=0.0)
            self.outcome.send_leftovers(self.run_dir, self.config, self.observer.emit)
            self.observer.close()

    def _plan(self) -> dict[int, dict[str, Any]]:
        """The configuration for every size that can run. The others are told of."""
        plans, refused = ask_for_plans(self.config, self.elastic)
        for size, why in refused.items():
            self._warn(f"{size} worker{'s' * (size != 1)} cannot run this: {why}")
        if not plans:
            raise UserError(f"--elastic {self.elastic}: none of these sizes can run; {next(iter(refused.values()))}")
        return plans

    # Rounds

    def _rounds(self) -> dict[str, Any]:
        try:
            while not self._round():
                pass
            self.rounds.say(done=True)
            return self._conclude()
        except SmolclusterError as error:
            self._tell_the_end(error)
            raise

    def _round(self) -> bool:
        """From the agreement on a round to its end. Returns whether that was the end of the run."""
        self.patient_until: float | None = time.monotonic() + PATIENCE_S
        decree = self.rounds.next(self._words, tick=self._tick, within_s=GATHER_S)
        over = True
        try:
            self._start(decree)
            over = self._watch()
        finally:
            crew, self.crew = self.crew, []
            if not over:
                self._warm_up(decree.ranks(self.rounds.me))  # they import while the former ones leave
            self._end(crew, grace_s=GRACE_S)
        return over

    def _words(self) -> dict[str, Any]:
        """What the leader says of a round that begins: where the run is, and where it goes on from."""
        if self.rounds.current.number:
            self.restarts += 1
            changes, deaths = self.rounds.reasons()
            self.deaths += bool(deaths)
            why = "; ".join([*changes, *deaths]) or "more workers are here"
            if self.deaths > self.elastic.max_restarts:
                raise WorkerFailed(
                    f"{why}; that was once more than --max-restarts {self.elastic.max_restarts}{self.last_lines}"
                )
            self._warn(f"{why}; starting again")
        resume = str(self.run_dir.checkpoints) if self.begun and self.run_dir.has_checkpoints() else self.resume
        return {"run_dir": str(self.run_dir.path), "resume": resume}

    def _start(self, decree: Decree) -> None:
        """One process for each rank of this machine."""
        if not self.leads:
            self.run_dir = RunDir(Path(decree.run_dir))
        if decree.number > 1 and decree.resume is None:
            truncate_metrics(self.run_dir.metrics, after_step=0)
        ranks, self.told_port = decree.ranks(self.rounds.me), False
        for rank, slot in zip(ranks, self.slots, strict=False):
            spec = replace(
                self._spec(rank, local_rank=slot.number),  # one that is left out keeps its GPU
                first_rank=ranks[0],
                config=self.plans[decree.world_size],
                world_size=decree.world_size,
                local_world_size=len(ranks),
                resume=decree.resume,
                again=decree.number > 1,
            )
            child = self.warm.pop(rank, None)
            if child is None or child.died is not None:
                child = self._spawn(spec)
            tell(child, spec.to_json())
            self.crew.append(child)
        self._end([*self.warm.values()])
        self.warm.clear()
        if not self.leads:
            those = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            self._note(f"round {decree.number}: this machine has {those} of {decree.world_size}")

    def _spec(self, rank: int, *, local_rank: int = 0) -> WorkerSpec:
        return WorkerSpec(
            config={},
            rank=rank,
            world_size=self.elastic.most,
            local_rank=local_rank,
            local_world_size=len(self.slots),
            host=self.host,
            run_dir=str(self.run_dir.path),
            backend=self.backend,
            master_addr="127.0.0.1" if self.elastic.endpoint is None else self.elastic.endpoint[0],
        )

    def _spawn(self, spec: WorkerSpec, *, standby: bool = False) -> Child:
        child = spawn(spec, self.inbox, module=_PROCESS, standby=standby)
        self.children.append(child)
        return child

    def _warm_up(self, ranks: range) -> None:
        """Processes that import what they will need, while there is something else to wait for."""
        for rank in ranks:
            if rank not in self.warm:
                self.warm[rank] = self._spawn(self._spec(rank), standby=True)

    # While a round lasts

    def _watch(self) -> bool:
        leaving: float | None = None  # when those who were asked to leave must have left
        while True:
            self._hear(TICK_S)
            self._pass_on_port()
            if self._finished():
                return True
            if any(child.died is not None for child in self.crew) and (end := self._deaths()) is not None:
                return end
            found = self.rounds.broken()
            if found is not None and not found.gently:
                return False
            if found is not None and leaving is None and not self.stopping:
                self._tell_crew(STOP)
                leaving = time.monotonic() + DRAIN_S
            if leaving is not None and time.monotonic() > leaving:
                return False

    def _hear(self, within_s: float) -> None:
        """Everything that was said, waiting for the first of it."""
        for notice in self.stopped.look(self.crew):
            self.observer.emit(notice)
        with contextlib.suppress(queue.Empty):
            self._handle(*self.inbox.get(timeout=within_s))
            while True:
                self._handle(*self.inbox.get_nowait())

    def _tick(self) -> None:
        """While the next round is waited for."""
        self._hear(0.001)
        if self.stopping:
            raise self._stopped()
        if self.patient_until is not None and time.monotonic() > self.patient_until:
            self.patient_until = None
            if self.leads:
                self._note(
                    f"waiting for more: {self.rounds.workers} workers are here, {min(self.rounds.sizes)} are needed"
                )
            else:
                self._note("waiting for a round that has room for this machine")

    def _handle(self, child: Child | None, event: Event | None) -> None:
        if child is None:
            self.stopping = True
            if not self.leads:
                self.rounds.say(leaves=True)
            self._tell_crew(STOP)
        elif event is None:
            child.process.wait()
            child.died = time.monotonic()
            return
        elif child not in self.crew:
            return
        match event:
            case Phase(name="port"):
                self.rounds.say(port=[self.rounds.current.number, int(event.detail)])
                return
            case Failed():
                assert child is not None
                child.failed = event  # told when it has ended
                return
            case Phase(name="finished"):
                assert child is not None
                child.finished = True
            case StepLogged():
                self.begun = True
                self.step = max(self.step, event.step)
                if self.config.cluster.standby and not self.stopping:
                    self._warm_up(self.rounds.current.ranks(self.rounds.me))
            case RunFinished():
                if event.summary["status"] != "finished" and not self.stopping:
                    return  # they make room for others
                event = RunFinished(summary=self._complete(event.summary))
            case _:
                pass
        self.observer.emit(event)  # type: ignore[arg-type]

    def _pass_on_port(self) -> None:
        port = self.rounds.port()
        if port is not None and not self.told_port:
            self.told_port = True
            self._tell_crew(json.dumps({"op": "port", "port": port}))

    def _finished(self) -> bool:
        """Everybody said so and left. Those who were stopped say so too."""
        return bool(self.crew) and all(
            child.finished and child.died is not None and child.process.returncode != Interrupted.exit_code
            for child in self.crew
        )

    def _deaths(self) -> bool | None:
        """Somebody is dead. None: wait for more; else as `_round`."""
        dead = [child for child in self.crew if child.died is not None]
        bad = [c for c in dead if c.failed is not None or not _left_in_order(c)]
        if not bad:
            if len(dead) < len(self.crew):
                return None
            if self.stopping:
                raise self._stopped()
            return False  # they were asked to make room
        if self.stopping:
            raise self._stopped()
        culprit = find_culprit(bad)
        victim = culprit.failed is not None and culprit.failed.kind == "peer"
        settle_s = SETTLE_S if victim and len(dead) < len(self.crew) else NEWS_S
        if time.monotonic() - min(c.died or 0.0 for c in bad) < settle_s:
            return None
        if self.outcome.summary is not None and self.outcome.summary["status"] == "finished":
            return True  # whoever fell after the last step has done its part
        self._account_for(culprit, victim=victim)
        return False

    def _account_for(self, culprit: Child, *, victim: bool) -> None:
        """What this death means for the next round; raises when there is none."""
        self.observer.emit(culprit.failed or Failed(rank=culprit.rank, kind="error", message=why_it_ended(culprit)))
        why = f"rank {culprit.rank} on {self.host} died: {why_it_ended(culprit).splitlines()[0]}"
        if culprit.failed is not None and culprit.failed.kind == "user":
            self.rounds.say(mistake=culprit.failed.message)
            raise UserError(culprit.failed.message)
        self.last_lines = f"{last_lines(culprit)}\nthe whole log: {culprit.log}"
        if not victim:
            why = self._count_against(self.slots[self.crew.index(culprit)], why)
        self.rounds.say(why=why, victim=victim, asks=self.rounds.current.number + 1)

    def _count_against(self, slot: _Slot, why: str) -> str:
        """Leaves the slot out if it dies too often. Returns what is to be told."""
        slot.deaths = slot.deaths + 1 if slot.deaths and self.step <= slot.step else 1
        slot.step = self.step
        if slot.deaths < MOST_DEATHS:
            return why
        often = f"{why}, {slot.deaths} times in a row without a new step"
        if len(self.slots) == 1 or not largest(self.rounds.sizes, self.rounds.workers - 1):
            raise WorkerFailed(f"{often}{self.last_lines}")
        self.slots.remove(slot)
        self.rounds.say(workers=len(self.slots))
        return f"{often}; going on without it"

    # The end of a round, and of the run

    def _end(self, children: list[Child], *, grace_s: float = 0.0) -> None:
        end_all(children, grace_s=grace_s)
        self.children = [child for child in self.children if child not in children]

    def _tell_crew(self, line: str) -> None:
        for child in self.crew:
            tell(child, line)
            if line == STOP:
                wake(child.process)

    def _stopped(self) -> Interrupted:
        if not self.leads:
            return Interrupted("interrupted; this machine has left, the others go on if they are enough")
        if self.outcome.summary is None:
            self.outcome.write_summary(self.run_dir, self.config, world_size=self._size, **self._ending("interrupted"))
        return self.outcome.interrupted(self.run_dir)

    def _tell_the_end(self, error: SmolclusterError) -> None:
        """The other machines hear of it, and the summary says it."""
        kind = {UserError: "user", Interrupted: "stopped"}.get(type(error), "failed")
        if not self.leads:
            return
        if kind == "failed":
            first = str(error).splitlines()[0]
            self.outcome.write_summary(
                self.run_dir, self.config, world_size=self._size, **self._ending("failed", first)
            )
        self._send_home({"kind": kind, "message": str(error).splitlines()[0]})

    def _send_home(self, over: dict[str, str]) -> None:
        self.rounds.say(over=over)
        deadline = time.monotonic() + HOME_S
        while len(self.rounds.agents) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    @property
    def _size(self) -> int:
        return self.rounds.current.world_size or self.elastic.most

    def _ending(self, status: str, error: str | None = None) -> dict[str, Any]:
        return {"status": status, "restarts": self.restarts, "members_lost": self.deaths, "error": error}

    def _complete(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The summary as rank 0 wrote it, and what only the launcher knows; on the disk as well."""
        known: dict[str, Any] = {"restarts": self.restarts, "members_lost": self.deaths}
        if self.restarts:
            known["wall_s"] = time.time() - self.outcome.started  # the workers know of their own time only
            with contextlib.suppress(OSError):  # a full disk must not hide how the run went
                write_summary(self.run_dir.summary, summary | known)
        return summary | known

    def _conclude(self) -> dict[str, Any]:
        if self.leads:
            self._send_home({"kind": "finished", "message": ""})
        return self.outcome.summary or {"status": "finished", "run_dir": str(self.run_dir.path)}

    def _note(self, message: str) -> None:
        self.observer.emit(Notice(level="INFO", message=message))

    def _warn(self, message: str) -> None:
        self.observer.emit(Notice(level="WARNING", message=message))


def _left_in_order(child: Child) -> bool:
    return child.finished or child.process.returncode == Interrupted.exit_code
