"""Readers: the next step of the loop and the samples to read for it.

StreamReader   a fixed world: this shard's part of every step, in order
LeaseReader    the elastic plane: what the server leases
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from smolcluster.comm.elastic.membership.server_link import Lease, Stopped
from smolcluster.data.leases import Range, indices
from smolcluster.data.sampler import Indices, Sampler, ShardedSampler


class Reader(Protocol):
    repeat: int  # the number of earlier steps of this round with the same number

    def next(self, done: int) -> tuple[int, Indices] | None:
        """Return the next step after `done` and its samples; None when the run is over."""


class StreamReader:
    repeat = 0

    def __init__(self, sampler: ShardedSampler, *, total_steps: int) -> None:
        self._sampler, self.total_steps = sampler, total_steps

    def next(self, done: int) -> tuple[int, Indices] | None:
        return (done + 1, self._sampler.next()) if done < self.total_steps else None


class LeaseReader:
    def __init__(
        self,
        sampler: Sampler,
        lease: Callable[[], Lease | None],
        *,
        holds: Callable[[int], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`holds`: whether the lease of the round that ends with this step is still held; else the rest of it is not read."""
        self._sampler, self._lease, self._holds, self._clock = sampler, lease, holds, clock
        self._left: deque[Indices] = deque()  # of the round that was begun, a part for each step
        self._done = 0  # steps of that round
        self.taken = 0  # the last step begun
        self.repeat = 0
        self.stopped = False  # a stop was requested

    @property
    def in_round(self) -> bool:
        """Whether steps of a round are left."""
        return bool(self._left)

    def next(self, done: int) -> tuple[int, Indices] | None:
        if self._left and not self._holds(self._round.step):
            self._left.clear()
        if not self._left and not self._begin_round():
            return None
        samples, before = self._left.popleft(), self.taken
        if self._is_late():
            self._left.clear()
        step = self._round.number(self._done + 1) if self._left else self._round.step
        self.repeat = self.repeat + 1 if self._done and step == before else 0
        self.taken, self._done = step, self._done + 1
        return step, samples

    def _is_late(self) -> bool:
        """Return whether another step would end after the deadline, estimated from the earlier ones."""
        most_s, passed_s = self._round.most_s, self._clock() - self._began
        return self._done > 0 and passed_s * (self._done + 2) > most_s * self._done

    def _begin_round(self) -> bool:
        try:
            lease = self._lease()
        except Stopped:
            self.stopped = True
            return False
        if lease is None:
            return False
        samples = indices(self._sampler, [Range(*r) for r in lease.ranges])
        self._left.extend(np.array_split(samples, lease.local))
        self._round, self._done, self._began = lease, 0, self._clock()
        return True
