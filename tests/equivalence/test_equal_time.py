"""`inner_steps: auto`: machines of unlike speed take as many steps in a round as each has time for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tests.equivalence.test_diloco import assert_close, weights
from tests.faults.elastic_history import Lines, assert_sound, commits, lines_of
from tests.tasks import Double
from tests.world import ElasticWorld, run_elastic_world
from torch import Tensor

from smolcluster.compute.optim import warmup_cosine
from smolcluster.compute.rng import seed_everything
from smolcluster.data.sampler import Sampler

SEED, RATE, BATCH, STEPS = 5, 0.01, 2, 14
CONFIG: dict[str, Any] = {
    "training.steps": STEPS,
    "training.seed": SEED,
    "training.learning_rate": RATE,
    "training.weight_decay": 0.0,
    "training.grad_clip_norm": 0.0,
    "training.batch_size": BATCH,
    "lr_schedule.warmup_iters": 4,
    "training.eval_steps": 0,
    "training.checkpoint_steps": 6,
    "cluster.plane": "elastic",
    "strategy.inner_steps": "auto",
}


def train(run_dir: Path, sets: dict[str, Any] | None = None, *, workers: int = 2, **world: Any) -> ElasticWorld:
    return run_elastic_world(workers, run_dir, CONFIG | (sets or {}), strategy="diloco", task="Unlike", **world)


def steps_of(lines: Lines) -> list[dict[int, int]]:
    """The steps of each rank in each round."""
    return [{part["rank"]: part["samples"] // BATCH for part in line["contributors"]} for line in commits(lines)]


def simulated(rounds: list[tuple[int, list[int]]]) -> dict[str, Tensor]:
    """One model for each worker, in turn. `rounds`: the run's steps, and those of each worker."""
    task = Double(config=None)  # type: ignore[arg-type]
    seed_everything(SEED, "weights", device=torch.device("cpu"))
    theta = task.model()
    count, position, first = len(rounds[0][1]), 0, 0
    models = [copy.deepcopy(theta) for _ in range(count)]
    inner = [torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0) for model in models]
    outer = torch.optim.SGD(theta.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    x, y = task.train_data()
    sampler = Sampler(len(x), seed=SEED)
    rate_of = warmup_cosine(peak=RATE, floor=RATE / 10, warmup=4, steps=STEPS)
    for steps, own in rounds:
        for parameter in theta.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for model, optimizer, taken in zip(models, inner, own, strict=True):
            model.load_state_dict(theta.state_dict())
            for j in range(taken):
                passed = j * (steps - 1) // (taken - 1) if taken > 1 else steps - 1
                optimizer.param_groups[0]["lr"] = rate_of(first + passed)
                read = torch.from_numpy(sampler.indices(position, BATCH))
                position += BATCH
                optimizer.zero_grad()
                task.loss(model, (x[read], y[read])).backward()
                optimizer.step()
            for common, mine in zip(theta.parameters(), model.parameters(), strict=True):
                assert common.grad is not None
                common.grad += (common.detach() - mine.detach()) * taken / sum(own)
        outer.step()
        first += steps
    return dict(theta.state_dict())


def test_unequal_steps_are_those_of_a_loop(tmp_path: Path) -> None:
    """Each trains on samples of its own, at the learning rate of the run's step, and counts by its samples."""
    world = train(tmp_path, environ={"TIMES": "1,3"})
    assert_sound(world, steps=STEPS)
    expected = [(6, [12, 4]), (6, [12, 4]), (2, [4, 1])]  # the median is 2
    assert steps_of(lines_of(world)) == [dict(enumerate(own)) for _, own in expected]
    assert world.summary["samples"] == BATCH * sum(sum(own) for _, own in expected)
    assert_close(weights(world, STEPS), simulated(expected))
