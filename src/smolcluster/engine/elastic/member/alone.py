"""Training without the coordinator: the samples that a worker reads while its link is down, and the limit on its steps.

    link lost        the current round becomes late work; training continues from its weights, one step at a time
    link back        JOIN with the last common anchor. The distance from it goes to the error buffer, as that of a late round

The samples are from a part of the stream that is never leased: no epoch counts them, and others may read them too. The log
reports their number.
"""

from __future__ import annotations

import logging

from smolcluster.comm.elastic.membership.server_link import Lease
from smolcluster.compute.replica import Replica
from smolcluster.strategies.base import Context

log = logging.getLogger(__name__)

FIRST = 1 << 40  # position in the stream; times the rank and one


class Alone:
    def __init__(self, context: Context, replica: Replica, *, most_steps: int) -> None:
        """`most_steps`: since the last common weights."""
        self._context, self._replica, self._most_steps = context, replica, most_steps
        self.batch = 0  # samples in a step; 0: not known yet
        self._position = FIRST * (context.seat.rank + 1)
        self._first, self._began, self._waits = 0, self._position, False

    @property
    def is_possible(self) -> bool:
        return self._most_steps > 0 and self.batch > 0

    def begin(self) -> None:
        self._first, self._began, self._waits = self._replica.updates, self._position, False
        log.warning("the link to the coordinator is lost: training alone, for at most %d steps", self._most_steps)

    def lease(self) -> Lease | None:
        """Return the samples of the next step; None: wait for the coordinator."""
        step = self._replica.updates + 1
        if step - self._first > self._most_steps or step >= self._context.total_steps:
            if not self._waits:
                log.warning("%d steps were taken without the coordinator: waiting for it", step - 1 - self._first)
            self._waits = True
            return None
        lease = Lease(step, ((self._position, self.batch),))
        self._position += self.batch
        return lease

    def end(self) -> None:
        steps, samples = self._replica.updates - self._first, self._position - self._began
        log.warning(
            "the link to the coordinator is back after %d steps alone; their %d samples count in no epoch",
            steps,
            samples,
        )
