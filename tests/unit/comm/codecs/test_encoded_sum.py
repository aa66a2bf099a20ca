"""`EncodedSum` with changing members: in one process, without sockets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.unit.comm.ranks import at_once
from torch import Tensor, nn

from smolcluster.comm import contributions
from smolcluster.comm.codecs import CODECS, make_codec
from smolcluster.comm.contributions import HEAD
from smolcluster.comm.encoded_sum import EncodedSum, shares
from smolcluster.comm.group import Group, PeerLost, Work
from smolcluster.comm.memory_group import MemoryGroup, MemoryHub
from smolcluster.comm.rounds import Committed, UnreadableContribution
from smolcluster.comm.view import View, ViewMember
from smolcluster.compute.replica import Replica
from smolcluster.parallel.encoding import sharded_traffic
from smolcluster.parallel.owned_sum import EncodedOwnedSum
from smolcluster.parallel.placement import Node, Shape
from smolcluster.parallel.shards import owners
from smolcluster.strategies.registry import find_strategy

SHAPES = {"matrix": (12, 10), "bias": (12,), "table": (8, 5), "number": ()}
LOSSY: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {},
    "int8": {"block": 16},
    "int4": {"block": 16},
    "blocktopk": {"k": 409, "bits": 4},
    "topk": {"fraction": 0.1},
    "randk": {"fraction": 0.1},
    "powersgd": {"rank": 1},
}
CODED = pytest.mark.parametrize("name", [name for name in CODECS if name != "fp32"])
Gradients = Mapping[str, Tensor]


@pytest.fixture
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with tensors that are large: each is a bucket of its own, or two are."""
    monkeypatch.setattr(contributions, "MIN_PIECE_BYTES", 1)
    monkeypatch.setattr(contributions, "MAX_PIECE_BYTES", 8)


SEVERAL_BUCKETS = pytest.mark.usefixtures("several_buckets")


def view_of(size: int, *, step: int = 0, epoch: int = 1) -> View:
    members = tuple(ViewMember(rank, f"{rank:016x}", "host", f"host:{rank + 1}") for rank in range(size))
    return View(epoch, step, members)


class Member:
    def __init__(self, codec: str, *, slots: int = 1) -> None:
        self.parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        made = make_codec(codec, **LOSSY.get(codec, {}))
        self.combination = EncodedSum(self.parameters, codec=made, deal=owners, num_slots=slots)
        self.slots = slots

    def join(self, group: Group, *, step: int, epoch: int = 1) -> None:
        self.combination.formed(group, view_of(group.size, step=step, epoch=epoch), [])

    def contribute(self, step: int, gradients: Gradients, *, weight: float = 1.0, scale: float = 1.0) -> None:
        self.combination.start(step % self.slots, weight=weight, scale=scale)
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name].clone() if name in gradients else None
        self.combination.finish(step % self.slots)
        assert all(parameter.grad is None for parameter in self.parameters.values())

    def again(self, step: int, *, zero: bool = False) -> None:
        self.combination.again(step % self.slots, zero=zero)

    def take(self, step: int, *, weight: float) -> dict[str, Tensor]:
        self.combination.wait(step % self.slots)
        self.combination.give(Committed(step, step % self.slots, factor=1 / weight))
        return {n: p.grad.clone() for n, p in self.parameters.items() if p.grad is not None}


def world(size: int, codec: str, *, slots: int = 1) -> list[Member]:
    members = [Member(codec, slots=slots) for _ in range(size)]
    regroup(members, step=0)
    return members


def regroup(members: Sequence[Member], *, step: int, epoch: int = 1) -> None:
    for member, group in zip(members, MemoryGroup.world(len(members)), strict=True):
        member.join(group, step=step, epoch=epoch)


def random_gradients(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def same(first: Gradients, second: Gradients) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def round_of(members: Sequence[Member], step: int, gradients: Sequence[Gradients]) -> dict[str, Tensor]:
    """Contribute on all members; return the mean, which must be the same on all."""
    for member, mine in zip(members, gradients, strict=True):
        member.contribute(step, mine)
    return taken(members, step, weight=len(members))


def taken(members: Sequence[Member], step: int, *, weight: float) -> dict[str, Tensor]:
    first, *others = at_once(members, lambda member: member.take(step, weight=weight))
    assert all(same(first, other) for other in others), "replicas differ"
    return dict(first)


@SEVERAL_BUCKETS
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("name", list(CODECS))
def test_everybody_has_the_same_bits(name: str, size: int) -> None:
    """Also where there are more members than tensors."""
    members = world(size, name)
    for step in range(1, 5):
        mean = round_of(members, step, [random_gradients(100 * step + rank) for rank in range(size)])
        assert mean.keys() == SHAPES.keys()


@SEVERAL_BUCKETS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_loss_it_is_the_weighted_mean(size: int) -> None:
    members, gradients = world(size, "fp32"), [random_gradients(rank) for rank in range(size)]
    for rank, member in enumerate(members):
        scaled = {name: 1024 * gradient for name, gradient in gradients[rank].items()}
        member.contribute(1, scaled, weight=rank + 1, scale=1024)
    total = size * (size + 1) / 2

    def norms(member: Member) -> tuple[float, float]:
        member.combination.wait(0)
        return member.combination.norms(0)

    told = at_once(members, norms)
    for mean in at_once(members, lambda member: member.take(1, weight=total)):
        for name in SHAPES:
            expected = sum((rank + 1) * g[name] for rank, g in enumerate(gradients)) / total
            torch.testing.assert_close(mean[name], expected)
        whole = math.hypot(*(float(torch.linalg.vector_norm(mean[name])) for name in SHAPES))
        assert [held for _, held in told] == pytest.approx([whole * total] * size, rel=1e-5)
    own = [math.hypot(*(float(torch.linalg.vector_norm(t)) for t in g.values())) for g in gradients]
    assert [mine for mine, _ in told] == pytest.approx([own[rank] * (rank + 1) for rank in range(size)], rel=1e-5)


@SEVERAL_BUCKETS
@pytest.mark.parametrize("name", ["fp16", "int8", "topk"])
def test_a_tensor_that_no_member_used_has_no_gradient(name: str) -> None:
    members = world(2, name)
    first, second = random_gradients(1), random_gradients(2)
    del first["table"], second["table"], second["bias"]
    mean = round_of(members, 1, [first, second])
    assert mean.keys() == SHAPES.keys() - {"table"}


@pytest.mark.parametrize("name", ["int8", "topk", "randk", "powersgd"])
def test_everything_arrives_in_the_end(name: str) -> None:
    """What is left out of a step, by the members or by the owners, comes later: the mean over many steps is the true one."""
    members, gradients = world(3, name), [random_gradients(rank) for rank in range(3)]
    true = {name: torch.stack([g[name] for g in gradients]).mean(0) for name in SHAPES}
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    steps = 100
    errors = []
    for step in range(1, steps + 1):
        for key, part in round_of(members, step, gradients).items():
            total[key] += part
        errors.append(max(float((total[k] / step - true[k]).norm() / true[k].norm()) for k in SHAPES))
    assert errors[-1] < 0.6 * errors[steps // 2 - 1], "it does not fall as 1 / steps"
    assert errors[-1] < 0.15


@SEVERAL_BUCKETS
@CODED
def test_a_member_that_dies_in_a_round_leaves_no_trace(name: str) -> None:
    """Two owners have sent means with its part in them. They combine again, and go on as if it had never been there."""
    gradients = [[random_gradients(10 * step + rank) for rank in range(3)] for step in range(4)]
    pair = world(2, name)
    expected = [round_of(pair, step, gradients[step][:2]) for step in (1, 2, 3)]

    trio = [Member(name) for _ in range(3)]
    hub = MemoryHub(3, timeout_s=0.05)
    for rank, member in enumerate(trio):
        member.join(MemoryGroup(hub, rank), step=0)
        member.contribute(1, gradients[1][rank])
    for member in trio[:2]:
        with pytest.raises(PeerLost):  # the third does not send its means
            member.combination.wait(0)
    regroup(trio[:2], step=0, epoch=2)
    for member in trio[:2]:
        member.again(1)
    assert same(expected[0], taken(trio[:2], 1, weight=2))
    for step in (2, 3):
        assert same(expected[step - 1], round_of(trio[:2], step, gradients[step][:2]))


@SEVERAL_BUCKETS
@CODED
def test_what_was_left_out_of_a_refused_gradient_does_not_come_later(name: str) -> None:
    gradients = [[random_gradients(10 * step + rank) for rank in range(2)] for step in range(5)]
    pairs = world(2, name), world(2, name)
    for pair in pairs:
        round_of(pair, 1, gradients[1])
    refused, quiet = pairs
    for rank, member in enumerate(refused):
        spoiled = {n: g * (1000.0 if rank == 1 else 1.0) for n, g in gradients[2][rank].items()}
        member.contribute(2, spoiled)
    at_once(refused, lambda member: member.combination.wait(0))
    regroup(refused, step=1, epoch=2)
    for rank, member in enumerate(refused):
        member.again(2, zero=rank == 1)
    for rank, member in enumerate(quiet):
        member.contribute(2, gradients[2][rank] if rank == 0 else {}, weight=float(rank == 0))
    assert same(*(taken(pair, 2, weight=1) for pair in pairs))
    for step in (3, 4):
        assert same(*(round_of(pair, step, gradients[step]) for pair in pairs))


@SEVERAL_BUCKETS
@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
def test_a_part_that_came_too_late_leaves_no_trace(name: str) -> None:
    """Its member was away, and found the round committed without it when it came back."""
    gradients = [random_gradients(step) for step in range(4)]
    late, punctual = Member(name), Member(name)
    for member in (late, punctual):
        member.join(MemoryGroup.world(1)[0], step=0)
        member.contribute(1, gradients[1])
        member.take(1, weight=1)
    late.contribute(2, {n: 1000 * g for n, g in gradients[2].items()})
    punctual.contribute(2, {}, weight=0.0)
    for member in (late, punctual):
        member.join(MemoryGroup.world(1)[0], step=2, epoch=2)
        member.contribute(3, gradients[3])
    # The owner's residual is the same on both: the round was never committed here.
    assert same(late.take(3, weight=1), punctual.take(3, weight=1))


@SEVERAL_BUCKETS
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_gradient_that_cannot_be_encoded_is_reported(value: float) -> None:
    members, gradients = world(2, "fp16"), [random_gradients(0), random_gradients(1)]
    for rank, member in enumerate(members):
        mine = dict(gradients[rank])
        if rank == 1:
            mine["table"] = torch.full(SHAPES["table"], value)
        member.contribute(1, mine)

    def norms(member: Member) -> tuple[float, float]:
        member.combination.wait(0)
        return member.combination.norms(0)

    (mine, held), (spoiled, also_held) = at_once(members, norms)
    assert math.isnan(spoiled)
    assert math.isfinite(mine)
    assert held == also_held > 0
    assert math.isfinite(held)


def test_a_round_that_is_not_combined_again_yet_has_a_result() -> None:
    """A view that is over before it is formed: what is asked of it meanwhile is of no use, and no error."""
    member = world(1, "int8")[0]
    member.contribute(1, random_gradients(0))
    regroup([member], step=0, epoch=2)
    member.combination.wait(0)


# While backward runs


class Model(nn.Module):
    """It does not use its first tensor."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("number", "matrix", "bias", "table"):
            setattr(self, name, nn.Parameter(torch.randn(SHAPES[name], generator=generator)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.matrix.T + self.bias)
        return torch.tanh(x[:, :8] @ self.table)


def backward(model: nn.Module, group: MemoryGroup, *, seed: int) -> float:
    """Return how many bytes had left when it reached the input."""
    sent: list[float] = []
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    x.register_hook(lambda _: sent.append(group.traffic.bytes_sent))
    model(x).square().sum().backward()
    return sent[0]


@SEVERAL_BUCKETS
@CODED
def test_parts_leave_while_backward_runs_and_are_the_same_bits(name: str) -> None:
    """As those of a twin that begins when backward is over. Two micro-batches; only the last is final."""
    worlds = []
    for _ in range(2):
        members = [Member(name) for _ in range(2)]
        models = [Model() for _ in members]
        groups = MemoryGroup.world(2)
        for member, model, group in zip(members, models, groups, strict=True):
            member.parameters = dict(model.named_parameters())
            codec = make_codec(name, **LOSSY[name])
            member.combination = EncodedSum(member.parameters, codec=codec, deal=owners, num_slots=1)
            member.join(group, step=0)
        worlds.append((members, models, groups))
    for step in (1, 2, 3):
        means = []
        for early, (members, models, groups) in zip((True, False), worlds, strict=True):
            left: list[float] = []
            for rank, (member, model, group) in enumerate(zip(members, models, groups, strict=True)):
                before = group.traffic.bytes_sent
                assert backward(model, group, seed=10 * step + rank) == before
                if early:
                    member.combination.start(0, weight=1.0, scale=2.0)
                sent = backward(model, group, seed=100 * step + rank)
                left.append(sent - before)
                if not early:
                    member.combination.start(0, weight=1.0, scale=2.0)
                member.combination.finish(0)
            assert any(left) == early, "or all that a member sends is the first layer's"
            means.append(taken(members, step, weight=2))
        assert same(*means)
        assert means[0].keys() == SHAPES.keys() - {"number"}


@SEVERAL_BUCKETS
@pytest.mark.parametrize("name", ["fp16", "topk"])
def test_a_part_that_breaks_half_way_leaves_no_trace(name: str) -> None:
    """Buckets of it have left. It is combined again without, and the residual is what it was before."""
    broken, quiet = world(2, name), world(2, name)
    gradients = [[random_gradients(10 * step + rank) for rank in range(2)] for step in range(4)]
    for pair in (broken, quiet):
        round_of(pair, 1, gradients[1])
    for rank, member in enumerate(broken):
        bad = {"matrix": torch.full(SHAPES["matrix"], math.nan)} if rank == 1 else {}
        member.combination.start(0, weight=1.0)
        for key in reversed(SHAPES):
            member.parameters[key].grad = {**gradients[2][rank], **bad}[key].clone()
            member.combination._parts._on_gradient(list(SHAPES).index(key), member.parameters[key])
        member.combination.finish(0)
    at_once(broken, lambda member: member.combination.wait(0))
    assert math.isnan(broken[1].combination.norms(0)[0])
    regroup(broken, step=1, epoch=2)
    for rank, member in enumerate(broken):
        member.again(2, zero=rank == 1)
    for rank, member in enumerate(quiet):
        member.contribute(2, gradients[2][rank] if rank == 0 else {}, weight=float(rank == 0))
    assert same(*(taken(pair, 2, weight=1) for pair in (broken, quiet)))
    assert same(*(round_of(pair, 3, gradients[3]) for pair in (broken, quiet)))


# Rounds in flight


@SEVERAL_BUCKETS
@CODED
def test_several_rounds_in_flight_stay_exact_through_a_new_view(name: str) -> None:
    gradients = [[random_gradients(10 * step + rank) for rank in range(2)] for step in range(6)]
    pairs = world(2, name, slots=3), world(2, name, slots=3)
    for number, pair in enumerate(pairs):
        for step in (1, 2, 3):
            for rank, member in enumerate(pair):
                member.contribute(step, gradients[step][rank])
        taken(pair, 1, weight=2)
        if number == 1:
            at_once(pair, lambda member: member.combination.wait(2))
            regroup(pair, step=1, epoch=2)
            for step in (2, 3):
                for member in pair:
                    member.again(step)
    for step in (2, 3):
        assert same(*(taken(pair, step, weight=2) for pair in pairs))
    for step in (4, 5):
        assert same(*(round_of(pair, step, gradients[step]) for pair in pairs))


def test_the_residual_is_dropped_where_a_refused_part_is_in_it() -> None:
    """A later round was encoded against it, so that it cannot be undone."""
    members = world(2, "topk", slots=2)
    for rank, member in enumerate(members):
        factor = 1e6 if rank == 1 else 1.0
        member.contribute(1, {n: factor * g for n, g in random_gradients(rank).items()})
        member.contribute(2, random_gradients(10 + rank))
    regroup(members, step=0, epoch=2)
    for rank, member in enumerate(members):
        member.again(1, zero=rank == 1)
        member.again(2, zero=rank == 1)
    taken(members, 1, weight=1)
    taken(members, 2, weight=1)
    for step in (3, 4):
        mean = round_of(members, step, [random_gradients(20 + rank) for rank in range(2)])
        assert max(float(part.abs().max()) for part in mean.values()) < 100


# A member that sends nonsense


class Garbling(MemoryGroup):
    """Spoils what it sends in one of the two phases."""

    phase = 0

    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Work:
        return super().send(self.spoiled(tensor) if tag % 2 == self.phase else tensor, to=to, tag=tag)

    def spoiled(self, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, 255)


class BadBody(Garbling):
    """Its head is sound; scales of int8 are NaN."""

    def spoiled(self, tensor: Tensor) -> Tensor:
        bad = torch.full_like(tensor, 255)
        bad[: HEAD.size] = tensor[: HEAD.size]
        bad[HEAD.size : HEAD.size + 1] = 1
        bad[HEAD.size + 1 : HEAD.size + len(SHAPES)] = 0
        return bad


class Blaming(Garbling):
    """Reports an unreadable contribution of a member that does not exist."""

    def spoiled(self, tensor: Tensor) -> Tensor:
        bad = tensor.clone()
        bad[8 : HEAD.size] = 255
        return bad


@pytest.mark.parametrize(("kind", "phase"), [(Garbling, 0), (Garbling, 1), (BadBody, 0), (BadBody, 1), (Blaming, 1)])
def test_all_others_name_the_member_whose_bytes_cannot_be_read(kind: type[Garbling], phase: int) -> None:
    """All others report it, so that one report alone need not be believed."""
    hub, members = MemoryHub(3), [Member("int8") for _ in range(3)]
    for rank, member in enumerate(members):
        group = (kind if rank == 2 else MemoryGroup)(hub, rank)
        if isinstance(group, Garbling):
            group.phase = phase
        member.join(group, step=0)
        member.contribute(1, random_gradients(rank))

    def blamed(member: Member) -> int:
        try:
            member.combination.wait(0)
        except UnreadableContribution as fault:
            return fault.place
        return -1

    assert at_once(members, blamed)[:2] == [2, 2]


# What it costs


@SEVERAL_BUCKETS
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("name", ["fp16", "int8", "powersgd"])
def test_bytes_are_those_of_the_plan(name: str, size: int) -> None:
    """For every member, though tensors do not deal evenly; and on top the heads of as many messages as the plan says."""
    strategy = find_strategy("allreduce", plane="elastic")
    options = strategy.Config.model_validate({"codec": name, "codec_rank": 1})
    nodes = [Node(name=f"n{rank}", stays=False) for rank in range(size)]
    shape = Shape(parameters=sum(map(math.prod, SHAPES.values())), tensors=list(SHAPES.values()))
    costs = strategy.plan(options, nodes, shape).checked().costs
    members = [Member(name) for _ in range(size)]
    if name == "int8":
        for member in members:
            member.combination = EncodedSum(member.parameters, codec=make_codec("int8"), deal=owners, num_slots=1)
    assert size != 2 or sum(cost.messages - 2 for cost in costs) > 4, "one bucket is all there is"
    groups = MemoryGroup.world(size)
    for member, group in zip(members, groups, strict=True):
        member.join(group, step=0)
    round_of(members, 1, [random_gradients(rank) for rank in range(size)])
    for cost, group in zip(costs, groups, strict=True):
        flags = len(SHAPES) * size
        heads = HEAD.size * (cost.messages - 2)
        assert 0 <= group.traffic.bytes_sent - cost.bytes_sent - heads <= flags
        heads = HEAD.size * (size - 1) * len(SHAPES) * 2
        assert cost.bytes_received <= group.traffic.bytes_received <= cost.bytes_received + heads + flags
    assert size == 1 or sum(c.bytes_sent for c in costs) == 2 * (size - 1) * sum(
        make_codec(name, **({"rank": 1} if name == "powersgd" else {})).nbytes(s) for s in SHAPES.values()
    )


def test_members_that_stay_encode_nothing() -> None:
    strategy = find_strategy("allreduce")
    nodes = [Node(name=f"n{rank}") for rank in range(2)]
    plain, coded = (
        strategy.plan(strategy.Config.model_validate(options), nodes, Shape(parameters=1000)).cost
        for options in ({}, {"codec": "int8"})
    )
    assert plain == coded


# Each sum at its owner


@SEVERAL_BUCKETS
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["fp16", "int8", "topk"])
def test_owner_and_backup_hold_the_same_bits_for_the_bytes_of_the_plan(name: str, size: int) -> None:
    codec = make_codec(name)
    models = [nn.ParameterDict({n: nn.Parameter(torch.zeros(s)) for n, s in SHAPES.items()}) for _ in range(size)]
    sums = [
        EncodedOwnedSum(
            cast("Replica", SimpleNamespace(model=m, parameters=list(m.parameters()))), codec=codec, num_slots=1
        )
        for m in models
    ]
    gradients, groups = [random_gradients(rank) for rank in range(size)], MemoryGroup.world(size)
    for combination, group, model, mine in zip(sums, groups, models, gradients, strict=True):
        combination.formed(group, view_of(size), [])
        combination.start(0, weight=2.0)
        for key, parameter in model.items():
            parameter.grad = mine[key].clone()
        combination.finish(0)
    for combination in sums:
        combination.wait(0)
    held = math.hypot(*(combination.norms(0)[1] for combination in sums))
    found: dict[str, list[Tensor]] = {}
    for combination, model in zip(sums, models, strict=True):
        combination.give(Committed(1, 0, factor=1 / (2 * size)))
        for key, parameter in model.items():
            if parameter.grad is not None:
                found.setdefault(key, []).append(parameter.grad)
    assert {key: len(copies) for key, copies in found.items()} == dict.fromkeys(SHAPES, min(2, size))
    assert all(torch.equal(copies[0], copies[-1]) for copies in found.values())
    whole = math.hypot(*(float(torch.linalg.vector_norm(copies[0])) for copies in found.values()))
    assert held == pytest.approx(2 * size * whole, rel=1e-5)
    if name != "topk":
        for key in SHAPES:
            true = torch.stack([mine[key] for mine in gradients]).mean(0)
            torch.testing.assert_close(found[key][0], true, rtol=0, atol=0.03)

    shape = Shape(parameters=sum(map(math.prod, SHAPES.values())), tensors=list(SHAPES.values()))
    handed_out = (size - 1) * 4 * max(shares(list(map(math.prod, SHAPES.values())), owners, size))
    for group, (sent, received) in zip(groups, sharded_traffic(codec, shape, size), strict=True):
        heads = (HEAD.size + 1) * len(SHAPES) * (size - 1)
        assert sent - handed_out <= group.traffic.bytes_sent <= sent - handed_out + heads
        assert received - handed_out <= group.traffic.bytes_received <= received - handed_out + heads


# Those who follow


@CODED
@pytest.mark.parametrize("size", [1, 3])
def test_one_that_follows_gets_the_same_bits(name: str, size: int) -> None:
    """From the shares of all members, without being one. A tensor that nobody used has no gradient there either."""
    members, follower = world(size, name, slots=2), Member(name, slots=2)
    for step in (1, 2, 3):
        used = {n: g for n, g in random_gradients(step).items() if n != "bias"}
        for member in members:
            member.contribute(step, used)
        at_once(members, lambda member, slot=step % 2: member.combination.wait(slot))  # type: ignore[misc]
        shares: dict[int, Tensor] = {}
        for member in members:
            shares |= {n: share.clone() for n, share in member.combination.shares(step % 2).items()}
        follower.combination.follow(step % 2, shares, members=size)
        follower.combination.give(Committed(step, step % 2, factor=1 / size))
        theirs = taken(members, step, weight=size)
        assert same(theirs, {n: p.grad for n, p in follower.parameters.items() if p.grad is not None})
        assert "bias" not in theirs
    with pytest.raises(ValueError, match="do not match a group of 4 members"):
        follower.combination.follow(0, shares, members=4)
