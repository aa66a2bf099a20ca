"""The base of every process of a run: its log, observer, task and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smolcluster.compute.device import choose_device, share_cores
from smolcluster.compute.memory import free_bytes, memory_bytes
from smolcluster.compute.replica import Replica
from smolcluster.config import public_dict
from smolcluster.config.options import Options
from smolcluster.config.schema import Config
from smolcluster.config.strategies import record_of
from smolcluster.data.dataset import as_dataset
from smolcluster.engine.channel import ControlChannel
from smolcluster.engine.checkpoint.async_saver import Saver, Store
from smolcluster.engine.checkpoint.snapshot import Snapshot, check_compatible, check_complete
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.engine.checkpoint.tokenizer_files import check_tokenizer
from smolcluster.engine.checks import Room, check_balance, check_disk_space, check_memory, describe_resume
from smolcluster.engine.link_preset import LinkPick, record_pick
from smolcluster.engine.profiler import Profiler, steps_of
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.spec import WorkerSpec
from smolcluster.engine.summary import write_summary
from smolcluster.engine.trial import needs_trial, try_task
from smolcluster.errors import UserError
from smolcluster.observe.events import CheckpointFailed, CheckpointSaved, Notice, Progress, RunStarted, SampleText
from smolcluster.observe.jsonl import truncate_metrics
from smolcluster.observe.logs import log_path, setup_logging
from smolcluster.observe.observer import NoticeHandler, Observer, Sink
from smolcluster.parallel.placement import Node, Shape
from smolcluster.strategies.base import Strategy
from smolcluster.strategies.registry import find_strategy, not_used, read_options
from smolcluster.tasks.base import Task
from smolcluster.tasks.find import find_task

log = logging.getLogger(__name__)

INTERRUPTED = 130


def room_of(device: torch.device) -> Room:
    return Room(total=memory_bytes(device), free=free_bytes(device))


class Role(ABC):
    """One process of a run. Subclasses define `run`, which calls their phases in order."""

    def __init__(self, spec: WorkerSpec, channel: ControlChannel, sinks: list[Sink]) -> None:
        self.spec, self.channel = spec, channel
        self.config = Config.model_validate(spec.config)
        self.observer = Observer(sinks)
        self._handler = NoticeHandler(self.observer, rank=spec.rank if spec.role == "worker" else None)
        logging.getLogger("smolcluster").addHandler(self._handler)
        self.started = time.time()
        self.cut_off: Callable[[], None] = lambda: None  # ends this process from another thread
        self._count_members: Callable[[], int] | None = None  # on the elastic plane
        if spec.run_dir:
            self._log_to(RunDir(Path(spec.run_dir)))

    @abstractmethod
    def run(self) -> int:
        """Run all phases; return the exit status."""

    def notify_peers(self, message: str) -> None:  # noqa: B027 - most roles have no peers to notify
        """Notify peers before this process fails."""

    def explain_loss(self, reason: str) -> str:
        """Return which peer is lost, where that is known. `reason`: the backend's message."""
        return reason

    def _log_to(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        spec = self.spec
        path = log_path(run_dir.path, spec.role, spec.rank, spec.host)
        path.parent.mkdir(parents=True, exist_ok=True)
        setup_logging(path, level=self.config.logging.level, role=spec.role, rank=spec.rank, host=spec.host)
        url = self.config.logging.loki_url
        if url is not None:
            from smolcluster.observe.loki import start_pushing

            with contextlib.suppress(UserError):  # `_choose` reports it
                self.observer.add(start_pushing(path, url=url, role=spec.role, rank=spec.rank, host=spec.host))

    # What is trained

    def _choose(self, *, lead: bool) -> None:
        """Choose the device and the strategy."""
        if self.config.logging.loki_url is not None:
            from smolcluster.observe.loki import endpoint_of

            endpoint_of(self.config.logging.loki_url)  # report errors early
        if self.config.logging.prometheus_port:
            import smolcluster.observe.prometheus  # noqa: F401 - report a missing package early
        share_cores(self.spec.local_world_size)
        self.device = choose_device(self.config.training.device, local_rank=self.spec.local_rank)
        self.options, ignored = read_options(self.config.strategy, plane=self.spec.plane)
        self.strategy_class = find_strategy(self.config.strategy.name, self.spec.plane, self.options)
        check_balance(self.config, self.options)
        if self.config.training.profile is not None:
            steps_of(self.config.training.profile)  # report errors early
            if self.spec.plane == "elastic" and lead:
                self._warn("training.profile has no effect on the elastic plane")
        if ignored and lead:
            self._warn(not_used(self.config.strategy.name, self.spec.plane, ignored))

    def _use_preset(self, pick: LinkPick, *, lead: bool) -> Config:
        """Train with a preset that was picked by the measured link. `lead`: record it, so that a resumed run keeps it."""
        strategy, chosen = self.config.strategy, {"preset": pick.preset}
        if self.spec.plane == "elastic":  # the coordinator was made for rounds of this length
            chosen["inner_steps"] = getattr(self.options, "inner_steps", None)
        self.config.strategy = strategy.with_options(chosen)
        self.options, _ = read_options(self.config.strategy, plane=self.spec.plane)
        if lead:
            record_pick(pick, self.run_dir.link)
            text = pick.describe(strategy.name)
            log.info("%s", text)
            self._notify(text)
        return self.config

    def _load_task(self) -> None:
        self.task = find_task(self.config, progress=self._progress)
        self.train_data = as_dataset(self.task.train_data())
        val_data = self.task.val_data()
        self.val_data = None if val_data is None else as_dataset(val_data)
        if self.val_data is not None and len(self.val_data) == 0:
            raise UserError(f"val_data() of {self.task.name} has no samples; return None to train without validation")

    def _check_memory(self, nodes: Sequence[Node], *, first: int, count: int) -> None:
        """Check that ranks `first` to `first + count - 1`, which run on this machine, fit into its memory."""
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                model = self.task.model()
                shape = Shape.of(model, self.config.training)
        except Exception as error:  # user code may need real numbers
            log.debug("the model cannot be built on fake tensors, so its memory is not estimated", exc_info=error)
            return
        # Count only what is certain, so that no feasible run is refused.
        if type(self.task).optimizer is not Task.optimizer:
            shape = dataclasses.replace(shape, optimizer_states=0)
        if not all(parameter.requires_grad for parameter in model.parameters()):
            return
        placement = self.strategy_class.plan(self.options, nodes, shape).checked()
        check_memory(
            placement.costs[first : first + count],
            rank=self.spec.rank - first,
            machine=room_of(torch.device("cpu")),
            gpu=room_of(self.device) if self.device.type == "cuda" else None,
            sharers=-(-count // torch.cuda.device_count()) if self.device.type == "cuda" else 1,
            warn=self._warn,
        )

    def _try_task(self, strategy: Strategy[Options]) -> None:
        """Try the user's code before step 1."""
        if needs_trial(self.task):
            size = self.config.training.batch_size or 1
            warning = try_task(self.task, strategy, train_data=self.train_data, val_data=self.val_data, batch_size=size)
            if warning is not None:
                self._warn(warning)

    # Checkpoints

    def _make_saver(self, strategy: Strategy[Options], *, saves_parts: bool = False, again: bool = False) -> Saver:
        """`saves_parts`: every rank saves its part of the state. `again`: the run has started before."""
        self.run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
        weights_bytes = sum(t.nbytes for t in strategy.replica.layout.values())
        if not again:
            check_disk_space(self.run_dir.path, need_bytes=3 * weights_bytes)
        self.store = CheckpointStore(self.run_dir.checkpoints, keep=self.config.training.max_checkpoints_to_keep)
        self.checkpoint: str | None = None
        reports = not saves_parts or self.spec.rank == 0

        def saved(event: CheckpointSaved) -> None:
            if not reports:
                return
            self.checkpoint = event.path
            self.observer.emit(event)

        def failed(event: CheckpointFailed) -> None:
            if not reports:
                return
            log.error(
                "the checkpoint of step %d could not be saved: %s", event.step, event.reason, extra={"event": event}
            )
            self.observer.emit(event)

        def skipped(step: int, by: int) -> None:
            log.warning("the disk is slower than checkpoint_steps: step %d is not saved, step %d is next", step, by)

        return Saver(self._make_store(), patient=saves_parts, on_saved=saved, on_failed=failed, on_skipped=skipped)

    def _make_store(self) -> Store:
        return self.store

    def _find_checkpoint(self, source: Path, *, lazily: bool = False) -> tuple[Path, Snapshot]:
        """Return the folder and the verified contents of a checkpoint. `lazily`: read tensors on first use."""
        if (source / "manifest.json").is_file():
            return source, CheckpointStore(source.parent, keep=1).load(source, lazily=lazily)
        found = CheckpointStore(source, keep=1).load_latest(lazily=lazily)
        if found is None:
            raise UserError(f"--resume: there is no checkpoint in {source}; start the run again without --resume")
        return found

    def _check_checkpoint(self, found: Snapshot, replica: Replica) -> None:
        """Raise UserError for a checkpoint of another model or tokenizer, or without optimizer state that it needs."""
        check_tokenizer(found.info, self.task)
        check_compatible(found, replica.layout)
        check_complete(found, replica)

    def _go_back_to(self, step: int, info: Mapping[str, Any], *, saves: bool) -> None:
        """Drop the rows and move aside the checkpoints after the step of a checkpoint, and report it."""
        dropped = truncate_metrics(self.run_dir.metrics, after_step=step)
        if saves:
            self.store.move_aside_after(step)
        self._notify(describe_resume(step, info=info, config=self.config, dropped_rows=dropped))

    # Reporting

    def _notify(self, text: str) -> None:
        """Show a message that is not a warning."""
        self.observer.emit(
            Notice(level="INFO", message=text, rank=self.spec.rank if self.spec.role == "worker" else None)
        )

    def _make_profiler(self, *, last_step: int) -> Profiler | None:
        training, rank = self.config.training, self.spec.rank
        if training.profile is None:
            return None
        steps, unknown = steps_of(training.profile), [r for r in training.profile_ranks if r >= self.spec.world_size]
        if rank == 0 and unknown:
            self._warn(
                f"training.profile_ranks: there is no rank {unknown[0]}; the ranks are 0 to {self.spec.world_size - 1}"
            )
        if rank == 0 and steps.start > last_step:
            self._warn(f"--profile {training.profile} writes nothing: the run ends at step {last_step}")
        if rank not in training.profile_ranks:
            return None
        return Profiler(
            steps,
            self.run_dir.path / "profile",
            rank=rank,
            device=self.device,
            notify=self._notify,
        )

    def _started_event(self, strategy: Strategy[Options], *, rank: int, world_size: int, **fields: Any) -> RunStarted:
        config = self.config
        return RunStarted(
            rank=rank,
            role=self.spec.role,
            host=self.spec.host,
            run_dir=str(self.run_dir.path) if self.spec.run_dir or self.spec.plane == "mesh" else "",
            task=self.task.name,
            strategy=config.strategy.name,
            algorithm=record_of(config.strategy.name).algorithm,
            world_size=world_size,
            device=str(self.device),
            parameters=strategy.replica.num_parameters,
            learning_rate=config.training.learning_rate,
            project_name=config.logging.project_name or "smolcluster",
            config=public_dict(config),
            **fields,
        )

    def _add_trackers(self, started: RunStarted, folder: Path) -> None:
        if self.config.logging.tensorboard:
            from smolcluster.observe.tracking import TensorBoardSink, run_name

            self.observer.add(TensorBoardSink(folder / "tensorboard", run_name(started)))
        if self.config.logging.wandb:
            from smolcluster.observe.tracking import WandbSink, run_name

            self.observer.add(WandbSink(started.project_name, run_name(started), run_dir=folder, config=started.config))
        if self.config.logging.prometheus_port:
            self._serve_metrics(started, self.config.logging.prometheus_port)

    def _serve_metrics(self, started: RunStarted, first_port: int) -> None:
        from smolcluster.observe.prometheus import PrometheusSink, port_of, run_name_of

        spec, host = self.spec, self.config.logging.prometheus_host
        port = port_of(first_port, role=spec.role, local_rank=spec.local_rank)
        run = run_name_of(started, server=spec.server)
        try:
            sink = PrometheusSink(started, host=host, port=port, run=run, members=self._count_members)
        except OSError as error:
            self._warn(
                f"metrics are not served on {host}:{port}: {error.strerror or error}; "
                "choose others with logging.prometheus_port and logging.prometheus_host"
            )
            return
        self.observer.add(sink)
        log.info("metrics are served on http://%s:%d/metrics", host, port)

    def _write_summary(self, summary: dict[str, Any]) -> None:
        try:
            write_summary(self.run_dir.summary, summary)
        except OSError as error:
            log.error("%s could not be written: %s", self.run_dir.summary, error.strerror or error)

    def _sample(self, replica: Replica, weights: Mapping[str, Tensor]) -> None:
        """Emit a sample of the trained model. `weights`: of the whole model, where this process has a part."""
        try:
            model = replica.model
            if not replica.whole:
                model = self.task.model()
                model.load_state_dict(weights)
            model.eval()
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
