"""A worker's progress in a round of local steps, and its names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from smolcluster.comm.codecs.feedback import under

# Prefixes in `State.own`
WEIGHTS, MOMENTS, ROUND, LATE = "weights/", "optimizer/", "round/", "late/"
OUTER = "outer/"  # also in `State.shared`


@dataclass(slots=True)
class LocalRound:
    first: int  # updates before it
    samples: int = 0
    weight: float = 0.0
    loss: Tensor | float = 0.0  # the sum of weighted losses
    compute_s: float = 0.0
    counted: bool = False  # the task counts targets
    steps: int = 0
    since: float = 0.0  # the end of its first step, by time.perf_counter

    def state(self) -> dict[str, Tensor]:
        numbers = {"first": self.first, "samples": self.samples, "weight": self.weight, "loss": self.loss}
        return {f"{ROUND}{name}": torch.as_tensor(value, dtype=torch.float64) for name, value in numbers.items()}

    @classmethod
    def saved_in(cls, own: Mapping[str, Tensor]) -> LocalRound | None:
        """Return the round that was saved in the middle, if one was."""
        numbers = {name: float(tensor) for name, tensor in under(ROUND, own).items()}
        if not numbers:
            return None
        return cls(int(numbers["first"]), int(numbers["samples"]), numbers["weight"], numbers.get("loss", 0.0))
