"""The server of a run on the elastic plane: it admits workers, serves its strategy, and keeps the run's record.

Evaluation and checkpoints happen here, beside serving. Every committed step is in the journal before anyone hears of it, so
a server that is killed goes on where it was when it is started again in the same run directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.elastic.membership.mailbox import Mailbox
from smolcluster.comm.elastic.membership.roster import Member, Roster
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.elastic.transport.security import check_bind, load_keyring
from smolcluster.comm.elastic.transport.tcp import LinkLimits, TcpTransport
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.compute.buffers import not_finite
from smolcluster.config import public_dict
from smolcluster.config.options import Options
from smolcluster.data.leases import Leases, Range, indices
from smolcluster.data.sampler import Sampler
from smolcluster.engine.checkpoint.safetensors_writer import weights_sha256
from smolcluster.engine.checkpoint.snapshot import ALL, Snapshot, check_compatible, check_whole, state_for
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.engine.checkpoint.tokenizer_files import check_tokenizer
from smolcluster.engine.checks import batch_size_of, check_enough_samples, check_finite, check_server_disk
from smolcluster.engine.durable_files import atomic_write_text, size_on_disk
from smolcluster.engine.elastic import history
from smolcluster.engine.elastic.admission import Admission, layout_of
from smolcluster.engine.elastic.adopted_config import MOST_STEPS
from smolcluster.engine.elastic.asynchronous import AsynchronousServer
from smolcluster.engine.elastic.coordinator import Coordinator
from smolcluster.engine.elastic.evaluator import Referee
from smolcluster.engine.elastic.journal import Journal, JournalFull, Recovered, disk_bound, least_disk
from smolcluster.engine.elastic.rounds import connect_s
from smolcluster.engine.elastic.row_quota import RowQuota
from smolcluster.engine.elastic.server_side import ServerSide
from smolcluster.engine.elastic.synchronous import SynchronousServer
from smolcluster.engine.identity import new_peer, new_run_id
from smolcluster.engine.record import RunRecord
from smolcluster.engine.role import INTERRUPTED, Role
from smolcluster.engine.run_length import last_step, more_of, samples_read
from smolcluster.engine.summary import evaluation_summary, join_ranks, write_summary
from smolcluster.engine.trial import unchanged_random_states
from smolcluster.errors import UserError
from smolcluster.observe.events import Notice, Phase, RunFinished, StepLogged, evaluation_fields, from_json
from smolcluster.observe.jsonl import MetricsFile, truncate_metrics
from smolcluster.parallel.placement import Node
from smolcluster.strategies.base import Commit, Context, Office, State, StepReport, Strategy
from smolcluster.strategies.base.replicated import Exchanging, Pushing
from smolcluster.tasks.base import count_of

log = logging.getLogger(__name__)

EPOCHS = 1 << 16  # of one server: another begins at a multiple of it, beyond views that left no trace in the record
GOODBYE_S = 5.0  # how long the last reports of the workers are waited for


class Server(Role):
    """The methods are its phases, in order."""

    def run(self) -> int:
        self._prepare()
        self._begin()
        self._announce()
        if self.step >= self.total_steps:  # the one before died after its last step
            self._due[self.step] = self._last_row()
            if not self._coordinates:
                self._arrived(self.step)
        try:
            self.duty.serve()
        finally:
            if self.referee is not None:
                if self.step < self.total_steps:  # told to stop: what is left is to save
                    self.referee.leave()
                self.referee.close()
        if self.referee is not None:
            self.referee.check()
        return self._finish()

    # What needs no worker

    def _prepare(self) -> None:
        spec, cluster, training = self.spec, self.config.cluster, self.config.training
        self._choose(lead=True)
        host, _, port = spec.server.rpartition(":")
        keyring = load_keyring(cluster.token, os.environ)
        check_bind(host, keyring)
        self._load_task()
        workers = cluster.num_workers or 1
        self.batch_sizes = [batch_size_of(self.config, r) * training.grad_accumulation for r in range(workers)]
        check_enough_samples(len(self.train_data), self.batch_sizes)
        self.run_id = self._run_id()
        self.me = new_peer(role="server", rank=workers, host=spec.host, run=self.run_id)
        self.transport = TcpTransport(
            self.me,
            keyring=keyring,
            buffer_size=cluster.buffer_size.get(spec.host),
            limits=LinkLimits(silence_s=cluster.silence_timeout, stall_s=cluster.stall_timeout),
        )
        self.address = (host, int(port))

    def _run_id(self) -> str:
        path = self.run_dir.path / "run-id"
        with contextlib.suppress(FileNotFoundError):
            if known := path.read_text().strip():
                return known
        run_id = new_run_id()
        atomic_write_text(path, run_id + "\n")  # workers that come back ask for this run, also after a power cut
        return run_id

    def _begin(self) -> None:
        """Where it starts is found before anything is built: how many steps are left follows from it."""
        # A journal of its own is begun last: a mistake that shows before must not cost the one that was put aside.
        journal = Journal(self.run_dir.journal) if self.run_dir.journal.is_dir() else None
        recovered = journal.recover() if journal is not None else None
        snapshot: Snapshot | None = None
        if recovered is not None and recovered.meta is None:
            recovered = None
        if self.spec.resume is not None and (recovered is None or self._checkpoint_is_better(recovered)):
            recovered, snapshot = None, self._find_checkpoint(Path(self.spec.resume))[1]
        self.total_steps = self.planned_steps = self._last_step(recovered, snapshot)
        self._check_something_is_left(recovered, snapshot)
        self._build()
        if recovered is None and snapshot is None:
            self._try_task(self.strategy)
        if journal is None:
            journal = Journal(self.run_dir.journal)
            journal.recover()
        journal.bound_disk(self._journal_bytes)
        self.journal = journal
        self._recover(recovered, snapshot)

    def _last_step(self, recovered: Recovered | None, snapshot: Snapshot | None) -> int:
        step = read = 0
        if recovered is not None and recovered.meta is not None:
            if self.spec.resume is None and "total_steps" in recovered.meta:
                return int(recovered.meta["total_steps"])  # the workers that come back know it as this
            step, leases = _end_of(recovered)
            read = samples_read(leases, with_holes=False)
        elif snapshot is not None:
            step, read = snapshot.step, samples_read(snapshot.state["sampler"], with_holes=False)
        training, batch = self.config.training, sum(self.batch_sizes)
        return last_step(training, samples=len(self.train_data), batch=batch, step=step, read=read)

    def _check_something_is_left(self, recovered: Recovered | None, snapshot: Snapshot | None) -> None:
        if snapshot is not None and snapshot.step >= self.total_steps:
            what = f"the checkpoint is at step {snapshot.step} and the run ends"
        elif recovered is not None and self.spec.resume is not None and _end_of(recovered)[0] > self.total_steps:
            what = f"this run has committed {_end_of(recovered)[0]} steps and would end"
        else:
            return
        more = more_of(self.config.training)
        raise UserError(f"{what} at {self.total_steps}: nothing is left to train; {more}")

    def _build(self) -> None:
        spec, training = self.spec, self.config.training
        self.mailbox = Mailbox()
        self.roster = Roster(
            self.mailbox,
            plan={"config": public_dict(self.config), "run": self.run_id, "total_steps": self.planned_steps},
            admit=lambda link, meta: self.admission.admit(link, meta),
            on_event=self._on_event,
            on_change=self._on_change,
        )
        self.office = Office(
            roster=self.roster,
            leases=Leases(),
            expected=len(self.batch_sizes),
            record=self._record,
            committed=self._committed,
            wants=self._wants,
            arrived=self._arrived,
            count=self._count_targets,
        )
        nodes = [Node(name=spec.host, batch_size=size, stays=False) for size in self.batch_sizes]
        seats = self.strategy_class.plan(self.options, nodes, None).checked().seats
        self.context = Context(
            config=self.config,
            seat=seats[-1],
            seats=seats,
            group=MemoryGroup.world(1)[0],
            device=self.device,
            total_steps=self.total_steps,
            samples_per_step=self.batch_sizes,
            stop_requested=self.channel.stop_requested,
            warn=self._warn,
            office=self.office,
        )
        self.strategy = self.strategy_class(self.options, self.context)
        self.strategy.setup(self.task)
        self.duty = self._take_duty()
        self.layout = layout_of(self.strategy.state().weights)
        self.admission = Admission(
            self.layout, len(self.train_data), self.config.cluster.workers, exchanging=self._coordinates
        )
        again = self.run_dir.journal.is_dir()
        self._journal_bytes = self._check_disk(again=again)
        self.saver = self._make_saver(self.strategy, again=again) if training.checkpoint_steps != 0 else None
        self.referee = (
            None
            if self.val_data is None
            else Referee(self.strategy.replica.model, self.task, self.val_data, device=self.device)
        )
        self.record = RunRecord(
            self.context,
            self.task,
            host=spec.host,
            world_size=len(self.batch_sizes),
            saver=self.saver,
            traffic=lambda: self.transport.traffic,
        )
        self.step = 0
        self._due: dict[int, StepLogged] = {}  # rows that wait for their evaluation
        self._read_by: dict[
            int, dict[str, Any]
        ] = {}  # what had been read by these steps, where their state is to come yet

    @property
    def _coordinates(self) -> bool:
        """Whether workers exchange by themselves and have the weights; else this process has them."""
        return not issubclass(self.strategy_class, Pushing)

    def _take_duty(self) -> ServerSide:
        """Be the parameter server of the strategy, or the coordinator of workers that exchange by themselves."""
        tokens = self.task.tokens_per_sample
        if isinstance(self.strategy, Pushing):
            server = SynchronousServer if self.strategy.combined == "server" else AsynchronousServer
            return server(self.context, self.strategy, tokens_per_sample=tokens)
        assert isinstance(self.strategy, Exchanging)  # or `find_strategy` would have refused it
        return Coordinator(
            self.context,
            self.strategy.replica,
            rounds_ahead=self.strategy.rounds_in_flight + 1,
            local_steps=self._local_steps,
            whole=self.strategy.results_are_whole,
            tokens_per_sample=tokens,
            step_timeout_s=self.strategy.round_timeout,
            connect_s=connect_s(self.context),
        )

    @property
    def _local_steps(self) -> int:
        """Steps of a round."""
        return self.strategy.local_steps if isinstance(self.strategy, Exchanging) else 1

    def _count_targets(self, ranges: Sequence[Range]) -> float | None:
        """Return how many targets count in leased samples, by this process's own data; None: samples do, all alike."""
        read = indices(Sampler(len(self.train_data), seed=self.config.training.seed or 0), ranges)
        pieces = self.config.training.grad_accumulation * self._local_steps
        size = max(1, len(read) // pieces)  # about as workers read them
        parts = [read[i : i + size] for i in range(0, len(read), size)]
        with unchanged_random_states(self.device):
            counts = [count_of(self.task, self.train_data.batch(part)) for part in parts]
        return None if None in counts else sum(filter(None, counts))

    def _check_disk(self, *, again: bool) -> int:
        """Return how many bytes the journal may take. `again`: one was begun before."""
        training, weights = self.config.training, sum(t.nbytes for t in self.strategy.replica.layout.values())
        needs = {"state_bytes": 0, "record_bytes": 0}
        if not self._coordinates:
            needs = {"state_bytes": 3 * weights, "record_bytes": weights}
        return check_server_disk(
            self.run_dir.path,
            checkpoint_bytes=3 * weights if training.checkpoint_steps != 0 else 0,
            keep=training.max_checkpoints_to_keep,
            least_bytes=least_disk(**needs),
            most_bytes=disk_bound(**needs),
            there_bytes=size_on_disk(self.run_dir.journal) + size_on_disk(self.run_dir.checkpoints),
            again=again,
            warn=self._warn,
        )

    # Where it starts: its own journal, a checkpoint, or nothing

    def _recover(self, recovered: Recovered | None, snapshot: Snapshot | None) -> None:
        self.history = history.History(self.run_dir.path / "history.jsonl")
        if recovered is not None and recovered.meta is not None:
            state = State.unpacked(recovered.state, recovered.meta["numbers"]) if recovered.state else None
            self._restore(state, recovered.meta)
            # A person's wish to continue, long after: the workers begin too, and have no weights where the server has none.
            self.office.fresh = self.spec.resume is not None
            for record in recovered.records:
                self._replay(record.meta, record.payload)
            lines = [record.meta["line"] for record in recovered.records]
            self.history.reconcile(lines, next_step=self.step + 1)
            self.observer.emit(Notice(level="WARNING", message=f"the server is back, at step {self.step}"))
        elif snapshot is not None:
            self._resume(snapshot)
            self.history.reconcile([], next_step=self.step + 1)
        last = max(self.roster.epoch, self.history.epoch)
        self.roster.epoch = last + EPOCHS - last % EPOCHS if last else 1
        data = history.Data.model_validate(self.office.leases.state_dict())
        begun = history.Begin(next_step=self.step + 1, epoch=self.roster.epoch, server=self.me.instance, data=data)
        self.history.add(begun)
        self.office.first_step = self.step
        self._set_end(self.step, data=self.office.leases.state_dict(), batch=sum(self.batch_sizes))
        self._read_by = {self.step: self.office.leases.state_dict()}
        self._snapshot_journal(wait=True)

    def _checkpoint_is_better(self, recovered: Recovered) -> bool:
        """To begin from, than this journal: it is newer, or the journal cannot be used. Refuses to lose a step for it."""
        assert recovered.meta is not None
        if not recovered.state:
            return True
        step, _ = _end_of(recovered)
        found = CheckpointStore(Path(str(self.spec.resume)), keep=1).load_latest()
        saved = found[1].step if found is not None else 0
        if saved > step:
            log.warning("the journal ends at step %d: going on from the checkpoint of step %d", step, saved)
        elif saved < step and self._coordinates:
            name, folder = recovered.meta.get("strategy", "its own"), self.run_dir.checkpoints / f"step-{saved:08d}"
            back = f", or go back to that checkpoint on purpose with --resume {folder}" if saved else ""
            raise UserError(
                f"this run has committed {step} steps, and its last checkpoint is of step {saved}: the rest is in the journal "
                f"of a parameter server; continue with --strategy {name}{back}"
            )
        return saved > step or self._coordinates

    def _restore(self, state: State | None, meta: Mapping[str, Any]) -> None:
        if state is not None:
            self.strategy.load_state(state)
            self.duty.load_shared(state.shared)
        self.step, self.record.samples, self.record.tokens = (
            int(meta["step"]),
            int(meta["samples"]),
            int(meta["tokens"]),
        )
        self.roster.epoch = int(meta["epoch"])
        self.office.leases = Leases.from_state(meta["leases"])
        self._restore_agreement(meta)
        self._restore_member_counts(meta)
        self.record.best.load_state_dict(meta)

    def _replay(self, meta: Mapping[str, Any], gradient: Tensor | None) -> None:
        line = meta["line"]
        contributors = line["contributors"]
        self.duty.replay(
            Commit(step=int(line["step"]), contributors=contributors, gradient=gradient, numbers=dict(meta))
        )
        samples = sum(int(c["samples"]) for c in contributors)
        self.step = int(line["step"])
        self.record.samples += samples
        self.record.tokens += samples * self.task.tokens_per_sample
        self.roster.epoch = max(self.roster.epoch, int(line["epoch"]))
        self.office.leases = Leases.from_state(line["data"])
        self._restore_agreement(meta)
        self._restore_member_counts(meta)

    def _restore_agreement(self, meta: Mapping[str, Any]) -> None:
        self.office.recent = {int(step): tuple(value) for step, value in meta.get("recent", {}).items()}
        self.office.established = meta.get("established", [])
        self.office.counted = meta.get("counted", {})
        if "loss_scale" in meta:
            self.office.scale.load_state_dict(meta["loss_scale"])

    def _member_counts(self) -> dict[str, int]:
        return {"joined": self.roster.joined, "lost": self.roster.lost}

    def _restore_member_counts(self, meta: Mapping[str, Any]) -> None:
        counts = meta.get("members", {})
        self.roster.joined, self.roster.lost = int(counts.get("joined", 0)), int(counts.get("lost", 0))

    def _resume(self, snapshot: Snapshot) -> None:
        check_tokenizer(snapshot.info, self.task)
        check_compatible(snapshot, self.strategy.replica.layout)
        check_whole(snapshot, self.strategy.replica)
        sampler = snapshot.state["sampler"] or {"position": 0}  # an imported model has read nothing
        name, ranks = self.config.strategy.name, len(self.batch_sizes)
        state, left = state_for(snapshot, strategy=name, rank=None, num_ranks=ranks)
        if left:
            self._warn(f"not taken over from the checkpoint: {'; '.join(left)}")
        leases = {"position": sampler["position"], "holes": sampler.get("holes", [])}
        samples = int(sampler["position"])
        self._restore(
            state,
            {
                "step": snapshot.step,
                "samples": samples,
                "tokens": samples * self.task.tokens_per_sample,
                "epoch": 0,
                "leases": leases,
                **{key: snapshot.state.get(key) for key in ("best_val_loss", "best")},
            },
        )
        dropped = truncate_metrics(self.run_dir.metrics, after_step=snapshot.step)
        if self.saver is not None:
            self.store.set_aside_after(snapshot.step)
        extra = f"; {dropped} rows logged after it are dropped" if dropped else ""
        self.observer.emit(Notice(level="INFO", message=f"resumed at step {snapshot.step}{extra}"))

    def _snapshot_journal(self, *, wait: bool = False) -> None:
        state = self.strategy.state()
        state.shared = self.duty.shared_state()
        meta = {
            "strategy": self.config.strategy.name,
            "numbers": state.numbers,
            "step": self.step,
            "total_steps": self.planned_steps,
            "samples": self.record.samples,
            "tokens": self.record.tokens,
            "epoch": self.roster.epoch,
            "leases": self.office.leases.state_dict(),
            "recent": {str(step): list(value) for step, value in self.office.recent.items()},
            "established": list(self.office.established),
            "counted": self.office.counted,
            "loss_scale": self.office.scale.state_dict(),
            "members": self._member_counts(),
            **self.record.best.state_dict(),
        }
        try:
            self.history.flush()
        except OSError as error:  # its lines are kept in memory, and training goes on
            log.error("%s", error)
        self.journal.snapshot(meta, {} if self._coordinates else state.packed(), wait=wait)

    def _announce(self) -> None:
        started = self._started_event(
            self.strategy,
            rank=self.me.rank,
            world_size=len(self.batch_sizes),
            first_step=self.step,
            steps=self.total_steps,
            batch_size=0,
            global_batch=sum(self.batch_sizes),
        )
        self.rows = RowQuota(tensors=len(self.layout))
        self.metrics = MetricsFile(self.run_dir.metrics, warn=self._warn)
        self.observer.add(self.metrics)
        self._count_members = lambda: len(self.roster.members)
        self._add_trackers(started, self.run_dir.path)
        self.observer.emit(started)
        bound = self.transport.listen(*self.address, self.mailbox)
        log.info("listening on %s, %d workers expected", bound, len(self.batch_sizes))
        if self.channel.announce is not None:
            self.channel.announce(int(bound.rpartition(":")[2]))
        self.record.meter.start()

    # Workers

    def _on_event(self, member: Member, meta: Mapping[str, Any]) -> None:
        """Write a worker's row to the run's record: its own, and no more than it can have trained."""
        text = meta.get("event")
        if not isinstance(text, str):
            return
        if not self.rows.admits(member.rank, text, samples=self.record.samples):
            if self.rows.first_refusal(member.rank):
                log.warning("rows of %s are dropped: they are too long, or more than it can have trained", member.name)
            return
        with contextlib.suppress(ValueError, RecursionError):
            event = from_json(text)
            if not isinstance(event, StepLogged) or (event.rank, event.role) != (member.rank, "worker"):
                return
            if type(event.step) is int and 0 <= event.step <= MOST_STEPS:
                self.metrics.handle(dataclasses.replace(event, host=member.host))

    def _on_change(self, what: str, member: Member, reason: str) -> None:
        who, epoch = member.instance, self.roster.epoch
        self.history.add(history.MemberLine(event=what, rank=member.rank, instance=who, epoch=epoch, reason=reason))
        if what == "joined" and member.returning:
            self.observer.emit(Notice(level="INFO", message=f"{member.name} is back"))
        elif what == "joined":
            self.observer.emit(Notice(level="INFO", message=f"{member.name} joined"))
            theirs, ours = dict(member.link.peer.versions), dict(self.me.versions)
            unlike = [f"{k} {theirs.get(k)} (here {v})" for k, v in ours.items() if theirs.get(k) != v]
            if unlike:  # the protocol is the same, or it would not be here; only the last digits may differ
                log.info("%s runs %s", member.name, ", ".join(unlike))

    # Steps

    def _record(self, commit: Commit) -> None:
        """In the journal first: that is what makes it count."""
        read = self.office.leases.state_dict()
        line = history.CommitLine(
            step=commit.step,
            steps=commit.steps,
            epoch=self.roster.epoch,
            server=self.me.instance,
            contributors=[history.ContributionLine.model_validate(c) for c in commit.contributors],
            data=history.Data.model_validate(read),
        )
        meta = {"line": line.fields(), "members": self._member_counts(), **commit.numbers}
        meta["loss_scale"] = self.office.scale.state_dict()
        self._append(meta, commit.gradient)
        self._restore_agreement(commit.numbers)
        self.history.add(line)
        self._recorded = commit.step
        read_now = sum(int(c["samples"]) for c in commit.contributors)
        self._set_end(commit.step, data=read, batch=-(-read_now // commit.steps))
        needed = min(self._due, default=commit.step)
        self._read_by = {step: kept for step, kept in self._read_by.items() if step >= needed} | {commit.step: read}

    def _set_end(self, step: int, *, data: Mapping[str, Any], batch: int) -> None:
        """Move the last step of a run over epochs: it ends when their samples have counted, however many members took part.

        The learning rate follows the number of steps that was planned at the start: all members have the same schedule.
        """
        training = self.config.training
        if training.steps is None and step > 0:
            read = samples_read(data, with_holes=False)
            end = last_step(training, samples=len(self.train_data), batch=max(1, batch), step=step, read=read)
            self.total_steps = self.context.total_steps = end

    def _append(self, meta: dict[str, Any], gradient: Tensor | Sequence[Tensor] | None) -> None:
        """A step that cannot be recorded is not committed: training waits for room, loudly."""
        told = -math.inf
        while True:
            try:
                self.journal.append(meta, gradient)
                return
            except JournalFull as error:
                if self.channel.stop_requested():
                    raise
                if time.monotonic() - told > 30:
                    log.error("training stands still: %s", error)
                    told = time.monotonic()
                time.sleep(0.5)

    def _committed(self, report: StepReport) -> None:
        """Log, evaluate and save where it is due; serving goes on meanwhile."""
        self.step = self._recorded
        self.record.samples += report.samples
        self.record.tokens += report.tokens
        wanted = self._wants(self.step)
        first = self._round_before(self.step) == 0
        logged = wanted or first or self._is_due(self.step, self.config.logging.log_interval)
        self.record.meter.add(report, step_s=0.0)
        self.record.meter.stop(before_row=logged)
        if wanted:
            self._due[self.step] = self._row()
            if not self._coordinates:
                self._arrived(self.step)
        elif logged:
            self.observer.emit(self._row())
        if self.journal.should_snapshot:
            self._snapshot_journal()
        self.record.meter.start()

    def _wants(self, step: int) -> bool:
        return step >= self.total_steps or self._to_evaluate(step) or self._to_save(step)

    def _to_evaluate(self, step: int) -> bool:
        every = self.config.training.eval_steps
        return self.referee is not None and (step >= self.total_steps or self._is_due(step, every))

    def _to_save(self, step: int) -> bool:
        every = self.config.training.checkpoint_steps
        return every != 0 and (step >= self.total_steps or self._is_due(step, every))

    def _is_due(self, step: int, every: int | None) -> bool:
        """Return whether what happens after every so many steps is due after the round that ends with this one."""
        return bool(every) and step // int(every or 1) > self._round_before(step) // int(every or 1)

    def _round_before(self, step: int) -> int:
        """Return the last step of the round before the one that ends with `step`."""
        return (step - 1) // self._local_steps * self._local_steps

    def _arrived(self, step: int) -> None:
        """The state after this step is in the strategy: evaluate it, save it."""
        steps = sorted(s for s in self._due if s <= step)  # states that came too late are made up for by this one
        if not steps:
            return
        *older, row = [self._due.pop(s) for s in steps]
        for missed in older:
            self.observer.emit(missed)
        final, save = step >= self.total_steps, any(map(self._to_save, steps))
        if any(map(self._to_evaluate, steps)):
            self._evaluate(row, self._snapshot(step), save=save, final=final)
            return
        self.observer.emit(row)
        if save:
            self._save(self._snapshot(step), best=False, final=final)

    def _row(self) -> StepLogged:
        return self.record.row(self.step, stale_rejected=self.duty.stale_rejected)

    def _last_row(self) -> StepLogged:
        """Of the last step, taken by the server before this one."""
        report = StepReport(
            loss=torch.tensor(math.nan),
            grad_norm=None,
            learning_rate=self.strategy.replica.rate_of(self.step - 1),
            samples=0,
            tokens=0,
        )
        self.record.meter.add(report, step_s=0.0)
        return self._row()

    def _evaluate(self, row: StepLogged, snapshot: Snapshot, *, save: bool, final: bool) -> None:
        assert self.referee is not None

        def then(result: dict[str, float]) -> None:
            if not result:
                self.observer.emit(row)
                if save:
                    self._save(snapshot, best=False, final=final)
                return
            improved = self.record.evaluated(result)
            self.observer.emit(_with(row, result))
            if improved or save:
                snapshot.metrics.update(result)
                snapshot.state.update(self.record.best.state_dict())
                self._save(snapshot, best=improved, final=final)

        self.referee.submit(snapshot.step, snapshot.weights, then)

    def _snapshot(self, step: int) -> Snapshot:
        state = self.strategy.state()
        leases = self._read_by[step]  # more may have been read since
        sampler = {**leases, "seed": self.config.training.seed or 0, "num_samples": len(self.train_data)}
        extra = {f"{ALL}/{name}": tensor for name, tensor in self.duty.shared_state().items()}
        return self.record.snapshot(step, state, copy=self._kept, sampler=sampler, extra=extra)

    def _kept(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what stays as it is while training goes on: a copy, but for a coordinator's state, which is never changed."""
        if self._coordinates and self.device.type == "cpu":
            return dict(tensors)
        return self.saver.snapshot_tensors(tensors) if self.saver is not None else _clone(tensors)

    def _save(self, snapshot: Snapshot, *, best: bool, final: bool) -> None:
        if self.saver is not None and self.record.fit_to_save(snapshot.step, snapshot.weights):
            self.saver.submit(snapshot, best=best, final=final)

    # The end

    def _finish(self) -> int:
        interrupted = self.step < self.total_steps
        if not interrupted:
            check_finite(not_finite(self.strategy.state().weights), step=self.step)
        if self.record.meter.unlogged:
            self.observer.emit(self._row())
        if interrupted and self.saver is not None and self.step > 0:
            self._save(self._snapshot(self.step), best=False, final=True)
        stayed = self.roster.in_order()
        if not (interrupted and self.channel.orphaned):  # a server that is started again needs them
            goodbye = Message(kind=Kind.STOP, meta={"reason": "interrupted" if interrupted else "finished"})
            self.roster.send(stayed, goodbye)
            self.roster.wait_for_end(timeout_s=GOODBYE_S)
            self.roster.send(self.roster.paused, goodbye)
            self.roster.send(self.roster.newcomers, goodbye)  # they came too late to take part
        if self.saver is not None:
            self.saver.close()
        agree = None if interrupted else self._replicas_agree(stayed)
        summary = self._summary("interrupted" if interrupted else "finished", replicas_agree=agree)
        try:
            write_summary(self.run_dir.summary, summary)
        except OSError as error:
            log.error("%s could not be written: %s", self.run_dir.summary, error.strerror or error)
        self.journal.close()
        self.history.close()
        if not interrupted:
            self._sample(self.strategy.replica, {})
            shutil.rmtree(self.journal.folder, ignore_errors=True)
        self.observer.emit(RunFinished(summary=summary))
        self.observer.emit(Phase(rank=self.me.rank, name="finished"))
        self.transport.close()
        return INTERRUPTED if interrupted else 0

    def _summary(self, status: str, **fields: Any) -> dict[str, Any]:
        mine = self.record.report(self.step, batch_samples=1)
        final = self.strategy.state().weights

        def sum_of(name: str) -> int:
            """Over this process and the workers that stayed to the end."""
            return sum(value for report in (mine, *self.roster.reports) if isinstance(value := report.get(name), int))

        return join_ranks(
            [mine],
            status=status,
            strategy=self.config.strategy.name,
            workers=len(self.batch_sizes),
            world_size=len(self.batch_sizes) + 1,
            stale_rejected=self.duty.stale_rejected,
            bytes_sent=sum_of("bytes_sent"),
            bytes_received=sum_of("bytes_received"),
            refused=dict(self.roster.refused),
            members_lost=self.roster.lost,
            members_joined=self.roster.joined,
            wall_s=time.time() - self.started,
            **evaluation_summary(self.record.last_evaluation),
            weights_sha256=weights_sha256(final),
            checkpoint=self.checkpoint if self.saver is not None else None,
            run_dir=str(self.run_dir.path),
            **fields,
        )

    def _replicas_agree(self, members: Sequence[Member]) -> bool | None:
        """Whether those who stayed to the end have the same weights; None where replicas may differ."""
        if not self._coordinates:
            return None
        ours = replica_sha256(self.strategy)
        said = {m.name: m.report["weights_sha256"] for m in members if m.report.get("weights_sha256")}
        different = sorted(name for name, theirs in said.items() if theirs != ours)
        if different:
            log.error(
                "the replicas differ at the end: %s, and the run's weights are %s; machines of different kinds may round "
                "differently, but those of one kind must agree: please report it",
                ", ".join(f"{name} has {str(said[name])[:16]}" for name in different),
                ours[:16],
            )
        return not different


def _end_of(recovered: Recovered) -> tuple[int, Mapping[str, Any]]:
    """The last step of a journal, and what had been read by then."""
    assert recovered.meta is not None
    if not recovered.records:
        return int(recovered.meta["step"]), recovered.meta["leases"]
    line = recovered.records[-1].meta["line"]
    return int(line["step"]), line["data"]


def replica_sha256(strategy: Strategy[Options]) -> str:
    """Of the weights that all replicas share. Buffers are not among them: running means are each worker's own."""
    own = {name for name, _ in strategy.replica.model.named_buffers()}
    return weights_sha256({n: t.cpu() for n, t in strategy.state().weights.items() if n not in own})


def _with(row: StepLogged, result: dict[str, Any]) -> StepLogged:
    return dataclasses.replace(row, **evaluation_fields(result))


def _clone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
