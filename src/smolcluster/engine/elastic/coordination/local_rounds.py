"""The terms of rounds with local steps: how many steps each member takes, until when, and how far it may go.

Every worker reports its time per step and the norm of its pseudo-gradient. With `equal_time` the member of median speed takes
the run's steps of a round, and each other one as many as take as long; one whose speed is not known takes the run's, too. All
end by a deadline, a little later than the median member needs, with the steps that are done then: the samples of the rest are
leased again. The first round has no deadline, since no time is known.

With equal steps or not, a pseudo-gradient far above the usual is clipped by its sender (`UsualNorm`).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from smolcluster.comm.elastic.membership.roster import Member, Roster
from smolcluster.data.leases import Leases, Range
from smolcluster.engine.elastic.balance import steps_in_time
from smolcluster.engine.elastic.gradient_gate import UsualNorm
from smolcluster.engine.elastic.server_side import LEAST_S, MOST_S, is_logged

SLACK = 1.5  # times the usual time of a round, until the deadline
KEPT = 3  # rounds whose times count
MOST_STEPS = 2**31  # of a member in a round


@dataclass(frozen=True, slots=True)
class LocalReport:
    """What a member reports of its steps in a round."""

    steps: int
    step_s: float
    norm: float  # of its pseudo-gradient, before it was clipped
    usual: float | None  # the norm that it was clipped to

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> LocalReport | None:
        """Parse the report in a DONE message; None for a strategy without local steps. Raises ValueError."""
        said = report.get("local")
        if said is None:
            return None
        try:
            usual = said.get("usual")
            numbers = int(said["steps"]), float(said["step_s"]), float(said["norm"])
            found = cls(*numbers, None if usual is None else float(usual))
        except (AttributeError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from error
        if (
            not 1 <= found.steps < MOST_STEPS
            or not found.step_s >= 0
            or (found.usual is not None and not found.usual > 0)
        ):
            raise ValueError(str(found))
        return found


class LocalRounds:
    def __init__(self, *, equal_time: bool, clipped: Counter[str], warn: Callable[[str], None]) -> None:
        """`equal_time`: members take as many steps as each has time for. `clipped`: counts by member."""
        self._equal_time, self._clipped, self._warn = equal_time, clipped, warn
        self._step_s: dict[str, deque[float]] = {}  # by instance, of the last rounds
        self._usual: tuple[int, float | None] | None = None  # an epoch, and the median time of a step in it
        self._norms = UsualNorm()

    def terms(self, member: Member, roster: Roster, *, steps: int) -> tuple[int, dict[str, Any]]:
        """Return how many steps the member takes in a round of `steps` steps of the run, and the limits for its lease."""
        said: dict[str, Any] = {}
        own_steps = steps
        if self._equal_time and (usual_s := self._usual_time(roster)) is not None:
            own_s = self._time_of(member)
            if own_s is not None:
                own_steps = steps_in_time(steps, usual_s=usual_s, own_s=own_s)
            said = {"own_steps": own_steps, "most_s": SLACK * steps * usual_s}
        if (bounds := self._norms.bounds(own_steps)) is not None:
            said["clip"] = bounds
        return own_steps, said

    def _usual_time(self, roster: Roster) -> float | None:
        """Return the median time of a step, computed once per epoch; None for a single member, or where no time is known."""
        if self._usual is None or self._usual[0] != roster.epoch:
            known = [s for member in roster.in_order() if (s := self._time_of(member)) is not None]
            several = len(roster.members) > 1
            self._usual = roster.epoch, statistics.median(known) if known and several else None
        return self._usual[1]

    def _time_of(self, member: Member) -> float | None:
        """Return a member's time per step; one that comes back to a restarted coordinator has reported it in its JOIN."""
        if times := self._step_s.get(member.instance):
            return statistics.median(times)
        try:
            before = LocalReport.of(member.said)
        except ValueError:
            return None
        return before.step_s if before is not None and LEAST_S < before.step_s < MOST_S else None

    def objection(self, member: Member, step: int, report: Mapping[str, Any], leases: Leases) -> str | None:
        """Return why a report is not acceptable, or None. Samples that the member has not read go back to the leases."""
        held: list[Range] = leases.held(member.instance).get(step, [])
        leased, read = sum(part.count for part in held), report.get("samples")
        try:
            LocalReport.of(report)
        except ValueError:
            return "its DONE message is malformed"
        if not held or read is None or read == leased:
            return None
        if type(read) is not int or not 0 <= read < leased:
            return f"it reports {read!r:.40} samples in step {step}, and {leased} are leased to it"
        if read:
            leases.shorten(member.instance, step, read)
        else:  # it entered this view without a state
            leases.give_back(member.instance, step)
        return None

    def committed(self, reports: Iterable[tuple[Member, Mapping[str, Any]]], *, step: int) -> None:
        """Take the reports of the members that contributed to a round."""
        self._usual = None
        found = [(member, local) for member, report in reports if (local := LocalReport.of(report)) is not None]
        for member, local in found:
            if LEAST_S < local.step_s < MOST_S:
                self._step_s.setdefault(member.instance, deque(maxlen=KEPT)).append(local.step_s)
            if local.usual is not None:
                self._count(member, step, norm=local.norm, usual=local.usual)
        norms = [(local.norm, local.steps) for _, local in found if math.isfinite(local.norm)]
        if norms:
            self._norms.committed(norms)

    def _count(self, member: Member, step: int, *, norm: float, usual: float) -> None:
        self._clipped[member.name] += 1
        if is_logged(self._clipped[member.name]):
            self._warn(
                f"the pseudo-gradient of {member.name} for step {step} is clipped: its norm is {norm:.3g}, "
                f"{norm / usual:.3g} times the usual {usual:.3g}"
            )
