"""Members of a coordinator that come while the others train, fall silent, or cannot reach each other."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from tests.unit.engine.members import DONE, Run, sent_to, set_clock, share

from smolcluster.comm.elastic.transport.api import Link
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.engine.elastic.coordination import coordinator, evictions


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return set_clock(monkeypatch)


# Newcomers get the state while the others train


def followed() -> Run:
    """Ranks 0 and 1 train; rank 2 comes after step 1, and the state that is sent to it stays in its queue."""
    run = Run(replicated=True)
    run.join_together(0, 1)
    run.commit(1)
    run.upload(0, {"w/x": torch.zeros(1)})
    run.commit(2)  # which the coordinator has no state of
    run.knock(2)
    run.links[2].queued_bytes = 2 << 20
    run.go_on()
    run.upload(0, {"w/x": torch.zeros(1)})
    return run


def test_rounds_are_committed_while_a_newcomer_gets_its_state() -> None:
    run = followed()
    assert sent_to(run, 2, Kind.WELCOME) == [(2, 0)]
    for step in (3, 4):
        run.commit(step)
    assert [commit.step for commit in run.commits] == [1, 2, 3, 4]
    assert sorted(run.roster.members) == [0, 1]
    assert run.links[0].last(Kind.COMMIT).meta["share"]

    # The results come in any order, and leave in theirs, when the state is through.
    share(run, 1, 0, step=4)
    share(run, 0, step=3)
    run.links[2].queued_bytes = 0
    run.go_on()
    assert sent_to(run, 2, Kind.COMMIT) == []
    share(run, 1, step=3)
    assert sent_to(run, 2, Kind.COMMIT) == [(3, 0), (4, 0)]
    assert sent_to(run, 2, Kind.STATE)[1:] == [(3, 0), (3, 1), (4, 1), (4, 0)]
    assert run.links[2].last(Kind.COMMIT).meta["members"] == 2
    view = run.links[2].last(Kind.VIEW)
    assert (view.step, view.meta["donations"], view.meta["idle"]) == (4, {}, [2])
    run.commit(5)
    assert not run.links[0].last(Kind.COMMIT).meta["share"]


def test_when_little_is_left_for_a_newcomer_it_is_waited_for() -> None:
    """Else rounds that are short would never let it in."""
    run = followed()
    run.commit(3)
    run.links[2].queued_bytes = 0
    run.commit(4)
    assert len(run.commits) == 3
    share(run, 0, 1, step=3)
    assert sorted(run.roster.members) == [0, 1, 2]


def test_a_newcomer_that_never_comes_nearer_is_waited_for() -> None:
    """What is kept for it is bounded."""
    run = followed()
    weights_bytes = sum(tensor.nbytes for tensor in run.replica.weights().values())
    for step in range(3, 9):
        run.commit(step)
        if len(run.commits) == step:
            share(run, 0, 1, step=step, nbytes=weights_bytes // 2)
    assert len(run.commits) == 2 + 5, "more than four times the weights are kept"
    [warning] = run.warnings
    assert warning == "worker 2 (testhost) receives the state more slowly than the others train: they wait for it"
    run.links[2].queued_bytes = 0
    run.go_on()
    assert sorted(run.roster.members) == [0, 1, 2]


def test_when_a_member_is_lost_with_its_share_newcomers_get_another_state() -> None:
    run = followed()
    run.commit(3)
    share(run, 1, step=3)
    run.leave(0)
    run.go_on()
    assert sorted(run.roster.members) == [1]
    run.upload(1, {"w/x": torch.zeros(1)})
    assert sent_to(run, 2, Kind.WELCOME) == [(2, 0), (3, 0)]
    run.commit(4)
    assert [commit.step for commit in run.commits] == [1, 2, 3, 4], "the others wait"
    share(run, 1, step=4)
    run.links[2].queued_bytes = 0
    run.go_on()
    assert sorted(run.roster.members) == [1, 2]


def test_a_newcomer_that_dies_on_its_way_is_forgotten() -> None:
    run = followed()
    run.leave(2)
    run.go_on()
    run.commit(3)
    assert run.coordinator._committed == 3
    assert not run.links[0].last(Kind.COMMIT).meta["share"]


def test_a_newcomer_that_has_caught_up_has_the_weights_when_all_others_die() -> None:
    run = followed()
    run.leave(0)
    run.leave(1)
    run.links[2].queued_bytes = 0
    run.go_on()
    assert sorted(run.roster.members) == [2]
    assert run.coordinator._without_state == set()


# A member is silent


def test_a_silent_member_is_paused_and_comes_back_when_it_is_heard() -> None:
    run = Run(replicated=True)
    run.join(0, 1, 2)
    run.commit(1)
    run.links[1].stalled, run.links[1].silent_s = True, 2.0
    run.go_on()
    assert sorted(run.roster.members) == [0, 2]
    assert run.links[1].open, "it was evicted"
    run.commit(2)
    assert run.coordinator._committed == 2
    run.hear(1, Message(kind=Kind.DONE, step=3, epoch=run.roster.epoch, meta=DONE))  # of its old place
    run.go_on()
    assert run.coordinator._done.get(3) is None
    run.links[1].stalled, run.links[1].silent_s = False, 0.0
    run.go_on()
    assert sorted(run.roster.members) == [0, 2], "it has missed a step"
    for _ in (1, 2):  # the state of step 1, which was asked for first, does not help it
        run.upload(0, {"w/x": torch.zeros(1)})
    assert sorted(run.roster.members) == [0, 1, 2]
    run.commit(3)
    assert run.coordinator._committed == 3
    assert (run.roster.joined, run.roster.lost) == (3, 0)


def test_the_only_holder_of_the_weights_comes_back_from_a_pause_with_them(clock: list[float]) -> None:
    """It was stopped when a newcomer waited for its state."""
    run = Run(replicated=False)
    run.join(0)
    run.commit(1)
    run.links[0].stalled, run.links[0].silent_s = True, 2.0
    run.knock(1)
    for _ in range(6):
        run.coordinator._iterate()
    assert sorted(run.roster.members) == [1]
    run.links[0].stalled, run.links[0].silent_s = False, 0.0
    for _ in range(3):
        clock[0] += 10.0
        run.coordinator._iterate()
    assert sorted(run.roster.members) == [0, 1]
    assert run.links[1].last(Kind.VIEW).meta["donations"] == {"1": 0}
    run.commit(2)
    assert run.coordinator._committed == 2


def test_a_paused_member_is_not_waited_for_where_the_coordinator_has_the_weights() -> None:
    """A newcomer got them from that member, by way of the coordinator, before it fell silent."""
    run = Run(replicated=True)
    run.join(0)
    run.commit(1)
    run.join(1)
    assert sorted(run.roster.members) == [0], "it has no state"
    run.upload(0, {"w/x": torch.zeros(1)})
    run.links[0].stalled, run.links[0].silent_s = True, 2.0
    for _ in range(4):
        run.coordinator._iterate()
    assert [member.rank for member in run.roster.paused] == [0]
    assert [member["rank"] for member in run.links[1].last(Kind.VIEW).meta["view"]["members"]] == [1]
    run.commit(2)
    assert run.coordinator._committed == 2


def test_a_paused_member_without_the_weights_is_not_waited_for(clock: list[float]) -> None:
    """The one that had them is gone, and does not come back in time."""
    run = Run(replicated=False)
    run.join(0)
    run.commit(1)
    run.knock(1, 2)
    run.go_on()
    assert run.coordinator._without_state == {1, 2}
    run.links[1].stalled, run.links[1].silent_s = True, 2.0
    run.leave(0)
    for _ in range(4):
        run.coordinator._iterate()
    assert [member.rank for member in run.roster.paused] == [1]
    assert run.coordinator._holder_may_return()
    clock[0] += coordinator.RECONNECT_S + 1.0
    assert not run.coordinator._holder_may_return()


def test_where_all_are_silent_nobody_is_paused() -> None:
    run = Run(replicated=True)
    run.join(0, 1)
    for link in run.links.values():
        link.stalled, link.silent_s = True, 2.0
    run.go_on()
    assert sorted(run.roster.members) == [0, 1]


def test_a_short_silence_is_waited_for_where_steps_are_long(clock: list[float]) -> None:
    run = Run(replicated=True)
    run.join(0, 1)
    for step in (1, 2):
        clock[0] += 8.0
        run.commit(step)
    run.links[1].stalled, run.links[1].silent_s = True, 4.0
    run.go_on()
    assert sorted(run.roster.members) == [0, 1]
    run.links[1].silent_s = 9.0
    run.go_on()
    assert sorted(run.roster.members) == [0]


# Links between members break


def suspect(run: Run, *suspicions: tuple[int, int]) -> None:
    """Each first one reports that it cannot reach the second; then all the time passes that is waited for others."""
    for reporter, suspected in suspicions:
        epoch = run.links[reporter].last(Kind.VIEW).epoch
        run.hear(reporter, Message(kind=Kind.SUSPECT, epoch=epoch, meta={"rank": suspected}))
    run.go_on()
    assert sorted(run.roster.members) == sorted(run.links), "nobody waited for the other suspicions"
    for suspicion in run.coordinator._evictions.suspicions:
        run.coordinator._evictions.suspicions[suspicion] -= coordinator.CONNECT_S + evictions.WITNESS_S
    run.go_on()


@pytest.mark.parametrize(
    ("suspicions", "stay"),
    [
        ([(0, 1), (1, 0), (0, 2), (2, 0), (0, 3), (3, 0)], [1, 2, 3]),
        ([(0, 1), (0, 2), (0, 3)], [1, 2, 3]),
        ([(0, 1)], [1, 2, 3]),
        ([(0, 1), (1, 0)], [0, 2, 3]),
        ([(0, 3), (1, 3)], [0, 1, 2]),
    ],
    ids=["the first is cut off", "only the first reports", "of one alone", "one link", "two witnesses"],
)
def test_a_partial_cut_costs_the_fewest_members(suspicions: list[tuple[int, int]], stay: list[int]) -> None:
    run = Run(replicated=True)
    run.join(0, 1, 2, 3)
    run.commit(1)
    suspect(run, *suspicions)
    assert sorted(run.roster.members) == stay
    run.commit(2)
    assert run.coordinator._committed == 2


@pytest.mark.parametrize("rounds_ahead", [1, 2])
def test_a_suspicion_counts_no_more_when_a_round_that_was_leased_after_it_is_committed(rounds_ahead: int) -> None:
    """The members have exchanged that round, so they reach each other. Earlier rounds may have been exchanged before."""
    run = Run(replicated=True, rounds_ahead=rounds_ahead)
    run.join(0, 1, 2)
    run.commit(1)
    run.hear(0, Message(kind=Kind.SUSPECT, epoch=run.links[0].last(Kind.VIEW).epoch, meta={"rank": 1}))
    run.go_on()
    for step in range(2, 2 + rounds_ahead):
        run.commit(step)
        assert list(run.coordinator._evictions.suspicions) == [(0, 1)]
    run.commit(2 + rounds_ahead)
    assert not run.coordinator._evictions.suspicions
    suspect(run, (1, 2), (2, 1))  # a later one counts
    assert len(run.roster.members) == 2


def test_a_member_that_is_silent_explains_the_suspicions() -> None:
    run = Run(replicated=True)
    run.join(0, 1, 2)
    run.links[0].silent_s = 2.0
    suspect(run, (0, 1), (1, 0))
    assert sorted(run.roster.members) == [1, 2]


def test_an_eviction_bars_for_longer_each_time_and_is_forgotten_after_a_while(clock: list[float]) -> None:
    run = Run(replicated=True)
    barred = []
    for pause_s in (0.0, 100.0, 100.0, 3600.0):
        clock[0] += pause_s
        run.join(*(rank for rank in range(2) if rank not in run.roster.members))
        run.coordinator._evict(run.roster.members[1], "a test")
        barred.append(run.coordinator._evictions.quarantined_until[1] - clock[0])
        run.go_on()
    assert barred == [0.0, 10.0, 30.0, 0.0]


def test_a_peer_that_is_refused_without_end_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(replicated=True)
    run.join(0)
    for _ in range(1000):
        run.roster.refuse(cast(Link, run.links[0]), "why not")
    assert 10 < len(caplog.records) < 20
    assert "(512 times by now)" in caplog.text
    assert run.roster.refused.total() == 1000
