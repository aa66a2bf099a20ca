"""The mean of encoded contributions that every member gathers: in one process, without sockets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest
import torch
from tests.unit.comm.ranks import at_once as all_ranks
from torch import Tensor, nn

from smolcluster.comm.codecs import make_codec
from smolcluster.comm.gathered_mean import GatheredMean
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.comm.rounds import Committed
from smolcluster.comm.view import View, ViewMember

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (12, 10), "bias": (12,)}
SENT = make_codec("blocktopk", k=409, bits=4)  # a tenth of the numbers
WEIGHTS = (6.0, 2.0, 4.0)
ROUND = Committed(1, 0)
M = TypeVar("M")
Everyone = Callable[[Callable[[int], object]], list[object]]


class Member:
    def __init__(self, group: MemoryGroup, *, senders: bool) -> None:
        self.parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        self.mean = GatheredMean(self.parameters, group, codec=SENT, decay=0.5, senders=senders)

    def contribute(self, tensors: dict[str, Tensor], weight: float, *, stop: bool = False) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = tensors[name].clone()
        self.mean.start(0, weight=weight, stop=stop)
        self.mean.finish(0)

    def take(self) -> dict[str, Tensor | None]:
        self.mean.wait(0)
        self.mean.give(ROUND)
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def residual(self) -> dict[str, Tensor]:
        kept = self.mean.own_state()
        return {name: kept.get(f"blocktopk/residual/{name}", torch.zeros(shape)) for name, shape in SHAPES.items()}


@pytest.fixture(params=[False, True], ids=["all", "senders"])
def members(request: pytest.FixtureRequest) -> list[Member]:
    return [Member(group, senders=request.param) for group in MemoryGroup.world(len(WEIGHTS))]


def at_once(members: list[M], act: Callable[[int, M], object]) -> list[object]:
    return all_ranks(list(enumerate(members)), lambda each: act(*each))


def drawn(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def through(tensor: Tensor) -> Tensor:
    data, decoded = torch.zeros(SENT.nbytes(tensor.shape), dtype=torch.uint8), torch.empty(tensor.shape)
    SENT.decode(data[: SENT.encode(tensor, data)], decoded)
    return decoded


def test_all_get_the_same_mean_and_keep_what_they_did_not_send(members: list[Member]) -> None:
    senders = members[0].mean._senders
    residuals = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in members]
    for number in range(4):
        given = [drawn(10 * number + rank) for rank in range(len(members))]

        def one(rank: int, member: Member, given: list[dict[str, Tensor]] = given) -> dict[str, Tensor | None]:
            member.contribute(given[rank], WEIGHTS[rank], stop=rank == 1)
            return member.take()

        got = at_once(members, one)
        for name in SHAPES:
            wanted = [given[rank][name] + 0.5 * residuals[rank][name] for rank in range(len(members))]
            sent = [through(tensor) for tensor in wanted]
            for rank, member in enumerate(members):
                residuals[rank][name] = wanted[rank] - sent[rank]
                torch.testing.assert_close(member.residual()[name], residuals[rank][name])
            total = sum(weight * tensor for weight, tensor in zip(WEIGHTS, sent, strict=True))
            who = sum(weight * (tensor != 0) for weight, tensor in zip(WEIGHTS, sent, strict=True))
            expected = total / (who.clamp(min=1) if senders else sum(WEIGHTS))
            torch.testing.assert_close(got[0][name], expected)  # type: ignore[index]
            assert all(torch.equal(mean[name], got[0][name]) for mean in got)  # type: ignore[index]
        assert [float(member.mean.stop_count(0)) for member in members] == [1.0] * len(members)


def test_one_that_is_not_finite_is_left_out(members: list[Member]) -> None:
    def one(rank: int, member: Member) -> tuple[float, dict[str, Tensor | None]]:
        tensors = drawn(rank)
        if rank == 0:
            tensors["bias"][3] = math.nan
        member.contribute(tensors, WEIGHTS[rank])
        member.mean.wait(0)
        mine, _ = member.mean.norms(0)
        return mine, member.take()

    got = at_once(members, one)
    assert [math.isnan(mine) for mine, _ in got] == [True, False, False]  # type: ignore[misc]
    assert all(torch.isfinite(mean["bias"]).all() for _, mean in got)  # type: ignore[misc]
    assert not any(tensor.any() for tensor in members[0].residual().values())


def test_a_round_is_combined_again_without_one_member(members: list[Member]) -> None:
    """Its error feedback is what it was; that of the others is kept once. Who follows gets the same mean."""
    at_once(members, lambda rank, member: (member.contribute(drawn(rank), WEIGHTS[rank]), member.take()))
    before = [member.residual() for member in members]
    groups = MemoryGroup.world(len(members))
    view = View(
        2, 1, tuple(ViewMember(rank, f"{rank:016x}", "host", f"host:{rank + 1}") for rank in range(len(members)))
    )

    def one(rank: int, member: Member) -> tuple[dict[int, Tensor], dict[str, Tensor | None]]:
        member.contribute(drawn(7 + rank), WEIGHTS[rank])
        member.mean.wait(0)
        member.mean.formed(groups[rank], view, [])
        member.mean.again(0, zero=rank == 2)
        member.mean.wait(0)
        return member.mean.shares(0), member.take()

    got = at_once(members, one)
    for name in SHAPES:
        assert torch.equal(members[2].residual()[name], before[2][name])
        wanted = drawn(7)[name] + 0.5 * before[0][name]
        torch.testing.assert_close(members[0].residual()[name], wanted - through(wanted))
    follower = Member(MemoryGroup.world(1)[0], senders=members[0].mean._senders)
    shares = {place: share for mine, _ in got for place, share in mine.items()}  # type: ignore[misc]
    follower.mean.follow(0, shares, members=len(members))
    follower.mean.give(ROUND)
    for name, parameter in follower.parameters.items():
        assert torch.equal(parameter.grad, got[0][1][name])  # type: ignore[index]
    with pytest.raises(ValueError, match="the contributions of 2 members"):
        follower.mean.follow(0, {0: shares[0], 1: shares[1]}, members=3)


def test_it_goes_on_with_what_it_had_of_its_own() -> None:
    (group,) = MemoryGroup.world(1)
    one, other = Member(group, senders=True), Member(group, senders=True)
    one.contribute(drawn(1), 1.0)
    one.take()
    other.mean.load_own(one.mean.own_state())
    for member in (one, other):
        member.contribute(drawn(2), 1.0)
    first, second = one.take(), other.take()
    for name in SHAPES:
        assert torch.equal(first[name], second[name])  # type: ignore[arg-type]


def test_what_a_member_contributed_is_what_it_gave(members: list[Member]) -> None:
    """Sent or kept: for a round that is too late."""
    at_once(members, lambda rank, member: (member.contribute(drawn(rank), WEIGHTS[rank]), member.take()))
    at_once(members, lambda rank, member: member.contribute(drawn(7 + rank), WEIGHTS[rank]))
    for found, expected in zip(members[1].mean.contributed(0), drawn(8).values(), strict=True):
        torch.testing.assert_close(found, expected)

    at_once(members, lambda rank, member: member.contribute({n: t * math.nan for n, t in drawn(1).items()}, 1.0))
    assert all(torch.isnan(tensor).all() for tensor in members[1].mean.contributed(0))
