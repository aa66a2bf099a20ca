"""The training loop. It names no strategy.

for each step: read a batch, strategy.step, and when they are due: evaluate, log a row, save
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from smolcluster.comm.group import collect_tensors, gather_json
from smolcluster.compute.buffers import buffers_of_first
from smolcluster.compute.replica import Batch
from smolcluster.compute.rng import seed_everything
from smolcluster.config.options import Options
from smolcluster.data.dataset import Dataset
from smolcluster.data.sampler import Indices, ShardedSampler
from smolcluster.engine.checkpoint.snapshot import ALL, Snapshot, state_for
from smolcluster.engine.evaluate import evaluate
from smolcluster.engine.profiler import Profiler
from smolcluster.engine.reader import Reader
from smolcluster.engine.record import RunRecord
from smolcluster.errors import UserError
from smolcluster.observe.events import evaluation_fields
from smolcluster.observe.observer import Observer
from smolcluster.strategies.base import Context, State, StepReport, Strategy
from smolcluster.tasks.base import Task, count_of

log = logging.getLogger(__name__)


class Loop:
    def __init__(
        self,
        *,
        strategy: Strategy[Options],
        task: Task,
        context: Context,
        reader: Reader,
        sampler: ShardedSampler | None,
        train_data: Dataset,
        val_data: Dataset | None,
        observer: Observer,
        record: RunRecord,
        saves_parts: bool = False,
        keep: Callable[[], None] = lambda: None,
        profiler: Profiler | None = None,
    ) -> None:
        """`sampler`: its position is saved; None: this process saves no checkpoints. `keep`: called after every step."""
        self.strategy, self.task, self.context, self.record = strategy, task, context, record
        self.step = 0  # the last one taken
        self.interrupted = False
        self._reader, self._sampler, self._train_data, self._val_data = reader, sampler, train_data, val_data
        self._observer, self._saves_parts = observer, saves_parts
        self._config = context.config.training
        self._log_interval = context.config.logging.log_interval
        self._profiler, self._keep = profiler, keep
        self._warned_of_loss = False
        self._counted: bool | None = None  # whether the task counts targets
        self._skipped = 0
        self._saved_step = -1

    def run(self) -> None:
        """Train to the last step, or to the step at which all ranks agree to stop."""
        total, first, meter = self.context.total_steps, True, self.record.meter
        meter.start()
        while (work := self._reader.next(self.step)) is not None:
            step, before = work[0], self.step
            report = self._step(*work)
            # On a stop request save and leave without an evaluation, which may take long.
            last, over = step == total, step == total or report.stop
            evaluated = self._val_data is not None and (last or (due(step, self._config.eval_steps) and not over))
            logged = evaluated or over or first or self._row_is_due(step, before)
            meter.stop(before_row=logged)
            if first:
                self._reserve()

            if last:
                self.strategy.drain()
            if last and report.stop:
                self._save(step, best=False, final=True)
            improved = self._evaluate() if evaluated else False
            if logged:
                self._log(step, with_evaluation=evaluated)
            if over or improved or due(step, self._config.checkpoint_steps):
                self._save(step, best=improved, final=over)
            self._keep()
            if over and not last:
                self.interrupted = True
                return
            first = False
            meter.start()
        if meter.unlogged:
            self._log(self.step, with_evaluation=False)

    def _row_is_due(self, step: int, before: int) -> bool:
        """A worker with fewer steps than the run skips numbers, and one with more repeats them."""
        every = self._log_interval
        return not self._reader.repeat and (step % every == 0 or step // every > before // every)

    def _step(self, step: int, indices: Indices) -> StepReport:
        # Random numbers follow from (seed, step, data shard) while the batch is read and from (seed, step, stream) after it: a
        # resumed run repeats them, and ranks that share a data shard augment its samples identically.
        seat, repeat = self.context.seat, [self._reader.repeat] if self._reader.repeat else []
        self._seed(step, "data", seat.rank if seat.shard is None else seat.shard, *repeat)
        batch = self._read(step, indices)
        self._seed(step, seat.rank if seat.stream is None else seat.stream, *repeat)
        started = time.perf_counter()
        if self._profiler is not None:
            self._profiler.before(step)
        report = self.strategy.step(batch)
        if self._profiler is not None:
            self._profiler.after(step, report.comm, last=report.stop or step == self.context.total_steps)
        self.record.meter.add(report, step_s=time.perf_counter() - started)
        self.step = step
        self.record.samples += report.samples
        self.record.tokens += report.tokens
        return report

    def _seed(self, *parts: int | str) -> None:
        seed_everything(self._config.seed or 0, *parts, device=self.context.device)

    def _read(self, step: int, indices: Indices) -> Batch:
        num_parts = self._config.grad_accumulation
        if self.strategy.options.balanced:
            num_parts *= -(-len(indices) // sum(self.context.samples_per_step))
        size = max(1, -(-len(indices) // num_parts))
        slices = [indices[i : i + size] for i in range(0, len(indices), size)]
        parts = [self._train_data.batch(part) for part in slices]
        counts = self._counts(parts)
        if counts is None and len(slices[-1]) < size:
            counts = [len(part) for part in slices]
        tokens = len(indices) * self.task.tokens_per_sample
        return Batch(parts=parts, samples=len(indices), tokens=tokens, step=step, counts=counts)

    def _counts(self, parts: Sequence[Any]) -> list[float] | None:
        """Return the number of targets of each micro-batch, where the task counts them."""
        counts = [count_of(self.task, part) for part in parts]
        found = [count for count in counts if count is not None]
        self._counted = bool(found) if self._counted is None else self._counted
        if len(found) != (len(parts) if self._counted else 0):
            raise UserError(f"count() of {self.task.name} is None for some batches and a number for others; return one")
        return found or None

    def _evaluate(self) -> bool:
        """Evaluate; return whether this is the best result so far."""
        assert self._val_data is not None
        share = self.strategy.share
        self._seed(self.step, "evaluation", share.index)  # ranks with the same share read the same batches
        with buffers_of_first(self.strategy.replica.model, share.replicas):
            result = evaluate(
                self.strategy.replica.model,
                self.task,
                self._val_data,
                group=self.context.group,
                device=self.context.device,
                batch_size=self._config.batch_size or 1,
                samples=self._config.eval_samples,
                measure=lambda part: self.strategy.measure(self.task, part),
                share=share,
            )
        return self.record.evaluated(result)

    def _log(self, step: int, *, with_evaluation: bool) -> None:
        self._warn_of_skipped(step)
        norms = {name: float(norm) for name, norm in self.strategy.replica.norms().items()} or None
        fields = evaluation_fields(self.record.last_evaluation) if with_evaluation else {}
        row = self.record.row(step, skipped=self._skipped, gradient_norms=norms, **fields)
        if not math.isfinite(row.loss) and not self._warned_of_loss:
            self._warned_of_loss = True
            self.context.warn(f"the loss is {row.loss} at step {step}; try a lower training.learning_rate")
        self._observer.emit(row)
        self.strategy.replica.check_progress()

    def _warn_of_skipped(self, step: int) -> None:
        before, self._skipped = self._skipped, self.strategy.replica.skipped
        new = self._skipped - before
        # In fp16 steps are skipped occasionally, to find the loss scale.
        if new > 0 and self.context.seat.rank == 0 and self._config.precision != "fp16":
            what = (
                "a step was skipped, as its gradient" if new == 1 else f"{new} steps were skipped, as their gradients"
            )
            self.context.warn(f"{what} had NaN or infinite values, at step {step} or shortly before")

    # Checkpoints. Every rank calls `state`; the lead rank copies and writes it, with the local state of each rank.
    # In a sharded save every rank copies and writes its part.

    def _state(self) -> State:
        return self.strategy.state("rank" if self._saves_parts else "run")

    def _reserve(self) -> None:
        """Allocate the copy of the state in the background, so that the first save stalls no longer than others."""
        if self._config.checkpoint_steps != 0:
            state, saver = self._state(), self.record.saver
            if saver is not None:
                saver.reserve(state.weights)
                saver.reserve(state.optimizer)

    def _save(self, step: int, *, best: bool, final: bool) -> None:
        if self._config.checkpoint_steps == 0 or step == self._saved_step:
            return
        state, saver = self._state(), self.record.saver
        self._saved_step = step
        extra = self._extra(state)
        if saver is None or not self.record.fit_to_save(step, state.weights, self._agree):
            return
        started = time.perf_counter()
        assert self._sampler is not None
        sampler = self._sampler.state_dict()
        snapshot = self.record.snapshot(step, state, copy=saver.snapshot_tensors, sampler=sampler, extra=extra)
        saver.submit(snapshot, best=best, final=final, stall_s=time.perf_counter() - started)

    def _agree(self, broken: str | None) -> str | None:
        """Return the name of a broken tensor on any rank, where every rank writes a part."""
        return next(filter(None, gather_json(self.context.group, broken)), None) if self._saves_parts else broken

    def _extra(self, state: State) -> dict[str, Tensor]:
        """Return the private tensors of the strategy by scope; on a lead rank that writes alone, those of all ranks."""
        rank = self.context.seat.rank
        own = {f"{rank}/{name}": tensor for name, tensor in state.own.items()}
        if not self._saves_parts and self.context.group.size > 1:
            own = collect_tensors(self.context.group, own)
        shared = {f"{ALL}/{name}": tensor for name, tensor in state.shared.items()} if rank == 0 else {}
        return shared | own

    def load(self, snapshot: Snapshot) -> None:
        """Continue from a checkpoint, perhaps of another strategy or number of workers."""
        state, seat, sampler = snapshot.state, self.context.seat, self._sampler
        assert sampler is not None
        name, ranks = self.context.config.strategy.name, self.context.group.size
        mine, left = state_for(snapshot, strategy=name, rank=seat.rank, num_ranks=ranks)
        if left and seat.rank == 0:
            self.context.warn(f"not restored from the checkpoint: {'; '.join(left)}")
        self.strategy.load_state(mine)
        if state["sampler"] is not None:  # None for an imported model
            sampler.load_state_dict(state["sampler"])
        now, before = sum(self.context.samples_per_step), sampler.position / max(1, snapshot.step)
        if seat.rank == 0 and snapshot.step and sampler.position and now != before:
            self.context.warn(f"the global batch is {now} samples; it was {before:g} before the checkpoint")
        samples = self._share(sampler.position) if self.context.reports_samples else 0
        self.step = snapshot.step
        self.record.samples, self.record.tokens = samples, samples * self.task.tokens_per_sample
        self.record.best.load_state_dict(state)

    def _share(self, total: int) -> int:
        """Return this rank's share of the samples read before the checkpoint."""
        counts, shard = self.context.samples_per_step, self.context.seat.shard or 0
        return total * sum(counts[: shard + 1]) // sum(counts) - total * sum(counts[:shard]) // sum(counts)

    def final_weights(self) -> Mapping[str, Tensor] | None:
        weights = self.strategy.state("weights").weights
        return weights if self.context.seat.rank == 0 else None


def due(step: int, every: int | None) -> bool:
    return bool(every) and step % int(every or 1) == 0
