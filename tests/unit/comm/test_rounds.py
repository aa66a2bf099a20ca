"""Rounds of a fixed membership: weights, and when results are applied. `tests/equivalence` runs them over sockets."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.unit.comm.ranks import in_memory
from torch import nn

from smolcluster.comm.buckets import BucketSum
from smolcluster.comm.group import Group
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.comm.rounds import Committed, MeshRounds
from smolcluster.comm.view import View
from smolcluster.strategies.registry import find_strategy


class Rank:
    """One of several that each have a parameter of two numbers, and add up its gradients."""

    def __init__(self, group: Group, *, samples: list[int], in_flight: int = 0) -> None:
        self.parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.applied: list[tuple[int, list[float]]] = []  # step and gradient
        self.asked = threading.Event()
        self.in_flight, self.samples = in_flight, samples[group.rank]
        self.rounds = MeshRounds(
            BucketSum([self.parameter], group, bucket_bytes=2**20, num_slots=in_flight + 1),
            self.apply,
            group=group,
            samples=samples,
            num_slots=in_flight + 1,
            stop_requested=self.asked.is_set,
            stop_flag=lambda count: bool(count.item()),
        )

    def apply(self, result: Committed) -> None:
        self.rounds.combination.give(result)
        self.applied.append((result.step, self.parameter.grad.tolist()))
        self.parameter.grad = None

    def step(self, step: int, value: float, *, weight: float | None = None) -> float:
        counted = weight is not None
        with self.rounds.contribute(
            step, samples=self.samples, weight=weight or 0.0, counted=counted, scale=1.0
        ) as mine:
            mine.start()
            mine.loss = (self.parameter * value).sum()
            mine.loss.backward()  # type: ignore[no-untyped-call]
        self.rounds.settle(in_flight=self.in_flight)
        return mine.loss_factor


def test_gradients_are_weighted_by_samples() -> None:
    def work(group: Group) -> Rank:
        rank = Rank(group, samples=[1, 3])
        rank.step(1, 4.0 if group.rank == 0 else 8.0)
        return rank

    assert [rank.applied for rank in in_memory(2, work)] == [[(1, [7.0, 7.0])]] * 2  # (1 * 4 + 3 * 8) / 4


def test_gradients_are_weighted_by_targets_where_they_count() -> None:
    factors: dict[int, float] = {}

    def work(group: Group) -> Rank:
        rank = Rank(group, samples=[1, 1])
        factors[group.rank] = rank.step(1, 4.0 if group.rank == 0 else 8.0, weight=3.0 if group.rank == 0 else 1.0)
        return rank

    assert [rank.applied for rank in in_memory(2, work)] == [[(1, [5.0, 5.0])]] * 2  # (3 * 4 + 1 * 8) / 4
    assert factors == {0: 1.5, 1: 0.5}, "the mean of both losses over samples is that over targets"


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_round_is_applied_after_exactly_so_many_others(bound: int) -> None:
    """So a run is repeated bit by bit, however fast the ranks are."""
    counts: list[list[int]] = []

    def work(group: Group) -> Rank:
        rank, seen = Rank(group, samples=[1, 1], in_flight=bound), []
        for step in range(1, 7):
            rank.step(step, float(step))
            seen.append(len(rank.applied))
        counts.append(seen)
        rank.rounds.settle(in_flight=0)
        return rank

    ranks = in_memory(2, work)
    assert counts == [[max(0, step - bound) for step in range(1, 7)]] * 2
    assert [rank.applied for rank in ranks] == [[(step, [float(step)] * 2) for step in range(1, 7)]] * 2


def test_all_stop_after_the_same_round_when_one_is_asked_to() -> None:
    met = threading.Barrier(2)

    def work(group: Group) -> Rank:
        rank = Rank(group, samples=[1, 1])
        rank.step(1, 1.0)
        assert not rank.rounds.stop
        if group.rank == 1:
            rank.asked.set()
        met.wait(300)
        rank.step(2, 1.0)
        return rank

    assert [rank.rounds.stop for rank in in_memory(2, work)] == [True, True]


def test_allreduce_is_the_same_class_on_both_planes() -> None:
    assert find_strategy("allreduce", plane="elastic") is find_strategy("allreduce", plane="mesh")


@pytest.mark.parametrize("size", [1, 3])
def test_one_that_follows_gets_the_same_bits(size: int) -> None:
    """From the buckets of all members, of which each sends some. A parameter that nobody used has no gradient there either."""

    def made(group: Group) -> tuple[list[nn.Parameter], BucketSum]:
        parameters = [nn.Parameter(torch.zeros(5)) for _ in range(4)]
        combination = BucketSum(parameters, None, bucket_bytes=16, num_slots=1)
        combination.formed(group, View(1, 0, ()), [])
        return parameters, combination

    def work(group: Group) -> tuple[dict[int, torch.Tensor], list[torch.Tensor | None]]:
        parameters, combination = made(group)
        combination.start(0, weight=2.0)
        for number, parameter in enumerate(parameters[1:]):
            (parameter * (0.1 + number + group.rank)).sum().backward()  # type: ignore[no-untyped-call]
        combination.finish(0)
        combination.wait(0)
        shares = {number: share.clone() for number, share in combination.shares(0).items()}
        combination.give(Committed(1, 0, factor=1 / 6))
        return shares, [parameter.grad for parameter in parameters]

    done = in_memory(size, work)
    shares = {number: share for mine, _ in done for number, share in mine.items()}
    parameters, combination = made(MemoryGroup.world(1)[0])
    combination.follow(0, shares, members=size)
    combination.give(Committed(1, 0, factor=1 / 6))
    unused, *used = [parameter.grad for parameter in parameters]
    assert unused is None
    for _, (first, *rest) in done:
        assert first is None
        for mine, theirs in zip(used, rest, strict=True):
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="buckets, expected"):
        combination.follow(0, {0: shares[0]}, members=size)
