"""The record of one process: metric rows, evaluations, checkpoints and the final report.

The training loop and the server each have one: they decide when to write.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.group import Traffic
from smolcluster.compute.buffers import not_finite
from smolcluster.compute.device import peak_memory_bytes
from smolcluster.engine.best import Best
from smolcluster.engine.checkpoint.async_saver import Saver
from smolcluster.engine.checkpoint.snapshot import Snapshot
from smolcluster.engine.checkpoint.tokenizer_files import tokenizer_info
from smolcluster.engine.checks import settings_of
from smolcluster.engine.step_clock import StepClock
from smolcluster.observe.events import StepLogged
from smolcluster.observe.machine import MachineFacts
from smolcluster.strategies.base import Context, State
from smolcluster.tasks.base import Task

log = logging.getLogger(__name__)


class RunRecord:
    def __init__(
        self,
        context: Context,
        task: Task,
        *,
        host: str,
        world_size: int,
        saver: Saver | None,
        traffic: Callable[[], Traffic],
    ) -> None:
        """`saver` None: another process saves, or none. `traffic`: bytes sent and received by this process."""
        self.saver, self._context, self._host = saver, context, host
        self._traffic = traffic
        self.meter = StepClock(context.device)
        self.best = Best(context.config.training.best)
        self.last_evaluation: dict[str, float] = {}
        self.samples = self.tokens = 0  # counted by this process, including those before a checkpoint
        self._facts = MachineFacts(str(context.device))
        self._info = {
            "task": task.name,
            "strategy": context.config.strategy.name,
            "world_size": world_size,
            "torch": torch.__version__,
            "settings": settings_of(context.config),
            **tokenizer_info(task),
        }

    def row(self, step: int, **fields: Any) -> StepLogged:
        """Return a metric row of the steps since the last one."""
        seat, traffic, numbers = self._context.seat, self._traffic(), self.meter.row()
        counted = {"samples": self.samples, "tokens": self.tokens, "stale_rejected": self._context.stale_rejected}
        return StepLogged(
            step=step,
            rank=seat.rank,
            role=seat.role,
            host=self._host,
            time=time.time(),
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            staleness_max=self.meter.staleness_max,
            machine=self._facts.due(),
            **(numbers | counted | fields),
        )

    def evaluated(self, result: dict[str, float]) -> bool:
        """Take the result of an evaluation. Return whether it is the best so far."""
        self.last_evaluation = result
        return self.best.improves(result)

    def fit_to_save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        agree: Callable[[str | None], str | None] = lambda broken: broken,
    ) -> bool:
        """Return whether all weights are finite: a broken checkpoint must not replace a good one. `agree`: over ranks."""
        broken = agree(not_finite(weights))
        if broken:
            log.error("step %d is not saved: %s has NaN or infinite values", step, broken)
        return not broken

    def snapshot(
        self,
        step: int,
        state: State,
        *,
        copy: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
        sampler: Mapping[str, Any],
        extra: Mapping[str, Tensor] | None = None,
    ) -> Snapshot:
        """Return a copy of a state with everything that resuming needs."""
        return Snapshot(
            step=step,
            weights=copy(state.weights),
            optimizer=copy(state.optimizer),
            state={"strategy": dict(state.numbers), "sampler": sampler, **self.best.state_dict()},
            metrics=dict(self.last_evaluation),
            info=self._info,
            extra=copy(extra) if extra else {},
            full_shapes=state.full_shapes,
            part=self._context.seat.rank,
        )

    def report(self, step: int, *, batch_samples: int, skipped: int = 0) -> dict[str, Any]:
        """Return the final counts of this process. `batch_samples`: the weight of its loss among ranks."""
        meter, traffic = self.meter, self._traffic()
        return {
            "role": self._context.seat.role,
            "step": step,
            "samples": self.samples,
            "tokens": self.tokens,
            "own_steps": meter.steps,
            "own_samples": meter.samples,
            "own_tokens": meter.tokens,
            "busy_s": meter.busy_s,
            "loss": meter.last_loss,
            "batch_samples": batch_samples,
            "bytes_sent": traffic.bytes_sent,
            "bytes_received": traffic.bytes_received,
            "staleness_sum": meter.staleness_sum,
            "staleness_max": meter.staleness_max,
            "stale_rejected": self._context.stale_rejected,
            "skipped": skipped,
            "peak_memory_bytes": peak_memory_bytes(self._context.device),
        }
