"""What every peer trains: the same weights, its share of the samples of each step, the same learning rates.

Peers that are programs of their own write rows of JSON, and wait for a line after each, so that the benchmark can count bytes
in between. The other end is `harness/peer_programs.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.harness.pipes import open_answers
from benchmarks.harness.workload import recipe_of
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.compute.rng import seed_everything
from smolcluster.config.schema import Config
from smolcluster.data.dataset import as_dataset
from smolcluster.data.sampler import Sampler, ShardedSampler
from smolcluster.engine.evaluate import evaluate
from smolcluster.tasks.find import find_task

Row = dict[str, Any]
CPU = torch.device("cpu")


class Work:
    """The work of one of `size` workers, in one thread."""

    def __init__(self, config: Config, *, rank: int, size: int) -> None:
        torch.set_num_threads(1)
        training = config.training
        assert training.batch_size is not None
        self.config, self.task, self.recipe = config, find_task(config), recipe_of(config)
        self.batch_size, seed = training.batch_size, training.seed or 0
        self.data = as_dataset(self.task.train_data())
        counts = [self.batch_size] * size
        self._sampler = ShardedSampler(Sampler(len(self.data), seed=seed), counts=counts, shard=rank)
        seed_everything(seed, "weights", device=torch.device("cpu"))
        self.model = self.task.model()

    def batch(self) -> Any:
        """Return this worker's samples of the next step."""
        return self.data.batch(self._sampler.next())

    def gradient(self) -> float:
        """Add the gradient of the next batch to `.grad`. Return the loss."""
        loss = self.task.loss(self.model, self.batch())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def validation_loss(
        self, model: nn.Module | None = None, *, samples: int | None = None, device: torch.device = CPU
    ) -> float:
        """Return the loss over the validation set, or its first samples. `device`: that of the model."""
        result = evaluate(
            model or self.model,
            self.task,
            as_dataset(self.task.val_data()),
            group=MemoryGroup.world(1)[0],
            device=device,
            batch_size=self.batch_size,
            samples=samples,
        )
        return result["val_loss"]


def converse() -> tuple[Row, Callable[[Row], None]]:
    """Return the order on the command line, and a function that writes a row, then waits for a line of input."""
    answer = open_answers()

    def tell(row: Row) -> None:
        answer({"time": time.time(), **row})
        if not sys.stdin.buffer.readline():
            os._exit(0)  # the benchmark has ended

    return json.loads(sys.argv[1]), tell
