"""Mixed precision: the type of forward and backward, and the loss scale that fp16 needs.

Weights, gradients and optimizer state stay fp32. bf16 has fp32's range and needs no scale. fp16 underflows, so the loss is
multiplied by a scale before backward and gradients divided by it after. The scale of a gradient travels with it, since with
delayed gradients it may have changed by the time the gradient is applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


GROWTH_INTERVAL = 2000  # steps without an overflow before the scale is doubled
PATIENCE = 4  # overflows of one member in a row, with steps of others between them, that lower the scale
MOST = 2.0**24  # a model whose gradients are all zero must not drive the scale to infinity


@dataclass(slots=True)
class LossScale:
    """Doubles after `growth_interval` good steps, halves after an overflow. Powers of two only, so scaling is exact.

    Ranks on the mesh plane judge the same norm and so hold the same scale. On the elastic plane the server or coordinator
    holds the scale of the run and sends it to the members (`AgreedScale`).
    """

    value: float = 2.0**16
    good_steps: int = 0
    growth_interval: int = field(default_factory=lambda: GROWTH_INTERVAL)

    def update(self, *, overflow: bool, used: float | None = None) -> bool:
        """Count one step; return whether the scale was lowered.

        `used` is the scale that the gradient was computed with, where that may differ from the present one. Gradients that
        overflowed under one scale lower it once, however many there are.
        """
        if overflow:
            before, used = self.value, self.value if used is None else used
            self.value, self.good_steps = max(min(self.value, used / 2), 1.0), 0
            return self.value < before
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value, self.good_steps = min(self.value * 2, max(self.value, MOST)), 0
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


@dataclass(slots=True)
class AgreedScale(LossScale):
    """The scale of a run whose members come and go. The server or coordinator applies the rule; members use what it sends.

    An overflow on one member lowers the scale of all. A member whose gradients stay non-finite while those of others count
    has another problem than the scale: after `PATIENCE` overflows in a row it lowers the scale no further.
    """

    commits: int = 0
    # Instance -> how many in a row, and when the last.
    overflows: dict[str, tuple[int, int]] = field(default_factory=dict)

    def overflowed(self, instance: str, used: Any) -> bool:
        """A member's gradient is not finite; `used` is the scale it reports. Returns whether the scale is the cause."""
        if not isinstance(used, int | float) or not used > 1.0:
            return False  # computed without a scale: the scale is not the cause
        count, last = self.overflows.get(instance, (0, -1))
        count += last != self.commits  # tries of one step count once: nobody else's gradient has counted between them
        self.overflows[instance] = count, self.commits
        if count > PATIENCE:
            return False
        self.update(overflow=True, used=max(used, self.value / 2))
        return self.value < used

    def committed(self, contributors: Iterable[str]) -> None:
        """A step counts, with gradients of these members."""
        self.update(overflow=False)
        self.commits += 1
        for instance in contributors:
            self.overflows.pop(instance, None)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context that forward runs in."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])
