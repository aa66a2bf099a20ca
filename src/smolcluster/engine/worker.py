"""One rank of a run on the mesh plane: from its configuration to its exit status, phase by phase."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path

import torch

from smolcluster.comm.group import Group, broadcast_tensors, gather_json
from smolcluster.comm.rendezvous import Place, choose_backend, connect
from smolcluster.compute.device import peak_memory_bytes
from smolcluster.config import public_dict
from smolcluster.data.sampler import Sampler, ShardedSampler
from smolcluster.engine.checks import batch_size_of, check_enough_samples, check_same_config
from smolcluster.engine.loop import Loop
from smolcluster.engine.reader import StreamReader
from smolcluster.engine.role import INTERRUPTED, Role
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.snapshot import Snapshot
from smolcluster.engine.summary import join_ranks, write_summary
from smolcluster.engine.tensorfile import weights_sha256
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.observe.events import Notice, Phase, RunFinished
from smolcluster.observe.jsonl import MetricsFile, truncate_metrics
from smolcluster.strategies.base import Context, Node

log = logging.getLogger(__name__)


class Worker(Role):
    """One rank. The methods are its phases, in order."""

    @property
    def lead(self) -> bool:
        return self.spec.rank == 0

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
        self._choose(lead=self.lead)
        self.backend = choose_backend(spec.backend, self.device, local_world_size=spec.local_world_size)
        hosts = self.config.cluster.workers
        nodes = [
            Node(name=hosts[r] if r < len(hosts) else spec.host, batch_size=batch_size_of(self.config, r))
            for r in range(spec.world_size)
        ]
        self.seats = self.strategy_class.seats(self.options, nodes)
        self.seat = self.seats[spec.rank]

        self._load_task()
        shards = sorted({s.shard: nodes[s.rank].batch_size for s in self.seats if s.shard is not None}.items())
        self.counts = [size * training.grad_accumulation for _, size in shards]
        check_enough_samples(len(self.train_data), self.counts)
        self._check_memory(nodes, first=spec.rank - spec.local_rank, count=spec.local_world_size)

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
            reader=StreamReader(
                ShardedSampler(
                    Sampler(len(self.train_data), seed=training.seed or 0), counts=self.counts, shard=self.seat.shard
                ),
                total_steps=total_steps,
            ),
            train_data=self.train_data,
            val_data=self.val_data,
            observer=self.observer,
            saver=self.saver,
            host=self.spec.host,
            profiler=self._make_profiler(),
            info={
                "task": self.task.name,
                "strategy": strategy.name,
                "world_size": self.spec.world_size,
                "torch": torch.__version__,
            },
        )

    def _resume(self) -> None:
        """The lead rank reads and checks the checkpoint; the others get it over the wire, so only one needs the files."""
        snapshot: Snapshot | None = None
        problem: str | None = None
        if self.lead:
            try:
                snapshot = self._read_checkpoint(Path(self.spec.resume or ""), self.loop.strategy)
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

    def _announce(self) -> None:
        started = self._started_event(
            self.loop.strategy,
            rank=self.spec.rank,
            world_size=self.spec.world_size,
            first_step=self.loop.progress.step,
            steps=self.context.total_steps,
            batch_size=batch_size_of(self.config, self.spec.rank),
            global_batch=sum(self.counts),
        )
        self.observer.add(MetricsFile(self.run_dir.metrics))
        self._add_trackers(started, self.run_dir.path)
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
            "batch_samples": self.counts[self.seat.shard or 0] if self.context.tells else 0,
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
            self._draw()
            if not loop.interrupted:
                self._sample(loop.strategy)
            self.observer.emit(RunFinished(summary=summary))
        self.observer.emit(Phase(rank=self.spec.rank, name="finished"))
        self.group.close()
        return INTERRUPTED if loop.interrupted else 0

    def _draw(self) -> None:
        drawing = self.loop.strategy.drawing()
        if drawing is not None:
            picture = self.run_dir.path / f"{drawing.name}.svg"
            picture.write_text(drawing.svg, encoding="utf-8")
            picture.with_suffix(".json").write_text(json.dumps(drawing.numbers) + "\n", encoding="utf-8")
            self.observer.emit(Notice(level="INFO", message=f"{picture}: {drawing.says}", rank=0))
