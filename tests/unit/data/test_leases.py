"""Leases: every position of the stream is counted once, whatever workers do."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from smolcluster.data.leases import Leases, Range, indices
from smolcluster.data.sampler import Sampler, ShardedSampler
from smolcluster.errors import UserError

HOLDERS = st.sampled_from(["a", "b", "c"])
STEPS = st.integers(0, 4)


def positions(ranges: list[Range]) -> list[int]:
    return [p for start, count in ranges for p in range(start, start + count)]


def not_committed(state: dict) -> set[int]:
    return set(positions([Range(*hole) for hole in state["holes"]]))


class LeasesModel(RuleBasedStateMachine):
    """Leases compared with the obvious model: a set of committed positions and a set for every lease."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases()
        self.committed: set[int] = set()
        self.held: dict[tuple[str, int], set[int]] = {}

    @rule(holder=HOLDERS, step=STEPS, count=st.integers(1, 7))
    def grant(self, holder: str, step: int, count: int) -> None:
        if (holder, step) in self.held:
            with pytest.raises(ValueError, match="already has a lease"):
                self.leases.grant(holder, step, count)
            return
        granted = positions(self.leases.grant(holder, step, count))
        taken = self.committed.union(*self.held.values())
        # The lowest that are free: what returned first, in order, then the fresh ones.
        lowest = [p for p in range(len(taken) + count) if p not in taken][:count]
        assert granted == lowest
        self.held[holder, step] = set(granted)

    @rule(holder=HOLDERS, step=STEPS, start=st.integers(0, 30), count=st.integers(1, 7), gap=st.integers(0, 4))
    def claim(self, holder: str, step: int, start: int, count: int, gap: int) -> None:
        if (holder, step) in self.held:
            with pytest.raises(ValueError, match="already has a lease"):
                self.leases.claim(holder, step, [Range(start, count)])
            return
        wanted = [Range(start + count + gap, 2), Range(start, count)]
        free = not self.committed.union(*self.held.values()) & set(positions(wanted))
        assert self.leases.claim(holder, step, wanted) == free
        if free:
            self.held[holder, step] = set(positions(wanted))

    @rule(holder=HOLDERS, step=STEPS)
    def commit(self, holder: str, step: int) -> None:
        if (holder, step) not in self.held:
            with pytest.raises(ValueError, match=f"'{holder}' has no lease for step {step}"):
                self.leases.commit(holder, step)
            return
        committed = set(positions(self.leases.commit(holder, step)))
        assert committed == self.held.pop((holder, step))
        assert not committed & self.committed, "a position was committed twice"
        self.committed |= committed

    @rule(holder=HOLDERS, step=STEPS)
    def release(self, holder: str, step: int) -> None:
        assert set(positions(self.leases.release(holder, step))) == self.held.pop((holder, step), set())

    @rule(holder=HOLDERS, step=STEPS, count=st.integers(1, 7))
    def shorten(self, holder: str, step: int, count: int) -> None:
        """A part of it was not read."""
        if (holder, step) in self.held:
            before = positions(self.leases.held(holder)[step])
            assert set(positions(self.leases.shorten(holder, step, count))) == set(before[count:])
            self.held[holder, step] = set(before[:count])

    @rule(holder=HOLDERS)
    def die(self, holder: str) -> None:
        expected = set().union(*(self.held.pop(key) for key in list(self.held) if key[0] == holder))
        assert set(positions(self.leases.release(holder))) == expected

    @rule()
    def restart(self) -> None:
        """A server that starts again knows only what is committed."""
        self.leases = Leases.from_state(json.loads(json.dumps(self.leases.state_dict())))
        self.held.clear()

    @invariant()
    def everything_is_somewhere_once(self) -> None:
        state = self.leases.state_dict()
        holes = not_committed(state)
        assert self.committed == set(range(state["position"])) - holes
        assert state["position"] == max(self.committed, default=-1) + 1, "not normalised"
        assert sum(len(held) for held in self.held.values()) == len(set().union(*self.held.values()))
        for holder in "abc":
            found = {(holder, step): set(positions(r)) for step, r in self.leases.held(holder).items()}
            assert found == {key: held for key, held in self.held.items() if key[0] == holder}

    def teardown(self) -> None:
        """When all that was left out is read, nothing is lost: the stream was read from its beginning."""
        for holder in "abc":
            self.leases.release(holder)
        state = self.leases.state_dict()
        rest = len(not_committed(state)) + 1
        self.leases.grant("last", 0, rest)
        self.committed.update(positions(self.leases.commit("last", 0)))
        assert self.leases.state_dict() == {"position": len(self.committed), "holes": []}


LeasesModel.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestLeases = LeasesModel.TestCase


def test_what_returns_goes_out_first_lowest_first() -> None:
    leases = Leases()
    assert leases.grant("a", 0, 4) == [(0, 4)]
    assert leases.grant("b", 0, 4) == [(4, 4)]
    assert leases.grant("c", 0, 4) == [(8, 4)]
    assert leases.release("b") == [(4, 4)]
    leases.commit("a", 0)
    leases.commit("c", 0)
    assert leases.state_dict() == {"position": 12, "holes": [[4, 4]]}
    assert leases.grant("a", 1, 6) == [(4, 4), (12, 2)]
    assert leases.state_dict() == {"position": 12, "holes": [[4, 4]]}
    leases.commit("a", 1)
    assert leases.state_dict() == {"position": 14, "holes": []}


def test_with_nothing_lost_the_state_is_how_far_the_stream_was_read() -> None:
    leases = Leases()
    for step in range(3):
        for holder in "ab":
            leases.grant(holder, step, 8)
        for holder in "ab":
            leases.commit(holder, step)
    leases.grant("a", 3, 8)
    assert leases.state_dict() == {"position": 48, "holes": []}
    leases.release("a")
    assert leases.grant("b", 3, 8) == [(48, 8)]


def test_a_replayed_record_commits_what_it_counted() -> None:
    """Recovery: a snapshot's state, then the ranges of every record after it."""
    leases = Leases.from_state({"position": 8, "holes": [[2, 2]]})
    assert leases.claim("a", 5, [[10, 2], [2, 1]])
    leases.commit("a", 5)
    assert leases.state_dict() == {"position": 12, "holes": [[3, 1], [8, 2]]}
    assert not leases.claim("a", 6, [[2, 1]]), "committed"
    assert not leases.claim("a", 6, [[3, 1], [11, 4]]), "partly committed"
    assert leases.claim("a", 6, [[3, 1], [12, 4]])
    assert not leases.claim("b", 6, [[13, 1]]), "held"
    with pytest.raises(ValueError, match="at least one"):
        leases.claim("b", 7, [])


def test_a_lease_has_samples() -> None:
    with pytest.raises(ValueError, match="at least one sample, not 0"):
        Leases().grant("a", 0, 0)


def test_giving_back_what_is_not_held_is_nothing() -> None:
    leases = Leases()
    assert leases.release("a") == leases.release("a", 3) == []
    assert leases.held("a") == {}


def test_a_plain_sampler_and_the_ledger_read_each_others_state() -> None:
    sampler = ShardedSampler(Sampler(100, seed=1), counts=[8, 8], shard=0)
    sampler.next()
    assert Leases.from_state(sampler.state_dict()).grant("a", 1, 4) == [(16, 4)]
    sampler.load_state_dict(sampler.state_dict() | Leases(position=64).state_dict())
    assert sampler.position == 64


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"position": -1}, "-1 is not a position"),
        ({"position": 2**63}, "9223372036854775808 is not a position"),
        ({"position": 4.0}, "4.0 is not a position"),
        ({"position": True}, "True is not a position"),
        ({"position": "8"}, "'8' is not a position"),
        ({"position": 8, "holes": {}}, "is not a list"),
        ({"position": 8, "holes": [3]}, "is not a list"),
        ({"position": 8, "holes": [[1, 2, 3]]}, "is not a list"),
        ({"position": 8, "holes": [[1, None]]}, "None is not a position"),
        ({"position": 8, "holes": [[1, 0]]}, r"the hole \[1, 0\] is empty"),
        ({"position": 8, "holes": [[1, -1]]}, "-1 is not a position"),
        ({"position": 8, "holes": [[6, 4]]}, "beyond position 8"),
        ({"position": 8, "holes": [[3, 2], [1, 3]]}, r"\[3, 2\] is empty, overlaps"),
    ],
)
def test_nonsense_is_refused(state: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"the saved data position is invalid: .*{message}.*resume from another"):
        Leases.from_state(state)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=4))
def test_indices_are_those_of_the_stream(ranges: list[tuple[int, int]]) -> None:
    sampler = Sampler(13, seed=5)
    stream = sampler.indices(0, 80)
    found = indices(sampler, ranges)
    assert found.dtype == np.int64
    assert found.tolist() == [int(stream[p]) for p in positions([Range(*r) for r in ranges])]


def test_a_quarantined_range_is_a_hole_and_is_not_granted_again() -> None:
    leases = Leases()
    leases.grant("a", 1, 4)
    leases.grant("a", 2, 4)
    assert leases.quarantine("a", 1) == [Range(0, 4)]
    assert leases.quarantine("a", 1) == []
    leases.commit("a", 2)
    assert leases.grant("b", 1, 2) == [Range(8, 2)]
    leases.commit("b", 1)
    assert leases.state_dict() == {"position": 10, "holes": [[0, 4]]}
    assert Leases.from_state(leases.state_dict()).grant("c", 1, 2) == [Range(0, 2)]  # another server may try them
