"""Rounds with local steps: how many steps each member takes, until when, and how large its contribution may be."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.unit.engine.members import member

from smolcluster.comm.elastic.membership.roster import Member, Roster
from smolcluster.comm.elastic.membership.server_link import Lease
from smolcluster.data.leases import Leases
from smolcluster.data.sampler import Sampler
from smolcluster.engine.elastic.balance import steps_in_time
from smolcluster.engine.elastic.coordination.local_rounds import DEADLINE_FACTOR, LocalRounds
from smolcluster.engine.elastic.gradient_gate import FIRST_ROUNDS, MedianNorm
from smolcluster.engine.loop import Loop
from smolcluster.engine.reader import LeaseReader


class Round:
    """A coordinator's part of a round, with members of these times per step."""

    def __init__(self, *, equal_time: bool = True) -> None:
        self.clipped, self.warnings = Counter[str](), list[str]()
        self.local = LocalRounds(equal_time=equal_time, clipped=self.clipped, warn=self.warnings.append)
        self.members: list[Member] = []

    def commit(
        self, *step_s: float, norms: dict[int, float] | None = None, clipped_to: dict[int, float] | None = None
    ) -> None:
        self.members = self.members or [member(rank) for rank in range(len(step_s))]
        local = [
            {"steps": 30, "step_s": time_s, "norm": repr((norms or {}).get(r, 1.0))} for r, time_s in enumerate(step_s)
        ]
        for rank, said in (clipped_to or {}).items():
            local[rank]["usual"] = said
        self.local.committed([(m, {"local": said}) for m, said in zip(self.members, local, strict=True)], step=30)

    @property
    def roster(self) -> Roster:
        members = dict(enumerate(self.members))
        return cast(Roster, SimpleNamespace(epoch=len(members), members=members, in_order=lambda: self.members))

    def steps(self, of: int = 30) -> list[int]:
        return [self.local.terms(each, self.roster, steps=of)[0] for each in self.members]

    def lease(self, rank: int = 0, of: int = 30) -> dict[str, Any]:
        return self.local.terms(self.members[rank], self.roster, steps=of)[1]


# Steps in equal time


def test_the_usual_machine_takes_the_steps_of_the_run() -> None:
    run = Round()
    run.commit(0.1, 0.2, 0.8)
    assert run.steps() == [60, 30, 8]
    assert run.lease() == {"own_steps": 60, "most_s": DEADLINE_FACTOR * 30 * 0.2}
    assert run.steps(of=10) == [20, 10, 2], "the last round of a run is shorter"
    assert run.steps(of=1) == [1, 1, 1]


def test_machines_that_are_alike_take_equally_many() -> None:
    """Measured times vary: nobody's steps change for that."""
    run, dice = Round(), random.Random(3)
    for _ in range(20):
        run.commit(*(0.1 * dice.uniform(0.93, 1.07) for _ in range(5)))
        assert run.steps() == [30] * 5


def test_a_machine_has_one_step_at_least_and_sixteen_rounds_at_most() -> None:
    assert steps_in_time(30, median_s=1.0, own_s=100.0) == 1
    assert steps_in_time(30, median_s=1.0, own_s=1e-4) == 480


def test_before_a_time_is_known_all_take_as_many_without_a_deadline() -> None:
    run = Round()
    run.members = [member(0), member(1)]
    assert run.steps() == [30, 30]
    assert run.lease() == {}


def test_a_newcomer_takes_the_usual_steps_until_the_deadline() -> None:
    run = Round()
    run.commit(0.1, 0.1)
    run.members.append(member(2))
    assert run.steps() == [30, 30, 30]
    assert run.lease(2)["most_s"] == pytest.approx(DEADLINE_FACTOR * 3.0)


def test_a_member_that_comes_back_to_a_new_coordinator_says_its_time() -> None:
    run = Round()
    run.members = [
        member(rank, said={"local": {"steps": 30, "step_s": 0.1 * (1 + rank), "norm": "1.0"}}) for rank in range(3)
    ]
    assert run.steps() == [60, 30, 20]
    run.members = [member(rank, said={"local": "no report"}) for rank in range(2)]
    assert run.lease() == {}


def test_one_round_that_was_disturbed_changes_nothing_and_two_do() -> None:
    run = Round()
    for _ in range(3):
        run.commit(0.1, 0.1, 0.1)
    run.commit(0.1, 0.1, 0.4)
    assert run.steps() == [30, 30, 30]
    run.commit(0.1, 0.1, 0.4)
    assert run.steps() == [30, 30, 8]


def test_alone_there_is_no_deadline_and_with_equal_steps_neither() -> None:
    run = Round()
    run.commit(0.1)
    assert run.lease() == {}
    run = Round(equal_time=False)
    run.commit(0.1, 0.4)
    assert (run.steps(), run.lease()) == ([30, 30], {})


# A round that ends early


@pytest.fixture
def leases() -> Leases:
    """One lease of 120 samples, for round 30 of rank 0."""
    leases = Leases()
    leases.grant(member(0).instance, 30, 120)
    return leases


@pytest.mark.parametrize("read", [4, 120])
def test_samples_that_were_not_read_return(leases: Leases, read: int) -> None:
    who, local = member(0), Round().local
    assert local.check_report(who, 30, {"samples": read}, leases) is None
    assert local.check_report(who, 30, {"samples": read}, leases) is None, "reported again in another view"
    assert leases.commit(who.instance, 30) == [(0, read)]
    assert leases.state_dict()["position"] == read


def test_a_member_that_has_read_nothing_loses_its_lease(leases: Leases) -> None:
    assert Round().local.check_report(member(0), 30, {"samples": 0}, leases) is None
    assert leases.held(member(0).instance) == {}


@pytest.mark.parametrize("read", [-4, 121, 4.0, "4", True])
def test_a_false_number_of_samples_is_no_report(leases: Leases, read: object) -> None:
    said = Round().local.check_report(member(0), 30, {"samples": read}, leases)
    assert said is not None
    assert "samples in step 30, and 120 are leased to it" in said


@pytest.mark.parametrize(
    "local",
    [
        "much",
        {"steps": 0, "step_s": 0.1, "norm": "1"},
        {"steps": 10**400, "step_s": 0.1, "norm": "1"},
        {"steps": 3, "step_s": "nan", "norm": "1"},
        {"steps": 3, "norm": "1"},
        {"steps": 3, "step_s": 0.1, "norm": "1", "usual": -1},
        {"steps": math.inf, "step_s": 0.1, "norm": "1"},
    ],
)
def test_a_malformed_report_is_refused(local: object) -> None:
    assert Round().local.check_report(member(0), 30, {"local": local}, Leases()) == "its DONE message is malformed"


def taken(lease: Lease, times: list[float]) -> tuple[list[int], list[int], list[int]]:
    """The numbers, repeats and samples of the steps that a reader begins, each of which takes so long."""
    now = itertools.accumulate([0.0, *times])
    leases = iter([lease, None])
    reader = LeaseReader(Sampler(1000, seed=1), lambda: next(leases), clock=lambda: next(now))
    steps = []
    while (work := reader.next(0)) is not None:
        steps.append((work[0], reader.repeat, len(work[1])))
    numbers, repeats, samples = zip(*steps, strict=True)
    return list(numbers), list(repeats), list(samples)


def test_the_steps_of_a_machine_are_spread_over_those_of_the_run() -> None:
    at_once = [0.0] * 20
    ranges = ((0, 24),)
    assert taken(Lease(12, ranges, 6), at_once)[0] == [7, 8, 9, 10, 11, 12]
    assert taken(Lease(12, ranges, 6, own_steps=2), at_once)[0] == [7, 12]
    assert taken(Lease(12, ranges, 6, own_steps=1), at_once)[0] == [12]
    numbers, repeats, samples = taken(Lease(12, ranges, 6, own_steps=12), at_once)
    assert numbers == [7, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12], "only the last one is the round's last"
    assert repeats == [0, 1, 2, 0, 1, 0, 1, 0, 1, 0, 1, 0], "so that each draws other random numbers"
    assert samples == [2] * 12


def test_a_round_ends_at_its_deadline_with_the_steps_that_are_done() -> None:
    """The first 4 of 6 steps take 3.5 s of 4 s; another would end too late."""
    lease = Lease(12, ((0, 24),), 6, most_s=4.0)
    assert taken(lease, [0.0, 0.9, 0.9, 0.9, 0.8, 0.8, 0.8])[0] == [7, 8, 9, 12]
    assert taken(lease, [0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])[0] == [7, 8, 9, 10, 11, 12]
    assert taken(lease, [0.0, 60.0, 60.0])[0] == [7, 12], "when it looks, it has begun the second"


@pytest.mark.parametrize(
    "said",
    [
        {"own_steps": 0},
        {"own_steps": 9},
        {"own_steps": 2, "step": 1, "steps": 1},
        {"clip": [0.0, 1.0]},
        {"clip": [2.0, 1.0]},
        {"clip": [1.0, math.inf]},
    ],
)
def test_invalid_leases_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"steps for 8 samples|median norm"):
        Lease.from_meta({"step": 6, "steps": 6, "ranges": [[0, 8]], **said})


def test_every_sample_of_a_round_that_ends_early_is_read_in_the_order_of_the_lease() -> None:
    read: list[Any] = []
    times = iter([0.0, 0.0, 1.0, 2.0])
    leases = iter([Lease(6, ((40, 4), (100, 8)), 6, most_s=3.5), None])
    reader = LeaseReader(Sampler(1000, seed=1), lambda: next(leases), clock=lambda: next(times))
    while (work := reader.next(0)) is not None:
        read.extend(work[1])
    sampler = Sampler(1000, seed=1)
    assert read == [*sampler.indices(40, 4), *sampler.indices(100, 2)]
    assert np.unique(read).size == 6


@pytest.mark.parametrize("repeats", [[0, 0], [0, 1]])
def test_steps_of_one_number_draw_random_numbers_of_their_own(repeats: list[int]) -> None:
    """A step that is computed again draws those of the first time."""
    drawn: list[tuple[float, float]] = []
    report = SimpleNamespace(samples=0, tokens=0)

    def step(batch: Any) -> Any:
        drawn.append((batch, float(torch.rand(1))))
        return report

    loop = cast(Any, object.__new__(Loop))
    loop.strategy, loop._profiler, loop._config = SimpleNamespace(step=step), None, SimpleNamespace(seed=3)
    loop.record = SimpleNamespace(meter=SimpleNamespace(add=lambda *_, **__: None), samples=0, tokens=0)
    loop.context = SimpleNamespace(seat=SimpleNamespace(rank=1, shard=1, stream=None), device=torch.device("cpu"))
    loop._read = lambda *_: float(torch.rand(1))
    for repeat in repeats:
        loop._reader = SimpleNamespace(repeat=repeat)
        loop._step(7, np.empty(0))
    (data, dropout), (later_data, later_dropout) = drawn
    assert (data == later_data, dropout == later_dropout) == (repeats == [0, 0],) * 2


# Outliers


def rounds(norms: MedianNorm, *each: float, count: int = FIRST_ROUNDS, steps: int = 30) -> None:
    for _ in range(count):
        norms.committed([(norm, steps) for norm in each])


def test_the_first_rounds_are_never_clipped() -> None:
    norms = MedianNorm()
    for _ in range(FIRST_ROUNDS):
        assert norms.bounds(30) is None
        rounds(norms, 1.0, 1.0, count=1)
    assert norms.bounds(30) == pytest.approx((1.0, 6.0))


def test_the_bound_follows_the_spread() -> None:
    norms = MedianNorm()
    rounds(norms, 1.0, 2.0, 4.0)
    median, bound = norms.bounds(30) or (0.0, 0.0)
    assert (median, bound) == pytest.approx((2.0, 12.0))
    norms = MedianNorm()
    rounds(norms, 0.1, 1.0, 3.0)
    assert norms.bounds(30) == pytest.approx((1.0, 10.0)), "1 and 10 times 0.9, which is what norms differ by"


@pytest.mark.parametrize("others", [1, 3])
def test_one_member_of_absurd_norms_does_not_move_the_usual(others: int) -> None:
    norms = MedianNorm()
    rounds(norms, *[1.0] * (others + 1))
    rounds(norms, 1e6, *[1.0] * others, count=200)
    median, bound = norms.bounds(30) or (0.0, 0.0)
    assert median == pytest.approx(1.0)
    assert bound < 1e3


def test_when_all_norms_have_grown_the_bound_follows() -> None:
    norms = MedianNorm()
    rounds(norms, 1.0, 1.0)
    rounds(norms, 1e4, 1e4, count=200)
    median, _ = norms.bounds(30) or (0.0, 0.0)
    assert median == pytest.approx(1e4)


def test_members_with_other_numbers_of_steps_are_compared() -> None:
    """Sixteen times as many in one direction are no outlier; nor is a single step of a walk without one."""
    norms = MedianNorm()
    rounds(norms, 30.0, 30.0)
    assert (norms.bounds(480) or (0.0, 0.0))[1] > 480.0
    norms = MedianNorm()
    rounds(norms, math.sqrt(30), math.sqrt(30))
    assert (norms.bounds(1) or (0.0, 0.0))[1] > 1.0


def test_a_lease_has_the_bound_and_what_was_clipped_is_counted_and_said() -> None:
    run = Round(equal_time=False)
    for _ in range(FIRST_ROUNDS):
        run.commit(0.1, 0.1)
    assert run.lease()["clip"] == pytest.approx((1.0, 6.0))
    for _ in range(200):
        run.commit(0.1, 0.1, norms={1: 1e6}, clipped_to={1: 1.0})
    assert run.clipped == {"worker 1 (testhost)": 200}
    assert run.warnings[0] == (
        "the pseudo-gradient of worker 1 (testhost) for step 30 is clipped: its norm is 1e+06, 1e+06 times the median 1"
    )
    assert len(run.warnings) == 101, "the first hundred, and the 128th"
