"""The gradient gate: accept finite gradients whose norm is similar to earlier ones.

One broken machine must not spoil the model of all. A gradient whose norm is not finite, or thousands of times the usual, is
refused, reported to its sender and counted. After several such large gradients in a row they are accepted as the usual:
training has changed, not a machine.

When no gradient of a step counts TRIES times in a row, the run ends with the reason.

Contributions of local steps are clipped before that: see `UsualNorm`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from smolcluster.errors import SmolclusterError

HISTORY = 64
ENOUGH = 5
FACTOR = 1000.0  # norms above so many times the median of the accepted ones are refused
STUBBORN = 8  # refusals in a row before large norms are accepted
TRIES = 20  # attempts in a row at a step of which no gradient counted
PATIENCE = 5  # refusals of one member in a row, while gradients of others count: it is the cause, not its samples
FIRST_ROUNDS = 4  # are not clipped


class GradientGate:
    def __init__(self) -> None:
        self._accepted: deque[float] = deque(maxlen=HISTORY)
        self._refused = 0  # in a row
        self._failed = 0  # attempts in a row of which nothing counted
        self.last_refusal = ""  # the last refusal since a gradient was accepted
        self._num_accepted = 0
        # Instance -> its refusals in a row, and `_num_accepted` at the last.
        self._members: dict[str, tuple[int, int]] = {}

    def objection(self, norm: float) -> str | None:
        """Return why a gradient of this norm is refused, or None."""
        if not math.isfinite(norm):
            return f"its norm is {norm}"
        if len(self._accepted) >= ENOUGH:
            usual = statistics.median(self._accepted)
            if norm > FACTOR * max(usual, 1e-12):
                self._refused += 1
                if self._refused > STUBBORN:
                    self._accepted.clear()
                    return None
                return f"its norm is {norm:.3g}, {norm / max(usual, 1e-12):.3g} times the usual {usual:.3g}"
        return None

    def refused(self, instance: str) -> bool:
        """Count a refused gradient of this member. Return whether the member is the cause, and others may read its samples."""
        count, last = self._members.get(instance, (0, -1))
        others_count = last not in (-1, self._num_accepted)
        count += others_count
        self._members[instance] = count, self._num_accepted
        return others_count and count >= PATIENCE

    def nothing_counted(self, step: int) -> None:
        """Count an attempt at this step in which no gradient counted. Raises after TRIES in a row."""
        self._failed += 1
        if self._failed > TRIES:
            why = f" ({self.last_refusal})" if self.last_refusal else ""
            raise SmolclusterError(
                f"no gradient of step {step} was valid, {TRIES} times in a row{why}; "
                "check the data, or lower training.learning_rate"
            )

    def start_over(self) -> None:
        """Reset the failed attempts, after the loss scale was lowered."""
        self._failed = 0

    def accept(self, norm: float, *, instance: str = "") -> None:
        """Count an accepted norm. `instance`: the member that sent it."""
        self._refused = self._failed = 0
        self._num_accepted += 1
        self._members.pop(instance, None)
        self.last_refusal = ""
        self._accepted.append(norm)


class UsualNorm:
    """The usual norm of a pseudo-gradient, and the bound beyond which one is clipped to the usual norm.

        usual  <- the median over recent rounds and all members       MAD <- the median of |norm - usual|
        bound  <- the larger of 6 usual and usual + 10 MAD

    Members take unlike numbers of steps, so norms are compared per square root of steps: that is how far a random walk gets;
    16 times as many steps in one direction get 4 times as far, still below the bound. Norms beyond the bound are remembered as
    the bound: a minority of outliers does not move the median, and when the norms of most members have grown it follows.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=HISTORY)
        self._rounds = 0

    def bounds(self, steps: int) -> tuple[float, float] | None:
        """Return the usual norm after so many steps, and the bound; None in the first rounds."""
        if self._rounds < FIRST_ROUNDS or len(self._norms) < ENOUGH:
            return None
        usual = statistics.median_low(self._norms)
        deviation = statistics.median_low(abs(norm - usual) for norm in self._norms)
        bound, root = max(6 * usual, usual + 10 * deviation), math.sqrt(steps)
        return (usual * root, bound * root) if usual > 0 else None

    def committed(self, norms: Iterable[tuple[float, int]]) -> None:
        """Remember the norms of a round's contributions before clipping, each with its number of steps."""
        _, bound = self.bounds(1) or (0.0, math.inf)
        self._norms.extend(min(norm / math.sqrt(steps), bound) for norm, steps in norms)
        self._rounds += 1
