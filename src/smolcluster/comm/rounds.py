"""Rounds: contributions of the members, their combination, and the commit. One interface for both planes.

A round consists of local steps, a contribution of every member (tensors and a weight), their combination, and an update:

    with rounds.contribute(step, ...) as mine:               this member's contribution, sent while it is computed
        mine.loss = replica.compute(batch, before_last=mine.start)
    rounds.settle(in_flight=K)                               wait while more than K of its rounds are not applied

A round is identified by its last step. With h > 1 local steps, rounds end at multiples of h and at the last step of the run;
`ends(step)` returns whether one ends with this step.

`settle` calls the strategy's `apply(result)` for each committed round: in order, on this thread, with the same result on every
member. On the mesh plane every round commits (`MeshRounds`). On the elastic plane a round commits when the coordinator has
recorded it; it is combined again without lost members (`engine/elastic/member/rounds.py`). Strategies see no difference.
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

from smolcluster.comm.group import Group, share_of
from smolcluster.comm.view import View
from smolcluster.errors import SmolclusterError


def _nothing() -> None: ...


@dataclass(slots=True, eq=False)
class Contribution:
    """This member's part of a round that is not applied yet."""

    step: int
    slot: int  # of the combination's memory
    samples: int = 0  # 0: this member contributes nothing
    weight: float = 0.0  # samples, or targets if the task counts them
    scale: float = 1.0  # loss scale of the backward pass
    start: Callable[[], None] = _nothing  # called before the last backward: contribute gradients as they become ready
    loss: Tensor | None = None
    host_loss: float = 0.0  # the same value, on the host
    loss_factor: float = 1.0  # so that the mean over samples is the loss of the global batch
    compute_s: float = 0.0  # compute time, including what overlaps with sending
    local: Mapping[str, Any] | None = None  # a strategy's report of its local steps, for the coordinator
    epoch: int = -1  # of the view it is combined in
    reported: bool = False
    again: bool = False  # to be combined again, as soon as no earlier round uses its memory
    left_out: bool = False  # then without this member's part


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a committed round, in the memory of the combination, which `give`s it to the parameters."""

    step: int
    slot: int
    factor: float = 1.0  # makes the sum a mean
    scale: float = 1.0  # loss scale, still in the sum
    norm: float | Tensor | None = None  # of the mean, for clipping; None: each member computes it
    empty: bool = False  # no contribution was accepted
    age: int = 0  # staleness: updates of the server's weights since those it was computed with


class UnreadableContribution(SmolclusterError):
    """A member's contribution cannot be decoded: the round must be combined without it."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place = place  # the member's index in the view


class Combination(ABC):
    """Combines the contributions to a round over a group, with memory for several rounds in flight (`slot`)."""

    def slot_of(self, step: int, *, number: int, num_slots: int) -> int:
        """Return the slot of round `number`, which ends with this step."""
        return number % num_slots

    def collide(self, slot: int, other: int) -> bool:
        """Return whether two slots use the same memory, so that only one of them may be in flight."""
        return slot == other

    @abstractmethod
    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        """Take each gradient, times `weight`, as the next backward produces it. `scale`: loss scale, to be divided out."""

    @abstractmethod
    def finish(self, slot: int) -> None:
        """After backward: combine the rest."""

    @abstractmethod
    def done(self, slot: int) -> bool:
        """Return whether `wait` returns at once."""

    @abstractmethod
    def wait(self, slot: int) -> None:
        """Wait for the result. Raises ViewChanged if members were lost, UnreadableContribution for an invalid one."""

    def stop_count(self, slot: int) -> Tensor:
        """Return how many members requested a stop in this round, after `wait`."""
        raise AssertionError(f"{type(self).__name__} needs a coordinator")

    def norm(self, slot: int) -> Tensor | None:
        """Return the norm of a result that is sharded over the group, after `stop_count`; None: each member has all of it."""
        return None

    @abstractmethod
    def give(self, result: Committed) -> None:
        """Set the result as the parameters' gradients."""

    def results(self, slot: int) -> list[Tensor | None]:
        """Return the result for each parameter, after `wait`, for a checkpoint; None for one that no member used."""
        raise AssertionError(f"{type(self).__name__} needs a coordinator")

    def put(self, slot: int, results: Sequence[Tensor | None]) -> None:
        """Set the result of a round to what `results` returned."""
        raise AssertionError(f"{type(self).__name__} needs a coordinator")

    def complete(self) -> None:  # noqa: B027 - only for sharded updates
        """Exchange parameters that only their owner has updated. Raises ViewChanged if members were lost."""

    def own_state(self) -> dict[str, Tensor]:
        """Return this member's local state (error feedback) after the last committed round."""
        return {}

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Restore `own_state`; state that is missing or of another codec starts empty."""

    # Elastic plane

    def drop(self, slot: int) -> None:  # noqa: B027
        """Forget this member's contribution, which was left out."""

    def formed(self, group: Group, view: View, established: Sequence[str | None]) -> None:
        """Combine in this group from now on. Every member of the new view calls this. May raise ViewChanged.

        `established`: the instances of the last view that committed a round, in its order; None for members whose state is
        lost.
        """
        raise AssertionError(f"{type(self).__name__} needs a fixed membership")

    def again(self, slot: int, *, zero: bool) -> None:
        """Combine again in the current group; `zero`: without this member's contribution."""
        raise AssertionError(f"{type(self).__name__} needs a fixed membership")

    def contributed(self, slot: int) -> list[Tensor]:
        """Return what this member contributed for each parameter, as the mean over its samples."""
        raise AssertionError(f"{type(self).__name__} keeps no contribution")

    def norms(self, slot: int) -> tuple[float, float]:
        """Return the norms of this member's weighted contribution, and of its part of the result."""
        raise AssertionError(f"{type(self).__name__} needs a fixed membership")

    def shares(self, slot: int) -> dict[int, Tensor]:
        """Return this member's share of the result, after `wait`. All shares together are the result, for `follow`."""
        raise AssertionError(f"{type(self).__name__} has no complete result")

    def follow(self, slot: int, shares: Mapping[int, Tensor], *, members: int) -> None:
        """Set the result of a round from the shares of all members. Raises ValueError if they do not match."""
        raise AssertionError(f"{type(self).__name__} has no complete result")

    def owned(self, names: Sequence[str]) -> list[str]:
        """Return those of these optimizer tensors that this member saves."""
        return list(names)


class AtServer(Combination):
    """A parameter server combines, and sends the mean back if workers apply it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters

    @cached_property
    def mean(self) -> dict[str, Tensor]:
        """The memory for the mean of a committed round."""
        return {name: torch.empty(p.shape) for name, p in self._parameters.items()}

    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        """Gradients are sent after backward; the server weights them."""

    def finish(self, slot: int) -> None:
        """The rounds send `.grad`."""

    def done(self, slot: int) -> bool:
        return True

    def wait(self, slot: int) -> None:
        """The server's messages report what is complete."""

    def give(self, result: Committed) -> None:
        put_gradients(self._parameters, self.mean)


def put_gradients(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].to(parameter.device, parameter.dtype)


class Rounds(ABC):
    """This member's rounds, oldest first."""

    stop = False  # all members stop after this step
    clip: tuple[float, float] | None = None  # a contribution whose norm exceeds the second is scaled to the first

    def __init__(self, combination: Combination, *, num_slots: int, local_steps: int = 1) -> None:
        self.combination, self.num_slots, self.local_steps = combination, num_slots, local_steps
        self.flights: deque[Contribution] = deque()

    def slot_of(self, step: int) -> int:
        """Return the combination's slot for the round that ends with this step."""
        return self.combination.slot_of(step, number=-(-step // self.local_steps), num_slots=self.num_slots)

    @abstractmethod
    def ends(self, step: int) -> bool:
        """Return whether a round ends with this member's step."""

    @contextmanager
    def contribute(
        self, step: int, *, samples: int, weight: float, counted: bool, scale: float
    ) -> Iterator[Contribution]:
        """Compute this member's contribution inside. `counted`: the weight is not known before the batch is read."""
        mine = Contribution(step, self.slot_of(step), samples, weight, scale)
        mine.start = self._starter(mine, counted=counted)
        self.flights.append(mine)
        started = time.perf_counter()
        yield mine
        mine.start = _nothing  # break a reference cycle
        self.combination.finish(mine.slot)
        self._contributed(mine, started)

    def own_state(self) -> dict[str, Tensor]:
        """Return this member's local state after the last committed round."""
        return self.combination.own_state()

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        self.combination.load_own(tensors)

    def state(self) -> tuple[list[dict[str, Any]], list[list[Tensor | None]]]:
        """Return the rounds in flight and their results, for a checkpoint. Empty if the coordinator records them."""
        return [], []

    def load(self, saved: Sequence[Mapping[str, Any]], results: Sequence[Sequence[Tensor | None]]) -> None:
        """Restore the rounds in flight. Those that exceed the slots are applied at once."""
        assert not saved, "the coordinator records rounds in flight"

    @abstractmethod
    def settle(self, *, in_flight: int) -> None:
        """Apply committed rounds, in order; wait while more than `in_flight` rounds are not applied."""

    def poll(self) -> None:  # noqa: B027
        """Make progress on the rounds in flight, between two local steps, without waiting."""

    def share(self, mine: Contribution) -> float:
        """Return this member's share of the mean, as far as it is known before the commit."""
        return mine.weight

    @abstractmethod
    def _starter(self, mine: Contribution, *, counted: bool) -> Callable[[], None]: ...

    def _contributed(self, mine: Contribution, started: float) -> None:  # noqa: B027
        """Handle a complete contribution."""


class ServerRounds(Rounds):
    """Rounds that a parameter server combines (`engine/elastic/parameter_server/pushed_rounds.py`).

    When its weights arrive the strategy's `take_weights` is called, between two steps or while it waits here.
    """

    @abstractmethod
    def pull(self) -> None:
        """Request the server's weights."""

    @abstractmethod
    def wait_until(self, done: Callable[[], bool], *, timeout_s: float | None = None) -> bool:
        """Handle the server's messages until `done()`, the end of the run, or a new WELCOME.

        Return whether one of these came within `timeout_s` seconds; None: no timeout.
        """

    def settle(self, *, in_flight: int) -> None:
        self.wait_until(lambda: len(self.flights) <= in_flight)


class MeshRounds(Rounds):
    """Rounds of a fixed membership: every one commits, and is applied after exactly `in_flight` further ones."""

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
        """`samples`: of every rank in a step. `stop_flag`: reads a value on the device without blocking the host."""
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

    def own_state(self) -> dict[str, Tensor]:
        for flight in self.flights:  # in the order in which all ranks expect them
            self.combination.wait(flight.slot)
        return super().own_state()

    def state(self) -> tuple[list[dict[str, Any]], list[list[Tensor | None]]]:
        for flight in self.flights:
            self.combination.wait(flight.slot)
        saved = [{"step": flight.step, "scale": flight.scale} for flight in self.flights]
        return saved, [self.combination.results(flight.slot) for flight in self.flights]

    def load(self, saved: Sequence[Mapping[str, Any]], results: Sequence[Sequence[Tensor | None]]) -> None:
        self.flights.clear()
        for flight, result in zip(saved, results, strict=True):
            self.settle(in_flight=self.num_slots - 1)
            step = int(flight["step"])
            mine = Contribution(step, self.slot_of(step), scale=float(flight["scale"]))
            self.combination.put(mine.slot, result)
            self.flights.append(mine)
        self.settle(in_flight=self.num_slots - 1)
        self.stop = False
