"""Plans of collectives, simulated: results, bytes, and freedom from deadlock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from smolcluster.comm.elastic.collectives.schedule import (
    MAX_PIECE_BYTES,
    MIN_PIECE_BYTES,
    Act,
    Plan,
    Verb,
    all_gather_plan,
    choose,
    choose_broadcast,
    line_broadcast_plan,
    piece_elements,
    receive_plan,
    reduce_scatter_plan,
    ring_plan,
    ring_seconds,
    send_plan,
    spans,
    tree_broadcast_plan,
    tree_plan,
    tree_seconds,
)

Make = Callable[[int, int, int], Plan]
RANKS = pytest.mark.parametrize("n", range(1, 10))
ELEMENTS = [0, 1, 2, 3, 5, 7, 8, 9, 17, 64, 101]
MATCHING = {Verb.SEND_PART: Verb.ADD, Verb.SEND: Verb.COPY}


@dataclass
class Paper:
    """All ranks' plans, run on paper: any act whose turn has come may be next."""

    plans: list[Plan]
    values: list[list[list[int]]]  # rank, element: the ranks whose part is in it, in the order they were added
    sent: list[int] = field(default_factory=list)  # elements, by rank
    received: list[int] = field(default_factory=list)

    def run(self, seed: int) -> None:
        """Raises when nothing can go on although not everything is done, or when a message finds no receiver."""
        order = random.Random(seed)
        n = len(self.plans)
        self.sent, self.received = [0] * n, [0] * n
        at = {(rank, i): 0 for rank, plan in enumerate(self.plans) for i in range(len(plan))}
        under_way: dict[tuple[int, int, int, int, Verb], list[list[int]]] = {}
        while True:
            ready = [key for key in at if self._next(key, at[key], under_way) is not None]
            if not ready:
                break
            rank, i = order.choice(ready)
            chain = self.plans[rank][i]
            act = chain.acts[at[rank, i]]
            at[rank, i] += 1
            span = range(chain.start, chain.stop)
            if act.verb.receives:
                content = under_way.pop((act.peer, rank, chain.start, chain.stop, act.verb))
                self.received[rank] += len(content)
                for element, value in zip(span, content, strict=True):
                    own = self.values[rank][element]
                    self.values[rank][element] = [*value, *own] if act.verb is Verb.ADD else list(value)
            else:
                key = (rank, act.peer, chain.start, chain.stop, MATCHING[act.verb])
                assert key not in under_way, "two messages that cannot be told apart"
                under_way[key] = [list(self.values[rank][element]) for element in span]
                self.sent[rank] += chain.stop - chain.start
        assert not under_way, f"sent and never received: {list(under_way)}"
        for (rank, i), done in at.items():
            assert done == len(self.plans[rank][i].acts), f"rank {rank} is stuck at {self.plans[rank][i]}"

    def _next(self, key: tuple[int, int], at: int, under_way: object) -> Act | None:
        chain = self.plans[key[0]][key[1]]
        if at == len(chain.acts):
            return None
        act = chain.acts[at]
        wanted = (act.peer, key[0], chain.start, chain.stop, act.verb)
        return act if not act.verb.receives or wanted in under_way else None  # type: ignore[operator]


def on_paper(make: Make, n: int, elements: int, *, seed: int = 0) -> Paper:
    paper = Paper([make(n, rank, elements) for rank in range(n)], [[[r] for _ in range(elements)] for r in range(n)])
    paper.run(seed)
    return paper


def no_circle(plans: list[Plan]) -> bool:
    """Whether the acts of all ranks can be put in an order in which every one comes after what it needs.

    Then no timing of messages whatever can stop them: a receive waits for its send, an act for the one before it in its
    chain, and nothing waits for anything else.
    """
    needs: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
    sends: dict[tuple[object, ...], tuple[object, ...]] = {}
    for rank, plan in enumerate(plans):
        for chain in plan:
            for i, act in enumerate(chain.acts):
                me = (rank, chain.start, i)
                needs[me] = {(rank, chain.start, i - 1)} if i else set()
                if not act.verb.receives:
                    sends[rank, act.peer, chain.start, MATCHING[act.verb]] = me
    for rank, plan in enumerate(plans):
        for chain in plan:
            for i, act in enumerate(chain.acts):
                if act.verb.receives:
                    needs[rank, chain.start, i].add(sends[act.peer, rank, chain.start, act.verb])
    done: set[tuple[object, ...]] = set()
    while free := [act for act, needed in needs.items() if act not in done and needed <= done]:
        done.update(free)
    return len(done) == len(needs)


# Sums


@RANKS
@pytest.mark.parametrize("make", [ring_plan, tree_plan])
@pytest.mark.parametrize("elements", ELEMENTS)
def test_everybody_has_everybodys_part_once_and_in_the_same_order(make: Make, n: int, elements: int) -> None:
    for seed in range(3):
        paper = on_paper(make, n, elements, seed=seed)
        for element in range(elements):
            sums = [paper.values[rank][element] for rank in range(n)]
            assert sorted(sums[0]) == list(range(n))
            assert all(s == sums[0] for s in sums), "another order of adding gives other bits"
        if seed == 0:
            first = paper.values
        assert paper.values == first, "the order of adding must not depend on which message was faster"


@RANKS
@pytest.mark.parametrize("elements", ELEMENTS)
def test_the_ring_moves_the_least_bytes_there_are(n: int, elements: int) -> None:
    """2 (n-1) S over all ranks, and each rank its share: no rank has more than its even part and the rounding."""
    paper = on_paper(ring_plan, n, elements)
    assert sum(paper.sent) == sum(paper.received) == 2 * (n - 1) * elements
    for moved in (*paper.sent, *paper.received):
        assert abs(moved - 2 * (n - 1) * elements / n) < 2
    if elements % n == 0:
        assert paper.sent == paper.received == [2 * (n - 1) * elements // n] * n


@RANKS
def test_the_tree_is_as_deep_as_the_logarithm(n: int) -> None:
    def depth(rank: int) -> int:
        acts = tree_plan(n, rank, 1)[0].acts
        parent = next((act.peer for act in acts if act.verb is Verb.SEND_PART), None)
        return 0 if parent is None else 1 + depth(parent)

    assert max(map(depth, range(n))) <= math.ceil(math.log2(n)) if n > 1 else depth(0) == 0
    paper = on_paper(tree_plan, n, 3)
    assert sum(paper.sent) == sum(paper.received) == 2 * (n - 1) * 3, "once up and once down each edge"


@RANKS
@pytest.mark.parametrize("each", [0, 1, 3, 8])
def test_reduce_scatter_sums_span_r_at_rank_r(n: int, each: int) -> None:
    paper = on_paper(reduce_scatter_plan, n, n * each)
    for rank in range(n):
        for element in range(rank * each, (rank + 1) * each):
            assert sorted(paper.values[rank][element]) == list(range(n))
    assert paper.sent == paper.received == [(n - 1) * each] * n


# Copies


@RANKS
@pytest.mark.parametrize("each", [0, 1, 3, 8])
def test_all_gather_copies_span_r_from_rank_r(n: int, each: int) -> None:
    paper = on_paper(all_gather_plan, n, n * each)
    for values in paper.values:
        assert values == [[owner] for owner in range(n) for _ in range(each)]
    assert paper.sent == paper.received == [(n - 1) * each] * n


@RANKS
@pytest.mark.parametrize("make", [line_broadcast_plan, tree_broadcast_plan])
def test_a_broadcast_reaches_everybody_once_from_any_source(make: Callable[..., Plan], n: int) -> None:
    for source in range(n):
        paper = on_paper(lambda n, rank, elements: make(n, rank, elements, source=source), n, 5)  # noqa: B023
        assert all(values == [[source]] * 5 for values in paper.values)
        assert paper.received == [0 if rank == source else 5 for rank in range(n)]
        if make is line_broadcast_plan:
            assert max(paper.sent) <= 5, "nobody sends the tensor twice"


def test_send_and_receive_fit() -> None:
    def make(n: int, rank: int, elements: int) -> Plan:
        return send_plan(elements, to=1) if rank == 0 else receive_plan(elements, source=0)

    assert on_paper(make, 2, 4).values[1] == [[0]] * 4
    assert send_plan(0, to=1) == ()


# Stopping


@RANKS
@pytest.mark.parametrize(
    "make",
    [
        ring_plan,
        tree_plan,
        reduce_scatter_plan,
        all_gather_plan,
        lambda n, rank, elements: line_broadcast_plan(n, rank, elements, source=n // 2),
        lambda n, rank, elements: tree_broadcast_plan(n, rank, elements, source=n // 2),
    ],
    ids=["ring", "tree", "reduce_scatter", "all_gather", "line", "tree broadcast"],
)
def test_no_act_waits_in_a_circle(make: Make, n: int) -> None:
    for elements in (n, 4 * n):
        assert no_circle([make(n, rank, elements) for rank in range(n)])


def test_a_circle_would_be_found() -> None:
    def wrong(n: int, rank: int, elements: int) -> Plan:
        """Both receive before they send."""
        chain = ring_plan(n, rank, elements)[0]
        return (type(chain)(0, 1, (Act(Verb.ADD, 1 - rank), Act(Verb.SEND_PART, 1 - rank))),)

    plans = [wrong(2, rank, 2) for rank in range(2)]
    assert not no_circle(plans)
    with pytest.raises(AssertionError, match="stuck"):
        Paper(plans, [[[r]] * 2 for r in range(2)]).run(0)


# Choosing and cutting


@pytest.mark.parametrize("n", [2, 3, 4, 8, 9])
def test_small_tensors_take_the_tree_and_large_ones_the_ring(n: int) -> None:
    assert [choose(n, r, 10, itemsize=4) for r in range(n)] == [tree_plan(n, r, 10) for r in range(n)]
    assert [choose(n, r, 10**6, itemsize=4) for r in range(n)] == [ring_plan(n, r, 10**6) for r in range(n)]
    turns = [tree_seconds(n, nbytes) < ring_seconds(n, nbytes) for nbytes in range(0, 10**6, 1000)]
    assert turns == sorted(turns, reverse=True), "the tree is the faster one up to some size, the ring from there on"


def test_the_more_ranks_the_longer_the_tree_is_worth_it() -> None:
    worth = [sum(tree_seconds(n, b) < ring_seconds(n, b) for b in range(0, 10**5, 100)) for n in (2, 4, 8, 16)]
    assert worth == sorted(worth)
    assert worth[0] < 100 < worth[-1], "10 KB"


def test_a_broadcast_takes_the_line_for_large_tensors() -> None:
    n = 8
    assert choose_broadcast(n, 3, 10, itemsize=4, source=2) == tree_broadcast_plan(n, 3, 10, source=2)
    assert choose_broadcast(n, 3, 10**7, itemsize=4, source=2) == line_broadcast_plan(n, 3, 10**7, source=2)
    assert choose_broadcast(2, 1, 10**7, itemsize=4, source=0) == line_broadcast_plan(2, 1, 10**7, source=0)


@RANKS
@pytest.mark.parametrize("elements", ELEMENTS)
def test_spans_cover_everything_once(n: int, elements: int) -> None:
    covered = [e for _, start, stop in spans(elements, n) for e in range(start, stop)]
    assert covered == list(range(elements))
    sizes = [stop - start for _, start, stop in spans(elements, n)]
    assert all(sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_pieces_have_a_least_and_a_most_size(itemsize: int) -> None:
    for span_bytes in (0, 1, 100, 10**5, 10**6, 10**7, 10**9):
        nbytes = piece_elements(span_bytes, itemsize=itemsize) * itemsize
        assert MIN_PIECE_BYTES <= nbytes <= MAX_PIECE_BYTES
