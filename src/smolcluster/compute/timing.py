"""How long something took where it ran: on the host's clock, or on the GPU's own."""

from __future__ import annotations

import time

import torch


class Span:
    """A stretch of time. On a GPU it is marked in the stream and read later, so that measuring does not make it wait."""

    __slots__ = ("_device", "_from", "_to")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._from = self._now()
        self._to = self._from

    def end(self) -> Span:
        self._to = self._now()
        return self

    def seconds(self) -> float:
        """On a GPU this waits until the end of the span has run."""
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
