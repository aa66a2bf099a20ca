"""Pure parts of the elastic plane: shares of work, the gradient gate, owners of parameters, packed tensors, the mailbox."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.comm.codecs import make_codec
from smolcluster.comm.elastic.collectives.packed_tensors import PackedTensors
from smolcluster.comm.elastic.membership.mailbox import Mailbox, Payload, Received
from smolcluster.comm.elastic.membership.roster import Member, Roster
from smolcluster.comm.elastic.transport.api import Link
from smolcluster.comm.elastic.transport.frames import UnexpectedPayload
from smolcluster.comm.elastic.transport.messages import Head, Kind, Message
from smolcluster.engine.elastic.gradient_gate import MAX_REJECTIONS_OF_MEMBER, GradientGate
from smolcluster.engine.elastic.member import busy_time
from smolcluster.engine.elastic.member.busy_time import BusyTime
from smolcluster.engine.elastic.server_side import ServerSide, share_out, smoothed
from smolcluster.parallel.shards import backed_up_by, backup_of, owners, providers

# balance


@given(
    st.lists(st.floats(0.01, 1e6), min_size=1, max_size=12),
    st.integers(0, 200),
    st.integers(1, 4),
)
def test_shares_are_whole_and_complete(speeds: list[float], extra: int, unit: int) -> None:
    total = (len(speeds) + extra) * unit
    shares = share_out(total, speeds, unit=unit)
    assert sum(shares) == total
    assert all(share >= unit and share % unit == 0 for share in shares)
    order = sorted(range(len(speeds)), key=lambda i: speeds[i])
    for slower, faster in itertools.pairwise(order):
        assert shares[slower] <= shares[faster] + unit  # no faster one gets less, but for rounding


def test_a_machine_four_times_as_fast_gets_four_times_as_much() -> None:
    assert share_out(100, [4.0, 1.0]) == [80, 20]
    assert share_out(10, [1.0, 1.0, 1.0]) == [4, 3, 3]
    assert share_out(3, [1000.0, 1.0, 1.0]) == [1, 1, 1]


def test_all_are_done_at_one_time_whatever_a_step_takes_beside_computing() -> None:
    speeds, fixed_s = [200.0, 50.0], [0.01, 0.08]
    shares = share_out(1000, speeds, fixed_s)
    done_s = [n / s + f for n, s, f in zip(shares, speeds, fixed_s, strict=True)]
    assert sum(shares) == 1000
    assert abs(done_s[0] - done_s[1]) <= 1 / min(speeds)
    assert share_out(10, [100.0, 100.0], [0.0, 5.0]) == [9, 1]  # even idle it would be the last


@pytest.mark.parametrize(("computes_on_cpu", "besides_s"), [(True, 0.08), (False, 0.02)], ids=["cpu", "gpu"])
def test_a_machine_with_a_quarter_of_a_core_needs_four_times_as_long_to_move_bytes(
    monkeypatch: pytest.MonkeyPatch, computes_on_cpu: bool, besides_s: float
) -> None:
    """And what a checkpoint costs, once, does not count. How long a GPU computes says nothing about the CPU."""
    now = {"wall": 0.0, "cpu": 0.0}
    clock = SimpleNamespace(perf_counter=lambda: now["wall"], process_time=lambda: now["cpu"])
    monkeypatch.setattr(busy_time, "time", clock)

    def spend(cpu_s: float, *, waiting_s: float = 0.0) -> None:
        now["cpu"] += cpu_s
        now["wall"] += 4 * cpu_s + waiting_s

    busy = BusyTime(computes_on_cpu=computes_on_cpu)
    assert busy.end_step() == 0.0
    for checkpoint_s in (0.0, 0.0, 7.0, 0.0):
        with busy.computing():
            spend(0.1)
        spend(0.02 + checkpoint_s, waiting_s=3.0)
        assert busy.end_step() == pytest.approx(besides_s)


@pytest.mark.parametrize(
    "said", [(0.0, 0.1), (math.inf, 0.1), (math.nan, 0.1), (0.1, math.inf), (0.1, math.nan), (-1.0, 0.0)]
)
def test_impossible_times_are_ignored(said: tuple[float, float]) -> None:
    member = SimpleNamespace(speed=0.0, fixed_s=0.0)
    ServerSide.note_speed(
        cast(ServerSide, SimpleNamespace()), cast(Member, member), samples=8, compute_s=said[0], fixed_s=said[1]
    )
    assert math.isfinite(member.speed)
    assert math.isfinite(member.fixed_s)
    assert share_out(10, [member.speed or 1.0, 1.0], [member.fixed_s, 0.0])


def test_smoothing_begins_with_the_first_measurement() -> None:
    assert smoothed(0.0, 8.0) == 8.0
    assert 8.0 < smoothed(8.0, 16.0) < 16.0


def test_a_measurement_over_a_round_counts_as_many_times_as_the_round_has_steps() -> None:
    speed = 8.0
    for _ in range(5):
        speed = smoothed(speed, 16.0)
    assert smoothed(8.0, 16.0, steps=5) == pytest.approx(speed)
    member = SimpleNamespace(speed=0.0, fixed_s=0.0)
    ServerSide.note_speed(
        cast(ServerSide, SimpleNamespace()), cast(Member, member), samples=320, compute_s=4.0, fixed_s=0.2, steps=20
    )
    assert (member.speed, member.fixed_s) == pytest.approx((80.0, 0.01)), "of a step"


# gate


def test_non_finite_gradients_never_pass() -> None:
    gate = GradientGate()
    for norm in (math.nan, math.inf, -math.inf):
        assert gate.rejection_reason(norm) is not None
    assert gate.rejection_reason(1e30) is None  # there is no median yet


def test_the_reason_for_a_far_too_large_gradient_has_the_median() -> None:
    gate = GradientGate()
    for _ in range(5):
        gate.accept(2.0)
    assert gate.rejection_reason(1999.0) is None
    reason = gate.rejection_reason(2e6)
    assert reason is not None
    assert "1e+06 times the median 2" in reason


def test_large_gradients_are_accepted_after_several_in_a_row() -> None:
    gate = GradientGate()
    for _ in range(20):
        gate.accept(1e-9)
    rejections = 0
    while gate.rejection_reason(1.0) is not None:
        rejections += 1
        assert rejections < 20
    assert rejections == 8
    gate.accept(1.0)
    assert gate.rejection_reason(1.5) is None
    for _ in range(5):
        gate.accept(1.0)
    for _ in range(30):  # one bad machine among good ones stays rejected
        gate.accept(1.0)
        assert gate.rejection_reason(1e6) is not None


def test_a_member_is_the_cause_when_it_alone_is_refused_again_and_again() -> None:
    gate = GradientGate()

    def rejections(count: int, *, others: bool) -> list[bool]:
        found = []
        for _ in range(count):
            found.append(gate.count_rejection("a"))
            if others:
                gate.accept(1.0, instance="b")
        return found

    assert rejections(MAX_REJECTIONS_OF_MEMBER, others=True) == [False] * MAX_REJECTIONS_OF_MEMBER
    assert rejections(50, others=True) == [True] * 50
    gate.count_rejection("a")
    assert not any(rejections(50, others=False))  # nobody's gradient counts: it may be their samples
    gate.accept(1.0, instance="a")
    assert rejections(MAX_REJECTIONS_OF_MEMBER, others=True) == [False] * MAX_REJECTIONS_OF_MEMBER


def test_the_median_follows_training() -> None:
    gate = GradientGate()
    for _ in range(100):
        gate.accept(1.0)
    for _ in range(100):
        gate.accept(1e-3)
    assert gate.rejection_reason(10.0) is not None


# shards


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60), st.integers(1, 9))
def test_every_parameter_has_one_owner_and_loads_are_even(sizes: list[int], members: int) -> None:
    owner = owners(sizes, members)
    assert all(0 <= place < members for place in owner)
    loads = [sum(size for size, place in zip(sizes, owner, strict=True) if place == m) for m in range(members)]
    assert max(loads) <= sum(sizes) / members + max(sizes)


@given(st.integers(1, 9))
def test_backup_and_backed_up_owner_are_inverse(members: int) -> None:
    for place in range(members):
        assert backed_up_by(backup_of(place, members), members) == place
        assert members == 1 or backup_of(place, members) != place


@given(st.integers(2, 9), st.integers(0, 8))
def test_one_loss_leaves_a_provider_for_everything(members: int, lost: int) -> None:
    established = [f"i{n}" if n != lost % members else None for n in range(members)]
    assert all(holder in established for holder in providers(established))


def test_losing_a_member_and_its_backup_is_an_error() -> None:
    assert providers(["a", None, "c", "d"]) == ["a", "c", "c", "d"]
    with pytest.raises(LookupError, match="member 1 and its backup are gone"):
        providers(["a", None, None, "d"])


# packed


@pytest.mark.parametrize("bucket_bytes", [1, 64, 10**6])
@pytest.mark.parametrize("codec", ["fp32", "int8", "topk", "powersgd", "blocktopk"])
def test_packed_tensors_come_back(codec: str, bucket_bytes: int) -> None:
    layout = [("a", (8, 4)), ("b", (3,)), ("c", ()), ("d", (5, 5))]
    tensors = {name: torch.randn(shape) for name, shape in layout}
    packed = PackedTensors(layout, codec=make_codec(codec), bucket_bytes=bucket_bytes)
    out = {name: torch.full(shape, math.nan) for name, shape in layout}
    payloads = list(packed.encode(tensors, key=3))
    assert [channel for channel, _ in payloads] == list(range(len(packed)))
    assert [tuple(p.shape) for _, p in payloads] == [p.shape for p in packed.payloads()]
    assert sum(p.nbytes for _, p in payloads) == packed.nbytes
    for channel, payload in payloads:
        packed.decode(channel, payload, out)
    for name, tensor in tensors.items():
        assert torch.isfinite(out[name]).all()
        if codec == "fp32":
            assert torch.equal(out[name], tensor)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_a_tensor_that_is_too_large_for_one_payload_travels_in_slices(codec: str) -> None:
    layout, max_bytes = [("a", (3,)), ("large", (300, 100)), ("b", (5,))], 30_000
    tensors = {name: torch.randn(shape) for name, shape in layout}
    packed = PackedTensors(layout, codec=make_codec(codec), bucket_bytes=10**6, max_bytes=max_bytes)
    out = {name: torch.full(shape, math.nan) for name, shape in layout}
    assert packed.names == ["a", "large", "b"]
    payloads = list(packed.encode(tensors, key=3))
    assert [tuple(p.shape) for _, p in payloads] == [p.shape for p in packed.payloads()]
    assert max(p.nbytes for _, p in payloads) <= max_bytes < packed.nbytes
    for channel, payload in payloads:
        packed.decode(channel, payload, out)
    whole = PackedTensors(layout, codec=make_codec(codec), bucket_bytes=10**6)
    expected = {name: torch.empty(shape) for name, shape in layout}
    assert len(whole) == 1
    for channel, payload in whole.encode(tensors, key=3):
        whole.decode(channel, payload, expected)
    for name in tensors:
        close = 0.1 if codec == "int8" else 0.0  # rounded at random
        assert torch.allclose(out[name], expected[name], rtol=0, atol=close), name


def test_a_payload_does_not_share_memory_with_what_it_was_made_of() -> None:
    tensors = {"w": torch.ones(16)}
    packed = PackedTensors([("w", (16,))], codec=make_codec("fp32"), bucket_bytes=10**6)
    [(_, payload)] = list(packed.encode(tensors))
    tensors["w"].zero_()
    assert torch.equal(payload.view(torch.float32), torch.ones(16))


# mailbox


class Nobody:
    """The other end of a link, as far as it matters here."""

    peer = SimpleNamespace(rank=0, name="worker 0", instance="0")

    def close(self, reason: str) -> None:
        pass


LINK = cast(Link, Nobody())


def deliver(mailbox: Mailbox, kind: Kind, *, channel: int = 0, size: int = 100) -> None:
    """A payload of so many bytes, as a transport brings it."""
    head = Head(
        kind=kind, step=7, channel=channel, dtype="uint8", shape=(size,), nbytes=size, epoch=0, codec="", meta={}
    )
    place = mailbox.place(LINK, head)
    assert place is not None
    mailbox.received(LINK, Message(kind=kind, step=7, channel=channel, payload=place))


def test_a_whole_model_may_come_while_the_reader_is_busy() -> None:
    mailbox = Mailbox(unread_bytes=150)
    mailbox.expect(Kind.WEIGHTS, [Payload(torch.uint8, (100,))] * 5)
    for channel in range(5):
        deliver(mailbox, Kind.WEIGHTS, channel=channel)
    assert [cast(Received, mailbox.get(0)).message.channel for _ in range(5)] == list(range(5))


def test_a_whole_state_may_come_while_the_reader_is_busy() -> None:
    mailbox = Mailbox(unread_bytes=150)
    mailbox.allow(Kind.STATE, max_bytes=800)
    for channel in range(8):
        deliver(mailbox, Kind.STATE, channel=channel)
    with pytest.raises(UnexpectedPayload, match="STATE of step 7: 900 unread bytes with it, the limit is 800"):
        deliver(mailbox, Kind.STATE)
    mailbox.get(0)
    deliver(mailbox, Kind.STATE)


def test_more_than_a_few_of_each_is_refused_and_the_reason_told() -> None:
    mailbox = Mailbox(unread_bytes=150)
    mailbox.expect(Kind.PUSH, [Payload(torch.uint8, (100,))])
    for _ in range(4):
        deliver(mailbox, Kind.PUSH)
    with pytest.raises(UnexpectedPayload, match="500 unread bytes with it, the limit is 400"):
        deliver(mailbox, Kind.PUSH)


def test_every_member_may_push_while_the_server_is_busy() -> None:
    mailbox = Mailbox(unread_bytes=150)
    mailbox.expect(Kind.PUSH, [Payload(torch.uint8, (100,))])
    roster = Roster(mailbox, plan={}, admit=lambda *_: members[0], on_event=lambda *_: None, on_change=lambda *_: None)
    members = [Member(rank=rank, link=LINK, batch_size=1) for rank in range(3)]
    for member in members:
        roster.newcomers.append(member)
        roster.welcome(member)
    for _ in range(12):
        deliver(mailbox, Kind.PUSH)
    with pytest.raises(UnexpectedPayload, match="the limit is 1200"):
        deliver(mailbox, Kind.PUSH)
    roster.evict(members[0], "slow")
    with pytest.raises(UnexpectedPayload, match="the limit is 800"):
        deliver(mailbox, Kind.PUSH)
