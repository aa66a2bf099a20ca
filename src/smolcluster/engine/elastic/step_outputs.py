"""Log, evaluate and save the steps that a server commits, where each is due. Training goes on meanwhile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from smolcluster.config.options import Options
from smolcluster.engine.checkpoint.async_saver import Saver
from smolcluster.engine.checkpoint.snapshot import ALL, Snapshot
from smolcluster.engine.elastic.evaluator import Evaluator
from smolcluster.engine.elastic.server_side import ServerSide
from smolcluster.engine.record import RunRecord
from smolcluster.observe.events import Event, StepLogged, evaluation_fields
from smolcluster.strategies.base import StepReport, Strategy


class StepOutputs:
    def __init__(
        self,
        *,
        strategy: Strategy[Options],
        server_side: ServerSide,
        record: RunRecord,
        saver: Saver | None,
        evaluator: Evaluator | None,
        emit: Callable[[Event], None],
        num_samples: int,
        coordinates: bool,
        local_steps: int,
    ) -> None:
        """`coordinates`: workers hold the weights, and the state of a step arrives after its commit."""
        self._context, self._strategy, self._server_side = server_side.context, strategy, server_side
        self._record, self._saver, self._evaluator, self._emit = record, saver, evaluator, emit
        self._num_samples, self._coordinates, self._local_steps = num_samples, coordinates, local_steps
        self._pending: dict[int, StepLogged] = {}  # rows that wait for the state of their step
        self._leases: dict[int, Mapping[str, Any]] = {}  # the leases at steps whose state may still be saved

    def note_leases(self, step: int, leases: Mapping[str, Any]) -> None:
        needed = min(self._pending, default=step)
        self._leases = {older: kept for older, kept in self._leases.items() if older >= needed} | {step: leases}

    def committed(self, step: int, report: StepReport) -> None:
        """Log, evaluate and save this step, where it is due."""
        wanted = self.wants(step)
        before = self._round_before(step)
        logged = wanted or before == 0 or self._is_due(step, self._context.config.logging.log_interval)
        self._record.meter.add(report, step_s=0.0, steps=step - before)
        self._record.meter.stop(before_row=logged)
        if wanted:
            self._pending[step] = self.row(step)
            if not self._coordinates:
                self.state_arrived(step)
        elif logged:
            self._emit(self.row(step))

    def finished_before(self, step: int) -> None:
        """Evaluate and save the last step, which the server before this one committed."""
        rate = self._strategy.replica.rate_of(step - 1)
        report = StepReport(loss=torch.tensor(math.nan), grad_norm=None, learning_rate=rate, samples=0, tokens=0)
        self._record.meter.add(report, step_s=0.0)
        self._pending[step] = self.row(step)
        if not self._coordinates:
            self.state_arrived(step)

    def wants(self, step: int) -> bool:
        """Return whether the state after this step is needed."""
        return self._is_last(step) or self._to_evaluate(step) or self._to_save(step)

    def state_arrived(self, step: int) -> None:
        """Evaluate and save the state of this step, which the strategy holds now."""
        steps = sorted(s for s in self._pending if s <= step)  # this state also stands for earlier ones that never came
        if not steps:
            return
        *older, row = [self._pending.pop(s) for s in steps]
        for missed in older:
            self._emit(missed)
        save = any(map(self._to_save, steps))
        if any(map(self._to_evaluate, steps)):
            self._evaluate(row, self._snapshot(step), save=save)
            return
        self._emit(row)
        if save:
            self._save(self._snapshot(step), best=False, final=self._is_last(step))

    def save_interrupted(self, step: int) -> None:
        """Save the last committed step of a run that stops early."""
        if self._saver is not None and step > 0:
            self._save(self._snapshot(step), best=False, final=True)

    def row(self, step: int) -> StepLogged:
        return self._record.row(step, stale_rejected=self._server_side.stale_rejected)

    def _is_last(self, step: int) -> bool:
        return step >= self._context.total_steps

    def _to_evaluate(self, step: int) -> bool:
        every = self._context.config.training.eval_steps
        return self._evaluator is not None and (self._is_last(step) or self._is_due(step, every))

    def _to_save(self, step: int) -> bool:
        every = self._context.config.training.checkpoint_steps
        return every != 0 and (self._is_last(step) or self._is_due(step, every))

    def _is_due(self, step: int, every: int | None) -> bool:
        """Return whether the round that ends with `step` passed a multiple of `every`."""
        return bool(every) and step // int(every or 1) > self._round_before(step) // int(every or 1)

    def _round_before(self, step: int) -> int:
        """Return the last step of the round before the one that ends with `step`."""
        return (step - 1) // self._local_steps * self._local_steps

    def _evaluate(self, row: StepLogged, snapshot: Snapshot, *, save: bool) -> None:
        assert self._evaluator is not None
        final = self._is_last(snapshot.step)

        def then(result: dict[str, float]) -> None:
            if not result:
                self._emit(row)
                if save:
                    self._save(snapshot, best=False, final=final)
                return
            improved = self._record.evaluated(result)
            self._emit(dataclasses.replace(row, **evaluation_fields(result)))
            if improved or save:
                snapshot.metrics.update(result)
                snapshot.state.update(self._record.best.state_dict())
                self._save(snapshot, best=improved, final=final)

        self._evaluator.submit(snapshot.step, snapshot.weights, then)

    def _snapshot(self, step: int) -> Snapshot:
        leases = self._leases[step]  # as of this step: more samples may have counted since
        sampler = {**leases, "seed": self._context.config.training.seed or 0, "num_samples": self._num_samples}
        extra = {f"{ALL}/{name}": tensor for name, tensor in self._server_side.shared_state().items()}
        return self._record.snapshot(step, self._strategy.state(), copy=self._copy, sampler=sampler, extra=extra)

    def _copy(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors that training does not change: copies, except of a coordinator's state, which is replaced whole."""
        if self._coordinates and self._context.device.type == "cpu":
            return dict(tensors)
        if self._saver is not None:
            return self._saver.snapshot_tensors(tensors)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def _save(self, snapshot: Snapshot, *, best: bool, final: bool) -> None:
        if self._saver is not None and self._record.fit_to_save(snapshot.step, snapshot.weights):
            self._saver.submit(snapshot, best=best, final=final)
