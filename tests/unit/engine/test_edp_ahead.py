"""A worker of edp computes at the weights that the server will have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.engine.served import Clock, Server, adamw

from smolcluster.comm.rounds import Committed
from smolcluster.config.options import EDPOptions
from smolcluster.strategies import edp as edp_module
from smolcluster.strategies.base.replicated import Announced
from smolcluster.strategies.edp import EDP


def test_a_worker_of_edp_with_sgd_computes_where_the_server_is_known_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = Server(EDP, EDPOptions(), monkeypatch).role.strategy
    worker.rejoined()
    push(worker, 1, 0.1)
    worker.take_change(Announced(change={name: torch.ones_like(p) for name, p in worker.trained.items()}), 1)
    assert difference(worker).abs().max() == 0
    assert list(worker._prediction.in_flight) == [1]  # for which it waits


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker of edp that has just joined."""
    edp: Any = adamw(Server(EDP, EDPOptions(), monkeypatch)).role.strategy
    edp.replica.grad_clip_norm = 1.0
    edp.rejoined()
    return edp


def push(worker: Any, number: int, gradient: float) -> None:
    for p in worker.trained.values():
        p.grad = torch.full_like(p, gradient)
    worker._prediction.add(number)


def difference(worker: Any) -> torch.Tensor:
    """The weights at which the worker computes, less those of the server."""
    worker._prediction.set_weights()
    return torch.cat([(p.detach() - worker._prediction.server[name]).flatten() for name, p in worker.trained.items()])


def test_a_worker_of_edp_computes_where_the_server_will_be(worker: Any) -> None:
    """Two pushes late, against torch's AdamW. Gradients change their size, so the clipping does too."""
    gradients = [0.4 + 0.3 * math.sin(number) for number in range(40)]
    for p in worker.trained.values():
        p.detach().zero_()
    worker.rejoined()
    server = {name: p.detach().clone().requires_grad_() for name, p in worker.trained.items()}
    optimizer = torch.optim.AdamW(server.values(), lr=0.1, weight_decay=0.0)
    states = [[p.detach().clone() for p in server.values()]]
    for gradient in gradients:  # where the server is after each step
        for p in server.values():
            p.grad = torch.full_like(p, gradient)
        norm = float(torch.nn.utils.clip_grad_norm_(server.values(), 1.0))
        optimizer.step()
        states.append([p.detach().clone() for p in server.values()])
        number = len(states) - 1
        push(worker, number, gradient)
        if number > 2:  # it hears of the step before the last two
            change = dict(zip(server, map(torch.sub, states[number - 2], states[number - 3]), strict=True))
            worker.take_change(Announced(change=change, counted=number - 2, norm=norm), number - 2)
        worker._prediction.set_weights()
        for p, there, known in zip(worker.trained.values(), states[number], states[number - 2], strict=False):
            if number > 10:
                torch.testing.assert_close(p.detach(), there, rtol=0, atol=0.1 * float((there - known).abs().max()))


def test_a_worker_of_edp_goes_as_many_steps_ahead_as_pushes_are_in_flight(worker: Any) -> None:
    push(worker, 1, 0.1)
    push(worker, 2, 0.1)
    newest, older = worker._prediction.in_flight[2]["bias"].item(), worker._prediction.in_flight[1]["bias"].item()
    change = {name: torch.full_like(p, 0.5) for name, p in worker.trained.items()}
    worker.take_change(Announced(change=change, workers=4), 1)
    change["bias"].fill_(7.0)  # memory that is used again
    momentum = 0.5 * (0.9 + 0.81)
    assert difference(worker)[-1].item() == pytest.approx(momentum + newest + older * 1.9)
    worker.take_change(Announced(change=None, workers=4), 3)
    assert worker._since_pull == worker.options.worker_update_interval
    worker.take_weights({name: torch.full_like(p, 2.0) for name, p in worker.trained.items()}, 3)
    assert difference(worker)[-1].item() == pytest.approx(momentum + newest + older * 1.9)
    worker.take_change(Announced(change={name: torch.ones_like(p) for name, p in worker.trained.items()}, counted=2), 4)
    assert worker._prediction.server["bias"].item() == 3.0
    assert difference(worker)[-1].item() == 0.0  # nothing in flight
    for number in range(3, 9):
        push(worker, number, 0.1)
    assert list(worker._prediction.in_flight) == [5, 6, 7, 8]
    worker.rejoined()
    assert difference(worker).abs().max() == 0


class Updates:
    """What a worker waits for: each is counted after so many seconds, and the worker's own steps take one second."""

    def __init__(self, worker: Any, clock: Clock, after: Callable[[int], float]) -> None:
        self.worker, self.clock, self.after = worker, clock, after
        self.waited: list[float] = []

    def wait_until(self, done: Callable[[], bool], *, timeout_s: float) -> bool:
        takes = self.after(max(self.worker._prediction.in_flight))
        self.waited.append(min(takes, timeout_s))
        self.clock.now += self.waited[-1]
        if takes <= timeout_s:
            self.worker._prediction.in_flight.clear()
        return done()


@pytest.mark.parametrize(
    ("after", "share", "least", "most"),
    [
        (lambda push: 0.3, 1.0, 0.29, 0.31),  # soon, always: waited for every time
        (lambda push: 9.0 if push == 20 else 0.3, 1.0, 0.29, 0.31),  # late once: and soon again as before
        (lambda push: math.inf, 0.07, 0.1, 0.15),  # never
        (lambda push: math.inf if push % 2 else 0.0, 0.1, 0.1, 0.15),  # every second one, at once
        (lambda push: 1.5, 0.26, 0.3, 0.4),  # late, always
    ],
)
def test_a_worker_of_edp_waits_for_its_update_and_seldom_where_that_is_in_vain(
    worker: Any, monkeypatch: pytest.MonkeyPatch, after: Any, share: float, least: float, most: float
) -> None:
    """`share`: of the steps that wait; the mean wait of a step is within bounds."""
    clock = Clock()
    monkeypatch.setattr(edp_module, "time", SimpleNamespace(monotonic=clock.monotonic))
    worker.rounds = updates = Updates(worker, clock, after)
    for step in range(1, 201):
        worker._prediction.in_flight[step] = {}
        worker._wait_for_update(step, 1.0)
    assert len(updates.waited) / 200 == pytest.approx(share, abs=0.05)
    assert least <= sum(updates.waited) / 200 <= most
    assert max(updates.waited) <= worker.options.max_wait


def test_a_worker_of_edp_never_waits_if_it_may_not(worker: Any) -> None:
    worker.options = worker.options.model_copy(update={"max_wait": 0.0})
    worker.rounds = None
    worker._prediction.in_flight[1] = {}
    worker._wait_for_update(1, 1.0)


def test_an_absurd_gradient_leads_a_worker_of_edp_nowhere(worker: Any) -> None:
    change = {name: torch.zeros_like(p) for name, p in worker.trained.items()}
    worker.take_change(Announced(change=change, workers=3, norm=1.0), 0)
    push(worker, 1, 1e6)
    assert worker._prediction.in_flight[1]["bias"].item() == pytest.approx(-0.1, rel=0.01)
    push(worker, 2, math.inf)
    assert list(worker._prediction.in_flight) == [1]
    worker.apply(Committed(1, slot=0, empty=True))  # refused
    assert difference(worker).abs().max() == 0
    push(worker, 3, 0.5)  # its own second moments are at most those of a gradient six times the server's
    assert worker._prediction.in_flight[3]["bias"].item() < -0.01


def test_a_step_ahead_has_the_size_of_a_step_of_the_server(worker: Any) -> None:
    """Whose gradients are of more samples, so that their squares are smaller."""
    push(worker, 1, 0.5)  # a norm of 0.87
    alone = worker._prediction.in_flight[1]["weight"]
    assert alone.mean().item() == pytest.approx(-0.1, rel=1e-3)  # the first step of AdamW
    said = Announced(workers=4, norm=2.0, denominators=[0.1, 0.0])  # of the bias nothing is known
    worker.take_change(dataclasses.replace(said, change={n: torch.zeros_like(p) for n, p in worker.trained.items()}), 0)
    push(worker, 2, 0.5)
    expected = -0.1 * 0.5 * 0.5 / 0.1  # rate, gradient, clipped by the server's norm, its denominator
    assert worker._prediction.in_flight[2]["weight"].mean().item() == pytest.approx(expected, rel=1e-3)
    assert worker._prediction.in_flight[2]["bias"].mean().item() == pytest.approx(-0.1 * 0.5, rel=1e-3)
