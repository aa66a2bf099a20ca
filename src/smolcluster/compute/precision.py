"""Mixed precision: the type of forward and backward, and the loss scale that fp16 needs.

Weights, gradients and optimizer state stay fp32. bf16 has fp32's range and needs no scale. fp16 underflows, so the loss is
multiplied by a scale before backward and gradients divided by it after. The scale of a gradient travels with it, since with
delayed gradients it may have changed by the time the gradient is applied.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class LossScale:
    """Doubles after `growth_interval` good steps, halves after an overflow. Powers of two only, so scaling is exact."""

    value: float = 2.0**16
    good_steps: int = 0
    growth_interval: int = 2000

    def update(self, *, overflow: bool) -> None:
        if overflow:
            self.value, self.good_steps = max(self.value / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context that forward runs in."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])
