"""The models that benchmarks train, and a strategy built as the engine builds it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.peers.bare import Recipe
from smolcluster.comm.group import Group
from smolcluster.config import load_config, resolve
from smolcluster.config.options import Options
from smolcluster.config.schema import Config
from smolcluster.parallel.placement import Node
from smolcluster.strategies.base import Context, Strategy
from smolcluster.strategies.registry import find_strategy, read_options
from smolcluster.tasks.base import Task


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT and the batch of one worker."""

    name: str
    model_dim: int
    num_layers: int
    num_heads: int
    max_seq_len: int
    batch_size: int
    vocab_size: int | None = None  # None: that of the bytes
    precision: str = "fp32"

    def overrides(self) -> dict[str, Any]:
        """Return it as configuration keys."""
        return {
            "model.model_dim": self.model_dim,
            "model.num_layers": self.num_layers,
            "model.num_heads": self.num_heads,
            "model.max_seq_len": self.max_seq_len,
            "model.vocab_size": self.vocab_size,
            "model.dropout": 0.0,
            "training.batch_size": self.batch_size,
            "training.precision": self.precision,
        }

    def arguments(self) -> list[str]:
        """Return the arguments of `peers/first_step.py` and `peers/elastic_ddp.py`."""
        return [str(n) for n in (self.model_dim, self.num_layers, self.num_heads, self.max_seq_len, self.batch_size)]


@dataclass(frozen=True, slots=True)
class Case:
    """A strategy with options."""

    name: str
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def overrides(self) -> dict[str, Any]:
        """Return the options as configuration keys."""
        return {f"strategy.{key}": value for key, value in self.options.items()}


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.8m", 128, 4, 4, 64, 16),
        Shape("10m", 384, 6, 6, 64, 4),
        Shape("124m", 768, 12, 12, 1024, 16, vocab_size=50257, precision="bf16"),
    )
}


def make_config(shape: Shape, *, steps: int, overrides: Mapping[str, Any]) -> Config:
    """A training run of this shape on the embedded text, with the defaults for everything else."""
    common = {"training.steps": steps, "training.checkpoint_steps": 0, "lr_schedule.warmup_iters": 10}
    return resolve(load_config([], overrides={**shape.overrides(), **common, **overrides}))


def make_strategy(config: Config, task: Task, *, group: Group, device: torch.device) -> Strategy[Options]:
    """Build the strategy of `config`, ready to step, with equal batches on all ranks."""
    training = config.training
    assert training.batch_size is not None
    assert training.steps is not None
    options, _ = read_options(config.strategy)
    strategy_class = find_strategy(config.strategy.name, options=options)
    nodes = [Node(name=f"rank{r}", batch_size=training.batch_size) for r in range(group.size)]
    seats = strategy_class.plan(options, nodes, None).checked().seats
    context = Context(
        config=config,
        seat=seats[group.rank],
        seats=seats,
        group=group,
        device=device,
        total_steps=training.steps,
        samples_per_step=[training.batch_size * training.grad_accumulation] * group.size,
        stop_requested=lambda: False,
        warn=lambda text: print(text, file=sys.stderr),
    )
    strategy = strategy_class(options, context)
    strategy.setup(task)
    return strategy


def recipe_of(config: Config) -> Recipe:
    """Return what a peer needs to do the same work."""
    training, schedule = config.training, config.lr_schedule
    assert training.steps is not None
    assert schedule.min_lr is not None
    assert training.grad_clip_norm is not None
    return Recipe(
        learning_rate=training.learning_rate,
        min_lr=schedule.min_lr,
        warmup=min(schedule.warmup_iters, training.steps // 2),
        steps=training.steps,
        weight_decay=training.weight_decay,
        betas=training.betas,
        clip=training.grad_clip_norm,
    )
