"""Who is evicted when members cannot reach each other: a pure function of the complaints."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.comm.elastic.membership.eviction_policy import EXACT, FORGET_S, Complaint, Strikes, is_lone, verdict


def between(*pairs: tuple[int, int]) -> set[Complaint]:
    """Both ends of each of these links complain."""
    return {complaint for a, b in pairs for complaint in ((a, b), (b, a))}


CASES: list[tuple[str, int, set[Complaint], set[int]]] = [
    ("no complaint", 4, set(), set()),
    ("the first is cut off from all others", 4, between((0, 1), (0, 2), (0, 3)), {0}),
    ("the last is cut off from all others", 4, between((0, 3), (1, 3), (2, 3)), {3}),
    ("the first alone complains about everybody", 4, {(0, 1), (0, 2), (0, 3)}, {0}),
    ("the first alone complains about one other", 4, {(0, 1)}, {0}),
    ("two accuse one that does not complain", 4, {(0, 1), (2, 1)}, {1}),
    ("one link is cut", 4, between((0, 1)), {1}),
    ("one of two parts is smaller", 5, between(*itertools.product((0, 3), (1, 2, 4))), {0, 3}),
    ("two equal parts", 4, between(*itertools.product((0, 1), (2, 3))), {2, 3}),
    ("only two members", 2, between((0, 1)), {1}),
    ("only two members, and one complains", 2, {(0, 1)}, {1}),
    ("every link is cut: at most half at once", 5, between(*itertools.combinations(range(5), 2)), {3, 4}),
    ("those who complain or are accused have left", 2, between((0, 2), (1, 3)), set()),
]


@pytest.mark.parametrize(
    ("members", "complaints", "out"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_smallest_set_that_explains_the_complaints_is_evicted(
    members: int, complaints: set[Complaint], out: set[int]
) -> None:
    assert verdict(range(members), complaints) == out


def test_a_member_that_is_silent_here_too_goes_first() -> None:
    assert verdict(range(4), between((0, 1)), silent=[0]) == {0}
    assert verdict(range(4), between((0, 1), (0, 2)), silent=[1, 2]) == {1, 2}
    assert verdict(range(4), between((0, 1)), silent=[3]) == {1}, "nobody complains about it"


def test_where_most_are_silent_nobody_is_evicted() -> None:
    assert verdict(range(4), between((0, 1), (2, 3)), silent=[1, 2, 3]) == set()


def test_between_equals_the_one_with_more_recent_evictions_goes() -> None:
    assert verdict(range(4), between((0, 1)), strikes={0: 1}) == {0}


def test_many_members() -> None:
    """Beyond the exact search."""
    members = range(3 * EXACT)
    assert verdict(members, between(*((5, other) for other in members if other != 5))) == {5}
    assert verdict(members, between(*itertools.product((2, 9), set(members) - {2, 9}))) == {2, 9}


def test_the_word_of_one_member_alone_waits_for_a_witness() -> None:
    assert is_lone(range(3), {(0, 1)})
    assert not is_lone(range(2), {(0, 1)}), "there is nobody to wait for"
    assert not is_lone(range(3), between((0, 1)))
    assert not is_lone(range(3), {(0, 1), (0, 2)})


def test_evictions_long_past_are_forgotten() -> None:
    strikes = Strikes()
    assert [strikes.add(3, now=now) for now in (0.0, 1.0, 2.0)] == [1, 2, 3]
    assert strikes.count(3, now=2.0 + FORGET_S) == 2
    assert strikes.add(3, now=2.0 + 2 * FORGET_S) == 2
    assert strikes.count(3, now=2.0 + 9 * FORGET_S) == 0
    assert strikes.count(4, now=0.0) == 0


# For any graph


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> tuple[int, set[Complaint]]:
    members = draw(st.integers(2, most))
    rank = st.integers(0, members - 1)
    return members, draw(st.sets(st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1]), max_size=15))


def explains(out: set[int], complaints: set[Complaint]) -> bool:
    return all(not out.isdisjoint(complaint) for complaint in complaints)


@given(graphs(most=2 * EXACT))
def test_never_a_majority_and_everything_is_explained_where_that_suffices(graph: tuple[int, set[Complaint]]) -> None:
    members, complaints = graph
    out = verdict(range(members), complaints)
    assert out <= {rank for complaint in complaints for rank in complaint}
    assert 2 * len(out) <= members
    assert explains(out, complaints) or len(out) == members // 2


@given(graphs())
def test_no_smaller_set_would_do_where_both_ends_complain(graph: tuple[int, set[Complaint]]) -> None:
    members, complaints = graph
    mutual = between(*complaints)
    out = verdict(range(members), mutual)
    smaller = [set(chosen) for size in range(len(out)) for chosen in itertools.combinations(range(members), size)]
    assert not any(explains(chosen, mutual) for chosen in smaller)


@given(graphs(), st.data())
def test_a_faulty_minority_costs_at_most_as_many(graph: tuple[int, set[Complaint]], data: st.DataObject) -> None:
    """Whatever a faulty minority says or breaks, as many members go as it has, at most."""
    members, complaints = graph
    ranks = st.sets(st.integers(0, members - 1), max_size=members // 2)
    faulty = data.draw(ranks)
    seen = between(*(complaint for complaint in complaints if not faulty.isdisjoint(complaint)))
    assert len(verdict(range(members), seen)) <= len(faulty)


@given(st.integers(3, 2 * EXACT), st.data())
def test_one_member_alone_evicts_nobody_but_itself(members: int, data: st.DataObject) -> None:
    accuser = data.draw(st.integers(0, members - 1))
    others = st.sets(st.integers(0, members - 1).filter(lambda rank: rank != accuser), min_size=1)
    assert verdict(range(members), {(accuser, other) for other in data.draw(others)}) == {accuser}
