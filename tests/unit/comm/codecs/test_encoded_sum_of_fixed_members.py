"""`EncodedSum` with a fixed group of ten members: in one process, without sockets."""

from __future__ import annotations

import pytest
import torch
from tests.unit.comm.test_gathered_mean import SENT, at_once, drawn, through
from torch import Tensor, nn

from smolcluster.comm.contributions import HEAD, buckets_of
from smolcluster.comm.encoded_sum import EncodedSum, rows_of
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.comm.rounds import Committed
from smolcluster.config.options import DiLoCoOptions
from smolcluster.parallel.placement import Node, Shape
from smolcluster.parallel.shards import owners
from smolcluster.strategies.diloco import DiLoCo

N, DECAY = 10, 0.5
SHAPES = {f"layers.{i}.{kind}": shape for i in range(6) for kind, shape in (("weight", (12, 10)), ("bias", (12,)))}
WEIGHTS = [rank / sum(range(1, N + 1)) for rank in range(1, N + 1)]
SIZES = [SENT.nbytes(shape) for shape in SHAPES.values()]


class Member:
    def __init__(self, group: MemoryGroup, *, senders: bool) -> None:
        self.group, self.parameters = group, {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        options = {"codec": SENT, "deal": owners, "num_slots": 1, "decay": DECAY, "senders": senders}
        self.sum = EncodedSum(self.parameters, group, **options)

    def contribute(self, tensors: dict[str, Tensor], weight: float, *, stop: bool = False) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = tensors[name].clone()
        self.sum.start(0, weight=weight, stop=stop)
        self.sum.finish(0)

    def take(self) -> dict[str, Tensor | None]:
        self.sum.wait(0)
        self.sum.give(Committed(1, 0))
        return {name: parameter.grad for name, parameter in self.parameters.items()}


@pytest.mark.parametrize("senders", [False, True], ids=["all", "senders"])
def test_ten_members_get_the_mean_that_a_loop_encodes_again(senders: bool) -> None:
    """To the bit on all of them, and what is left out waits: at the member, and at the owner of a mean."""
    members = [Member(group, senders=senders) for group in MemoryGroup.world(N)]
    left = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(N + 1)]  # the last: of means
    for number in range(3):
        given = [drawn(100 * number + rank, SHAPES) for rank in range(N)]

        def one(rank: int, member: Member, given: list[dict[str, Tensor]] = given) -> dict[str, Tensor | None]:
            member.contribute(given[rank], WEIGHTS[rank], stop=rank in (1, 7))
            member.sum.wait(0)
            assert float(member.sum.stop_count(0)) == 2
            return member.take()

        got = at_once(members, one)
        for name, shape in SHAPES.items():
            total, who = torch.zeros(shape), torch.zeros(shape)
            for rank in range(N):
                wanted = given[rank][name] + DECAY * left[rank][name]
                sent = through(wanted)
                left[rank][name] = wanted - sent
                total, who = total + WEIGHTS[rank] * sent, who + WEIGHTS[rank] * (sent != 0 if senders else 1)
            wanted = total / who.where(who > 0, 1.0) + DECAY * left[N][name]
            expected = through(wanted)
            left[N][name] = wanted - expected
            for other in got:
                assert torch.equal(other[name], got[0][name])  # type: ignore[index]
            torch.testing.assert_close(got[0][name], expected, rtol=0, atol=1e-5)  # type: ignore[index]


def test_bytes_are_those_of_the_plan() -> None:
    """Beside the heads of messages, and one number more, of members that ask to stop."""
    members = [Member(group, senders=True) for group in MemoryGroup.world(N)]
    at_once(members, lambda rank, member: (member.contribute(drawn(rank, SHAPES), WEIGHTS[rank]), member.take()))
    shape = Shape(parameters=1, bytes_per_parameter=4, tensors=list(SHAPES.values()))
    options = DiLoCoOptions(codec="blocktopk", codec_k=409, codec_bits=4, inner_steps=1)
    costs = DiLoCo.plan(options, [Node(name=f"n{i}") for i in range(N)], shape).costs
    rows, (bucket,) = rows_of(owners(SIZES, N), N), buckets_of(SIZES, N)
    heads = [HEAD.size + len(row) if row else 0 for row in rows]
    assert sorted(bucket) == list(range(len(SIZES)))
    for rank, (member, cost) in enumerate(zip(members, costs, strict=True)):
        stop = 2 * (N - 1) / N * 4
        own = sum(heads) - heads[rank] + (N - 1) * heads[rank]
        assert member.group.traffic.bytes_sent == pytest.approx(cost.bytes_sent + own + stop, abs=1)
        assert member.group.traffic.bytes_received == pytest.approx(cost.bytes_received + own + stop, abs=1)
    assert sum(cost.bytes_received for cost in costs) == 2 * (N - 1) * sum(SIZES)


def test_it_goes_on_with_what_it_had_of_its_own() -> None:
    """Also from the middle of a round, with its result. Residuals of other parameters are not taken."""
    before, after = ([Member(group, senders=True) for group in MemoryGroup.world(N)] for _ in range(2))
    at_once(before, lambda rank, member: member.contribute(drawn(rank, SHAPES), WEIGHTS[rank]))
    at_once(before, lambda _, member: member.sum.wait(0))
    own = [member.sum.own_state() for member in before]
    foreign = {"blocktopk/parts/residual/other": torch.zeros(3)}

    def restore(rank: int, member: Member) -> None:
        member.sum.load_own({**own[rank], **foreign})
        member.sum.put(0, before[rank].sum.results(0))

    at_once(after, restore)

    def go_on(rank: int, member: Member) -> object:
        first = member.take()
        member.contribute(drawn(50 + rank, SHAPES), WEIGHTS[rank])
        return first, member.take(), member.sum.own_state()

    for mine, other in zip(at_once(before, go_on), at_once(after, go_on), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
