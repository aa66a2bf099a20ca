"""Evaluation beside training: who waits for a result is told, whatever becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.tasks import Tiny
from torch import Tensor, nn

from smolcluster.config import load_config
from smolcluster.data.dataset import as_dataset
from smolcluster.engine.elastic.evaluator import Evaluator


class Slow(Tiny):
    """An evaluation waits for `go`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.go, self.begun, self.broken = threading.Event(), threading.Event(), False
        self.calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        self.begun.set()
        assert self.go.wait(300)
        if self.broken:
            raise ValueError("a metric of the user's own")
        return super().loss(model, batch)


@pytest.fixture
def task() -> Slow:
    return Slow(load_config([], overrides={"training.batch_size": 8}))


@pytest.fixture
def evaluator(task: Slow) -> Iterator[Evaluator]:
    evaluator = Evaluator(task.model(), task, as_dataset(task.val_data()), device=torch.device("cpu"))
    yield evaluator
    task.go.set()
    evaluator.close()


def test_one_that_gives_way_to_a_newer_one_is_told_so(task: Slow, evaluator: Evaluator) -> None:
    told: dict[int, dict[str, float]] = {}
    weights = task.model().state_dict()
    evaluator.submit(1, dict(weights), lambda result: told.update({1: result}))
    assert task.begun.wait(300)
    for step in (2, 3):
        evaluator.submit(step, dict(weights), lambda result, step=step: told.update({step: result}))  # type: ignore[misc]
    task.go.set()
    evaluator.close()
    evaluator.check()
    assert list(told) == [1, 2, 3]
    assert told[2] == {}
    assert told[1]["val_loss"] == told[3]["val_loss"] > 0


def test_a_failure_is_told_to_who_waits_and_to_who_asks(task: Slow, evaluator: Evaluator) -> None:
    told: list[dict[str, float]] = []
    task.broken = True
    task.go.set()
    evaluator.submit(1, dict(task.model().state_dict()), told.append)
    evaluator.close()
    assert told == [{}]
    with pytest.raises(ValueError, match="a metric of the user's own"):
        evaluator.check()


def test_a_run_that_leaves_waits_for_no_evaluation(task: Slow, evaluator: Evaluator) -> None:
    """Neither for the rest of the one that runs nor for the one that waits; both are told."""
    told: list[int] = []
    for step in (1, 2):
        evaluator.submit(
            step, dict(task.model().state_dict()), lambda result, step=step: told.append(step - len(result))
        )  # type: ignore[misc]
        assert task.begun.wait(300)
    evaluator.cancel()
    task.go.set()
    evaluator.close()
    evaluator.check()
    assert told == [1, 2]
    assert task.calls == 1
