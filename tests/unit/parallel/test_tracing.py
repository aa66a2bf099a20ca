"""Models that are no sequence, as chains of layers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tasks import Residual, ResidualNet
from torch import Tensor, nn

from smolcluster.config.schema import Config
from smolcluster.errors import UserError
from smolcluster.models import SimpleNN
from smolcluster.parallel.tracing import TracedLayers, trace_layers


class Given(Residual):
    """A task for a model."""

    make: Callable[[], nn.Module]

    def model(self) -> nn.Module:
        return type(self).make()


def chain_of(make: Callable[[], nn.Module], *, at_least: int = 2) -> TracedLayers:
    task = type("Task", (Given,), {"make": staticmethod(make)})(Config())
    return trace_layers(task, lambda count: (torch.zeros(count, 12), torch.zeros(count).long()), at_least=at_least)


def stages(chain: TracedLayers, model: nn.Module) -> list[nn.Module]:
    count = chain.count
    return [chain.stage(model, range(n, n + 1), first=n == 0, last=n == count - 1) for n in range(count)]


def test_layers_end_where_one_tensor_is_on_its_way_and_keep_their_names() -> None:
    model = ResidualNet()
    parts = stages(chain_of(ResidualNet), model)
    assert [sorted({name.rpartition(".")[0] for name in part.state_dict()}) for part in parts] == [
        ["", "stem"],
        *([f"blocks.{n}", f"blocks.{n}.first", f"blocks.{n}.second"] for n in range(3)),
        ["norm"],
        ["head"],
    ]
    assert {name for part in parts for name in part.state_dict()} == set(model.state_dict())
    x = held = torch.randn(5, 12)  # another number of samples than it was traced with
    for part in parts:
        held = part(held)
    torch.testing.assert_close(held, model(x), rtol=0, atol=0)
    held.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_function_may_depend_on_the_mode() -> None:
    def make() -> nn.Module:
        model = ResidualNet()
        model.drops = True
        return model

    model, x = make(), torch.randn(4, 12)
    last = stages(chain_of(make), model)[-1]
    held = torch.randn(4, 48)
    assert torch.equal(last.eval()(held), model.head(held))  # the dropout stays with the layer before the head
    before = stages(chain_of(make), model)[-2]
    hidden = torch.randn(4, 4, 12)
    assert (before.train()(hidden) == 0).float().mean() == pytest.approx(0.5, abs=0.2)
    assert (before.eval()(hidden) == 0).sum() == 0
    assert torch.equal(model.eval()(x), model(x))


def test_the_projects_own_classifier() -> None:
    model = SimpleNN(input_dim=12, hidden=8, out=3)
    parts = stages(chain_of(lambda: SimpleNN(input_dim=12, hidden=8, out=3)), model)
    assert [list(part.state_dict()) for part in parts] == [["hidden.weight", "hidden.bias"], ["out.weight", "out.bias"]]


class Opaque(nn.Module):
    """Its own forward cannot be traced; it may be a step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * len(x.shape)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Opaque(), Opaque()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.one(x)))


def test_a_module_that_cannot_be_traced_is_one_step() -> None:
    model, x = Wrapped(), torch.randn(3, 12)
    first, second = stages(chain_of(Wrapped), model)
    assert sorted(first.state_dict()) == ["one.linear.bias", "one.linear.weight"]
    assert torch.equal(second(first(x)), model(x))


class Skipping(nn.Module):
    """The input of the first layer is needed by the last: two tensors cross each cut."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        if tied:
            self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        first = kept = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            first = torch.tanh(layer(first))
        return operator.add(first, kept)


def test_more_tensors_cross_where_there_is_no_other_way() -> None:
    model, x = Skipping(), torch.randn(3, 12)
    parts = stages(chain_of(Skipping, at_least=3), model)
    assert len(parts) == 4
    held: tuple[Any, ...] = (x,)
    for part in parts:
        output = part(*held)
        held = output if isinstance(output, tuple) else (output,)
    assert torch.equal(held[0], model(x))


def test_weights_that_are_used_twice_stay_together() -> None:
    assert chain_of(lambda: Skipping(tied=True)).count == 1


class Unused(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Linear(1, 1)


class Steps(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.one(x)


class Counting(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.size(0) > 2 else 1.0)


class Makes(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.ones(12))


class Pair(Wrapped):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Unused, "three.bias has no part in its forward"),
        (Steps, "its steps differ between training and evaluation"),
        (Counting, "its steps depend on the number of samples"),
        (Makes, "it creates a tensor; register that as a buffer"),
        (Pair, "it does not return exactly one tensor"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_the_reason(make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(UserError, match=rf"cannot be traced \({reason}\). Fix that, make it an nn.Sequential, or give"):
        chain_of(make)
