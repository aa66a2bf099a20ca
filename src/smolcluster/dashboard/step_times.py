"""Map times to steps of the run, for rows of workers with local step counts.

The server's rows give the time of each step. A row with an evaluation may be written after rows of later steps, so rows are
kept sorted by time. The step of a worker's row is interpolated between two of them, or extrapolated from the last two.

    server      50 ----- 55 ----- 60
    worker            ^ 53           ^ 62

The steps of one worker never decrease, unless the server resumes from an earlier step.
"""

from __future__ import annotations

import bisect

MAX_STEPS = 64


class StepTimes:
    def __init__(self) -> None:
        self._times: list[float] = []
        self._steps: list[int] = []
        self._drawn: dict[int, tuple[float, float]] = {}  # by rank: time and step of its latest row

    @property
    def known(self) -> bool:
        return bool(self._times)

    def add(self, time: float, step: int) -> None:
        """Add a row of the server."""
        if self._times and time > self._times[-1] and step < self._steps[-1]:  # resumed from an earlier step
            self._times, self._steps, self._drawn = [], [], {}
        index = bisect.bisect(self._times, time)
        self._times.insert(index, time)
        self._steps.insert(index, step)
        if len(self._times) > MAX_STEPS:
            del self._times[0], self._steps[0]

    def step_at(self, time: float, *, rank: int, last: int | None = None) -> float:
        """Return the step of the run, at most `last`, for a row of this rank."""
        step = self._between(time)
        if last is not None:
            step = min(step, float(last))
        last_time, last_step = self._drawn.get(rank, (time, step))
        if time >= last_time:
            step = max(step, last_step)
            self._drawn[rank] = (time, step)
        return step

    def _between(self, time: float) -> float:
        times, steps = self._times, self._steps
        index = bisect.bisect(times, time)
        if index == 0 or len(times) == 1:
            return float(steps[0])
        # After the last row: extrapolate at most to the next expected one.
        first = min(index, len(times) - 1) - 1
        (t0, t1), (s0, s1) = times[first : first + 2], steps[first : first + 2]
        share = (time - t0) / (t1 - t0) if t1 > t0 else 1.0
        return s0 + min(share, 2.0) * (s1 - s0)
