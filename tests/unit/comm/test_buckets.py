"""Buckets of gradients: their order, what they carry, and when they leave."""

from __future__ import annotations

from typing import Any

import torch

from smolcluster.comm.buckets import BucketSum, assign_buckets
from smolcluster.comm.memory_group import MemoryGroup, MemoryHub
from smolcluster.comm.rounds import Committed


def test_buckets_go_from_the_last_parameter_to_the_first() -> None:
    f32, f16 = torch.float32, torch.float16
    assert assign_buckets([(f32, 4)] * 4, bucket_bytes=8, first_bucket_bytes=4) == ([2, 1, 1, 0], 3)
    assert assign_buckets([(f32, 100), (f32, 4)], bucket_bytes=8, first_bucket_bytes=4) == ([1, 0], 2)
    assert assign_buckets([(f32, 4), (f16, 4), (f32, 4)], bucket_bytes=100, first_bucket_bytes=100) == ([2, 1, 0], 3)
    assert assign_buckets([(f32, 4)], bucket_bytes=1, first_bucket_bytes=1) == ([0], 1)


class Recording(MemoryGroup):
    """Remembers when buckets left."""

    def __init__(self) -> None:
        super().__init__(MemoryHub(1), 0)
        self.sent: list[int] = []

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self.sent.append(tensor.numel())
        return super().all_reduce(tensor)


def test_a_bucket_leaves_while_backward_still_runs() -> None:
    """The last layer's gradient is on its way before the first layer's backward has begun."""
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 3, bias=False))
    group = Recording()
    buckets = BucketSum(list(layers.parameters()), group, bucket_bytes=1, num_slots=1)
    sent_when_first_layer_runs: list[int] = []
    layers[0].register_full_backward_pre_hook(lambda *_: sent_when_first_layer_runs.append(len(group.sent)))
    buckets.start(0, weight=1.0)
    layers(torch.ones(2, 4, requires_grad=True)).sum().backward()
    buckets.finish(0)
    assert sent_when_first_layer_runs == [1]
    assert group.sent == [12, 16 + 3], "the last bucket also carries the stop count, and who used which parameter"


def test_buckets_leave_in_order_whatever_order_gradients_come_in() -> None:
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    group = Recording()
    buckets = BucketSum([first, second], group, bucket_bytes=1, num_slots=1)
    buckets.start(0, weight=0.5, stop=True)
    first.sum().backward()
    assert group.sent == [], "the second parameter's bucket must leave first"
    second.sum().backward()
    assert group.sent == [3, 2 + 3]
    buckets.finish(0)
    buckets.wait(0)
    buckets.give(Committed(1, 0))
    assert first.grad.tolist() == [0.5, 0.5]
    assert buckets.stop_count(0).item() == 1.0


def test_gradients_outside_an_armed_step_are_left_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    buckets = BucketSum([parameter], Recording(), bucket_bytes=100, num_slots=1)
    parameter.sum().backward()
    assert parameter.grad is not None
    buckets.start(0, weight=1.0)
    parameter.sum().backward()
    buckets.finish(0)
    buckets.wait(0)
    buckets.give(Committed(1, 0))
    assert parameter.grad.tolist() == [2.0, 2.0], "both micro-batches count"


def test_the_gradient_of_a_micro_batch_before_the_last_is_sent() -> None:
    """Of a parameter that the last one does not use. One that none of them uses has none, as without buckets."""
    early, last, never = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    buckets = BucketSum([early, last, never], Recording(), bucket_bytes=1, num_slots=1)
    early.sum().backward()
    buckets.start(0, weight=0.5)
    last.sum().backward()
    buckets.finish(0)
    buckets.wait(0)
    buckets.give(Committed(1, 0))
    assert [None if p.grad is None else p.grad.tolist() for p in (early, last, never)] == [[0.5] * 2, [0.5] * 2, None]
