"""Time spans and flags of a device, without synchronizing it."""

from __future__ import annotations

import time

import torch
from torch import Tensor


class Span:
    """A time span. On a GPU it is recorded as events and read later, without synchronizing."""

    __slots__ = ("_device", "_from", "_to")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._from = self._now()
        self._to = self._from

    def end(self) -> Span:
        self._to = self._now()
        return self

    def seconds(self) -> float:
        """Return the seconds. On a GPU waits for the end event."""
        if isinstance(self._from, float) or isinstance(self._to, float):
            return float(self._to) - float(self._from)  # type: ignore[arg-type]
        self._to.synchronize()
        return float(self._from.elapsed_time(self._to)) / 1000

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class DelayedFlag:
    """Read a flag from the device without synchronizing: at once on a CPU, one step later on a GPU; the same on every rank."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = torch.zeros(1, pin_memory=True) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def read(self, value: Tensor) -> bool:
        if self._pinned is None:
            return bool(value.item())
        earlier = False
        if self._copied is not None:
            self._copied.synchronize()
            earlier = bool(self._pinned.item())
        self._pinned.copy_(value, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()
        return earlier
