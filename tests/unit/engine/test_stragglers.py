"""Stragglers of syncps: what they cost the others, and how they come back."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.engine.served import Clock, Event, Server, Worker

from smolcluster.comm.elastic.membership.roster import Member, MemberGone, MemberMessage
from smolcluster.comm.elastic.membership.server_link import Lease
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.config.options import SyncPSOptions
from smolcluster.engine.elastic.parameter_server import synchronous
from smolcluster.strategies.syncps import SyncPS


class Steps:
    """A server of syncps, driven step by step on a clock of its own; `timeout` is 10 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ranks: int, automatic: bool = False) -> None:
        self.clock = Clock()
        monkeypatch.setattr(synchronous, "time", self.clock)
        self.server = Server(SyncPS, SyncPSOptions(timeout=10.0), monkeypatch)
        self.members = self.server.join(*ranks)
        for who in self.members:
            who.automatic = automatic
        self.records: list[list[int]] = []  # ranks that counted, by step
        self.waited: list[float] = []  # seconds that each step took
        self.server.role.context.total_steps = 1000
        self.server.role.server_context.record = lambda commit: self.records.append(
            [c["rank"] for c in commit.contributors]
        )

    def lease(self, who: Member) -> tuple[int, int] | None:
        """The step and the number of samples of the last lease that was sent to it."""
        leases = [lease for m in who.link.sent for lease in m.meta.get("leases", ())]  # type: ignore[attr-defined]
        return (leases[-1]["step"], sum(n for _, n in leases[-1]["ranges"])) if leases else None

    def after(self, seconds: float, event: Event = lambda: None) -> Event:
        def happens() -> MemberMessage | MemberGone | None:
            self.clock.now += seconds
            return event()

        return happens

    def push(self, who: Member, *, compute_s: float = 1.0) -> Event:
        """Of the step that it was leased last, as it is when its turn comes."""

        def event() -> MemberMessage:
            step, samples = self.lease(who) or (0, 0)
            return self.server.push(who, 1.0, step=step, samples=samples, compute_s=compute_s)

        return event

    def run(self, *events: Event) -> None:
        """Serve until these have happened, and nothing is left to do."""
        begun, role = self.clock.now, self.server.role
        self.server.roster.script = [*events, lambda: None]
        commits = len(self.records)
        role.wait_for_workers, role.tokens_per_sample = lambda: None, 1
        role.serve()
        self.waited += [self.clock.now - begun] * (len(self.records) - commits)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Rank 1 has not pushed step 1, and the timeout has passed, once."""
    steps = Steps(monkeypatch, 0, 1)
    steps.run(steps.after(1, steps.push(steps.members[0])), *[steps.after(1)] * 10)
    return steps


def test_a_straggler_costs_one_timeout_and_not_one_per_step(late: Steps) -> None:
    steps, (fast, slow) = late, late.members
    assert steps.records == [[0]]
    assert "late with step 1" in steps.server.warned[0]
    for _ in range(20):
        steps.run(steps.after(1, steps.push(fast)))
    assert steps.records == [[0]] * 21
    assert steps.waited[1:] == [1.0] * 20
    assert steps.lease(slow) == (1, 4)  # busy: nothing more is leased to it
    assert len(steps.server.warned) == 1
    assert steps.server.leases.state_dict() == {"position": 84, "holes": []}


def test_a_straggler_starts_with_the_others_and_is_waited_for_once_it_keeps_up(late: Steps) -> None:
    steps, (fast, slow) = late, late.members
    steps.run(steps.after(1, steps.push(slow)), steps.after(1, steps.push(fast)))  # step 1 of the one, 2 of the other
    assert steps.lease(slow) == (3, 4)
    steps.run(steps.after(1, steps.push(fast)), steps.after(3, steps.push(slow)))  # too late, but within the timeout
    assert steps.records == [[0]] * 3
    steps.run(steps.after(1, steps.push(fast)))
    assert steps.lease(slow) == (5, 4)
    steps.run(steps.after(1, steps.push(fast)), steps.after(9, steps.push(slow)))
    assert steps.records[3:] == [[0], [0, 1]]
    assert len(steps.server.warned) == 1


def test_a_straggler_that_stays_too_slow_is_not_waited_for(late: Steps) -> None:
    steps, (fast, slow) = late, late.members
    for _ in range(5):
        steps.run(*[steps.after(1, steps.push(fast))] * 15, steps.after(0, steps.push(slow)))
    assert steps.records == [[0]] * (1 + 5 * 15)


def test_a_straggler_that_is_early_for_once_counts(late: Steps) -> None:
    steps, (fast, slow) = late, late.members
    steps.run(steps.after(1, steps.push(slow)), steps.after(1, steps.push(fast)))
    steps.run(steps.after(1, steps.push(slow)), steps.after(1, steps.push(fast)))
    assert steps.records == [[0], [0], [0, 1]]


def test_the_speed_of_a_straggler_is_learned_from_its_late_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With batch_size: auto it gets less, and keeps up."""
    steps = Steps(monkeypatch, 0, 1, automatic=True)
    fast, slow = steps.members
    steps.run(steps.after(1, steps.push(fast)), *[steps.after(1)] * 10)
    steps.run(
        *[steps.after(1, steps.push(fast))] * 18, steps.push(slow, compute_s=30.0), steps.after(1, steps.push(fast))
    )
    assert slow.speed == pytest.approx(4 / 30)
    assert steps.lease(fast) == (21, 7)
    assert steps.lease(slow) == (21, 1)


def test_a_straggler_that_is_left_alone_goes_on_alone(late: Steps) -> None:
    steps, (fast, slow) = late, late.members
    steps.run(
        lambda: steps.server.roster.gone(fast),
        steps.after(1, steps.push(slow)),  # of step 1, which is over
        lambda: None,
        steps.after(1, steps.push(slow)),
    )
    assert steps.records == [[0], [1]]


def test_a_bad_gradient_of_the_others_does_not_shut_a_straggler_out(late: Steps) -> None:
    steps, (fast, slow) = late, late.members
    steps.run(steps.after(1, steps.push(slow)), steps.after(1, steps.push(fast)))
    bad = lambda: steps.server.push(fast, math.nan, step=3)  # noqa: E731
    steps.run(steps.after(1, bad), steps.after(30, steps.push(slow)))
    assert steps.records == [[0], [0], [1]]


def test_a_worker_reports_a_lease_that_it_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The average of that step came before it was begun: nothing is computed, and the server knows."""
    worker = Worker(SyncPS, SyncPSOptions(), monkeypatch)
    worker.leases.append(Lease(step=1, ranges=((0, 4),)))
    (payload,) = (
        p
        for _, p in worker.strategy.rounds._packed.gradients.encode({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
    )
    worker.strategy.rounds._handle(Message(kind=Kind.AVERAGE, step=1, meta={"counted": [1]}, payload=payload))
    assert [(m["kind"], m["step"], m["meta"]) for m in worker.sent] == [(Kind.PUSH, 1, {"skip": "late"})]

    steps = Steps(monkeypatch, 0, 1)
    fast, slow = steps.members
    steps.run(steps.after(1, steps.push(fast)), *[steps.after(1)] * 10)
    skipped = Message(kind=Kind.PUSH, step=1, epoch=slow.epoch, meta={"skip": "late"})
    steps.run(lambda: MemberMessage(slow, skipped), steps.after(1, steps.push(fast)))
    assert steps.lease(slow) == (3, 4)
    assert steps.server.role.stale_rejected == 0
