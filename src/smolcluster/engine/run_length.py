"""How long a run is. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smolcluster.config.schema import TrainingConfig


def last_step(training: TrainingConfig, *, samples: int, batch: int, step: int = 0, read: int = 0) -> int:
    """The step that a run ends with, where each reads `batch` of the `samples` there are.

    A run that goes on has done `step` steps and `read` so many samples, perhaps with another batch: `training.epochs` is about
    what is read, so only what is left of it is counted in steps of now.
    """
    if training.steps is not None:
        return training.steps
    left = (training.epochs or 1) * samples - read
    return step + max(0, -(-left // batch))


def more_of(training: TrainingConfig) -> str:
    """What to raise, for a run that is to go further."""
    return "raise training.steps (--steps)" if training.steps is not None else "raise training.epochs"


def samples_read(sampler: Mapping[str, Any] | None, *, with_holes: bool) -> int:
    """By the state of a sampler in a checkpoint; an imported model has none. `with_holes`: what was left out counts as read."""
    if sampler is None:
        return 0
    holes = 0 if with_holes else sum(int(count) for _, count in sampler.get("holes", []))
    return int(sampler["position"]) - holes
