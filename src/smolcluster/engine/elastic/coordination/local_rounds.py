"""The terms of rounds with local steps: how many steps each member takes, its deadline, and the bound for its norm.

Every worker reports its time per step and the norm of its pseudo-gradient. With `equal_time` the member of median speed takes
the run's steps of a round, and each other one the number that takes equally long; one of unknown speed takes the run's. All
end by a deadline, a little later than the median member needs, with the steps done by then: the samples of the others are
leased again. The first round has no deadline, since no time is known.

With equal steps or not, a pseudo-gradient far above the median is clipped to it by its sender (`MedianNorm`).
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
from smolcluster.engine.elastic.gradient_gate import MedianNorm
from smolcluster.engine.elastic.server_side import LEAST_S, MOST_S, is_logged

DEADLINE_FACTOR = 1.5  # the deadline of a round, in median times of a round
MAX_ROUNDS = 3  # whose times count
MOST_STEPS = 2**31  # of a member in a round


@dataclass(frozen=True, slots=True)
class LocalReport:
    """What a member reports of its steps in a round."""

    steps: int
    step_s: float
    norm: float  # of its pseudo-gradient, before it was clipped
    clipped_to: float | None  # the norm that it was clipped to

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> LocalReport | None:
        """Parse the report in a DONE message; None for a strategy without local steps. Raises ValueError."""
        local = report.get("local")
        if local is None:
            return None
        try:
            clipped_to = local.get("usual")
            numbers = int(local["steps"]), float(local["step_s"]), float(local["norm"])
            found = cls(*numbers, None if clipped_to is None else float(clipped_to))
        except (AttributeError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from error
        if (
            not 1 <= found.steps < MOST_STEPS
            or not found.step_s >= 0
            or (found.clipped_to is not None and not found.clipped_to > 0)
        ):
            raise ValueError(str(found))
        return found


class LocalRounds:
    def __init__(self, *, equal_time: bool, clipped: Counter[str], warn: Callable[[str], None]) -> None:
        """`equal_time`: each member takes as many steps as it has time for. `clipped`: counts by member."""
        self._equal_time, self._clipped, self._warn = equal_time, clipped, warn
        self._step_s: dict[str, deque[float]] = {}  # by instance, of the last rounds
        self._median: tuple[int, float | None] | None = None  # an epoch, and the median time of a step in it
        self._norms = MedianNorm()

    def terms(self, member: Member, roster: Roster, *, steps: int) -> tuple[int, dict[str, Any]]:
        """Return the steps that the member takes in a round of `steps` steps of the run, and the limits for its lease."""
        limits: dict[str, Any] = {}
        own_steps = steps
        if self._equal_time and (median_s := self._median_step_s(roster)) is not None:
            own_s = self._time_of(member)
            if own_s is not None:
                own_steps = steps_in_time(steps, median_s=median_s, own_s=own_s)
            limits = {"own_steps": own_steps, "most_s": DEADLINE_FACTOR * steps * median_s}
        if (bounds := self._norms.bounds(own_steps)) is not None:
            limits["clip"] = bounds
        return own_steps, limits

    def _median_step_s(self, roster: Roster) -> float | None:
        """Return the median time of a step, computed once per epoch; None for a single member, or while no time is known."""
        if self._median is None or self._median[0] != roster.epoch:
            known = [s for member in roster.in_order() if (s := self._time_of(member)) is not None]
            several = len(roster.members) > 1
            self._median = roster.epoch, statistics.median(known) if known and several else None
        return self._median[1]

    def _time_of(self, member: Member) -> float | None:
        """Return a member's time per step; one that rejoins a restarted coordinator reports it in its JOIN."""
        if times := self._step_s.get(member.instance):
            return statistics.median(times)
        try:
            before = LocalReport.of(member.said)
        except ValueError:
            return None
        return before.step_s if before is not None and LEAST_S < before.step_s < MOST_S else None

    def check_report(self, member: Member, step: int, report: Mapping[str, Any], leases: Leases) -> str | None:
        """Return an error for an invalid report, or None. Samples that the member has not read are leased again."""
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
            leases.release(member.instance, step)
        return None

    def committed(self, reports: Iterable[tuple[Member, Mapping[str, Any]]], *, step: int) -> None:
        """Record the reports of the members that contributed to a round."""
        self._median = None
        found = [(member, local) for member, report in reports if (local := LocalReport.of(report)) is not None]
        for member, local in found:
            if LEAST_S < local.step_s < MOST_S:
                self._step_s.setdefault(member.instance, deque(maxlen=MAX_ROUNDS)).append(local.step_s)
            if local.clipped_to is not None:
                self._count_clipped(member, step, norm=local.norm, median=local.clipped_to)
        norms = [(local.norm, local.steps) for _, local in found if math.isfinite(local.norm)]
        if norms:
            self._norms.committed(norms)

    def _count_clipped(self, member: Member, step: int, *, norm: float, median: float) -> None:
        self._clipped[member.name] += 1
        if is_logged(self._clipped[member.name]):
            self._warn(
                f"the pseudo-gradient of {member.name} for step {step} is clipped: its norm is {norm:.3g}, "
                f"{norm / median:.3g} times the median {median:.3g}"
            )
