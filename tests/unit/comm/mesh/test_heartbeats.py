"""The heartbeat roster: all members receive all reports; silent, slow and hostile peers do not delay the others."""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.unit.comm.test_transport import Recorder, make_peer

from smolcluster.comm.elastic.transport.connection import LinkLimits, TcpLink
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.elastic.transport.security import Keyring, new_token
from smolcluster.comm.elastic.transport.tcp import TcpTransport
from smolcluster.comm.mesh import heartbeats as membership
from smolcluster.comm.mesh.heartbeats import CLOSED, SILENT, Fields, MembershipClient, MembershipServer

HERE = "127.0.0.1"
WAIT_S = 60.0
TOKEN = new_token()


class Roster:
    """One server, its members, and peers of other sorts; all are closed in the end."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def serve(self, *, silent_s: float = 30.0, port: int = 0, **options: Any) -> MembershipServer:
        self.server = MembershipServer(HERE, port, silent_s=silent_s, **options)
        self._stack.callback(self.server.close)
        return self.server

    def dial(self, fields: Fields, address: str = "", *, silent_s: float = 30.0, **options: Any) -> MembershipClient:
        client = MembershipClient(address or self.server.address, fields, silent_s=silent_s, **options)
        self._stack.callback(client.close)
        return client

    def join(self, **fields: Any) -> MembershipClient:
        client = self.dial(fields)
        assert client.wait(lambda: client.number >= 0, timeout_s=WAIT_S)
        return client

    def peer(self, role: str = "member", **limits: Any) -> tuple[TcpTransport, Recorder]:
        """A peer with a plain transport, controlled by the test."""
        transport = TcpTransport(make_peer(role), limits=LinkLimits(**{"silence_s": 1e9, **limits}), uvloop=False)
        self._stack.callback(transport.close)
        return transport, Recorder()

    def socket(self) -> socket.socket:
        return self._stack.enter_context(socket.create_connection((HERE, self.server.port), timeout=WAIT_S))


@pytest.fixture
def roster() -> Iterator[Roster]:
    with contextlib.ExitStack() as stack:
        yield Roster(stack)


def sees(client: MembershipClient, *members: Fields) -> None:
    """Wait until these are all members that the client sees, in the order of their arrival."""
    assert client.wait(
        lambda: list(dict(sorted(client.view.members.items())).values()) == list(members), timeout_s=WAIT_S
    )


def hung_up(sock: socket.socket) -> bool:
    """Whether the server closes, after whatever it has to say."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def test_all_receive_who_is_there_and_who_was(roster: Roster) -> None:
    server = roster.serve()
    first = roster.join(name="a")
    second = roster.join(name="b")
    sees(first, {"name": "a"}, {"name": "b"})
    second.say(step=7)
    sees(first, {"name": "a"}, {"name": "b", "step": 7})
    second.close()
    assert first.wait(lambda: first.view.gone == {1: {"name": "b", "step": 7}}, timeout_s=WAIT_S)
    assert first.view.how == {1: CLOSED}
    assert (first.number, roster.join(name="c").number) == (0, 2)
    server.close()
    assert not first.wait(lambda: False, timeout_s=WAIT_S)
    assert first.lost == CLOSED


def test_on_change_is_called_until_the_client_is_closed(roster: Roster) -> None:
    roster.serve()
    client = roster.dial({})
    called = threading.Event()
    client.on_change = called.set
    client.say(step=1)
    assert called.wait(WAIT_S)
    sees(client, {"step": 1})
    called.clear()
    client.close()
    assert not called.is_set()


def test_silence_is_noticed_on_both_sides(roster: Roster) -> None:
    server = roster.serve(silent_s=3.0)
    watcher = roster.dial({"name": "w"}, silent_s=3.0)
    mute, at_mute = roster.peer(beat_s=1e6)
    mute.dial(server.address, at_mute)
    at_mute.link().send(Message(kind=Kind.REPORT, meta={"name": "mute"}))
    assert watcher.wait(lambda: list(watcher.view.how.values()) == [SILENT], timeout_s=WAIT_S)
    assert list(watcher.view.gone.values()) == [{"name": "mute"}]

    silent_server, at_server = roster.peer(beat_s=1e6)
    other = roster.dial({}, silent_server.listen(HERE, 0, at_server), silent_s=3.0)
    assert not other.wait(lambda: False, timeout_s=WAIT_S)
    assert other.lost == SILENT


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("worker", Message(kind=Kind.REPORT, meta={"name": "x"})),
        ("member", Message(kind=Kind.JOIN, meta={"name": "x"})),
        ("member", Message(kind=Kind.REPORT, meta={"name": "x" * membership.REPORT_BYTES})),
    ],
    ids=["another role", "another message", "too long"],
)
def test_peers_that_are_no_members_are_turned_away(roster: Roster, role: str, message: Message) -> None:
    server = roster.serve()
    known = roster.join(name="a")
    other, at_other = roster.peer(role)
    dialer = other.dial(server.address, at_other)
    at_other.link().send(message)
    dialer.close()
    at_other.wait(lambda seen: seen.ends)
    known.say(step=1)
    sees(known, {"name": "a", "step": 1})
    assert known.view.gone == {}


def test_all_reports_together_are_bounded(roster: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that left are forgotten first; then a report without room ends its sender, and nobody else."""
    monkeypatch.setattr(membership, "VIEW_BYTES", 5000)
    roster.serve()
    known = roster.join(name="a")
    left = roster.join(text="x" * 2000)
    left.close()
    assert known.wait(lambda: list(known.view.gone) == [1], timeout_s=WAIT_S)
    large = roster.join(text="y" * 1500, more="y" * 1500)
    assert known.wait(lambda: known.view.gone == {}, timeout_s=WAIT_S)
    too_large = roster.dial({"text": "z" * 1900})
    assert not too_large.wait(lambda: too_large.number >= 0, timeout_s=WAIT_S)
    assert too_large.lost == CLOSED
    large.say(more="")
    assert roster.join(text="z" * 1900).number == 3


def test_members_are_bounded(roster: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_MEMBERS", 2)
    monkeypatch.setattr(membership, "MAX_GONE", 3)
    roster.serve()
    known = roster.join(name="a")
    for number in range(1, 6):
        roster.join(name="b").close()
        assert known.wait(functools.partial(lambda number: number in known.view.gone, number), timeout_s=WAIT_S)
    assert sorted(known.view.gone) == sorted(known.view.how) == [3, 4, 5]
    roster.join(name="b")
    third = roster.dial({"name": "c"})
    assert not third.wait(lambda: third.number >= 0, timeout_s=WAIT_S)


def heard(known: MembershipClient, change: int) -> bool:
    return any(fields.get("change") == change for fields in known.view.members.values())


def test_one_that_does_not_read_blocks_nobody_and_is_evicted(roster: Roster) -> None:
    """It sends heartbeats all the time, so that it is not silent."""
    server = roster.serve(silent_s=3.0)
    deaf, at_deaf = roster.peer(beat_s=0.05)
    deaf.dial(server.address, at_deaf)
    link = at_deaf.link()
    assert isinstance(link, TcpLink)
    link.send(Message(kind=Kind.REPORT, meta={"name": "deaf"}))
    at_deaf.wait(lambda seen: seen.messages)
    deaf.post(link._transport.pause_reading)
    known = roster.dial({"name": "a"}, silent_s=3.0)
    changes = 0
    while not known.view.gone:
        changes += 1
        known.say(change=changes, **{f"more-{n}": "y" * 2000 for n in range(30)})
        assert known.wait(functools.partial(heard, known, changes), timeout_s=WAIT_S)
        member = next(iter(server._members))
        assert member.queued_bytes < 2 * membership.VIEW_BYTES, "views wait in memory"
    assert list(known.view.gone.values()) == [{"name": "deaf"}]
    assert known.lost is None


def test_without_the_token_there_is_no_membership(roster: Roster) -> None:
    roster.serve(keyring=Keyring([TOKEN]))
    known = roster.dial({"name": "a"}, keyring=Keyring([new_token(), TOKEN]))  # the first of its tokens is another one
    sees(known, {"name": "a"})
    other = roster.dial({"name": "b"}, keyring=Keyring([new_token()]))
    assert not other.wait(lambda: False, timeout_s=WAIT_S)
    assert other.refusal == "the peer does not have our token"
    plain = roster.dial({"name": "plain"})
    assert plain.wait(lambda: bool(plain.problem), timeout_s=1.0) or plain.number < 0
    known.say(step=1)
    sees(known, {"name": "a", "step": 1})
    assert known.view.gone == {}


def test_without_the_secret_there_is_no_membership(roster: Roster) -> None:
    secret = secrets.token_bytes(16)
    roster.serve(secret=secret)
    known = roster.dial({"name": "a"}, secret=secret)
    sees(known, {"name": "a"})
    for wrong in (b"", secrets.token_bytes(16)):
        other = roster.dial({"name": "b"}, secret=wrong)
        assert not other.wait(lambda: False, timeout_s=WAIT_S)
        assert other.refusal == "the cluster token is missing or not the one used here"
    known.say(step=1)
    sees(known, {"name": "a", "step": 1})
    assert known.view.gone == {}


def test_connections_that_say_nothing_leave_room_for_members(roster: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_PENDING", 4)
    monkeypatch.setattr(membership, "CONNECT_S", 600.0)
    roster.serve()
    silent = [roster.socket() for _ in range(20)]
    sees(roster.join(name="a"), {"name": "a"})
    for sock in silent[:16]:  # those that had to make room
        assert hung_up(sock)


def test_a_member_that_comes_back_is_a_new_one(roster: Roster) -> None:
    """A lost link is not made again by itself."""
    server = roster.serve()
    known, other = roster.join(name="a"), roster.join(name="b")
    next(link for link in server._members if server._members[link].number == 1).close("for this test")
    assert not other.wait(lambda: False, timeout_s=WAIT_S)
    assert known.wait(lambda: list(known.view.gone) == [1], timeout_s=WAIT_S)
    assert roster.join(name="b").number == 2


VIEWS: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
    lambda view: {},
    lambda view: view | {"members": []},
    lambda view: view | {"gone": {"first": {}}},
]


@pytest.mark.parametrize("change", VIEWS, ids=range(len(VIEWS)))
def test_a_view_that_is_none_ends_the_link(roster: Roster, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    server, at_server = roster.peer()
    client = roster.dial({}, server.listen(HERE, 0, at_server))
    meta = change({"members": {}, "gone": {}, "how": {}})
    at_server.link().send(Message(kind=Kind.VIEW, meta=meta))
    assert not client.wait(lambda: client.number >= 0, timeout_s=WAIT_S)
    assert client.lost == CLOSED
    at_server.wait(lambda seen: seen.ends and seen.ends[0].startswith("not a valid VIEW"))
