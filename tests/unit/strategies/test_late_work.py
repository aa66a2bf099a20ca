"""The error buffer of rounds that were too late."""

from __future__ import annotations

import torch
from tests.tasks import Tiny
from torch import Tensor, nn

from smolcluster.comm.buckets import BucketSum
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.config import load_config, resolve
from smolcluster.config.options import DiLoCoOptions
from smolcluster.parallel.placement import Seat
from smolcluster.strategies.base import Context
from smolcluster.strategies.base.late_work import LateWork
from smolcluster.strategies.diloco import DiLoCo

NAMES = ["a", "b"]


def one(value: float) -> Tensor:
    return torch.full((2,), value)


def waiting(late: LateWork) -> dict[int, float]:
    return {place: float(tensor[0]) for place, tensor in late.tensors.items()}


def test_what_waits_is_added_to_the_next_contribution_until_one_counts() -> None:
    late = LateWork()
    late.put({0: one(1.0), 1: one(2.0)}, samples=8, weight=4.0, loss=3.0)
    late.put({0: one(10.0)}, samples=8, weight=12.0, loss=1.0)
    assert (waiting(late), late.samples, late.weight, late.loss) == ({0: 11.0, 1: 2.0}, 16, 16.0, 1.5)
    assert float(late.add_to(0, one(0.5))[0]) == 11.5

    late.counted()
    assert (late.samples, late.rounds) == (0, 0.0)
    late.not_committed()  # the round was lost: the next contribution has it again
    assert late.rounds == 2.0
    assert float(late.add_to(0, one(0.25))[0]) == 11.25
    late.committed([0])
    assert waiting(late) == {1: 2.0}, "only what was contributed counts"
    assert float(late.add_to(0, one(0.5))[0]) == 0.5


def test_a_contribution_with_it_that_is_too_late_as_well_is_not_added_twice() -> None:
    late = LateWork()
    late.put({0: one(1.0)}, samples=8, weight=8.0, loss=1.0)
    late.counted()
    contributed = late.add_to(0, one(4.0))
    late.put({0: contributed}, samples=8, weight=8.0, loss=1.0)
    assert (waiting(late), late.samples, late.rounds) == ({0: 5.0}, 8, 2.0)


def test_it_is_saved_by_name_and_restored_to_the_bit() -> None:
    late, again = LateWork(), LateWork()
    late.put({1: torch.rand(2)}, samples=8, weight=8.0, loss=1.0)
    again.load(NAMES, late.state(NAMES))
    assert torch.equal(again.add_to(1, one(0.1)), late.add_to(1, one(0.1)))


def make_strategy() -> DiLoCo:
    config = resolve(
        load_config([], overrides={"strategy.name": "diloco", "training.device": "cpu", "training.steps": 8})
    )
    seat = Seat(rank=0, node="here", shard=0)
    context = Context(
        config=config,
        seat=seat,
        seats=[seat],
        group=MemoryGroup.world(1)[0],
        device=torch.device("cpu"),
        total_steps=8,
        samples_per_step=[2],
        stop_requested=lambda: False,
        warn=lambda _: None,
    )
    strategy = DiLoCo(DiLoCoOptions(), context)
    strategy.setup(Tiny(config=config))
    return strategy


def test_it_is_part_of_what_a_worker_keeps_of_its_own() -> None:
    """And the next contribution after a restart has it, to the bit."""
    one, other = make_strategy(), make_strategy()
    one._late.put({place: torch.randn_like(p) for place, p in enumerate(one._anchor)}, samples=8, weight=8.0, loss=1.0)
    state = one.state()
    assert sum(name.startswith("late/") for name in state.own) == len(one._anchor)
    other.load_state(state)
    for strategy in (one, other):
        with torch.no_grad():
            strategy._put_gradients(range(len(strategy._anchor)), [torch.zeros_like(a) for a in strategy._anchor])
    for mine, theirs in zip(one.replica.parameters, other.replica.parameters, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert bool(mine.grad.any())
        assert torch.equal(mine.grad, theirs.grad)


def test_a_dense_sum_keeps_what_this_member_contributed() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    combination = BucketSum(parameters, None, bucket_bytes=1 << 20, num_slots=1)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 0.5)
    combination.start(0, weight=6.0)
    combination.finish(0)
    found = combination.contributed(0)
    assert [tensor.shape for tensor in found] == [parameter.shape for parameter in parameters]
    assert [float(tensor.mean()) for tensor in found] == [0.5, 1.5]
