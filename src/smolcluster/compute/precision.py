"""Mixed precision: autocast, and the loss scale of fp16.

Weights, gradients and optimizer state stay fp32. bf16 has fp32's range and needs no scale. fp16 underflows, so the loss is
multiplied by a scale before backward, and gradients are divided by it after. Each gradient is sent with its scale, which may
have changed when a delayed gradient is applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


GROWTH_INTERVAL = 2000  # steps without an overflow before the scale is doubled
MAX_OVERFLOWS_OF_MEMBER = 4  # in a row, with steps of others between them; further ones do not lower the scale
MAX_SCALE = 2.0**24  # a model whose gradients are all zero must not drive the scale to infinity


@dataclass(slots=True)
class LossScale:
    """Doubles after `growth_interval` good steps, halves after an overflow. Powers of two only, so scaling is exact.

    Ranks on the mesh plane see the same norm and so have the same scale. On the elastic plane the server or coordinator
    sends the scale of the run to the members (`AgreedScale`).
    """

    value: float = 2.0**16
    good_steps: int = 0
    growth_interval: int = field(default_factory=lambda: GROWTH_INTERVAL)

    def update(self, *, overflow: bool, used: float | None = None) -> bool:
        """Count one step; return whether the scale was lowered.

        `used`: the scale that the gradient was computed with, if it may differ from the present one. All gradients that
        overflowed with one scale lower it once.
        """
        if overflow:
            before, used = self.value, self.value if used is None else used
            self.value, self.good_steps = max(min(self.value, used / 2), 1.0), 0
            return self.value < before
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value, self.good_steps = min(self.value * 2, max(self.value, MAX_SCALE)), 0
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


@dataclass(slots=True)
class AgreedScale(LossScale):
    """The scale of a run on the elastic plane: the server or coordinator updates it, members use the value that it sends.

    An overflow on one member lowers the scale of all. After `MAX_OVERFLOWS_OF_MEMBER` overflows in a row, while others
    contribute, the scale is not the cause, and a member no longer lowers it.
    """

    commits: int = 0
    # Instance -> overflows in a row, and `commits` at the last.
    overflows: dict[str, tuple[int, int]] = field(default_factory=dict)

    def overflowed(self, instance: str, used: Any) -> bool:
        """Count a non-finite gradient of a member; `used`: its scale. Return whether the scale is the cause."""
        if not isinstance(used, int | float) or not used > 1.0:
            return False  # it was computed without a scale
        count, last = self.overflows.get(instance, (0, -1))
        count += last != self.commits  # attempts at one step count once
        self.overflows[instance] = count, self.commits
        if count > MAX_OVERFLOWS_OF_MEMBER:
            return False
        self.update(overflow=True, used=max(used, self.value / 2))
        return self.value < used

    def committed(self, contributors: Iterable[str]) -> None:
        """Count a committed step with gradients of these members."""
        self.update(overflow=False)
        self.commits += 1
        for instance in contributors:
            self.overflows.pop(instance, None)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context for forward."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])
