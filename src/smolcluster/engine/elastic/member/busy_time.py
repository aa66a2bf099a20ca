"""How long a worker's CPU is busy in a step besides computing: it sends, receives, encrypts and applies.

On a machine with a slow CPU that takes long too, and the others wait for it, so a division of samples by speed must count it.
Wall-clock time would include waiting for others. CPU time alone is too short where the process has only a part of a core, so it
is scaled by what a second of CPU time takes while computing. With several computing threads that gives a lower bound. Computing
on another device says nothing about the CPU: then CPU time counts as it is.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

MOST_STEPS = 5  # whose median counts: a step with an evaluation or a checkpoint is an exception


class BusyTime:
    def __init__(self, *, computes_on_cpu: bool) -> None:
        self._computes_on_cpu = computes_on_cpu
        self._cpu_s = time.process_time()  # at the end of the last step
        self._compute_s = self._compute_cpu_s = 0.0  # of this step
        self._besides: deque[float] = deque(maxlen=MOST_STEPS)

    @contextmanager
    def computing(self) -> Iterator[None]:
        started, cpu_s = time.perf_counter(), time.process_time()
        yield
        self._compute_s += time.perf_counter() - started
        self._compute_cpu_s += time.process_time() - cpu_s

    def end_step(self) -> float:
        """Return the seconds of a step besides computing: the median of the last steps; 0 while none is known."""
        now = time.process_time()
        if self._compute_cpu_s > 0:
            besides_s = max(0.0, now - self._cpu_s - self._compute_cpu_s)
            scale = self._compute_s / self._compute_cpu_s if self._computes_on_cpu else 1.0
            self._besides.append(besides_s * scale)
        self._cpu_s, self._compute_s, self._compute_cpu_s = now, 0.0, 0.0
        return statistics.median(self._besides) if self._besides else 0.0
