"""How long a run is. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smolcluster.config.schema import TrainingConfig


def last_step(training: TrainingConfig, *, samples: int, batch: int, step: int = 0, read: int = 0) -> int:
    """Return the last step of a run, where each step reads `batch` of the `samples`.

    A resumed run has done `step` steps and `read` samples, perhaps with another batch size: `training.epochs` counts samples,
    so only the samples that are left are counted in steps of the current size.
    """
    if training.steps is not None:
        return training.steps
    left = (training.epochs or 1) * samples - read
    return step + max(0, -(-left // batch))


def more_of(training: TrainingConfig) -> str:
    """Return which setting to raise to train further."""
    return "raise training.steps (--steps)" if training.steps is not None else "raise training.epochs"


def samples_read(sampler: Mapping[str, Any] | None, *, with_holes: bool) -> int:
    """Return the samples read, by a sampler's state; None for an imported model. `with_holes`: skipped ones count as read."""
    if sampler is None:
        return 0
    holes = 0 if with_holes else sum(int(count) for _, count in sampler.get("holes", []))
    return int(sampler["position"]) - holes
