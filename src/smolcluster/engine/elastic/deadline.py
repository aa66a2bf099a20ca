"""How long a member may compute while others wait for it.

A worker whose computing hangs still sends heartbeats: its transport has a thread of its own. So workers that wait report it
from the thread that trains (WAITING), once a second. A member that neither waits nor has delivered its result is computing;
if it does so for longer than the deadline while another one waits, it has hung, and the step goes on without it.

The deadline follows the steps of the run: several times a usual step, and more where their times are spread. It is generous,
since an eviction costs a state transfer. The first step of a member may take minutes: it compiles, or fills caches.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence

LEAST_S = 30.0  # however short steps are
FIRST_S = 300.0  # for a member that has not contributed yet, and while too few steps are measured
ENOUGH = 8  # steps
KEPT = 64  # steps
WAITING_S = 1.0  # a worker reports that it waits once in this time
FRESH_S = 5 * WAITING_S  # a report is believed for so long
LOOK_S = 0.25
STOOD_STILL_S = 1.0  # between two looks: this process was busy or stopped, and has not read what came


def step_deadline(times: Sequence[float]) -> float:
    """Return the seconds that a step may take, from the seconds that recent ones took."""
    if len(times) < ENOUGH:
        return FIRST_S
    ordered = sorted(times)
    usual, slow = statistics.median(ordered), ordered[math.ceil(0.9 * len(ordered)) - 1]
    return max(LEAST_S, 4 * usual, usual + 10 * (slow - usual))


class ComputeWatch:
    """Finds members that have hung. Members are known by their instance; the caller passes the time."""

    def __init__(self, timeout_s: float | None) -> None:
        """`timeout_s`: a fixed deadline instead of one that adapts."""
        self._timeout_s = timeout_s
        self._deadline_s = FIRST_S if timeout_s is None else timeout_s  # of a member that has contributed
        self._times: deque[float] = deque(maxlen=KEPT)
        self._began = self._looked = -math.inf
        self._since: dict[str, float] = {}  # it computes since then, or has been seen to wait
        self._waited: dict[str, float] = {}  # when it last reported that it waits
        self._proven: set[str] = set()  # have contributed to a step

    def begin(self, members: Iterable[str], *, now: float) -> None:
        """A view begins: its members may all compute."""
        self._began = now
        self._since = dict.fromkeys(members, now)
        self._waited = {}
        self._proven &= self._since.keys()

    def commit(self, contributors: Collection[str], *, now: float) -> None:
        """A step is committed, and the members compute the next."""
        self._times.append(now - self._began)
        if self._timeout_s is None:
            self._deadline_s = step_deadline(self._times)
        self._proven |= self._since.keys() & contributors
        self.begin(list(self._since), now=now)

    @property
    def usual_s(self) -> float:
        """What a step usually takes; 0: not known."""
        return statistics.median(self._times) if self._times else 0.0

    def waits(self, member: str, *, now: float) -> None:
        if member in self._since:
            self._since[member] = self._waited[member] = now

    def deadline(self, member: str) -> float:
        return self._deadline_s if member in self._proven else max(self._deadline_s, FIRST_S)

    def is_due(self, now: float) -> bool:
        """Return whether it is time to look: not at every message."""
        return now - self._looked >= LOOK_S

    def overdue(self, *, delivered: Collection[str], now: float) -> dict[str, float]:
        """Return the members that have hung, and for how long. `delivered`: have sent their result of this step."""
        if not self.is_due(now):
            return {}
        passed_s, self._looked = now - self._looked, now
        if passed_s > LOOK_S + STOOD_STILL_S:
            self._since = {member: min(now, since + passed_s) for member, since in self._since.items()}
            return {}
        fresh = {member for member, when in self._waited.items() if now - when <= FRESH_S}
        if not fresh and not delivered:
            return {}  # nobody waits for anybody
        busy = {member: now - since for member, since in self._since.items() if member not in delivered}
        return {member: busy_s for member, busy_s in busy.items() if busy_s > max(self.deadline(member), FRESH_S)}
