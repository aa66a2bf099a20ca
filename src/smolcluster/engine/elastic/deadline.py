"""The compute deadline: how long a member may compute while others wait for it.

A worker whose training thread hangs still sends heartbeats, from the thread of its transport. So a worker that waits sends
WAITING from its training thread, once a second. A member that neither waits nor has delivered its result is computing; one that
computes past the deadline while another waits is considered hung and evicted.

The deadline adapts to the step times of the run: several times the median, more where they vary. It is generous, since an
eviction costs a state transfer. The first step of a member may take minutes: it compiles and fills caches.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence

LEAST_S = 30.0  # the shortest deadline
FIRST_S = 300.0  # for a member that has not contributed yet, and while too few steps are measured
MIN_STEPS = 8  # steps
MAX_STEPS = 64
WAITING_S = 1.0  # the interval of WAITING
FRESH_S = 5 * WAITING_S  # how long a WAITING is valid
POLL_S = 0.25  # between two checks
STOPPED_S = 1.0  # after a longer gap between two checks this process was stopped, and has unread messages


def step_deadline(times: Sequence[float]) -> float:
    """Return the seconds that a step may take, from the seconds that recent ones took."""
    if len(times) < MIN_STEPS:
        return FIRST_S
    ordered = sorted(times)
    median, slow = statistics.median(ordered), ordered[math.ceil(0.9 * len(ordered)) - 1]
    return max(LEAST_S, 4 * median, median + 10 * (slow - median))


class ComputeWatch:
    """Find members that hang. Members are identified by instance; the caller passes the time."""

    def __init__(self, timeout_s: float | None) -> None:
        """`timeout_s`: a fixed deadline instead of one that adapts."""
        self._timeout_s = timeout_s
        self._deadline_s = FIRST_S if timeout_s is None else timeout_s  # of a member that has contributed
        self._times: deque[float] = deque(maxlen=MAX_STEPS)
        self._began = self._checked = -math.inf
        self._since: dict[str, float] = {}  # computing since, or last seen waiting
        self._waited: dict[str, float] = {}  # the last WAITING
        self._proven: set[str] = set()  # members that have contributed to a step

    def begin(self, members: Iterable[str], *, now: float) -> None:
        """Start the clocks of the members of a view."""
        self._began = now
        self._since = dict.fromkeys(members, now)
        self._waited = {}
        self._proven &= self._since.keys()

    def commit(self, contributors: Collection[str], *, now: float) -> None:
        """Record the time of a step, and restart the clocks."""
        self._times.append(now - self._began)
        if self._timeout_s is None:
            self._deadline_s = step_deadline(self._times)
        self._proven |= self._since.keys() & contributors
        self.begin(list(self._since), now=now)

    @property
    def median_s(self) -> float:
        """The median step time; 0: unknown."""
        return statistics.median(self._times) if self._times else 0.0

    def waits(self, member: str, *, now: float) -> None:
        if member in self._since:
            self._since[member] = self._waited[member] = now

    def deadline(self, member: str) -> float:
        return self._deadline_s if member in self._proven else max(self._deadline_s, FIRST_S)

    def is_due(self, now: float) -> bool:
        """Return whether it is time for a check: not at every message."""
        return now - self._checked >= POLL_S

    def overdue(self, *, delivered: Collection[str], now: float) -> dict[str, float]:
        """Return the members that hang, and for how long. `delivered`: have sent their result of this step."""
        if not self.is_due(now):
            return {}
        passed_s, self._checked = now - self._checked, now
        if passed_s > POLL_S + STOPPED_S:
            self._since = {member: min(now, since + passed_s) for member, since in self._since.items()}
            return {}
        fresh = {member for member, when in self._waited.items() if now - when <= FRESH_S}
        if not fresh and not delivered:
            return {}  # no member waits
        busy = {member: now - since for member, since in self._since.items() if member not in delivered}
        return {member: busy_s for member, busy_s in busy.items() if busy_s > max(self.deadline(member), FRESH_S)}
