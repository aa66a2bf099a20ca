"""Plan a run for several world sizes with the same samples per step.

A run that loses workers keeps its loss curve: the remaining workers read the samples of the lost ones. They take more
micro-steps, so that none needs more memory than before; if the samples cannot be divided evenly, larger micro-batches.

The launcher imports no torch. It runs `python -m smolcluster.planner.world_sizes`, which reads a configuration and the sizes as
a line of JSON and writes a plan for each size.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from smolcluster.config.schema import Config
from smolcluster.engine.checks import batch_size_of
from smolcluster.errors import UserError
from smolcluster.parallel.placement import Node, Placement, Shape
from smolcluster.strategies.registry import find_strategy, read_options
from smolcluster.tasks.find import find_task

log = logging.getLogger(__name__)


def plans(config: Config, sizes: Iterable[int]) -> dict[int, Config | UserError]:
    """Return the configuration for each size, or why it cannot run. The largest possible one sets the samples per step."""
    sizes = sorted(sizes)
    model = _model(config)
    largest = _largest(config, sizes, model)
    found: dict[int, Config | UserError] = {}
    for size in sizes:
        try:
            found[size] = _fit(_with_workers(largest, size), size, model)
        except UserError as error:
            found[size] = error
    return found


def _largest(config: Config, sizes: list[int], model: nn.Module | None) -> Config:
    """Return the configuration for the largest size that can run. If none can, raise the error of the largest."""
    reasons: list[UserError] = []
    for size in reversed(sizes):
        fitted = config.model_copy(deep=True)
        fitted.cluster.num_workers = size
        try:
            return _fit(fitted, size, model)
        except UserError as error:
            reasons.append(error)
    raise reasons[0]


def _fit(config: Config, size: int, model: nn.Module | None) -> Config:
    """Return the configuration if it can run on this number of workers; else raise UserError."""
    nodes = [Node(name=f"worker-{r}", batch_size=batch_size_of(config, r)) for r in range(size)]
    place(config, nodes, None if model is None else Shape.of(model, config.training))
    return config


def _model(config: Config) -> nn.Module | None:
    """Return the model on the meta device; None if that fails: the workers will report the reason."""
    try:
        with torch.device("meta"):
            return find_task(config).model()
    except Exception as error:  # noqa: BLE001 - code of the user
        log.debug("the model cannot be built on the meta device: %s: %s", type(error).__name__, error)
        return None


def place(config: Config, nodes: Sequence[Node], shape: Shape | None = None, *, plane: str | None = None) -> Placement:
    """Return the placement of ranks on these nodes. Raises UserError if the strategy cannot run on them."""
    options, _ = read_options(config.strategy, plane=plane)
    strategy = find_strategy(config.strategy.name, plane, options)
    return strategy.plan(options, nodes, shape).checked()


def _with_workers(config: Config, size: int) -> Config:
    """Return a copy in which `size` workers read the same samples per step as cluster.num_workers did."""
    if config.cluster.batch_size:
        return config  # batch sizes per host stay
    training = config.training
    batch_size = training.batch_size or 1
    node = Node(name="", batch_size=batch_size)
    before, now = (place(config, [node] * count) for count in (config.cluster.num_workers or size, size))
    samples = before.num_shards * batch_size * training.grad_accumulation
    micro_steps, sizes = share(samples, now.num_shards, at_most=batch_size)
    fitted = config.model_copy(deep=True)
    fitted.training.grad_accumulation = micro_steps
    if set(sizes) != {batch_size}:  # training.batch_size itself stays: it also sets the batches of an evaluation
        names = [f"worker-{seat.rank}" for seat in now.seats]
        fitted.cluster.workers = names
        fitted.cluster.batch_size = {name: sizes[s.shard or 0] for name, s in zip(names, now.seats, strict=True)}
    return fitted


def share(samples: int, shards: int, *, at_most: int) -> tuple[int, list[int]]:
    """Return the fewest micro-steps with at most `at_most` samples per shard, and the samples of each shard in one."""
    possible = [n for n in range(1, samples + 1) if samples % n == 0 and samples // n >= shards]
    if not possible:
        raise UserError(f"{shards} workers cannot share {samples} samples; use a larger training.batch_size")
    micro_steps = next((n for n in possible if -(-samples // n // shards) <= at_most), possible[-1])
    each, rest = divmod(samples // micro_steps, shards)
    return micro_steps, [each + (shard < rest) for shard in range(shards)]


def describe(config: Config, sizes: Iterable[int]) -> str:
    """Return a line for each size, for `train --dry-run`."""
    lines = []
    for size, plan in plans(config, sizes).items():
        if isinstance(plan, UserError):
            lines.append(f"# {size} workers cannot run this: {plan}")
            continue
        each = ", ".join(str(batch_size_of(plan, rank)) for rank in range(size))
        lines.append(f"# {size} workers: {plan.training.grad_accumulation} micro-steps, of {each} samples")
    return "\n".join(lines)


def main() -> None:
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    config = Config.model_validate(request["config"])
    try:
        found = plans(config, request["sizes"])
    except UserError as error:
        print(json.dumps({"error": str(error)}))
        return
    response = {
        size: {"error": str(plan)} if isinstance(plan, UserError) else {"config": plan.model_dump(mode="json")}
        for size, plan in found.items()
    }
    print(json.dumps({"plans": response}))


if __name__ == "__main__":
    main()
