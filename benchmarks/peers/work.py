"""What every peer trains: the same weights, its share of the samples of each step, the same learning rates.

Peers that are programs of their own print a row of JSON now and then, and wait for a line before they go on: so whoever
started them can count in between. See `harness/peer_programs.py` for the other end.
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
    """The part of one of `size` workers. It computes in one thread."""

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
        """Its samples of the next step."""
        return self.data.batch(self._sampler.next())

    def gradient(self) -> float:
        """Of the next batch, into `.grad`. Returns the loss."""
        loss = self.task.loss(self.model, self.batch())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def validation_loss(
        self, model: nn.Module | None = None, *, samples: int | None = None, device: torch.device = CPU
    ) -> float:
        """Over the validation set, or its first samples. `device`: where the model is."""
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
    """The order from the command line, and a function that tells a row and waits until it may go on.

    Libraries print: only rows go to standard output, all else to standard error.
    """
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def tell(row: Row) -> None:
        answers.write(json.dumps({"time": time.time(), **row}).encode() + b"\n")
        if not sys.stdin.buffer.readline():
            os._exit(0)  # nobody listens any more

    return json.loads(sys.argv[1]), tell
