"""Evaluation during training: on a copy of the weights, in a thread.

One evaluation runs and one may wait; a newer one replaces the one that waits. So a slow machine evaluates less often and never
holds up the workers. Every submitted evaluation gets its callback, with an empty result where it was replaced or cancelled.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.data.dataset import Dataset
from smolcluster.engine.evaluate import evaluate
from smolcluster.tasks.base import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Evaluation:
    step: int
    weights: Mapping[str, Tensor]
    then: Callable[[dict[str, float]], None]


class _Cancelled(Exception):
    """The run stops: this evaluation has no result."""


class Evaluator:
    def __init__(self, model: nn.Module, task: Task, data: Dataset, *, device: torch.device) -> None:
        self._model = copy.deepcopy(model).to(device)
        self._task, self._data, self._device = task, data, device
        self._changed = threading.Condition()
        self._waiting: _Evaluation | None = None
        self._replaced: list[_Evaluation] = []
        self._closed = False
        self._cancelled = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="evaluation", daemon=True)
        self._thread.start()

    def submit(self, step: int, weights: Mapping[str, Tensor], then: Callable[[dict[str, float]], None]) -> None:
        """Evaluate these weights, which must not change before `then` is called.

        `then` is called on the evaluation thread; with {} when the evaluation was replaced or cancelled, or failed.
        """
        with self._changed:
            self._raise()
            if self._waiting is not None:
                log.warning(
                    "evaluation is slower than eval_steps: step %d is not evaluated, step %d is next",
                    self._waiting.step,
                    step,
                )
                self._replaced.append(self._waiting)
            self._waiting = _Evaluation(step, weights, then)
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of an earlier evaluation."""
        with self._changed:
            self._raise()

    def cancel(self) -> None:
        """End the current evaluation at its next batch, and skip the waiting one."""
        self._cancelled = True

    def close(self) -> None:
        """Wait for all submitted evaluations and stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        training = self._task.config.training
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                job, self._waiting = self._waiting, None
                replaced, self._replaced = self._replaced, []
                if job is None:
                    return
            result: dict[str, float] = {}
            try:
                for older in replaced:
                    older.then({})
                self._model.load_state_dict(job.weights)
                result = evaluate(
                    self._model,
                    self._task,
                    self._data,
                    group=MemoryGroup.world(1)[0],
                    device=self._device,
                    batch_size=training.batch_size or 1,
                    samples=training.eval_samples,
                    measure=self._measure,
                )
            except _Cancelled:
                pass
            except Exception as error:  # noqa: BLE001 - raised by the next `submit` or `check`
                self._error = error
            try:
                job.then(result)
            except Exception as error:  # noqa: BLE001 - the same
                self._error = self._error or error

    def _measure(self, part: Any) -> dict[str, Tensor]:
        if self._cancelled:
            raise _Cancelled
        return self._task.metrics(self._model, part)
