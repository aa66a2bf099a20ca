"""Readers: the next step of the loop and the samples to read for it.

StreamReader   a fixed world: this shard's part of every step, in order
LeaseReader    the elastic plane: what the server lends
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from smolcluster.comm.elastic.membership.server_link import Lease, Stopped
from smolcluster.data.leases import Range, indices
from smolcluster.data.sampler import Indices, Sampler, ShardedSampler


class Reader(Protocol):
    def next(self, done: int) -> tuple[int, Indices] | None:
        """Return the next step after `done` and its samples; None when the run is over."""

    @property
    def position(self) -> int:
        """The position in the stream that all workers together have read."""

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class StreamReader:
    def __init__(self, sampler: ShardedSampler, *, total_steps: int) -> None:
        self._sampler, self.total_steps = sampler, total_steps

    def next(self, done: int) -> tuple[int, Indices] | None:
        return (done + 1, self._sampler.next()) if done < self.total_steps else None

    @property
    def position(self) -> int:
        return self._sampler.position

    def state_dict(self) -> dict[str, int]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)


class LeaseReader:
    def __init__(self, sampler: Sampler, lease: Callable[[], Lease | None], *, holds: Callable[[int], bool]) -> None:
        """`holds`: whether the lease of this step is still held; else the rest of it is not read."""
        self._sampler, self._lease, self._holds = sampler, lease, holds
        self._steps: deque[tuple[int, Indices]] = deque()  # of the round that was begun
        self.taken = 0  # the last step begun
        self.stopped = False  # this worker was asked to stop

    def next(self, done: int) -> tuple[int, Indices] | None:
        if self._steps and not self._holds(self._steps[0][0]):
            self._steps.clear()
        if not self._steps and not self._begin_round():
            return None
        self.taken, samples = self._steps.popleft()
        return self.taken, samples

    def _begin_round(self) -> bool:
        try:
            lease = self._lease()
        except Stopped:
            self.stopped = True
            return False
        if lease is None:
            return False
        samples = indices(self._sampler, [Range(*r) for r in lease.ranges])
        first = lease.step - lease.steps + 1
        self._steps.extend(enumerate(np.array_split(samples, lease.steps), start=first))
        return True

    @property
    def position(self) -> int:
        raise AssertionError("the server knows")

    def state_dict(self) -> dict[str, int]:
        raise AssertionError("the server saves")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("the server resumes")
