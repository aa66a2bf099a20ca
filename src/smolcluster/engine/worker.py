"""One rank of a run on the mesh plane: from its configuration to its exit status, phase by phase."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from smolcluster.comm.group import Group, broadcast_tensors, gather_json
from smolcluster.comm.kv_store import KeyValueStore
from smolcluster.comm.link_speed import measure_link
from smolcluster.comm.mesh.backends import check_backend
from smolcluster.comm.mesh.liveness import LivenessMonitor
from smolcluster.comm.mesh.rendezvous import RankPlace, connect
from smolcluster.compute.buffers import not_finite
from smolcluster.config import public_dict
from smolcluster.config.options import Options
from smolcluster.data.sampler import Sampler, ShardedSampler
from smolcluster.engine.checkpoint.async_saver import Saver, Store
from smolcluster.engine.checkpoint.lazy_tensors import StoredTensors
from smolcluster.engine.checkpoint.safetensors_writer import weights_sha256
from smolcluster.engine.checkpoint.sharded_save import LeadStore, PartStore, is_shared
from smolcluster.engine.checkpoint.snapshot import (
    Snapshot,
    manifest_sha256,
    open_checkpoint,
    read_manifest,
)
from smolcluster.engine.checks import (
    OWN_TO_A_HOST,
    batch_size_of,
    check_enough_samples,
    check_finite,
    check_same_config,
    check_same_task,
    identify_task,
)
from smolcluster.engine.identity import must_agree
from smolcluster.engine.link_preset import LinkPick, on_one_machine, pick_preset, recorded_pick
from smolcluster.engine.loop import Loop
from smolcluster.engine.reader import StreamReader
from smolcluster.engine.record import RunRecord
from smolcluster.engine.role import INTERRUPTED, Role
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.run_length import last_step, more_of, samples_read
from smolcluster.engine.summary import evaluation_summary, join_ranks, last_known
from smolcluster.engine.trial import needs_trial
from smolcluster.errors import DamagedCheckpoint, UserError
from smolcluster.observe.events import Failed, Phase, RunFinished
from smolcluster.observe.jsonl import MetricsFile, read_metrics, truncate_metrics
from smolcluster.parallel.placement import Node
from smolcluster.parallel.timeline import Drawing
from smolcluster.strategies.base import Context, Strategy

log = logging.getLogger(__name__)


class Worker(Role):
    """One rank. The methods are its phases, in order."""

    saver: Saver | None = None
    kv_store: KeyValueStore | None = None
    watch: LivenessMonitor | None = None
    found: Snapshot | None = None  # the checkpoint to resume from, where this rank has read it
    drawing: Drawing | None = None  # of the pipeline schedule

    @property
    def lead(self) -> bool:
        return self.spec.rank == 0

    def run(self) -> int:
        self._prepare()
        self._connect()
        if self.resuming:
            self._find()
        self._pick_preset()
        self._build()
        if self.resuming:
            self._resume()
        if not self.spec.again:
            self._try_task_on_lead()
        self._announce()
        try:
            self.loop.run()
        except BaseException:
            self._finish_saves()
            raise
        if self.saver is not None:
            self.saver.close()
        return self._finish()

    # Before any other rank is needed, so that errors are reported early.

    def _prepare(self) -> None:
        spec, training = self.spec, self.config.training
        self._choose(lead=self.lead)
        check_backend(spec.backend)
        hosts = self.config.cluster.workers
        nodes = [
            Node(
                name=hosts[r] if r < len(hosts) else spec.host,
                batch_size=batch_size_of(self.config, r),
                # Without a cluster file, assume that all machines have the same number of ranks.
                machine=hosts[r] if r < len(hosts) else f"machine {r // spec.local_world_size}",
            )
            for r in range(spec.world_size)
        ]
        self.seats = self.strategy_class.plan(self.options, nodes, None).checked().seats
        self.seat = self.seats[spec.rank]

        self._load_task()
        shards = sorted({s.shard: nodes[s.rank].batch_size for s in self.seats if s.shard is not None}.items())
        self.counts = [size * training.grad_accumulation for _, size in shards]
        check_enough_samples(len(self.train_data), self.counts)
        self._check_memory(nodes, first=spec.first_here, count=spec.local_world_size)

    def _connect(self) -> None:
        spec = self.spec
        place = RankPlace(
            rank=spec.rank,
            world_size=spec.world_size,
            local_rank=spec.local_rank,
            local_world_size=spec.local_world_size,
            master_addr=spec.master_addr,
            master_port=spec.master_port
            or (0 if self.lead or spec.world_size == 1 else self.channel.rendezvous_port()),
            join_timeout_s=self.config.cluster.join_timeout,
        )
        self.group: Group = connect(
            place,
            device=self.device,
            backend=spec.backend,
            announce=self.channel.announce,
            versions=must_agree(),
            stop_requested=(lambda: False) if spec.watched else self.channel.stop_requested,  # a launcher ends its own
        )
        if not spec.watched and spec.world_size > 1:
            self._start_liveness()
        task = identify_task(self.config.task, name=type(self.task).__name__)
        everyone = gather_json(self.group, {"config": public_dict(self.config), "task": task})
        for rank, theirs in enumerate(everyone):  # every rank compares all, so all raise the same error
            own = OWN_TO_A_HOST | {"task"}
            check_same_config(everyone[0]["config"], theirs["config"], rank=rank, own=own)
            check_same_task(everyone[0]["task"], theirs["task"], rank=rank)
        # Use the lead rank's: the others may be on machines without the run directory.
        named, self.resuming = gather_json(self.group, [spec.run_dir, spec.resume is not None])[0]
        if not spec.run_dir:
            self._log_to(RunDir(Path(named)))
        self.observer.emit(Phase(rank=spec.rank, name="connected"))

    # Watching the other ranks, without a launcher

    def _start_liveness(self) -> None:
        try:
            self.watch = LivenessMonitor(self.group, self.spec.master_addr, name=self.spec.host, on_lost=self._give_up)
        except OSError as error:
            self._warn(
                f"failure detection between ranks is off ({error}): a dead rank is only noticed at the timeout of the backend"
            )

    def _give_up(self, message: str) -> None:
        """Report a lost rank that this one waits for, and exit. Runs on the watch's thread."""
        self.observer.emit(Failed(rank=self.spec.rank, kind="peer", message=message))
        logging.getLogger("worker").error("lost another rank: %s", message)
        self._finish_saves()
        self.observer.close()
        self.cut_off()

    def _finish_saves(self) -> None:
        """Stop waiting for the checkpoint part of a lost rank."""
        if self.kv_store is not None:
            self.kv_store.close()
        if self.saver is not None:
            self.saver.close()

    def notify_peers(self, message: str) -> None:
        if self.watch is not None:
            self._claim_exit(self.watch)
            self.watch.leave(message.splitlines()[0])

    def explain_loss(self, reason: str) -> str:
        if self.watch is None:
            return reason
        self._claim_exit(self.watch)
        return self.watch.explain(reason)

    @staticmethod
    def _claim_exit(watch: LivenessMonitor) -> None:
        """Wait for the watch, which is ending this process."""
        if not watch.claim():
            threading.Event().wait()

    def _find(self) -> None:
        """Read and check the checkpoint on the lead rank, before anything is built: the steps that are left follow from it."""
        head: dict[str, Any] | None = None
        with self._raised_on_all_ranks():
            if self.lead:
                try:
                    path, self.found = self._find_checkpoint(Path(self.spec.resume or ""), lazily=True)
                except DamagedCheckpoint as error:
                    raise UserError(
                        f"{error}; this checkpoint is damaged; pass the run directory to use the newest good one"
                    ) from error
                head = {
                    "step": self.found.step,
                    "state": self.found.state,
                    "metrics": self.found.metrics,
                    "info": self.found.info,
                    "path": str(path),
                    "sha256": manifest_sha256(path),
                }
        self.head: dict[str, Any] = gather_json(self.group, head)[0]

    def _pick_preset(self) -> None:
        """Pick the preset by the measured link, where the options leave it open; keep that of a run that is resumed."""
        if not self.options.picks_preset:
            return
        found = None
        if self.lead and self.resuming:
            found = recorded_pick(self.run_dir, self.spec.resume)
        found = gather_json(self.group, None if found is None else asdict(found))[0]
        if found is not None:
            pick = LinkPick(**found)
        elif all(gather_json(self.group, on_one_machine(self.spec))):
            pick = pick_preset(None)
        else:
            pick = pick_preset(measure_link(self.group))
        self._use_preset(pick, lead=self.lead)

    def _last_step(self) -> int:
        training, samples, batch = self.config.training, len(self.train_data), sum(self.counts)
        if not self.resuming:
            return last_step(training, samples=samples, batch=batch)
        with self._invalid_state_as_user_error():
            read = samples_read(self.head["state"]["sampler"], with_holes=True)
        return last_step(training, samples=samples, batch=batch, step=self.head["step"], read=read)

    def _build(self) -> None:
        training, total_steps = self.config.training, self._last_step()
        self.context = Context(
            config=self.config,
            seat=self.seat,
            seats=self.seats,
            group=self.group,
            device=self.device,
            total_steps=total_steps,
            samples_per_step=self.counts,
            stop_requested=self.channel.stop_requested,
            warn=self._warn,
            draw=self._set_drawing,
            example=lambda count: self.train_data.batch(np.arange(count)),
            notify=self._notify,
        )
        strategy = self.strategy_class(self.options, self.context)
        strategy.setup(self.task)
        self.kv_store = self._find_kv_store(strategy)
        saves_parts = self.kv_store is not None
        self.saver = None
        if training.checkpoint_steps != 0 and (self.lead or saves_parts):
            self.saver = self._make_saver(strategy, saves_parts=saves_parts, again=self.spec.again)
        assert self.seat.shard is not None
        stream = Sampler(len(self.train_data), seed=training.seed or 0)
        sampler = ShardedSampler(stream, counts=self.counts, shard=self.seat.shard)
        self.loop = Loop(
            strategy=strategy,
            task=self.task,
            context=self.context,
            reader=StreamReader(sampler, total_steps=total_steps),
            sampler=sampler,
            train_data=self.train_data,
            val_data=self.val_data,
            observer=self.observer,
            record=RunRecord(
                self.context,
                self.task,
                host=self.spec.host,
                world_size=self.spec.world_size,
                saver=self.saver,
                traffic=lambda: self.context.traffic,
            ),
            saves_parts=saves_parts,
            profiler=self._make_profiler(last_step=total_steps),
        )

    def _find_kv_store(self, strategy: Strategy[Options]) -> KeyValueStore | None:
        """Return the store for sharded saves, if the strategy shards the model and every rank sees the run directory."""
        training, group = self.config.training, self.group
        if training.checkpoint_steps == 0 or not training.sharded_checkpoints or group.size == 1:
            return None
        name = gather_json(group, secrets.token_hex(8))[0]
        kv_store = group.kv_store(name)
        if kv_store is None or strategy.state("rank").full_shapes is None:
            return None
        if not is_shared(group, self.run_dir.checkpoints):
            if self.lead:
                self._warn(
                    "checkpoints are not sharded, but written by rank 0: not every rank can read its run directory"
                )
            return None
        return kv_store

    def _make_store(self) -> Store:
        store = super()._make_store()
        if self.kv_store is None:
            return store
        if self.lead:
            return LeadStore(self.store, self.kv_store, size=self.spec.world_size)
        return PartStore(self.store.folder, self.kv_store, rank=self.spec.rank)

    def _resume(self) -> None:
        """Load the checkpoint: from its files if every rank sees them, else broadcast by the lead rank."""
        head, found = self.head, self.found
        with self._raised_on_all_ranks():
            if found is not None:
                self._check_checkpoint(found, self.loop.strategy.replica)
        if head["step"] >= self.context.total_steps and not self.spec.again:
            raise UserError(
                f"the checkpoint is at step {head['step']} and the run ends at {self.context.total_steps}: nothing is left "
                f"to train; {more_of(self.config.training)}"
            )
        path = Path(head["path"])
        if all(gather_json(self.group, manifest_sha256(path) == head["sha256"])):
            found = found or open_checkpoint(path, read_manifest(path), lazily=True)
        else:
            found = Snapshot(
                step=head["step"],
                weights=broadcast_tensors(self.group, found.weights if found else None),
                optimizer=broadcast_tensors(self.group, found.optimizer if found else None),
                state=head["state"],
                metrics=head["metrics"],
                info=head["info"],
                extra=broadcast_tensors(self.group, found.extra if found else None),
            )
        with self._invalid_state_as_user_error():
            self.loop.load(found)
        # Keep the evaluation of that step, in case this process trains no step itself.
        if self.val_data is not None:
            self.loop.record.last_evaluation = dict(found.metrics)
        if self.saver is not None and path.parent.resolve() == self.run_dir.checkpoints.resolve():
            self.checkpoint = str(path)
        if self.lead:
            self._go_back_to(head["step"], head["info"], saves=self.saver is not None)
        for tensors in (found.weights, found.optimizer, found.extra):
            if isinstance(tensors, StoredTensors):
                tensors.close()
        self.found = None
        self.group.barrier()  # no rank opens the metrics file before it is truncated
        if not self.lead:  # another machine has another file; this one is truncated already
            truncate_metrics(self.run_dir.metrics, after_step=head["step"])
        self.group.barrier()

    @contextlib.contextmanager
    def _raised_on_all_ranks(self) -> Iterator[None]:
        """Raise a UserError of the lead rank on every rank. All ranks must enter and leave this together."""
        problem: str | None = None
        try:
            yield
        except UserError as error:
            problem = str(error)
        problem = gather_json(self.group, problem)[0]
        if problem is not None:
            raise UserError(problem)

    @contextlib.contextmanager
    def _invalid_state_as_user_error(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"state.json of {self.spec.resume} is not what this version writes ({type(error).__name__}: {error}); "
                "resume from another checkpoint"
            ) from error

    def _try_task_on_lead(self) -> None:
        if not needs_trial(self.task):
            return
        with self._raised_on_all_ranks():
            if self.lead:
                self._try_task(self.loop.strategy)

    def _announce(self) -> None:
        started = self._started_event(
            self.loop.strategy,
            rank=self.spec.rank,
            world_size=self.spec.world_size,
            first_step=self.loop.step,
            steps=self.context.total_steps,
            batch_size=batch_size_of(self.config, self.spec.rank),
            global_batch=sum(self.counts),
        )
        self.observer.add(MetricsFile(self.run_dir.metrics, warn=self._warn))
        self._add_trackers(started, self.run_dir.path)
        self.observer.emit(started)

    def _finish(self) -> int:
        """Join the reports of all ranks; the lead writes the summary."""
        loop = self.loop
        weights = loop.final_weights()
        if not loop.interrupted:
            broken = not_finite(weights) if weights is not None else None
            check_finite(gather_json(self.group, broken)[0], step=loop.step)
        batch_samples = self.counts[self.seat.shard or 0] if self.context.reports_samples else 0
        mine = loop.record.report(loop.step, batch_samples=batch_samples, skipped=loop.strategy.replica.skipped)
        if self.watch is not None:
            self.watch.done()
        ranks = gather_json(self.group, mine)
        if self.lead:
            assert weights is not None
            nothing_trained = not any(rank["own_steps"] for rank in ranks)
            summary = join_ranks(
                ranks,
                status="interrupted" if loop.interrupted else "finished",
                strategy=self.config.strategy.name,
                wall_s=time.time() - self.started,
                **evaluation_summary(loop.record.last_evaluation),
                weights_sha256=weights_sha256(weights),
                checkpoint=self.checkpoint if self.saver is not None else None,
                run_dir=str(self.run_dir.path),
                **(last_known(read_metrics(self.run_dir.metrics)) if nothing_trained else {}),
            )
            self._write_summary(summary)
            self._draw()
            if not loop.interrupted:
                self._sample(loop.strategy.replica, weights)
            self.observer.emit(RunFinished(summary=summary))
        self.observer.emit(Phase(rank=self.spec.rank, name="finished"))
        self.group.close()
        if self.watch is not None:
            self.watch.leave()
        return INTERRUPTED if loop.interrupted else 0

    def _set_drawing(self, drawing: Drawing) -> None:
        self.drawing = drawing

    def _draw(self) -> None:
        drawing = self.drawing
        if drawing is None and getattr(self.options, "draw_schedule", False) and not self.loop.interrupted:
            self._warn("no schedule was drawn: the run ended before a step could be, or has one stage only")
        if drawing is None:
            return
        picture = self.run_dir.path / f"{drawing.name}.svg"
        try:
            picture.write_text(drawing.svg, encoding="utf-8")
            picture.with_suffix(".json").write_text(json.dumps(drawing.numbers) + "\n", encoding="utf-8")
        except OSError as error:  # the run has finished all the same
            self._warn(f"{picture} could not be drawn: {error.strerror or error}")
            return
        self._notify(f"{picture}: {drawing.caption}")
