"""How long a member may compute while others wait for it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.engine.elastic.deadline import (
    FIRST_S,
    FRESH_S,
    LEAST_S,
    MIN_STEPS,
    POLL_S,
    ComputeWatch,
    step_deadline,
)


class Clock:
    """A watch with members a and b, both of which have contributed, that is looked at as often as it may be."""

    def __init__(self, timeout_s: float | None = None, *, proven: str = "ab") -> None:
        self.now, self.watch = 100.0, ComputeWatch(timeout_s)
        self.watch.begin("ab", now=self.now)
        for _ in range(MIN_STEPS):
            self.now += 0.1
            self.watch.commit(set(proven), now=self.now)

    def hung_after(self, *, waiting: str = "", delivered: str = "", most_s: float = 2 * FIRST_S) -> dict[str, float]:
        """Members that are found to have hung, each with the seconds until then."""
        began = self.now
        while self.now < began + most_s:
            for member in waiting:
                self.watch.waits(member, now=self.now)
            if found := self.watch.overdue(delivered=delivered, now=self.now):
                return found
            self.now += 2 * POLL_S
        return {}


def test_a_member_that_computes_while_another_waits_has_hung() -> None:
    assert Clock().hung_after(waiting="a") == {"b": pytest.approx(LEAST_S, abs=1.0)}
    assert Clock().hung_after(delivered="a") == {"b": pytest.approx(LEAST_S, abs=1.0)}


def test_nobody_has_hung_while_all_compute_or_all_wait() -> None:
    assert Clock().hung_after() == {}
    assert Clock().hung_after(waiting="ab") == {}
    assert Clock().hung_after(waiting="a", delivered="b") == {}


def test_a_first_step_may_take_longer() -> None:
    assert Clock(proven="a").hung_after(waiting="a") == {"b": pytest.approx(FIRST_S, abs=1.0)}
    assert Clock(5.0, proven="a").hung_after(waiting="a") == {"b": pytest.approx(FIRST_S, abs=1.0)}


def test_the_deadline_can_be_set() -> None:
    assert Clock(70.0).hung_after(waiting="a") == {"b": pytest.approx(70.0, abs=1.0)}
    assert Clock(0.1).hung_after(waiting="a") == {"b": pytest.approx(FRESH_S, abs=1.0)}
    assert Clock(float("inf")).hung_after(waiting="a") == {}


def test_time_in_which_the_coordinator_stood_still_does_not_count() -> None:
    clock = Clock()
    assert clock.hung_after(waiting="a", most_s=LEAST_S / 2) == {}
    clock.now += 10 * LEAST_S  # it evaluates, and reads nothing
    assert clock.hung_after(waiting="a", most_s=LEAST_S / 2 - 2) == {}
    assert clock.hung_after(waiting="a", most_s=5.0).keys() == {"b"}


def test_a_commit_or_a_new_view_begins_anew() -> None:
    clock = Clock()
    for begin in (lambda: clock.watch.commit("ab", now=clock.now), lambda: clock.watch.begin("ab", now=clock.now)):
        assert clock.hung_after(waiting="a", most_s=LEAST_S - 1) == {}
        begin()
    assert clock.hung_after(waiting="a", most_s=LEAST_S - 1) == {}


def test_a_deadline_follows_the_step_times() -> None:
    assert step_deadline([]) == FIRST_S
    assert step_deadline([0.02] * 20) == LEAST_S
    assert step_deadline([60.0] * 20) == 240.0
    assert step_deadline([20.0] * 15 + [40.0] * 5) == 220.0, "where steps differ there is more time"
    assert step_deadline([20.0] * 19 + [900.0]) == 80.0, "a single long step is no measure"


@given(st.lists(st.floats(0.001, 1e4), min_size=MIN_STEPS, max_size=64))
def test_a_deadline_is_generous(times: list[float]) -> None:
    deadline = step_deadline(times)
    assert deadline >= LEAST_S
    late = sum(time > deadline for time in times)
    assert late <= len(times) / 10, "more than a tenth of these steps would have been too late"
    assert all(a <= b for a, b in itertools.pairwise(map(step_deadline, (times, [2 * time for time in times]))))
