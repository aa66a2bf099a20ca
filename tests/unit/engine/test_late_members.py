"""Members that are late: when they are, what is kept for them, and how they come back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.engine.members import Run, sent_to, set_clock, share

from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.engine.elastic.coordination.late_members import MIN_ROUNDS, VIEW_CHANGE_S, needed, round_deadline

ROUND_S = 10.0


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([10.0] * (MIN_ROUNDS - 1), math.inf),  # too few are known
        ([10.0] * MIN_ROUNDS, 15.0),  # half as long again
        ([8.0, 9.0, 10.0, 11.0, 12.0], 16.0),  # six median absolute deviations after the median
        ([10.0] * 9 + [1000.0], 15.0),  # one that was very late moves nothing
        ([0.1] * MIN_ROUNDS, 0.1 + VIEW_CHANGE_S),  # no sooner than a change of members pays
    ],
)
def test_the_deadline_follows_from_earlier_rounds(times: list[float], expected: float) -> None:
    assert round_deadline(times) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("quorum", "counts"),
    [(0.5, {1: 1, 2: 2, 3: 2, 4: 3, 5: 3}), (1.0, {1: 1, 3: 3}), (0.0, {1: 1, 2: 1, 8: 1}), (0.75, {4: 4, 8: 7})],
)
def test_a_quorum_is_more_than_its_share(quorum: float, counts: dict[int, int]) -> None:
    assert {members: needed(members, quorum=quorum) for members in counts} == counts


class LateRun(Run):
    """Three members on a clock; all rounds before the first of a test take ten seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.clock = set_clock(monkeypatch)
        super().__init__(replicated=True, total_steps=100, **{"quorum": 0.5} | options)
        self.coordinator._late._clock = lambda: self.clock[0]
        self.join_together(0, 1, 2)
        for step in range(1, MIN_ROUNDS + 1):
            self.wait(ROUND_S)
            self.announce(0, 1, 2, step=step)
            self.commit(step)
        self.step = MIN_ROUNDS + 1

    def announce(self, *ranks: int, step: int) -> None:
        for rank in ranks:
            epoch = self.links[rank].last(Kind.VIEW).epoch
            self.hear(rank, Message(kind=Kind.WAITING, step=step, epoch=epoch))
        self.go_on()

    def wait(self, seconds: float) -> None:
        """Time passes, in small pieces."""
        for _ in range(math.ceil(seconds)):
            self.clock[0] += 1.0
            self.coordinator._late.suspend_late(self.coordinator._rounds)
        self.go_on()

    def leave_behind_rank_2(self) -> None:
        self.announce(0, 1, step=self.step)
        self.wait(2 * ROUND_S)

    def held(self, rank: int) -> list[tuple[int, int]]:
        return [tuple(r) for r in self.leases_of(rank).get(self.step, [])]  # type: ignore[misc]

    def leases_of(self, rank: int) -> dict[int, Any]:
        return self.server_context.leases.held(self.links[rank].peer.instance)

    def answer(self, rank: int, *late: int) -> None:
        epoch = self.links[rank].last(Kind.WELCOME).epoch
        self.hear(rank, Message(kind=Kind.WAITING, epoch=epoch, meta={"late": [[step, 4] for step in late]}))
        self.go_on()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> LateRun:
    return LateRun(monkeypatch)


def test_a_late_member_is_not_waited_for_and_its_work_counts_later(run: LateRun) -> None:
    step, lease = run.step, run.held(2)
    run.announce(0, 1, step=step)
    run.wait(0.4 * ROUND_S)
    assert sorted(run.roster.members) == [0, 1, 2], "before the deadline"
    run.wait(1.2 * ROUND_S)
    assert sorted(run.roster.members) == [0, 1]
    welcome = run.links[2].last(Kind.WELCOME)
    assert (welcome.step, welcome.meta) == (step - 1, {"late": True})
    assert run.links[2].open
    assert any("is late for the round that ends with step 6" in warning for warning in run.warnings)

    # It is no member before the others have committed the round, and before it has answered.
    run.answer(2, step)
    assert sorted(run.roster.members) == [0, 1]
    run.commit(step)
    assert [part["rank"] for part in run.commits[-1].contributors] == [0, 1]
    share(run, 0, 1, step=step)
    assert sent_to(run, 2, Kind.COMMIT)[-1] == (step, 0), "the result of the round is not sent"
    view = run.links[2].last(Kind.VIEW).meta
    assert (view["idle"], view["late"], view["donations"]) == ([2], [2], {})

    # Its samples are those of the round it was late for.
    run.step += 1
    assert run.held(2) == lease
    run.commit(run.step)
    assert [part["ranges"] for part in run.commits[-1].contributors if part["rank"] == 2] == [[list(r) for r in lease]]


def test_a_member_that_is_not_back_holds_up_nobody(run: LateRun) -> None:
    """What is kept for it is bounded; then it needs a state."""
    run.leave_behind_rank_2()
    weights_bytes = sum(tensor.nbytes for tensor in run.replica.weights().values())
    for step in range(run.step, run.step + 12):
        run.commit(step)
        assert run.coordinator._committed == step, "the others wait for it"
        if run.links[0].last(Kind.COMMIT).meta["share"]:
            share(run, 0, 1, step=step, nbytes=weights_bytes // 2)
    assert not run.links[0].last(Kind.COMMIT).meta["share"], "its results are kept for ever"
    run.answer(2, run.step)
    assert run.coordinator._followers.lack_state
    for _ in (1, 2):  # the state that was asked for first does not help it
        run.upload(0, {"w/x": torch.zeros(1)})
    assert sorted(run.roster.members) == [0, 1, 2]
    assert run.links[2].last(Kind.VIEW).meta["late"] == [2], "with another state its work counts all the same"


def test_the_samples_of_a_late_member_that_is_lost_are_leased_again(run: LateRun) -> None:
    lease = run.held(2)
    run.leave_behind_rank_2()
    run.leave(2)
    run.go_on()
    run.commit(run.step)
    run.step += 1
    assert lease in (run.held(0), run.held(1))


def test_a_round_that_it_has_not_begun_is_leased_again(run: LateRun) -> None:
    lease = run.held(2)
    run.leave_behind_rank_2()
    run.commit(run.step)
    run.answer(2)
    share(run, 0, 1, step=run.step)
    assert run.links[2].last(Kind.VIEW).meta["late"] == []
    run.commit(run.step + 1)
    run.step += 2
    assert lease in [run.held(rank) for rank in range(3)]


def test_without_a_quorum_all_are_waited_for(run: LateRun) -> None:
    run.announce(0, step=run.step)
    run.wait(4 * ROUND_S)
    assert sorted(run.roster.members) == [0, 1, 2]
    [warning] = run.warnings
    assert "waits for worker 1 (testhost), worker 2 (testhost): 1 of 3 members have contributed" in warning
    assert "a quorum is 2 (strategy.quorum 0.5)" in warning
    run.announce(2, step=run.step)
    assert sorted(run.roster.members) == [0, 2]


def test_those_that_are_late_count_for_the_quorum_until_they_are_lost(run: LateRun) -> None:
    run.leave_behind_rank_2()
    run.commit(run.step)
    run.announce(0, step=run.step + 1)
    run.wait(4 * ROUND_S)
    assert sorted(run.roster.members) == [0, 1], "one of three is no quorum"


def test_with_quorum_1_nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    run = LateRun(monkeypatch, quorum=1.0)
    run.announce(0, 1, step=run.step)
    run.wait(4 * ROUND_S)
    assert (sorted(run.roster.members), run.warnings) == ([0, 1, 2], [])


def test_time_in_which_the_coordinator_stood_still_does_not_count(run: LateRun) -> None:
    run.announce(0, 1, step=run.step)
    run.clock[0] += 10 * ROUND_S
    run.go_on()
    assert sorted(run.roster.members) == [0, 1, 2]
    run.wait(2 * ROUND_S)
    assert sorted(run.roster.members) == [0, 1]


def test_a_silent_member_keeps_its_lease(run: LateRun) -> None:
    lease = run.held(2)
    run.links[2].stalled, run.links[2].silent_s = True, 100.0
    run.go_on()
    run.commit(run.step)
    share(run, 0, 1, step=run.step)
    run.links[2].stalled, run.links[2].silent_s = False, 0.0
    run.go_on()
    assert sorted(run.roster.members) == [0, 1], "it has not answered"
    run.answer(2, run.step)
    run.step += 1
    assert (sorted(run.roster.members), run.held(2)) == ([0, 1, 2], lease)
