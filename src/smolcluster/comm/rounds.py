"""Rounds: what members contribute, how it is combined, and when the result counts. One interface for both planes.

A round is a number of local steps, a contribution of every member (tensors and a weight), their combination, and an update:

    with rounds.contribute(step, ...) as mine:               my part of this round; it leaves as it is computed
        mine.loss = replica.compute(batch, before_last=mine.start)
    rounds.settle(in_flight=K)                               wait while more than K of my rounds are not applied

A round is known by its last step. Where it has h > 1 local steps, rounds end with the steps that h divides, and with the last
of the run; `ends(step)` says whether this is one of them.

`settle` calls `apply(result)` of the strategy for each round that is committed: in order, on this thread, with the same result
on every member. On the mesh plane every round commits (`MeshRounds`). On the elastic plane a round commits when the coordinator
has recorded it; it is combined again without members that are lost (`engine/elastic/rounds.py`). A strategy sees no difference.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.comm.buckets import GradientBuckets
from smolcluster.comm.elastic.membership.view import View
from smolcluster.comm.group import Group, share_of
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.errors import SmolclusterError


def _nothing() -> None: ...


@dataclass(slots=True, eq=False)
class Contribution:
    """My part of a round that is not applied yet."""

    step: int
    slot: int  # of the combination's memory
    samples: int = 0  # 0: a round of the others, to which I add nothing
    weight: float = 0.0  # samples, or targets where the task counts them
    scale: float = 1.0  # of the loss, when it was computed
    start: Callable[[], None] = _nothing  # the next backward is the last: contribute gradients as they appear
    loss: Tensor | None = None
    said_loss: float = 0.0  # the same number, on the host
    loss_factor: float = 1.0  # makes the mean of losses over samples that of the global batch
    compute_s: float = 0.0  # before it was contributed, and meanwhile
    epoch: int = -1  # of the view it is combined in
    reported: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a round that counts. It lies in the memory of the combination, which `give`s it to the parameters."""

    step: int
    slot: int
    factor: float = 1.0  # makes the sum a mean
    scale: float = 1.0  # of the loss, which is still in the sum
    norm: float | Tensor | None = None  # of the mean, where all must clip alike; None: each member computes it
    empty: bool = False  # nothing in it was fit to count
    age: int = 0  # updates of the server's weights between those it was computed at and those it is added to


class UnreadableContribution(SmolclusterError):
    """A member sent what cannot be read: the others cannot go on with it."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place = place  # in the view


class Combination(ABC):
    """How the contributions to a round are combined over a group, in memory for several rounds in flight (`slot`)."""

    @abstractmethod
    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        """Take each gradient, times `weight`, as the next backward produces it. `scale`: of the loss, to be divided out."""

    @abstractmethod
    def finish(self, slot: int) -> None:
        """Backward is over: combine what is not under way yet."""

    @abstractmethod
    def done(self, slot: int) -> bool:
        """Return whether `wait` returns at once."""

    @abstractmethod
    def wait(self, slot: int) -> None:
        """Return when the result is there. Raises ViewChanged where it never will be, Unreadable where a member is to blame."""

    def stop_count(self, slot: int) -> Tensor:
        """Return how many members asked to stop in this round, after `wait`."""
        raise AssertionError(f"{type(self).__name__} needs a coordinator")

    def norm(self, slot: int) -> Tensor | None:
        """Return the norm of the result where members that stay hold parts of it, after `stop_count`; None: each has it all."""
        return None

    @abstractmethod
    def give(self, result: Committed) -> None:
        """Put the result on the parameters, as their gradients."""

    def results(self, slot: int) -> list[Tensor | None]:
        """Return the result for each parameter, after `wait`; None for one that nobody used. To be saved."""
        raise AssertionError(f"{type(self).__name__} needs a coordinator")

    def put(self, slot: int, results: Sequence[Tensor | None]) -> None:
        """Take these for the result of a round, as `results` gave them."""
        raise AssertionError(f"{type(self).__name__} needs a coordinator")

    def complete(self) -> None:  # noqa: B027 - as a rule everybody has all there is
        """Exchange what is updated in one place only. Raises ViewChanged where the others cannot be reached any more."""

    def own_state(self) -> dict[str, Tensor]:
        """Return what this member alone has, as it was after the last round that is committed: error feedback."""
        return {}

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Go on with what `own_state` gave; what is not there, or of another codec, begins anew."""

    # Where members come and go

    def formed(self, group: Group, view: View, established: Sequence[str | None]) -> None:
        """Combine in this group from now on.

        `established` are the instances of the last view that committed a round, in its order; None where what a member held
        is lost. Every member of the new view calls this. May raise ViewChanged.
        """
        raise AssertionError(f"{type(self).__name__} needs members that stay")

    def again(self, slot: int, *, zero: bool) -> None:
        """Combine once more in the present group; `zero`: without a part of mine."""
        raise AssertionError(f"{type(self).__name__} needs members that stay")

    def norms(self, slot: int) -> tuple[float, float]:
        """Return the norm of my own weighted part, and of what I hold of the result."""
        raise AssertionError(f"{type(self).__name__} needs members that stay")

    def shares(self, slot: int) -> dict[int, Tensor]:
        """Return my share of the result, after `wait`. Those of all members make up the whole, for one that only follows."""
        raise AssertionError(f"{type(self).__name__} has no whole result")

    def follow(self, slot: int, shares: Mapping[int, Tensor], *, members: int) -> None:
        """Take the shares of so many members for the result of a round. Raises ValueError for those that do not fit."""
        raise AssertionError(f"{type(self).__name__} has no whole result")

    def owned(self, names: Sequence[str]) -> list[str]:
        """Of these optimizer tensors, those that this member saves for all."""
        return list(names)


class BucketSum(Combination):
    """Every member gets the whole sum of gradients, in buckets that leave while backward runs (`buckets.py`)."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Group | None, *, bucket_bytes: int, num_slots: int
    ) -> None:
        """`group`: of members that stay; None: views name it, and each member keeps its own part to combine it again."""
        self.buckets = GradientBuckets(
            parameters,
            group or MemoryGroup.world(1)[0],
            bucket_bytes=bucket_bytes,
            num_slots=num_slots,
            keep=group is None,
        )

    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        self.buckets.arm(slot, weight=weight / scale, stop=stop)

    def finish(self, slot: int) -> None:
        self.buckets.disarm()

    def done(self, slot: int) -> bool:
        return self.buckets.done(slot)

    def wait(self, slot: int) -> None:
        self.buckets.wait(slot)

    def stop_count(self, slot: int) -> Tensor:
        return self.buckets.stop_count(slot)

    def give(self, result: Committed) -> None:
        self.buckets.give(result.slot, factor=result.factor)

    def results(self, slot: int) -> list[Tensor | None]:
        return self.buckets.sums(slot)

    def put(self, slot: int, results: Sequence[Tensor | None]) -> None:
        self.buckets.put(slot, results)

    def formed(self, group: Group, view: View, established: Sequence[str | None]) -> None:
        self.buckets.group = group

    def again(self, slot: int, *, zero: bool) -> None:
        self.buckets.restart(slot, zero=zero)

    def norms(self, slot: int) -> tuple[float, float]:
        return self.buckets.kept_norm(slot), self.buckets.sum_norm(slot)

    def shares(self, slot: int) -> dict[int, Tensor]:
        group, flats = self.buckets.group, self.buckets.flats(slot)
        return {number: flats[number] for number in range(group.rank, len(flats), group.size)}

    def follow(self, slot: int, shares: Mapping[int, Tensor], *, members: int) -> None:
        self.buckets.take(slot, shares)


class AtServer(Combination):
    """A parameter server combines, and sends the mean back where workers apply it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters

    @cached_property
    def mean(self) -> dict[str, Tensor]:
        """The memory that the mean of a committed round is read into."""
        return {name: torch.empty(p.shape) for name, p in self._parameters.items()}

    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        """Gradients leave after backward: the server weights them."""

    def finish(self, slot: int) -> None:
        """The rounds send what lies in `.grad`."""

    def done(self, slot: int) -> bool:
        return True

    def wait(self, slot: int) -> None:
        """Messages of the server say what is there."""

    def give(self, result: Committed) -> None:
        put_gradients(self._parameters, self.mean)


def put_gradients(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].to(parameter.device, parameter.dtype)


class Rounds(ABC):
    """This member's rounds, oldest first."""

    stop = False  # all members leave after this step

    def __init__(self, combination: Combination, *, num_slots: int, local_steps: int = 1) -> None:
        self.combination, self.num_slots, self.local_steps = combination, num_slots, local_steps
        self.flights: deque[Contribution] = deque()

    def slot_of(self, step: int) -> int:
        """Return where the combination keeps the round that ends with this step."""
        return -(-step // self.local_steps) % self.num_slots

    @abstractmethod
    def ends(self, step: int) -> bool:
        """Return whether a round ends with this step of mine."""

    @contextmanager
    def contribute(
        self, step: int, *, samples: int, weight: float, counted: bool, scale: float
    ) -> Iterator[Contribution]:
        """Compute my part of a round inside. `counted`: the weight is not known before the batch is read."""
        mine = Contribution(step, self.slot_of(step), samples, weight, scale)
        mine.start = self._starter(mine, counted=counted)
        self.flights.append(mine)
        started = time.perf_counter()
        yield mine
        mine.start = _nothing  # it refers to this contribution, whose tensors would wait for the garbage collector
        self.combination.finish(mine.slot)
        self._contributed(mine, started)

    def own_state(self) -> dict[str, Tensor]:
        """Return what this member alone has, as it was after the last round that is committed."""
        return self.combination.own_state()

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        self.combination.load_own(tensors)

    def state(self) -> tuple[list[dict[str, Any]], list[list[Tensor | None]]]:
        """Return the rounds in flight, and their results, to be saved: alike on all members. Here the coordinator's record."""
        return [], []

    def load(self, said: Sequence[Mapping[str, Any]], results: Sequence[Sequence[Tensor | None]]) -> None:
        """Take up the rounds in flight of a saved run. What is more than fits here is applied at once."""
        assert not said, "a coordinator has the record"

    @abstractmethod
    def settle(self, *, in_flight: int) -> None:
        """Apply what is committed, in order; wait while more than `in_flight` rounds are not."""

    @abstractmethod
    def _starter(self, mine: Contribution, *, counted: bool) -> Callable[[], None]: ...

    def _contributed(self, mine: Contribution, started: float) -> None:  # noqa: B027
        """My part is complete."""


class ServerRounds(Rounds):
    """Rounds that a parameter server combines (`engine/elastic/pushed_rounds.py`); its weights can be had as well.

    When they come `take_weights` of the strategy is called, between two steps or while it waits here.
    """

    @abstractmethod
    def pull(self) -> None:
        """Ask for the server's weights."""

    @abstractmethod
    def wait_until(self, done: Callable[[], bool]) -> None:
        """Act on what the server says until this holds, the run is over, or this worker was welcomed anew."""

    def settle(self, *, in_flight: int) -> None:
        self.wait_until(lambda: len(self.flights) <= in_flight)


class MeshRounds(Rounds):
    """Members that stay: every round commits, and is applied after exactly `in_flight` further ones."""

    def __init__(
        self,
        combination: Combination,
        apply: Callable[[Committed], None],
        *,
        group: Group,
        samples: Sequence[int],
        stop_requested: Callable[[], bool],
        stop_flag: Callable[[Tensor], bool],
        num_slots: int = 1,
        local_steps: int = 1,
    ) -> None:
        """`samples` of every rank in a step. `stop_flag` reads a number on the device without making the host wait."""
        super().__init__(combination, num_slots=num_slots, local_steps=local_steps)
        self._apply, self._group = apply, group
        self._share = samples[group.rank] / sum(samples)
        self._stop_requested, self._stop_flag = stop_requested, stop_flag

    def ends(self, step: int) -> bool:
        return step % self.local_steps == 0

    def _starter(self, mine: Contribution, *, counted: bool) -> Callable[[], None]:
        share = share_of(self._group, mine.weight) if counted else lambda: self._share

        def start() -> None:
            mine.weight = share()
            mine.loss_factor = mine.weight / self._share
            self.combination.start(mine.slot, weight=mine.weight, stop=self._stop_requested())

        return start

    def settle(self, *, in_flight: int) -> None:
        while len(self.flights) > in_flight:
            oldest = self.flights.popleft()
            self.combination.wait(oldest.slot)
            self.stop = self._stop_flag(self.combination.stop_count(oldest.slot))
            norm = self.combination.norm(oldest.slot)
            norm = None if norm is None else norm / oldest.scale
            self._apply(Committed(oldest.step, oldest.slot, scale=oldest.scale, norm=norm))
            self.combination.complete()

    def state(self) -> tuple[list[dict[str, Any]], list[list[Tensor | None]]]:
        for flight in self.flights:
            self.combination.wait(flight.slot)
        said = [{"step": flight.step, "scale": flight.scale} for flight in self.flights]
        return said, [self.combination.results(flight.slot) for flight in self.flights]

    def load(self, said: Sequence[Mapping[str, Any]], results: Sequence[Sequence[Tensor | None]]) -> None:
        self.flights.clear()
        for flight, result in zip(said, results, strict=True):
            self.settle(in_flight=self.num_slots - 1)
            step = int(flight["step"])
            mine = Contribution(step, self.slot_of(step), scale=float(flight["scale"]))
            self.combination.put(mine.slot, result)
            self.flights.append(mine)
        self.settle(in_flight=self.num_slots - 1)
        self.stop = False
