"""Who is evicted when members cannot reach each other: a pure function of the suspicions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.comm.elastic.membership.eviction_policy import (
    EXACT,
    FORGET_S,
    EvictionCounts,
    Suspicion,
    is_lone,
    select_evictions,
)


def between(*pairs: tuple[int, int]) -> set[Suspicion]:
    """Both ends of each of these links report it."""
    return {suspicion for a, b in pairs for suspicion in ((a, b), (b, a))}


CASES: list[tuple[str, int, set[Suspicion], set[int]]] = [
    ("no suspicion", 4, set(), set()),
    ("the first is cut off from all others", 4, between((0, 1), (0, 2), (0, 3)), {0}),
    ("the last is cut off from all others", 4, between((0, 3), (1, 3), (2, 3)), {3}),
    ("the first alone suspects everybody", 4, {(0, 1), (0, 2), (0, 3)}, {0}),
    ("the first alone suspects one other", 4, {(0, 1)}, {0}),
    ("two suspect one that reports nothing", 4, {(0, 1), (2, 1)}, {1}),
    ("one link is cut", 4, between((0, 1)), {1}),
    ("one of two parts is smaller", 5, between(*itertools.product((0, 3), (1, 2, 4))), {0, 3}),
    ("two equal parts", 4, between(*itertools.product((0, 1), (2, 3))), {2, 3}),
    ("only two members", 2, between((0, 1)), {1}),
    ("only two members, and one reports", 2, {(0, 1)}, {1}),
    ("every link is cut: at most half at once", 5, between(*itertools.combinations(range(5), 2)), {3, 4}),
    ("reporters and suspects have left", 2, between((0, 2), (1, 3)), set()),
]


@pytest.mark.parametrize(
    ("members", "suspicions", "out"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_smallest_set_that_explains_the_suspicions_is_evicted(
    members: int, suspicions: set[Suspicion], out: set[int]
) -> None:
    assert select_evictions(range(members), suspicions) == out


def test_a_member_that_is_silent_here_too_goes_first() -> None:
    assert select_evictions(range(4), between((0, 1)), silent=[0]) == {0}
    assert select_evictions(range(4), between((0, 1), (0, 2)), silent=[1, 2]) == {1, 2}
    assert select_evictions(range(4), between((0, 1)), silent=[3]) == {1}, "no member suspects it"


def test_where_most_are_silent_nobody_is_evicted() -> None:
    assert select_evictions(range(4), between((0, 1), (2, 3)), silent=[1, 2, 3]) == set()


def test_between_equals_the_one_with_more_recent_evictions_goes() -> None:
    assert select_evictions(range(4), between((0, 1)), recent={0: 1}) == {0}


def test_many_members() -> None:
    """Beyond the exact search."""
    members = range(3 * EXACT)
    assert select_evictions(members, between(*((5, other) for other in members if other != 5))) == {5}
    assert select_evictions(members, between(*itertools.product((2, 9), set(members) - {2, 9}))) == {2, 9}


def test_the_word_of_one_member_alone_waits_for_a_witness() -> None:
    assert is_lone(range(3), {(0, 1)})
    assert not is_lone(range(2), {(0, 1)}), "there is nobody to wait for"
    assert not is_lone(range(3), between((0, 1)))
    assert not is_lone(range(3), {(0, 1), (0, 2)})


def test_evictions_long_past_are_forgotten() -> None:
    counts = EvictionCounts()
    assert [counts.add(3, now=now) for now in (0.0, 1.0, 2.0)] == [1, 2, 3]
    assert counts.count(3, now=2.0 + FORGET_S) == 2
    assert counts.add(3, now=2.0 + 2 * FORGET_S) == 2
    assert counts.count(3, now=2.0 + 9 * FORGET_S) == 0
    assert counts.count(4, now=0.0) == 0


# For any graph


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> tuple[int, set[Suspicion]]:
    members = draw(st.integers(2, most))
    rank = st.integers(0, members - 1)
    return members, draw(st.sets(st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1]), max_size=15))


def explains(out: set[int], suspicions: set[Suspicion]) -> bool:
    return all(not out.isdisjoint(suspicion) for suspicion in suspicions)


@given(graphs(most=2 * EXACT))
def test_never_a_majority_and_everything_is_explained_where_that_suffices(graph: tuple[int, set[Suspicion]]) -> None:
    members, suspicions = graph
    out = select_evictions(range(members), suspicions)
    assert out <= {rank for suspicion in suspicions for rank in suspicion}
    assert 2 * len(out) <= members
    assert explains(out, suspicions) or len(out) == members // 2


@given(graphs())
def test_no_smaller_set_would_do_where_both_ends_report_it(graph: tuple[int, set[Suspicion]]) -> None:
    members, suspicions = graph
    mutual = between(*suspicions)
    out = select_evictions(range(members), mutual)
    smaller = [set(chosen) for size in range(len(out)) for chosen in itertools.combinations(range(members), size)]
    assert not any(explains(chosen, mutual) for chosen in smaller)


@given(graphs(), st.data())
def test_a_faulty_minority_costs_at_most_as_many(graph: tuple[int, set[Suspicion]], data: st.DataObject) -> None:
    """Whatever a faulty minority says or breaks, as many members go as it has, at most."""
    members, suspicions = graph
    ranks = st.sets(st.integers(0, members - 1), max_size=members // 2)
    faulty = data.draw(ranks)
    seen = between(*(suspicion for suspicion in suspicions if not faulty.isdisjoint(suspicion)))
    assert len(select_evictions(range(members), seen)) <= len(faulty)


@given(st.integers(3, 2 * EXACT), st.data())
def test_one_member_alone_evicts_nobody_but_itself(members: int, data: st.DataObject) -> None:
    reporter = data.draw(st.integers(0, members - 1))
    others = st.sets(st.integers(0, members - 1).filter(lambda rank: rank != reporter), min_size=1)
    assert select_evictions(range(members), {(reporter, other) for other in data.draw(others)}) == {reporter}
