"""One rank of the `ddp` benchmark: it has a model for each variant, and trains one of them for a block of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.pipes import Message
from benchmarks.harness.workload import make_strategy, recipe_of
from benchmarks.harness.world import serve
from benchmarks.peers.ddp import DDPTraining
from smolcluster.comm.group import Group
from smolcluster.compute.replica import Batch
from smolcluster.compute.rng import seed_everything
from smolcluster.config.schema import Config
from smolcluster.data.dataset import as_dataset
from smolcluster.data.sampler import Sampler, ShardedSampler
from smolcluster.tasks.base import Task
from smolcluster.tasks.find import find_task

Run = Callable[[Sequence[tuple[Tensor, Tensor]]], float]


def make_variant(variant: dict[str, Any], config: Config, task: Task, group: Group) -> Run:
    """Return a function that trains on batches and returns the last loss."""
    if variant["kind"] == "ddp":
        seed_everything(config.training.seed or 0, "weights", device=torch.device("cpu"))
        training = DDPTraining(task.model(), recipe_of(config), gradient_as_bucket_view=variant["bucket_view"])
        return training.run
    config = config.model_copy(deep=True)
    config.strategy = config.strategy.with_options({"staleness_bound": variant["staleness_bound"]})
    strategy = make_strategy(config, task, group=group, device=torch.device("cpu"))

    def run(batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        loss = torch.zeros(())
        for number, part in enumerate(batches):
            samples = len(part[0])
            report = strategy.step(Batch(parts=[part], samples=samples, tokens=part[0].numel(), step=number))
            loss = report.loss
        strategy.drain()  # what is in flight belongs to this block, not to the next one's
        return loss.item()

    return run


def setup(spec: Message, group: Group) -> Callable[[Message], Message]:
    torch.set_num_threads(1)
    config = Config.model_validate(spec["config"])
    task = find_task(config)
    data = as_dataset(task.train_data())
    assert config.training.batch_size is not None
    counts = [config.training.batch_size] * group.size
    sampler = ShardedSampler(Sampler(len(data), seed=config.training.seed or 0), counts=counts, shard=group.rank)
    batches = [data.batch(sampler.next()) for _ in range(spec["block"])]
    variants = {variant["name"]: make_variant(variant, config, task, group) for variant in spec["variants"]}

    def handle(message: Message) -> Message:
        run = variants[message["variant"]]
        group.barrier()
        started = time.perf_counter()
        loss = run(batches)
        return {"seconds": time.perf_counter() - started, "loss": loss}

    return handle


if __name__ == "__main__":
    serve(setup)
