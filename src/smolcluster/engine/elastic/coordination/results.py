"""The results of a round, as its members report them in DONE: checks that they are well formed and agree, and their totals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smolcluster.comm.elastic.membership.roster import Member
from smolcluster.data.leases import Range
from smolcluster.errors import SmolclusterError

NORM_TOLERANCE = 1e-3  # relative: machines of different kinds round the same sum differently

Report = dict[str, Any]  # the fields of a DONE message


@dataclass(slots=True)
class RoundTotals:
    contributors: list[dict[str, Any]] = field(default_factory=list)
    loss: float = 0.0  # weighted
    weight: float = 0.0
    samples: int = 0

    def add(self, member: Member, step: int, ranges: Sequence[Range], report: Report) -> tuple[int, float]:
        """Add the contribution of a member; return its samples and its weight."""
        samples = sum(r.count for r in ranges)
        weight = float(report.get("weight", samples))
        self.loss += float(report["loss"]) * weight
        self.weight += weight
        self.samples += samples
        contributor = {"rank": member.rank, "instance": member.instance, "seq": step, "samples": samples}
        self.contributors.append(contributor | {"ranges": [list(r) for r in ranges]})
        return samples, weight


def is_well_formed(report: Report) -> bool:
    """Return whether a DONE message has all its numbers."""
    try:
        numbers = [float(report[name]) for name in ("mine", "held", "loss", "compute_s", "fixed_s")]
        return bool(numbers) and 0 <= float(report.get("weight", 0.0)) < 2**53
    except (KeyError, TypeError, ValueError):
        return False


def sum_norm(done: Mapping[int, Report], *, replicated: bool) -> float:
    """Return the norm of the complete sum: one number, so that all members clip by the same factor."""
    held = [float(done[rank]["held"]) for rank in sorted(done)]
    return held[0] if replicated else math.hypot(*held)


def find_difference(step: int, done: Mapping[int, Report], *, replicated: bool) -> str:
    """Return how the sums of the members differ, "" where they agree. Raises SmolclusterError where they overflowed."""
    sums = [float(report["held"]) for report in done.values()]
    finite = [math.isfinite(held) for held in sums]
    if not (any(finite) if replicated else all(finite)):
        # Each gradient is finite, else it would have been refused: a retry would overflow again.
        raise SmolclusterError(
            f"the gradients of step {step} are so large that their sum has overflowed; check the data, or lower "
            "training.learning_rate"
        )
    if not replicated or (all(finite) and max(sums) - min(sums) <= NORM_TOLERANCE * max(sums)):
        return ""
    return f"{min(sums):g} to {max(sums):g}"


def odd_one_out(done: Mapping[int, Report]) -> int | None:
    """Return the rank whose sum is furthest from the median; None with fewer than three members."""
    sums = {rank: float(report["held"]) for rank, report in done.items()}
    if len(sums) < 3:
        return None
    median = statistics.median(sums.values())
    return max(sums, key=lambda rank: math.inf if math.isnan(sums[rank] - median) else abs(sums[rank] - median))
