"""The cost of a step, a view and a join as a function of the number of members, in executed lines instead of seconds."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.tasks import Tiny

from smolcluster.comm.elastic.membership.mailbox import Linked, Mailbox
from smolcluster.comm.elastic.membership.received_state import ReceivedState
from smolcluster.comm.elastic.membership.roster import Member, Roster
from smolcluster.comm.elastic.membership.server_link import ServerLink
from smolcluster.comm.elastic.transport import frames
from smolcluster.comm.elastic.transport.api import Link
from smolcluster.comm.elastic.transport.messages import Kind, Message, Peer
from smolcluster.comm.elastic.transport.tcp import LinkLimits, TcpTransport
from smolcluster.compute.optim import make_optimizer
from smolcluster.compute.replica import Replica
from smolcluster.config.schema import TrainingConfig
from smolcluster.data.leases import Leases
from smolcluster.engine.elastic.admission import MAX_LISTED, _difference, short_layout
from smolcluster.engine.elastic.coordination.coordinator import Coordinator
from smolcluster.engine.elastic.server_side import send_state
from smolcluster.strategies.base import Context, ServerContext

FEW, MANY = 20, 160
STEPS = 1000


class WireLink:
    """Encodes what is sent, as a socket would."""

    open, silent_s, stalled, queued_bytes = True, 0.0, False, 0

    def __init__(self, rank: int) -> None:
        self.peer = Peer(role="worker", rank=rank, host="testhost", instance=f"{rank:016x}", run="", versions={})
        self.sent: list[Message] = []
        self.nbytes = 0

    def send(self, message: Message) -> None:
        self.nbytes += frames.encode(message).nbytes
        self.sent.append(message)

    def close(self, reason: str) -> None:
        self.open = False

    def last(self, kind: Kind) -> Message:
        return [message for message in self.sent if message.kind is kind][-1]


class Cluster:
    """A coordinator and many members, which do what it says."""

    def __init__(self, num_members: int) -> None:
        self.mailbox = Mailbox()
        model = Tiny(config=None).model()  # type: ignore[arg-type]
        replica = Replica(
            model=model,
            loss=lambda *_: torch.zeros(()),
            optimizer=make_optimizer(model, TrainingConfig()),
            learning_rate=lambda _: 0.1,
            device=torch.device("cpu"),
        )

        def admit(link: Link, meta: Any) -> Member:
            address = f"127.0.0.1:{1000 + link.peer.rank}"
            return Member(rank=link.peer.rank, link=link, batch_size=4, automatic=True, address=address, said=meta)

        self.roster = Roster(
            self.mailbox, plan={}, admit=admit, on_event=lambda *_: None, on_change=lambda *_: None, epoch=1
        )
        server_context = ServerContext(
            roster=self.roster,
            leases=Leases(),
            expected=0,
            record=lambda commit: server_context.leases.state_dict(),
            committed=lambda report: None,
            wants=lambda step: False,
            arrived=lambda step: None,
        )
        context = SimpleNamespace(
            total_steps=STEPS,
            warn=pytest.fail,
            stop_requested=lambda: False,
            server_context=server_context,
            config=SimpleNamespace(training=SimpleNamespace(grad_accumulation=1)),
        )
        self.coordinator = Coordinator(cast(Context, context), replica, rounds_ahead=1, replicated=True)
        self.coordinator.restore()
        self.links: dict[int, WireLink] = {}
        self.join(*range(num_members))

    @property
    def sent_bytes(self) -> int:
        return sum(link.nbytes for link in self.links.values())

    def join(self, *ranks: int) -> None:
        for rank in ranks:
            link = self.links[rank] = WireLink(rank)
            self.mailbox.linked(cast(Link, link))
            self.mailbox.received(cast(Link, link), Message(kind=Kind.JOIN))
        while len(self.roster.members) + len(self.roster.newcomers) < len(self.links):
            self.roster.get(0)
        self.coordinator._iterate()
        assert self.roster.members.keys() == self.links.keys()

    def step(self, step: int) -> None:
        """Every member reports that it waits, and then its result."""
        epoch = self.links[0].last(Kind.VIEW).epoch
        meta = {"mine": "1.0", "held": "1.0", "loss": "1.0", "fixed_s": 0.0}
        for kind in (Kind.WAITING, Kind.DONE):
            for rank, link in self.links.items():
                said = meta | {"compute_s": 0.1 + rank / 1000} if kind is Kind.DONE else {}
                self.mailbox.received(cast(Link, link), Message(kind=kind, step=step, epoch=epoch, meta=said))
        coordinator = self.coordinator
        while coordinator._committed < step:
            coordinator._iterate()
            while coordinator._committed < step and coordinator._agreed(coordinator._rounds[0]):
                coordinator._commit(coordinator._rounds[0])


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the lines of Python that run; a round of a loop is one at least."""
    counts: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        counts[frame.f_code.co_qualname if event == "line" else "calls"] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counts
    finally:
        sys.settrace(before)


def lines(counts: Counter[str]) -> int:
    return sum(count for name, count in counts.items() if name != "calls")


def growth(few: Counter[str], many: Counter[str]) -> float:
    """How much more work there is for each member where members are many."""
    ratio = lines(many) / lines(few) / (MANY / FEW)
    worst = sorted(many, key=lambda name: few[name] - many[name])[:5]
    print(f"{lines(few)} and {lines(many)} lines: {ratio:.2f} times for each member; most in {worst}")
    return ratio


def test_the_work_of_a_step_does_not_grow_with_the_square_of_members() -> None:
    counts = []
    for num_members in (FEW, MANY):
        cluster = Cluster(num_members)
        for step in (1, 2):  # speeds are known from then on
            cluster.step(step)
        with counted() as counter:
            cluster.step(3)
        counts.append(counter)
    assert growth(*counts) < 1.5


def test_a_view_is_encoded_once_for_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(FEW)
    sizes: list[int] = []
    encode_meta = frames.encode_meta

    def measured(meta: Any) -> bytes:
        data = encode_meta(meta)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(frames, "encode_meta", measured)
    cluster.join(FEW)
    view = len(encode_meta(cluster.links[0].last(Kind.VIEW).meta))
    assert len({id(link.last(Kind.VIEW)) for link in cluster.links.values()}) == 1
    assert sum(size >= view for size in sizes) == 1


def test_a_member_that_stays_gets_the_keys_of_newcomers_only() -> None:
    cluster = Cluster(FEW)
    assert all(len(link.last(Kind.MEMBER).meta["keys"]) == FEW - 1 for link in cluster.links.values())
    cluster.join(FEW)
    newcomer = cluster.links[FEW]
    assert len(newcomer.last(Kind.MEMBER).meta["keys"]) == FEW
    for rank in range(FEW):
        link = cluster.links[rank]
        key = newcomer.last(Kind.MEMBER).meta["keys"][link.peer.instance]
        assert link.last(Kind.MEMBER).meta["keys"] == {newcomer.peer.instance: key}
        kinds = [message.kind for message in link.sent]
        assert kinds.index(Kind.MEMBER) < kinds.index(Kind.VIEW), "it cannot prove itself in that view"


def test_the_work_of_a_newcomer_does_not_grow_with_the_square_of_members() -> None:
    counts = []
    for num_members in (FEW, MANY):
        cluster = Cluster(num_members)
        with counted() as counter:
            cluster.join(num_members)
        counts.append(counter)
    assert growth(*counts) < 1.5


# Models with many tensors, or with large ones


def test_a_server_sends_ten_thousand_tensors_and_one_beyond_the_largest_payload() -> None:
    limits = LinkLimits(payload_bytes=1 << 20, silence_s=60.0)
    server, worker = (
        TcpTransport(Peer(role=role, rank=0, host="here", instance=f"{i:016x}"), limits=limits)
        for i, role in enumerate(("server", "worker"))
    )
    try:
        mailbox = Mailbox()
        line = ServerLink(worker, server.listen("127.0.0.1", 0, mailbox))
        line.allow(Kind.STATE, max_bytes=8 << 20)
        line.join = lambda: {}
        linked = mailbox.get(60.0)
        assert isinstance(linked, Linked)
        state = {f"o/exp_avg/layers.{i}.as_long_as_names_are.weight": torch.full((1, 3), i) for i in range(10_000)}
        state |= {"w/large": torch.arange(500_000).view(5, -1), "w/empty": torch.zeros(0, 3), "w/one": torch.tensor(7)}
        assert state["w/large"].nbytes > limits.payload_bytes
        member = cast(Member, SimpleNamespace(link=linked.link))
        send_state(member, state, step=3, epoch=1, meta={"numbers": {"updates": 3}})
        welcome = line.get(60.0)
        assert welcome.kind is Kind.WELCOME
        received = line.state(welcome.meta["state"])
    finally:
        worker.close()
        server.close()
    assert list(received) == list(state)
    assert all(torch.equal(received[name], tensor) for name, tensor in state.items())


def slice_of(number: int, payload: torch.Tensor, **meta: Any) -> Message:
    return Message(kind=Kind.STATE, channel=number, meta=meta, payload=payload)


FIRST = slice_of(0, torch.zeros(2), name="a", shape=[3])
WRONG: dict[str, list[Message]] = {
    "another kind": [Message(kind=Kind.VIEW)],
    "no payload": [Message(kind=Kind.STATE, meta={"name": "a", "shape": [3]})],
    "no name": [slice_of(0, torch.zeros(3), shape=[3])],
    "no shape": [slice_of(0, torch.zeros(3), name="a")],
    "a negative size": [slice_of(0, torch.zeros(3), name="a", shape=[-3])],
    "a name twice": [
        slice_of(0, torch.zeros(3), name="a", shape=[3]),
        slice_of(1, torch.zeros(3), name="a", shape=[3]),
    ],
    "too large": [slice_of(0, torch.zeros(3), name="a", shape=[2**20])],
    "too large and empty": [slice_of(0, torch.zeros(0), name="a", shape=[2**20, 0])],
    "one too many": [FIRST, slice_of(1, torch.zeros(2))],
    "of another type": [FIRST, slice_of(1, torch.zeros(1, dtype=torch.int32))],
    "of nothing": [FIRST, slice_of(1, torch.zeros(0))],
    "not the next": [FIRST, slice_of(2, torch.zeros(1))],
}


@pytest.mark.parametrize("messages", WRONG.values(), ids=WRONG.keys())
def test_an_invalid_slice_of_a_state_is_refused(messages: list[Message]) -> None:
    state = ReceivedState(2, limit_bytes=1000)
    for message in messages[:-1]:
        state.take(message)
    with pytest.raises(ValueError):
        state.take(messages[-1])
    assert not state.complete


def test_a_model_with_many_tensors_is_compared_by_its_hash() -> None:
    few = [[f"layer.{i}", "float32", [3]] for i in range(MAX_LISTED)]
    many = [[f"layer.{i}.with_a_name_of_usual_length.weight", "float32", [3, 4]] for i in range(20_000)]
    other = [*many[:-1], ["last", "float32", [3, 4]]]
    assert len(frames.encode_meta({"layout": short_layout(few)})) < frames.META_BYTES
    assert len(frames.encode_meta({"layout": short_layout(many)})) < 100
    assert _difference(few, short_layout(few)) == ""
    assert _difference(many, short_layout(many)) == ""
    assert "differs from the server's 20000" in _difference(many, short_layout(other))
    assert _difference(few, short_layout(many)) == "no tensors where the server has 2000"
    assert _difference(many, few) == "2000 tensors where the server has 20000"
