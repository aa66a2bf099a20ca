"""One rank of a run: from its configuration to its exit status, phase by phase."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch

from smolcluster.comm.group import Group, broadcast_tensors, gather_json
from smolcluster.comm.rendezvous import Place, choose_backend, connect
from smolcluster.compute.device import choose_device, peak_memory_bytes, share_cores
from smolcluster.config import public_dict
from smolcluster.config.schema import Config
from smolcluster.data.dataset import as_dataset
from smolcluster.data.sampler import Sampler, ShardedSampler
from smolcluster.engine.channel import Channel
from smolcluster.engine.checkpoint import CheckpointStore
from smolcluster.engine.checks import batch_size_of, check_disk_space, check_enough_samples, check_same_config
from smolcluster.engine.loop import Loop
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.saver import Saver
from smolcluster.engine.snapshot import Snapshot, check_compatible
from smolcluster.engine.spec import WorkerSpec
from smolcluster.engine.summary import join_ranks, write_summary
from smolcluster.engine.tensorfile import weights_sha256
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    Notice,
    Phase,
    Progress,
    RunFinished,
    RunStarted,
    SampleText,
)
from smolcluster.observe.jsonl import MetricsFile, truncate_metrics
from smolcluster.observe.logs import log_path, setup_logging
from smolcluster.observe.observer import NoticeHandler, Observer, Sink
from smolcluster.strategies.base import Context, Node
from smolcluster.strategies.registry import find_strategy, read_options
from smolcluster.tasks.find import find_task

log = logging.getLogger(__name__)

INTERRUPTED = 130


class Worker:
    """One rank. The methods are its phases, in order."""

    def __init__(self, spec: WorkerSpec, channel: Channel, sinks: list[Sink]) -> None:
        self.spec, self.channel = spec, channel
        self.config = Config.model_validate(spec.config)
        self.lead = spec.rank == 0
        self.observer = Observer(sinks)
        logging.getLogger("smolcluster").addHandler(NoticeHandler(self.observer, rank=spec.rank))
        self.started = time.time()
        if spec.run_dir:
            self._log_to(RunDir(Path(spec.run_dir)))

    def _log_to(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        spec = self.spec
        path = log_path(run_dir.path, "worker", spec.rank, spec.host)
        path.parent.mkdir(parents=True, exist_ok=True)
        setup_logging(path, level=self.config.logging.level, role="worker", rank=spec.rank, host=spec.host)

    def run(self) -> int:
        self._prepare()
        self._connect()
        self._build()
        if self.spec.resume is not None:
            self._resume()
        self._announce()
        try:
            self.loop.run()
        finally:
            if self.saver is not None:
                self.saver.close()
        return self._finish()

    # What needs no other rank: a mistake here is reported before anyone waits.

    def _prepare(self) -> None:
        spec, training = self.spec, self.config.training
        share_cores(spec.local_world_size)
        self.device = choose_device(training.device, local_rank=spec.local_rank)
        self.backend = choose_backend(spec.backend, self.device, local_world_size=spec.local_world_size)
        self.strategy_class = find_strategy(self.config.strategy.name)
        self.options, ignored = read_options(self.strategy_class, self.config.strategy)
        if ignored and self.lead:
            self._warn(f"strategy {self.strategy_class.name} does not use: {', '.join(ignored)}")
        hosts = self.config.cluster.workers
        nodes = [
            Node(name=hosts[r] if r < len(hosts) else spec.host, batch_size=batch_size_of(self.config, r))
            for r in range(spec.world_size)
        ]
        self.seats = self.strategy_class.seats(self.options, nodes)
        self.seat = self.seats[spec.rank]

        self.task = find_task(self.config, progress=self._progress)
        self.train_data = as_dataset(self.task.train_data())
        val_data = self.task.val_data()
        self.val_data = None if val_data is None else as_dataset(val_data)
        shards = sorted({s.shard: nodes[s.rank].batch_size for s in self.seats if s.shard is not None}.items())
        self.counts = [size * training.grad_accumulation for _, size in shards]
        check_enough_samples(len(self.train_data), self.counts)

    def _connect(self) -> None:
        spec = self.spec
        place = Place(
            rank=spec.rank,
            world_size=spec.world_size,
            local_rank=spec.local_rank,
            local_world_size=spec.local_world_size,
            master_addr=spec.master_addr,
            master_port=spec.master_port
            or (0 if self.lead or spec.world_size == 1 else self.channel.rendezvous_port()),
        )
        self.group: Group = connect(place, device=self.device, backend=self.backend, announce=self.channel.announce)
        everyone = gather_json(self.group, public_dict(self.config))
        check_same_config(everyone[0], everyone[spec.rank], rank=spec.rank)
        named = gather_json(self.group, spec.run_dir)[0]
        if not spec.run_dir:
            self._log_to(RunDir(Path(named)))
        self.observer.emit(Phase(rank=spec.rank, name="connected"))

    def _build(self) -> None:
        training = self.config.training
        total_steps = training.steps or math.ceil((training.epochs or 1) * len(self.train_data) / sum(self.counts))
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
        )
        strategy = self.strategy_class(self.options, self.context)
        strategy.setup(self.task)
        self.saver = self._make_saver(strategy) if self.lead and training.checkpoint_steps != 0 else None
        assert self.seat.shard is not None
        self.loop = Loop(
            strategy=strategy,
            task=self.task,
            context=self.context,
            sampler=ShardedSampler(
                Sampler(len(self.train_data), seed=training.seed or 0), counts=self.counts, shard=self.seat.shard
            ),
            train_data=self.train_data,
            val_data=self.val_data,
            observer=self.observer,
            saver=self.saver,
            host=self.spec.host,
            info={
                "task": self.task.name,
                "strategy": strategy.name,
                "world_size": self.spec.world_size,
                "torch": torch.__version__,
            },
        )

    def _make_saver(self, strategy: Any) -> Saver:
        self.run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
        state = strategy.state()
        weights_bytes = sum(t.nbytes for t in state.weights.values())
        check_disk_space(self.run_dir.path, need_bytes=3 * weights_bytes)
        self.store = CheckpointStore(self.run_dir.checkpoints, keep=self.config.training.max_checkpoints_to_keep)
        self.checkpoint: str | None = None

        def saved(event: CheckpointSaved) -> None:
            self.checkpoint = event.path
            self.observer.emit(event)

        def failed(event: CheckpointFailed) -> None:
            log.error(
                "the checkpoint of step %d could not be saved: %s", event.step, event.reason, extra={"event": event}
            )
            self.observer.emit(event)

        def skipped(step: int, by: int) -> None:
            log.warning("the disk is slower than checkpoint_steps: step %d is not saved, step %d is next", step, by)

        return Saver(self.store, on_saved=saved, on_failed=failed, on_skipped=skipped)

    def _resume(self) -> None:
        """The lead rank reads and checks the checkpoint; the others get it over the wire, so only one needs the files."""
        snapshot: Snapshot | None = None
        problem: str | None = None
        if self.lead:
            try:
                snapshot = self._read_checkpoint(Path(self.spec.resume or ""))
            except SmolclusterError as error:
                problem = str(error)
        problem = gather_json(self.group, problem)[0]
        if problem is not None:
            raise UserError(problem)
        head = {"step": snapshot.step, "state": snapshot.state} if snapshot else None
        head = gather_json(self.group, head)[0]
        if head["step"] >= self.context.total_steps:
            raise UserError(
                f"the checkpoint is at step {head['step']} and the run ends at {self.context.total_steps}: nothing is left "
                "to train; raise --steps or training.epochs"
            )
        weights = broadcast_tensors(self.group, snapshot.weights if snapshot else None)
        optimizer = broadcast_tensors(self.group, snapshot.optimizer if snapshot else None)
        found = Snapshot(
            step=head["step"], weights=weights, optimizer=optimizer, state=head["state"], metrics={}, info={}
        )
        try:
            self.loop.load(found)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"state.json of {self.spec.resume} is not what this version writes ({type(error).__name__}: {error}); "
                "resume from another checkpoint"
            ) from error
        if self.lead:
            dropped = truncate_metrics(self.run_dir.metrics, after_step=head["step"])
            if self.saver is not None:
                self.store.set_aside_after(head["step"])
            extra = f"; {dropped} rows logged after it are dropped" if dropped else ""
            self.observer.emit(Notice(level="INFO", message=f"resumed at step {head['step']}{extra}", rank=0))
        self.group.barrier()  # nobody opens the metrics file before it is cut

    def _read_checkpoint(self, source: Path) -> Snapshot:
        if (source / "manifest.json").is_file():
            snapshot = CheckpointStore(source.parent, keep=1).load(source)
        else:
            found = CheckpointStore(source, keep=1).load_latest()
            if found is None:
                raise UserError(f"--resume: there is no checkpoint in {source}")
            snapshot = found[1]
        check_compatible(snapshot, self.loop.strategy.state().weights)
        return snapshot

    def _announce(self) -> None:
        strategy, config = self.loop.strategy, self.config
        started = RunStarted(
            rank=self.spec.rank,
            role=self.seat.role,
            host=self.spec.host,
            run_dir=str(self.run_dir.path),
            task=self.task.name,
            strategy=strategy.name,
            algorithm=strategy.algorithm,
            world_size=self.spec.world_size,
            device=str(self.device),
            parameters=sum(p.numel() for p in strategy.model.parameters()),
            first_step=self.loop.progress.step,
            steps=self.context.total_steps,
            batch_size=batch_size_of(config, self.spec.rank),
            global_batch=sum(self.counts),
            learning_rate=config.training.learning_rate,
            project_name=config.logging.project_name or "smolcluster",
            config=public_dict(config),
        )
        self.observer.add(MetricsFile(self.run_dir.metrics))
        if config.logging.tensorboard:
            from smolcluster.observe.tensorboard import TensorBoardSink
            from smolcluster.observe.tracking import run_name

            self.observer.add(TensorBoardSink(self.run_dir.path / "tensorboard", run_name(started)))
        if config.logging.wandb:
            from smolcluster.observe.tracking import run_name
            from smolcluster.observe.wandb import WandbSink

            self.observer.add(
                WandbSink(started.project_name, run_name(started), run_dir=self.run_dir.path, config=started.config)
            )
        self.observer.emit(started)

    def _finish(self) -> int:
        """Join what every rank counted; the lead writes the summary."""
        loop, traffic, meter = self.loop, self.group.traffic, self.loop.meter
        weights = loop.final_weights()
        mine = {
            "role": self.seat.role,
            "step": loop.progress.step,
            "samples": loop.progress.samples,
            "tokens": loop.progress.tokens,
            "own_steps": meter.steps,
            "own_samples": meter.samples,
            "own_tokens": meter.tokens,
            "busy_s": meter.busy_s,
            "loss": meter.last_loss,
            "batch_samples": self.counts[self.seat.shard or 0],
            "bytes_sent": traffic.bytes_sent,
            "bytes_received": traffic.bytes_received,
            "staleness_sum": meter.staleness_sum,
            "staleness_max": meter.staleness_max,
            "stale_rejected": loop.strategy.stale_rejected,
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }
        ranks = gather_json(self.group, mine)
        if self.lead:
            assert weights is not None
            summary = join_ranks(
                ranks,
                status="interrupted" if loop.interrupted else "finished",
                strategy=loop.strategy.name,
                wall_s=time.time() - self.started,
                **{k: loop.last_evaluation.get(k) for k in ("val_loss", "val_accuracy", "val_ppl")},
                weights_sha256=weights_sha256(weights),
                checkpoint=self.checkpoint if self.saver is not None else None,
                run_dir=str(self.run_dir.path),
            )
            try:
                write_summary(self.run_dir.summary, summary)
            except OSError as error:
                log.error("%s could not be written: %s", self.run_dir.summary, error.strerror or error)
            if not loop.interrupted:
                self._sample()
            self.observer.emit(RunFinished(summary=summary))
        self.observer.emit(Phase(rank=self.spec.rank, name="finished"))
        self.group.close()
        return INTERRUPTED if loop.interrupted else 0

    def _sample(self) -> None:
        model = self.loop.strategy.model
        model.eval()
        try:
            with torch.no_grad():
                sample = self.task.sample(model)
        except Exception as error:
            log.warning("the task could not make a sample: %s: %s", type(error).__name__, error, exc_info=error)
            return
        if sample is not None:
            self.observer.emit(SampleText(prompt=sample[0], text=sample[1]))

    def _warn(self, message: str) -> None:
        log.warning("%s", message)

    def _progress(self, name: str, done: int, total: int | None) -> None:
        self.observer.emit(Progress(name=name, done=done, total=total))
