"""The gradient gate: reject gradients that are not finite, or whose norm is more than 1000 times the median of recent ones.

One broken machine must not spoil the model of all. A rejected gradient is reported to its sender and counted. After eight large
norms in a row the history is cleared and large norms are accepted: the cause is a change in training, not one machine.

When no gradient of a step is accepted in more than `MAX_FAILED_ATTEMPTS` attempts in a row, the run ends with the reason.

Contributions of local steps are clipped before that: see `MedianNorm`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from smolcluster.errors import SmolclusterError

HISTORY = 64
MIN_HISTORY = 5
MAX_RATIO = 1000.0  # norms above this multiple of the median of the accepted ones are rejected
MAX_REJECTIONS_IN_A_ROW = 8  # then large norms are accepted
MAX_FAILED_ATTEMPTS = 20  # in a row at a step: attempts in which no gradient was accepted
MAX_REJECTIONS_OF_MEMBER = 5  # in a row, while others are accepted; then the member is the cause, not its samples
FIRST_ROUNDS = 4  # not clipped


class GradientGate:
    def __init__(self) -> None:
        self._accepted: deque[float] = deque(maxlen=HISTORY)
        self._rejected = 0  # large norms in a row
        self._failed = 0  # attempts in a row in which no gradient was accepted
        self.last_rejection = ""  # since a gradient was accepted
        self._num_accepted = 0
        # Instance -> its rejections in a row, and `_num_accepted` at the last.
        self._members: dict[str, tuple[int, int]] = {}

    def rejection_reason(self, norm: float) -> str | None:
        """Return why a gradient of this norm is rejected, or None. After several large norms in a row they are accepted."""
        if not math.isfinite(norm):
            return f"its norm is {norm}"
        if len(self._accepted) >= MIN_HISTORY:
            median = statistics.median(self._accepted)
            if norm > MAX_RATIO * max(median, 1e-12):
                self._rejected += 1
                if self._rejected > MAX_REJECTIONS_IN_A_ROW:
                    self._accepted.clear()
                    return None
                return f"its norm is {norm:.3g}, {norm / max(median, 1e-12):.3g} times the median {median:.3g}"
        return None

    def count_rejection(self, instance: str) -> bool:
        """Count a rejected gradient of this member. Return whether the member is the cause: others may read its samples."""
        count, last = self._members.get(instance, (0, -1))
        others_accepted = last not in (-1, self._num_accepted)
        count += others_accepted
        self._members[instance] = count, self._num_accepted
        return others_accepted and count >= MAX_REJECTIONS_OF_MEMBER

    def count_failed_attempt(self, step: int) -> None:
        """Count an attempt at this step in which no gradient was accepted. Raises after too many in a row."""
        self._failed += 1
        if self._failed > MAX_FAILED_ATTEMPTS:
            reason = f" ({self.last_rejection})" if self.last_rejection else ""
            raise SmolclusterError(
                f"no gradient of step {step} was valid, {MAX_FAILED_ATTEMPTS} times in a row{reason}; "
                "check the data, or lower training.learning_rate"
            )

    def reset_failed_attempts(self) -> None:
        """Start to count from 0, after the loss scale was lowered."""
        self._failed = 0

    def accept(self, norm: float, *, instance: str = "") -> None:
        """Count an accepted norm. `instance`: the member that sent it."""
        self._rejected = self._failed = 0
        self._num_accepted += 1
        self._members.pop(instance, None)
        self.last_rejection = ""
        self._accepted.append(norm)


class MedianNorm:
    """The median norm of pseudo-gradients, and the bound above which one is clipped to the median.

        median <- over recent rounds and all members       MAD <- the median of |norm - median|
        bound  <- the larger of 6 median and median + 10 MAD

    Members take different numbers of steps, so norms are divided by the square root of the steps, as for a random walk. If all
    steps have one direction, 16 times the steps give 4 times the median, still below the bound. Norms above the bound are
    recorded as the bound: a minority of outliers does not change the median, and it follows when most norms have grown.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=HISTORY)
        self._rounds = 0

    def bounds(self, steps: int) -> tuple[float, float] | None:
        """Return the median norm after `steps` steps, and the bound; None in the first rounds."""
        if self._rounds < FIRST_ROUNDS or len(self._norms) < MIN_HISTORY:
            return None
        median = statistics.median_low(self._norms)
        deviation = statistics.median_low(abs(norm - median) for norm in self._norms)
        bound, root = max(6 * median, median + 10 * deviation), math.sqrt(steps)
        return (median * root, bound * root) if median > 0 else None

    def committed(self, norms: Iterable[tuple[float, int]]) -> None:
        """Record the norms of a round's contributions before clipping, each with its number of steps."""
        _, bound = self.bounds(1) or (0.0, math.inf)
        self._norms.extend(min(norm / math.sqrt(steps), bound) for norm, steps in norms)
        self._rounds += 1
