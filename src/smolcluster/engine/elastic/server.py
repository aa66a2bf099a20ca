"""The server of a run on the elastic plane: it admits workers, serves its strategy and keeps the run's record.

It also evaluates and saves. Every step is in the journal before its commit is announced, so a server that is killed resumes at
the last committed step when it is restarted in the same run directory.
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
from typing import Any

from torch import Tensor

from smolcluster.comm.elastic.membership.mailbox import Mailbox
from smolcluster.comm.elastic.membership.roster import Member, Roster
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.elastic.transport.security import check_bind, load_keyring
from smolcluster.comm.elastic.transport.tcp import LinkLimits, TcpTransport
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.compute.buffers import not_finite
from smolcluster.config import public_dict
from smolcluster.data.leases import Leases, Range, indices
from smolcluster.data.sampler import Sampler
from smolcluster.engine.checkpoint.snapshot import Snapshot, state_for
from smolcluster.engine.checks import batch_size_of, check_enough_samples, check_finite
from smolcluster.engine.elastic import history
from smolcluster.engine.elastic.admission import Admission, RowQuota, layout_of
from smolcluster.engine.elastic.adopted_config import MAX_STEPS
from smolcluster.engine.elastic.coordination.coordinator import Coordinator
from smolcluster.engine.elastic.evaluator import Evaluator
from smolcluster.engine.elastic.member.rounds import connect_s
from smolcluster.engine.elastic.parameter_server.asynchronous import AsynchronousServer
from smolcluster.engine.elastic.parameter_server.synchronous import SynchronousServer
from smolcluster.engine.elastic.server_side import ServerSide
from smolcluster.engine.elastic.server_start import bound_journal, choose_start, count_steps
from smolcluster.engine.elastic.server_state import ServerState
from smolcluster.engine.elastic.server_summary import replicas_agree, server_summary
from smolcluster.engine.elastic.step_outputs import StepOutputs
from smolcluster.engine.elastic.wal.journal import Journal, JournalFull
from smolcluster.engine.elastic.wal.recovery import Recovered
from smolcluster.engine.identity import new_peer, run_id_in
from smolcluster.engine.link_preset import pick_by_workers, recorded_pick
from smolcluster.engine.record import RunRecord
from smolcluster.engine.role import INTERRUPTED, Role
from smolcluster.engine.run_length import last_step, samples_read
from smolcluster.engine.trial import unchanged_random_states
from smolcluster.observe.events import Notice, Phase, RunFinished, StepLogged, from_json
from smolcluster.observe.jsonl import MetricsFile
from smolcluster.parallel.placement import Node
from smolcluster.strategies.base import Commit, Context, ServerContext, State, StepReport
from smolcluster.strategies.base.replicated import Exchanging, Pushing
from smolcluster.tasks.base import count_of

log = logging.getLogger(__name__)

EPOCHS = 1 << 16  # reserved for one server: the next starts at a multiple, beyond epochs that were never recorded
FINAL_REPORT_S = 5.0  # to wait for the last reports of the workers


class Server(Role):
    """The methods are its phases, in order."""

    def run(self) -> int:
        self._prepare()
        self._begin()
        self._announce()
        if self.step >= self.total_steps:  # a restart: the server before this one died after its last step
            self.outputs.finished_before(self.step)
        try:
            self.server_side.serve()
        finally:
            if self.evaluator is not None:
                if self.step < self.total_steps:  # interrupted: do not wait for evaluations
                    self.evaluator.cancel()
                self.evaluator.close()
        if self.evaluator is not None:
            self.evaluator.check()
        return self._finish()

    # Before any worker joins

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
        self.run_id = run_id_in(self.run_dir.run_id)
        self.me = new_peer(role="server", rank=workers, host=spec.host, run=self.run_id)
        self.transport = TcpTransport(
            self.me,
            keyring=keyring,
            buffer_size=cluster.buffer_size.get(spec.host),
            limits=LinkLimits(silence_s=cluster.silence_timeout, stall_s=cluster.stall_timeout),
        )
        self.address = (host, int(port))

    def _begin(self) -> None:
        """Find where the run starts, build for the steps that are left, and open the journal."""
        # A new journal is created last, so that a mistake found before leaves an old one in place.
        journal = Journal(self.run_dir.journal) if self.run_dir.journal.is_dir() else None
        recovered, snapshot = choose_start(
            journal.recover() if journal is not None else None,
            resume=self.spec.resume,
            load_checkpoint=lambda path: self._find_checkpoint(path)[1],
            checkpoints=self.run_dir.checkpoints,
            coordinates=self._coordinates,
        )
        self.total_steps = self.planned_steps = count_steps(
            recovered,
            snapshot,
            resume=self.spec.resume,
            training=self.config.training,
            num_samples=len(self.train_data),
            batch=sum(self.batch_sizes),
        )
        self._build()
        again = recovered is not None or snapshot is not None
        if self.options.picks_preset:
            self._pick_preset(again=again)
        if not again:
            self._try_task(self.strategy)
        if journal is None:
            journal = Journal(self.run_dir.journal)
            journal.recover()
        journal.bound_disk(self._journal_bytes)
        self.journal = journal
        self._recover(recovered, snapshot)

    def _build(self) -> None:
        self.step = 0
        self.mailbox = Mailbox()
        self.roster = Roster(
            self.mailbox,
            plan={"config": public_dict(self.config), "run": self.run_id, "total_steps": self.planned_steps},
            admit=lambda link, meta: self.admission.admit(link, meta),
            on_event=self._on_event,
            on_change=self._on_change,
        )
        self.server_context = ServerContext(
            roster=self.roster,
            leases=Leases(),
            expected=len(self.batch_sizes),
            record=self._record,
            committed=self._committed,
            wants=lambda step: self.outputs.wants(step),
            arrived=lambda step: self.outputs.state_arrived(step),
            count=self._count_targets,
        )
        nodes = [Node(name=self.spec.host, batch_size=size, stays=False) for size in self.batch_sizes]
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
            server_context=self.server_context,
        )
        self.strategy = self.strategy_class(self.options, self.context)
        self.strategy.setup(self.task)
        self.server_side = self._make_server_side()
        self.layout = layout_of(self.strategy.state().weights)
        self.admission = Admission(
            self.layout, len(self.train_data), self.config.cluster.workers, exchanging=self._coordinates
        )
        self._build_outputs()

    def _build_outputs(self) -> None:
        """Make what writes: journal bounds, checkpoints, the evaluator and the run's record."""
        again = self.run_dir.journal.is_dir()
        self._journal_bytes = bound_journal(
            self.run_dir,
            self.config.training,
            weights_bytes=sum(t.nbytes for t in self.strategy.replica.layout.values()),
            coordinates=self._coordinates,
            again=again,
            warn=self._warn,
        )
        saves = self.config.training.checkpoint_steps != 0
        self.saver = self._make_saver(self.strategy, again=again) if saves else None
        model = self.strategy.replica.model
        self.evaluator = (
            None if self.val_data is None else Evaluator(model, self.task, self.val_data, device=self.device)
        )
        self.record = RunRecord(
            self.context,
            self.task,
            host=self.spec.host,
            world_size=len(self.batch_sizes),
            saver=self.saver,
            traffic=lambda: self.transport.traffic,
        )
        self.state = ServerState(self.strategy, self.server_side, self.record)
        self.outputs = StepOutputs(
            strategy=self.strategy,
            server_side=self.server_side,
            record=self.record,
            saver=self.saver,
            evaluator=self.evaluator,
            emit=self.observer.emit,
            num_samples=len(self.train_data),
            coordinates=self._coordinates,
            local_steps=self._local_steps,
        )

    def _pick_preset(self, *, again: bool) -> None:
        """Pick the preset by the links of the workers, which get it with the plan; a run that goes on keeps its own."""
        found = recorded_pick(self.run_dir, self.spec.resume) if again else None
        host, expected = self.address[0], len(self.batch_sizes)
        pick_by_workers(self.roster, found, host=host, expected=expected, use=lambda p: self._use_preset(p, lead=True))

    @property
    def _coordinates(self) -> bool:
        """Whether this process coordinates workers that exchange among themselves and hold the weights."""
        return not issubclass(self.strategy_class, Pushing)

    def _make_server_side(self) -> ServerSide:
        """Make the parameter server of the strategy, or the coordinator of workers that exchange among themselves."""
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
            equal_time=self.strategy.equal_time,
            replicated=self.strategy.results_are_replicated,
            tokens_per_sample=tokens,
            step_timeout_s=self.strategy.round_timeout,
            quorum=self.strategy.quorum,
            connect_s=connect_s(self.context),
        )

    @property
    def _local_steps(self) -> int:
        """Steps in a round."""
        return self.strategy.local_steps if isinstance(self.strategy, Exchanging) else 1

    def _count_targets(self, ranges: Sequence[Range]) -> float | None:
        """Return how many targets leased samples have in this process's data; None: the task weighs all samples alike."""
        read = indices(Sampler(len(self.train_data), seed=self.config.training.seed or 0), ranges)
        num_parts = self.config.training.grad_accumulation * self._local_steps
        size = max(1, len(read) // num_parts)  # roughly the micro-batches of the workers
        parts = [read[i : i + size] for i in range(0, len(read), size)]
        with unchanged_random_states(self.device):
            counts = [count_of(self.task, self.train_data.batch(part)) for part in parts]
        return None if None in counts else sum(filter(None, counts))

    # Restoring: from its own journal, a checkpoint, or neither

    def _recover(self, recovered: Recovered | None, snapshot: Snapshot | None) -> None:
        self.history = history.History(self.run_dir.path / "history.jsonl")
        if recovered is not None and recovered.meta is not None:
            state = State.unpacked(recovered.state, recovered.meta["numbers"]) if recovered.state else None
            self.step = self.state.restore(state, recovered.meta)
            # With --resume the workers are new too: nobody holds weights that the server lacks.
            self.server_context.fresh = self.spec.resume is not None
            for record in recovered.records:
                self.step = self.state.replay(record)
            lines = [record.meta["line"] for record in recovered.records]
            self.history.reconcile(lines, next_step=self.step + 1)
            self.observer.emit(Notice(level="WARNING", message=f"the server is back, at step {self.step}"))
        elif snapshot is not None:
            self._resume(snapshot)
            self.history.reconcile([], next_step=self.step + 1)
        last = max(self.roster.epoch, self.history.epoch)
        self.roster.epoch = last + EPOCHS - last % EPOCHS if last else 1
        data = history.LeaseState.model_validate(self.server_context.leases.state_dict())
        begun = history.Begin(next_step=self.step + 1, epoch=self.roster.epoch, server=self.me.instance, data=data)
        self.history.add(begun)
        self.server_context.first_step = self.step
        self._set_end(self.step, data=self.server_context.leases.state_dict(), batch=sum(self.batch_sizes))
        self.outputs.note_leases(self.step, self.server_context.leases.state_dict())
        self._snapshot_journal(wait=True)

    def _resume(self, snapshot: Snapshot) -> None:
        self._check_checkpoint(snapshot, self.strategy.replica)
        sampler = snapshot.state["sampler"] or {"position": 0}  # an imported model has read nothing
        name, ranks = self.config.strategy.name, len(self.batch_sizes)
        state, left = state_for(snapshot, strategy=name, rank=None, num_ranks=ranks)
        if left:
            self._warn(f"not restored from the checkpoint: {'; '.join(left)}")
        leases = {"position": sampler["position"], "holes": sampler.get("holes", [])}
        samples = int(sampler["position"])
        self.step = self.state.restore(
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
        self._go_back_to(snapshot.step, snapshot.info, saves=self.saver is not None)

    def _snapshot_journal(self, *, wait: bool = False) -> None:
        state = self.strategy.state()
        state.shared = self.server_side.shared_state()
        meta = self.state.snapshot_meta(self.step, state.numbers, total_steps=self.planned_steps)
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
        """Write a worker's row to metrics.jsonl, if it is the worker's own and within its quota."""
        text = meta.get("event")
        if not isinstance(text, str):
            return
        if not self.rows.admits(member.rank, text, samples=self.record.samples):
            if self.rows.first_refusal(member.rank):
                log.warning(
                    "dropping metric rows of %s: too long, or more rows than samples that it trained on", member.name
                )
            return
        with contextlib.suppress(ValueError, RecursionError):
            event = from_json(text)
            if not isinstance(event, StepLogged) or (event.rank, event.role) != (member.rank, "worker"):
                return
            if type(event.step) is int and 0 <= event.step <= MAX_STEPS:
                self.metrics.handle(dataclasses.replace(event, host=member.host))

    def _on_change(self, what: str, member: Member, reason: str) -> None:
        who, epoch = member.instance, self.roster.epoch
        self.history.add(history.MemberLine(event=what, rank=member.rank, instance=who, epoch=epoch, reason=reason))
        if what == "joined" and member.returning:
            self._notify(f"{member.name} is back")
        elif what == "joined":
            self._notify(f"{member.name} joined")
            theirs, ours = dict(member.link.peer.versions), dict(self.me.versions)
            unlike = [f"{k} {theirs.get(k)} (here {v})" for k, v in ours.items() if theirs.get(k) != v]
            if unlike:  # the handshake has checked that they are compatible
                log.info("%s runs %s", member.name, ", ".join(unlike))

    # Steps

    def _record(self, commit: Commit) -> None:
        """Commit a step: it counts once it is in the journal."""
        read = self.server_context.leases.state_dict()
        line = history.CommitLine(
            step=commit.step,
            steps=commit.steps,
            epoch=self.roster.epoch,
            server=self.me.instance,
            contributors=[history.ContributionLine.model_validate(c) for c in commit.contributors],
            data=history.LeaseState.model_validate(read),
        )
        self._append(self.state.record_meta(commit, line.fields()), commit.gradient)
        self.state.set_agreement(commit.numbers)
        self.history.add(line)
        self._recorded = commit.step
        read_now = sum(int(c["samples"]) for c in commit.contributors)
        self._set_end(commit.step, data=read, batch=-(-read_now // commit.steps))
        self.outputs.note_leases(commit.step, read)

    def _set_end(self, step: int, *, data: Mapping[str, Any], batch: int) -> None:
        """Recompute the last step of a run over epochs from the samples read so far: members may have come or gone.

        The learning rate schedule keeps the number of steps planned at the start, which all members have.
        """
        training = self.config.training
        if training.steps is None and step > 0:
            read = samples_read(data, with_holes=False)
            end = last_step(training, samples=len(self.train_data), batch=max(1, batch), step=step, read=read)
            self.total_steps = self.context.total_steps = end

    def _append(self, meta: dict[str, Any], gradient: Tensor | Sequence[Tensor] | None) -> None:
        """Append to the journal; while the disk is full, log an error and wait: a step that is not recorded must not count."""
        logged = -math.inf
        while True:
            try:
                self.journal.append(meta, gradient)
                return
            except JournalFull as error:
                if self.channel.stop_requested():
                    raise
                if time.monotonic() - logged > 30:
                    log.error("training is blocked: %s", error)
                    logged = time.monotonic()
                time.sleep(0.5)

    def _committed(self, report: StepReport) -> None:
        self.step = self._recorded
        self.record.samples += report.samples
        self.record.tokens += report.tokens
        self.outputs.committed(self.step, report)
        if self.journal.should_snapshot:
            self._snapshot_journal()
        self.record.meter.start()

    # The end

    def _finish(self) -> int:
        interrupted = self.step < self.total_steps
        if not interrupted:
            check_finite(not_finite(self.strategy.state().weights), step=self.step)
        if self.record.meter.unlogged:
            self.observer.emit(self.outputs.row(self.step))
        if interrupted:
            self.outputs.save_interrupted(self.step)
        stayed = self.roster.in_order()
        if not (interrupted and self.channel.orphaned):  # else keep them for the server that restarts
            stop = Message(kind=Kind.STOP, meta={"reason": "interrupted" if interrupted else "finished"})
            self.roster.send(stayed, stop)
            self.roster.wait_for_end(timeout_s=FINAL_REPORT_S)
            self.roster.send(self.roster.paused, stop)
            self.roster.send(self.roster.newcomers, stop)  # they joined too late to take part
        if self.saver is not None:
            self.saver.close()
        agree = replicas_agree(self.strategy, stayed) if self._coordinates and not interrupted else None
        summary = self._summary("interrupted" if interrupted else "finished", replicas_agree=agree)
        self._write_summary(summary)
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
        return server_summary(
            self.strategy,
            self.roster,
            report=self.record.report(self.step, batch_samples=1),
            evaluation=self.record.last_evaluation,
            workers=len(self.batch_sizes),
            status=status,
            stale_rejected=self.server_side.stale_rejected,
            wall_s=time.time() - self.started,
            checkpoint=self.checkpoint if self.saver is not None else None,
            run_dir=str(self.run_dir.path),
            **fields,
        )
