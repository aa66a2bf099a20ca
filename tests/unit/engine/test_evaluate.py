"""Validation: the mean over the same samples, however they are shared out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from tests.tasks import Double
from torch import Tensor

from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.config.schema import Config
from smolcluster.data.dataset import as_dataset
from smolcluster.engine.evaluate import evaluate
from smolcluster.tasks.base import Task

SAMPLES = 17


def results(task: Task, *, ranks: int = 1, batch_size: int = 4, samples: int | None = SAMPLES) -> dict[str, float]:
    """Of the first rank; all ranks have the same."""
    torch.manual_seed(1)
    model, data = task.model(), as_dataset(task.val_data())

    def of_rank(group: MemoryGroup) -> dict[str, float]:
        cpu = torch.device("cpu")
        return evaluate(model, task, data, group=group, device=cpu, batch_size=batch_size, samples=samples)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(of_rank, MemoryGroup.world(ranks)))
    assert all(result == found[0] for result in found)
    return found[0]


def expected_loss(task: Double, samples: int) -> float:
    torch.manual_seed(1)
    model = task.model()
    x, y = (t[:samples] for t in task.val_data())
    with torch.no_grad():
        return F.cross_entropy(model.eval()(x), y).item()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 5, 16, 64])
def test_the_same_samples_for_any_number_of_workers_and_batch_size(ranks: int, batch_size: int) -> None:
    task = Double(Config())
    found = results(task, ranks=ranks, batch_size=batch_size)
    assert found["val_loss"] == pytest.approx(expected_loss(task, SAMPLES), rel=1e-12)


@pytest.mark.parametrize("samples", [None, 50, 1000])
def test_all_samples_where_there_are_no_more(samples: int | None) -> None:
    task = Double(Config())
    assert results(task, ranks=2, samples=samples)["val_loss"] == pytest.approx(expected_loss(task, 50), rel=1e-12)


class Uncounted(Double):
    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return 0


def test_where_nothing_counts_there_is_no_mean() -> None:
    assert results(Uncounted(Config())) == {}
