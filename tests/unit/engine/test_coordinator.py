"""The coordinator of the strategies without a parameter server, with members that say what a test lets them say."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.unit.engine.members import DONE, NAMES, FakeLink, Run, member, set_clock
from torch import Tensor

from smolcluster.comm.elastic.membership.roster import JoinRefused
from smolcluster.comm.elastic.membership.server_link import Lease
from smolcluster.comm.elastic.transport.api import Link
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.view import View
from smolcluster.engine.elastic.admission import Admission
from smolcluster.engine.elastic.coordination.coordinator import Coordinator
from smolcluster.engine.elastic.member.rounds import ElasticRounds
from smolcluster.engine.elastic.step_outputs import StepOutputs
from smolcluster.engine.identity import instance_of, run_id_in
from smolcluster.errors import SmolclusterError
from smolcluster.strategies.base import State
from smolcluster.strategies.base.replicated import replica_state


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return set_clock(monkeypatch)


# The state of a step, where each member has a part


def test_the_state_of_a_step_is_put_together_from_all_owners() -> None:
    run = Run(replicated=False)
    run.join(0, 1, 2)
    run.commit(1)
    for rank in (2, 0, 1):
        run.upload(rank, run.part(rank))
    assert run.with_state() == {1: set(NAMES)}
    assert run.warnings == []


def test_when_an_owner_dies_nobody_is_asked_before_its_part_has_a_new_owner() -> None:
    run = Run(replicated=False)
    run.join(0, 1, 2)
    run.commit(1)
    first = {rank: run.part(rank) for rank in (0, 1)}
    run.upload(0, first[0])
    run.leave(2)
    run.coordinator._listen()
    assert [run.links[rank].count(Kind.PULL) for rank in (0, 1)] == [1, 1], "asked for what nobody owns"
    run.go_on()
    assert [[m.kind for m in run.links[rank].sent[-2:]] for rank in (0, 1)] == [[Kind.VIEW, Kind.PULL]] * 2

    # The rest of the first answer, at the same step, is no part of the second.
    before = run.links[0].sent[0].epoch
    run.upload(1, first[1], epoch=before)
    assert run.saved == {}
    for rank in (0, 1):
        run.upload(rank, run.part(rank))
    assert run.with_state() == {1: set(NAMES)}


def test_a_newcomer_that_owns_a_part_is_asked_too() -> None:
    run = Run(replicated=False)
    run.join(0, 1)
    run.commit(1)
    run.upload(0, run.part(0), but=1)
    run.join(2)
    assert run.links[2].count(Kind.PULL) == 1
    for rank in (0, 1, 2):
        run.upload(rank, run.part(rank))
    assert run.with_state() == {1: set(NAMES)}


def test_a_state_with_a_part_missing_is_not_used() -> None:
    run = Run(replicated=False)
    run.join(0, 1)
    run.commit(1)
    run.upload(0, run.part(0))
    run.upload(1, {"o/exp_avg/nothing": torch.zeros(1)})
    assert run.saved == {}
    [warning] = run.warnings
    assert warning.startswith("the state of step 1 arrived without the optimizer's for ")
    run.commit(2)
    for rank in (0, 1):
        run.upload(rank, run.part(rank))
    assert run.with_state() == {2: set(NAMES)}


def test_one_that_has_the_whole_state_is_asked_as_soon_as_another_is_lost() -> None:
    run = Run(replicated=True)
    run.join(0, 1)
    run.commit(1)
    assert [run.links[rank].count(Kind.PULL) for rank in (0, 1)] == [1, 0]
    run.leave(0)
    run.coordinator._listen()
    assert run.links[1].count(Kind.PULL) == 1
    run.upload(1, {"w/x": torch.zeros(1)})
    assert list(run.saved) == [1]


# Whose part is in a result


@pytest.mark.parametrize("how", ["evicted", "paused"])
def test_a_result_with_the_part_of_one_who_was_put_out_does_not_count(how: str) -> None:
    """All others hold it. The weight of what was put out is not in the mean, and its samples go to others."""
    run = Run(replicated=True)
    run.join_together(0, 1)
    meta = DONE | {"weight": 4.0}
    epoch = run.links[1].last(Kind.VIEW).epoch
    if how == "evicted":
        run.hear(0, Message(kind=Kind.DONE, step=1, epoch=epoch, meta=meta))
        run.hear(1, Message(kind=Kind.DONE, step=1, epoch=epoch, meta=meta | {"weight": 400.0}))
    else:
        run.hear(0, Message(kind=Kind.DONE, step=1, epoch=epoch, meta=meta))
        run.links[1].stalled, run.links[1].silent_s = True, 100.0
    run.go_on()
    assert run.commits == []
    run.commit(1)
    [commit] = run.commits
    assert [(part["rank"], part["samples"]) for part in commit.contributors] == [(0, 4)]


# Rounds of several steps


def test_rounds_end_with_the_steps_that_their_length_divides_and_with_the_last() -> None:
    run = Run(replicated=True, local_steps=4)  # of ten steps
    run.join_together(0, 1)
    assert run.links[0].last(Kind.LEASE).meta["leases"] == [{"step": 4, "steps": 4, "ranges": [[0, 16]]}]
    for step in (4, 8, 10):
        run.commit(step)
    assert [(commit.step, commit.steps) for commit in run.commits] == [(4, 4), (8, 4), (10, 2)]
    assert [sum(part["samples"] for part in commit.contributors) for commit in run.commits] == [32, 32, 16]
    assert "leases" not in run.links[0].last(Kind.COMMIT).meta


def test_a_run_that_goes_on_ends_its_first_round_where_all_do() -> None:
    run = Run(replicated=True, committed=5, local_steps=4)
    run.coordinator._state_step = 5
    run.join(0)
    assert run.links[0].last(Kind.LEASE).meta["leases"] == [{"step": 8, "steps": 3, "ranges": [[0, 12]]}]


def test_a_newcomer_waits_for_the_rounds_that_are_under_way() -> None:
    run = Run(replicated=True, local_steps=3, rounds_ahead=2)
    run.join(0)
    run.join(1)
    view = run.links[1].last(Kind.VIEW).meta
    assert (view["rounds"], view["idle"], run.links[1].count(Kind.LEASE)) == ([3, 6], [1], 0)


def test_a_lease_of_a_view_that_ends_before_its_holder_has_the_state_returns() -> None:
    """Else its samples would count without a gradient, and it would compute a round that is over."""
    run = Run(replicated=True, committed=3, has=False)
    run.join_together(0, 1, 2, updates=(3, 3, 0))
    assert run.links[2].last(Kind.LEASE).meta["leases"][0]["step"] == 4
    run.leave(1)
    run.go_on()
    assert run.links[2].last(Kind.VIEW).meta["idle"] == [2]
    run.commit(4)
    assert [part["rank"] for part in run.commits[-1].contributors] == [0]
    assert [lease["step"] for lease in run.links[2].last(Kind.COMMIT).meta["leases"]] == [5]
    run.commit(5)
    assert [part["rank"] for part in run.commits[-1].contributors] == [0, 2]


def test_a_member_without_the_state_gets_a_lease_when_all_that_had_it_are_gone() -> None:
    run = Run(replicated=True, committed=3, has=False)
    run.join_together(0, 2, updates=(3, 0))
    run.knock(1, updates=3, held=[])
    while not run.roster.newcomers:
        run.roster.get(0)
    run.leave(0)
    run.go_on()
    view = run.links[2].last(Kind.VIEW)
    assert view.meta["donations"] == {"2": 1}
    for rank in (1, 2):
        lease = run.links[rank].last(Kind.LEASE)
        assert (lease.epoch, lease.meta["leases"][0]["step"]) == (view.epoch, 4)
    run.commit(4)
    assert [part["rank"] for part in run.commits[-1].contributors] == [1, 2]


def test_an_idle_worker_drops_the_leases_of_earlier_views() -> None:
    """The server has taken them back: it would compute a round that others have committed."""
    leases = deque([Lease(4, ((8, 4),))])
    worker = SimpleNamespace(
        context=SimpleNamespace(seat=SimpleNamespace(rank=2)),
        flights=deque(),
        num_slots=1,
        slot_of=lambda step: 0,
        combination=SimpleNamespace(formed=lambda *_: None, again=lambda *_, **__: None),
        _keys={},
        _peers=SimpleNamespace(form=lambda *_: None),
        _is_over=lambda view: False,
        _receive_state=lambda view: True,
        _link=SimpleNamespace(leases=leases),
        _strategy=SimpleNamespace(rejoined=lambda: None),
        _count_late=lambda meta: False,
        _announce=lambda flight: None,
        _combine_again=lambda: None,
    )
    meta = {"donations": {"2": 0}, "established": [], "idle": [2], "rounds": [4], "left_out": {}}
    view = Message(kind=Kind.VIEW, step=3, epoch=6, meta=meta | {"view": View(6, 3, ()).to_meta()})
    ElasticRounds._regroup(cast(ElasticRounds, worker), view)
    assert not leases
    assert [flight.step for flight in worker.flights] == [4]


@pytest.mark.parametrize(
    ("local_steps", "updates", "held", "knows"),
    [
        *((4, 8, [], True), (4, 4, [[8, 7]], True), (4, 4, [[8, 6]], False), (4, 4, [], False)),
        *((4, 0, [[4, 7], [8, 7]], False), (4, 3, [[8, 7]], False)),
        # Only what leads to the committed step is taken for it.
        *((1, updates, [], updates == 8) for updates in (0, 7, 8, 9, 12)),
    ],
)
def test_one_who_holds_the_committed_rounds_that_it_lacks_knows_the_weights(
    local_steps: int, updates: int, held: list[list[int]], knows: bool
) -> None:
    run = Run(replicated=True, committed=8, has=False, local_steps=local_steps)
    run.coordinator._recent = {8: (7, 1.0, 1.0)}
    assert run.coordinator._is_current(member(0, said={"updates": updates, "held": held})) is knows


def test_a_state_may_be_of_a_later_round_than_the_one_that_was_asked_for() -> None:
    """A worker in the middle of a round answers when it is over."""
    run = Run(replicated=True, local_steps=4)
    run.join(0)
    run.commit(4)
    run.commit(8)
    assert run.links[0].last(Kind.PULL).step == 4
    for step, numbers in (
        (12, {"updates": 12}),
        (8, {"updates": 8}),
    ):  # of a round that is not committed, and of one that is
        meta = {"name": "w/x", "last": True, "numbers": numbers}
        epoch = run.links[0].last(Kind.VIEW).epoch
        run.hear(0, Message(kind=Kind.STATE, step=step, epoch=epoch, meta=meta, payload=torch.zeros(1)))
        run.go_on()
    assert list(run.saved) == [8]


# Who comes back to a coordinator that was started again


def test_one_that_is_ahead_of_the_record_gets_the_state_of_one_that_is_not() -> None:
    run = Run(replicated=True, committed=5, has=False)
    run.join_together(0, 1, updates=(6, 5))
    assert run.links[0].last(Kind.VIEW).meta["donations"] == {"0": 1}


# Who may not take part


@pytest.mark.parametrize(
    "address", [None, 7, "", "somewhere", "host:", ":5000", "host:99999", "host:5000\n", "h" * 300]
)
def test_one_that_the_others_could_not_reach_is_refused(address: Any) -> None:
    """They would all fail to read the view that it stands in."""
    admission = Admission(layout=[], num_samples=100, hosts=[], exchanging=True)
    said = {"layout": [], "samples": 100, "batch_size": 4, "secret": "s"}
    link = cast(Link, FakeLink(0, instance_of("s")))
    good = admission.admit(link, {**said, "address": "127.0.0.1:5000"})
    assert good.address == "127.0.0.1:5000"
    with pytest.raises(JoinRefused, match="other workers could not reach it: "):
        admission.admit(link, {**said, "address": address})
    served = dataclasses.replace(admission, exchanging=False)  # then nobody needs to
    assert served.admit(link, {**said, "address": ""}).rank == 0


def test_one_on_loopback_among_others_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(replicated=True)
    run.join(0, 1)
    assert "loopback" not in caplog.text
    run.join(2, address="10.8.0.3:5000")
    assert "worker 0 (testhost), worker 1 (testhost) joined over a loopback address" in caplog.text


def test_a_second_rank_with_the_instance_of_another_is_refused() -> None:
    run = Run(replicated=True)
    run.join(0, 1)
    run.links[2] = FakeLink(2, run.links[1].peer.instance)
    run.mailbox.linked(run._link(2))
    run.hear(2, Message(kind=Kind.JOIN))
    run.go_on()
    assert (
        f"instance {run.links[1].peer.instance} is already used by worker 1 (testhost)"
        in run.links[2].last(Kind.REFUSE).meta["reason"]
    )
    assert sorted(run.roster.members) == [0, 1]
    run.commit(1)
    assert run.links[1].last(Kind.COMMIT).step == 1


def test_an_empty_run_id_is_none(tmp_path: Path) -> None:
    """As a power cut may leave it."""
    (tmp_path / "run-id").write_text("")
    run_id = run_id_in(tmp_path / "run-id")
    assert len(run_id) == 16
    assert run_id_in(tmp_path / "run-id") == run_id
    assert [path.name for path in tmp_path.iterdir()] == ["run-id"]


# A run over epochs: its last step moves


def test_nobody_gets_a_lease_of_a_step_twice_when_the_run_becomes_shorter_and_longer_again() -> None:
    run = Run(replicated=True)
    run.coordinator._rounds_ahead = 3
    run.join(0, 1)
    run.commit(1)
    run.coordinator.context.total_steps = 3
    run.leave(1)
    run.go_on()
    assert sorted(run.roster.members) == [0]
    run.coordinator.context.total_steps = 5
    run.commit(2)
    assert run.coordinator._committed == 2
    assert sorted(run.server_context.leases.held(run.roster.members[0].instance)) == [3, 4, 5]


# A member computes for ever


def test_a_member_that_computes_while_others_wait_is_evicted_after_the_deadline(clock: list[float]) -> None:
    run = Run(replicated=True, step_timeout_s=6.0)
    run.join(0, 1, 2)
    run.commit(1)
    run.commit(2)
    while sorted(run.roster.members) == [0, 1, 2] and clock[0] < 1020.0:
        clock[0] += 0.5
        for rank in (0, 2):
            epoch = run.links[rank].last(Kind.VIEW).epoch
            run.hear(rank, Message(kind=Kind.WAITING, epoch=epoch))
        run.go_on()
    assert sorted(run.roster.members) == [0, 2]
    assert 6.0 < clock[0] - 1000.0 < 8.0
    run.commit(3)
    assert run.coordinator._committed == 3


# Sums


@pytest.mark.parametrize("replicated", [True, False])
def test_a_sum_that_overflows_everywhere_is_nobodys_fault(replicated: bool) -> None:
    run = Run(replicated=replicated)
    run.join(0, 1, 2)
    with pytest.raises(SmolclusterError, match="the gradients of step 1 are so large that their sum has overflowed"):
        run.commit(1, held=math.inf)
    assert run.warnings == []
    assert sorted(run.roster.members) == [0, 1, 2]


def test_a_sum_that_is_infinite_on_one_worker_is_not_agreed() -> None:
    run = Run(replicated=True)
    run.join(0, 1, 2)
    run.commit(1, held=math.inf, others=1.0)
    assert run.coordinator._committed == 0
    assert sorted(run.roster.members) == [1, 2], "the one that differs stays"
    assert "differ between workers (1 to inf)" in run.warnings[0]


# A worker that joins


def test_a_state_that_comes_before_its_view_is_kept() -> None:
    """The donor may have heard of the next view while this worker waits for a state in the one before."""
    loaded: list[State] = []
    sent = [({"epoch": epoch, "numbers": {"updates": epoch}}, {"w/x": torch.zeros(1)}) for epoch in (3, 5)]

    def receive_state(timeout_s: float) -> Any:
        assert sent, "waits for a state that has come already"
        return sent.pop(0)

    worker = SimpleNamespace(
        _donated=None,
        flights=deque(),
        _is_over=lambda view: False,
        _check_stop=lambda: None,
        _report_waiting=lambda: None,
        _peers=SimpleNamespace(receive_state=receive_state),
        _strategy=SimpleNamespace(load_state=loaded.append),
    )
    received = [ElasticRounds._receive_state(cast(ElasticRounds, worker), View(epoch, 0, ())) for epoch in (4, 5)]
    assert received == [False, True]
    assert [state.numbers["updates"] for state in loaded] == [5]


def test_a_state_that_is_not_finite_is_not_used_and_another_member_is_asked() -> None:
    """Buffers are each member's own: the next one's may be good."""
    run = Run(replicated=True)
    run.join(0, 1)
    run.commit(1)
    run.upload(0, {"w/x": torch.zeros(1), "w/norm.running_mean": torch.tensor([math.nan])})
    assert run.saved == {}
    assert run.warnings == [
        "the state of step 1 arrived with NaN or infinite values in norm.running_mean: it is not used"
    ]
    run.commit(2)
    assert [run.links[rank].count(Kind.PULL) for rank in (0, 1)] == [1, 1]
    run.upload(1, {"w/x": torch.zeros(1)})
    assert list(run.saved) == [2]


def test_results_of_steps_that_nobody_computes_are_not_kept() -> None:
    run = Run(replicated=True)
    run.join(0, 1)
    run.commit(1)
    view = run.links[0].last(Kind.VIEW)
    for step in (0, 1, 3, *range(1000, 2000), 2**64 - 1):
        run.hear(0, Message(kind=Kind.DONE, step=step, epoch=view.epoch, meta=DONE))
    run.go_on()
    assert run.coordinator._done == {}
    run.commit(2)
    assert run.coordinator._committed == 2


def test_every_view_and_commit_carries_the_loss_scale_of_the_run() -> None:
    run = Run(replicated=True)
    run.server_context.scale.growth_interval = 2
    run.join(0, 1)
    run.commit(1)
    run.commit(2)
    assert run.links[0].last(Kind.VIEW).meta["scale"] == {"value": 2.0**16, "good_steps": 0}
    assert [run.links[rank].last(Kind.COMMIT).meta["scale"]["value"] for rank in (0, 1)] == [2.0**17] * 2


# Memory


def storages(tensors: dict[str, Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}


def test_a_coordinator_copies_no_state_that_it_passes_on() -> None:
    """One state is here and one on its way, however it is saved, evaluated and handed to newcomers meanwhile."""
    run = Run(replicated=True)
    server_side = Coordinator(run.coordinator.context, run.replica, rounds_ahead=1, replicated=True)

    def state_after(step: int) -> State:
        weights = {name: torch.full_like(tensor, step) for name, tensor in run.replica.weights().items()}
        moments = {f"{kind}/{name}": torch.full_like(weights[name], step) for name in NAMES for kind in KINDS}
        steps = {f"step/{name}": torch.tensor(float(step)) for name in NAMES}
        return State(weights=weights, optimizer=moments | steps, numbers={"updates": step})

    outputs = cast(Any, StepOutputs.__new__(StepOutputs))
    outputs._context, outputs._coordinates, outputs._saver = SimpleNamespace(device=torch.device("cpu")), True, None
    first, second = state_after(1), state_after(2)
    came = storages({**first.weights, **{k: t for k, t in first.optimizer.items() if t.ndim}})
    server_side.load_state(first)
    state, (sent, _) = replica_state(run.replica), server_side.copied_state()
    kept = {**outputs._copy(state.weights), **outputs._copy({k: t for k, t in state.optimizer.items() if t.ndim})}
    assert storages(kept) == came
    assert storages({n: t for n, t in sent.items() if t.ndim}) == came
    server_side.load_state(second)
    assert all(bool((tensor == 1).all()) for tensor in kept.values()), "what was there before is not changed"
    assert all(bool((tensor == 2).all()) for tensor in run.replica.weights().values())
    assert run.replica.updates == 2
    with pytest.raises(RuntimeError, match="Missing key"):
        server_side.load_state(State(weights={}, optimizer={}, numbers={"updates": 3}))


KINDS = ("exp_avg", "exp_avg_sq")
