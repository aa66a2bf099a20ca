"""A heartbeat roster: members report fields to a server, which sends all reports to all members. Does not import torch.

    member -> server     REPORT: all fields of this member, again whenever one changes
    server -> members    VIEW: the fields of all members, whenever they change

Links, heartbeats, authentication and limits are those of the elastic plane's transport (transport/tcp.py). When a process
dies its connection closes and the others detect it at once. When its machine or network is lost, it times out after `silent_s`.

The mesh plane uses it twice: between the launchers of `train --elastic` (launch/restart/rendezvous.py), with the cluster
token, and between ranks without a launcher (liveness.py), with a secret of that run.

Server and client each run on their transport's thread and never block it. A slow member skips views: it receives the newest
one after the last has been sent. One that does not read is disconnected. Reports, members and the view are bounded.
"""

from __future__ import annotations

import functools
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from smolcluster.comm.addresses import split_address
from smolcluster.comm.elastic.transport.api import Handler, Link
from smolcluster.comm.elastic.transport.frames import META_BYTES, encode_meta, with_encoded_meta
from smolcluster.comm.elastic.transport.messages import Kind, Message, Peer
from smolcluster.comm.elastic.transport.security import Keyring
from smolcluster.comm.elastic.transport.tcp import LinkLimits, TcpTransport

REPORT_BYTES = 1 << 17  # of one member
VIEW_BYTES = META_BYTES - (1 << 12)  # of all reports together
NUMBER_BYTES = 32  # per member in a view: its number, and how it left
TEXT_CHARS = 2000  # of one text in a report
MAX_MEMBERS = 4096
MAX_GONE = 256  # former members in the view
MAX_PENDING = 64  # unauthenticated connections
CONNECT_S = 10.0  # per attempt; then the name is resolved again

CLOSED, SILENT = "closed", "silent"  # how a member left
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Membership:
    """The reports by member number. Numbers are assigned in the order of arrival and never reused."""

    members: dict[int, Fields] = field(default_factory=dict)
    gone: dict[int, Fields] = field(default_factory=dict)  # the last report of each former member
    how: dict[int, str] = field(default_factory=dict)  # CLOSED or SILENT, for each of `gone`


class MembershipServer(Handler):
    """Serves the roster. Listens once constructed; raises UserError if it cannot.

    Members authenticate with a token of the `keyring`, or else with the `secret`.
    """

    def __init__(
        self, host: str, port: int, *, silent_s: float, keyring: Keyring | None = None, secret: bytes = b""
    ) -> None:
        # All of these belong to the transport's thread.
        self._view = Membership()
        self._news = Message(kind=Kind.VIEW)  # the view, encoded when it is first sent
        self._sizes: dict[int, int] = {}  # bytes of each report, former members included
        self._members: dict[Link, _Member] = {}
        self._count = 0
        self._transport = _transport(silent_s, keyring, secret)
        try:
            self.address = self._transport.listen(host, port, self)
        except BaseException:
            self._transport.close()
            raise

    @property
    def port(self) -> int:
        return split_address(self.address)[1]

    def close(self) -> None:
        """Close after everything queued was sent."""
        self._transport.close()

    def linked(self, link: Link) -> None:
        if link.peer.role != "member":
            link.close(f"this address serves a heartbeat roster and accepts no {link.peer.role}")
        elif len(self._members) >= MAX_MEMBERS:
            link.close(f"the heartbeat roster is full: {MAX_MEMBERS} members")
        else:
            self._members[link] = _Member()

    def received(self, link: Link, message: Message) -> None:
        member = self._members.get(link)
        if member is None:
            return
        nbytes = len(encode_meta(message.meta)) + NUMBER_BYTES
        number = member.number if member.number >= 0 else self._count
        if message.kind is not Kind.REPORT or nbytes > REPORT_BYTES or not self._make_room(number, nbytes):
            link.close(f"{message.kind.name} of {nbytes} bytes is not accepted; reports have at most {REPORT_BYTES}")
            return
        if member.number < 0:
            member.number, self._count = number, self._count + 1
        self._sizes[number] = nbytes
        self._view.members[number] = message.meta
        self._send_to_all()

    def unlinked(self, link: Link, reason: str) -> None:
        member = self._members.pop(link, None)
        if member is None or member.number < 0:
            return
        self._view.gone[member.number] = self._view.members.pop(member.number)
        self._view.how[member.number] = _how(link)
        if len(self._view.gone) > MAX_GONE:
            self._forget_one()
        self._send_to_all()

    def _make_room(self, number: int, nbytes: int) -> bool:
        """Forget former members until the report fits. Returns whether it does."""
        while sum(self._sizes.values()) - self._sizes.get(number, 0) + nbytes > VIEW_BYTES:
            if not self._view.gone:
                return False
            self._forget_one()
        return True

    def _forget_one(self) -> None:
        oldest = min(self._view.gone)
        del self._view.gone[oldest], self._view.how[oldest], self._sizes[oldest]

    def _send_to_all(self) -> None:
        self._news = Message(kind=Kind.VIEW)
        for link, member in self._members.items():
            member.is_stale = member.number >= 0
            self._send(link, member)

    def _send(self, link: Link, member: _Member) -> None:
        """Send the newest view, unless the member has it or the last one is still being sent."""
        if member.is_stale and not member.is_sending:
            member.is_stale, member.is_sending = False, True
            if not self._news.encoded:  # encode once for all members
                self._news.meta = {part: getattr(self._view, part) for part in Membership.__slots__}
                with_encoded_meta(self._news)
            link.send(replace(self._news, channel=member.number), sent=functools.partial(self._sent, link, member))

    def _sent(self, link: Link, member: _Member, _: bool) -> None:
        member.is_sending = False
        if link in self._members:
            self._send(link, member)


@dataclass(slots=True)
class _Member:
    number: int = -1  # until its first report
    is_stale: bool = False  # it has not been sent the newest view
    is_sending: bool = False


class MembershipClient(Handler):
    """One member. Dials until the server accepts; does not reconnect after a loss.

    `on_change` is called after every change of the view, on the transport's thread, and must not block.
    """

    def __init__(
        self, address: str, fields: Fields, *, silent_s: float, keyring: Keyring | None = None, secret: bytes = b""
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.view = Membership()
        self.number = -1  # in the view; -1: not known yet
        self.refusal: str | None = None  # why the server refused this member
        self.lost: str | None = None  # CLOSED or SILENT, after the server was lost
        self._fields, self._open = dict(fields), True
        self._link: Link | None = None
        self._news = threading.Condition()
        self._transport = _transport(silent_s, keyring, secret)
        with self._news:  # `linked` needs the dialer
            self._dialer = self._transport.dial(address, self)

    @property
    def problem(self) -> str:
        """Why the last attempt to connect failed."""
        return self._dialer.problem

    def say(self, **fields: Any) -> None:
        """Change the fields of this member, and report them."""
        with self._news:
            self._fields |= {name: _short(value) for name, value in fields.items()}
            self._report()

    def wait(self, question: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until `question()` is true; it is evaluated at every change. Returns False on timeout or a lost server."""
        with self._news:
            self._news.wait_for(lambda: bool(self.lost or self.refusal) or question(), timeout=timeout_s)
        return question()

    def close(self) -> None:
        """Close after the last report was sent."""
        self._open = False
        self._transport.close()

    def linked(self, link: Link) -> None:
        with self._news:
            self._dialer.close()
            self._link = link
            self._report()

    def received(self, link: Link, message: Message) -> None:
        try:
            number, view = _read(message)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            link.close(f"not a valid VIEW: {error!r}")
            return
        with self._news:
            self.number, self.view = number, view
        self._changed()

    def unlinked(self, link: Link, reason: str) -> None:
        self.lost = _how(link)
        self._changed()

    def refused(self, address: str, reason: str) -> None:
        self.refusal = reason
        self._changed()

    def _report(self) -> None:
        if self._link is not None:
            self._link.send(Message(kind=Kind.REPORT, meta=self._fields))

    def _changed(self) -> None:
        with self._news:
            self._news.notify_all()
        if self._open:
            self.on_change()


def _transport(silent_s: float, keyring: Keyring | None, secret: bytes) -> TcpTransport:
    me = Peer(role="member", rank=0, host=socket.gethostname(), instance=secrets.token_hex(8))
    limits = LinkLimits(
        unauthenticated=MAX_PENDING,
        handshake_s=CONNECT_S,
        beat_s=min(1.0, silent_s / 6),
        silence_s=silent_s,
        stuck_s=silent_s,
    )
    return TcpTransport(me, keyring=keyring, secret=secret, limits=limits, uvloop=False)


def _how(link: Link) -> str:
    return SILENT if link.stalled else CLOSED


def _read(message: Message) -> tuple[int, Membership]:
    if message.kind is not Kind.VIEW:
        raise ValueError(message.kind.name)
    parts = ({int(k): v for k, v in message.meta[part].items()} for part in Membership.__slots__)
    return message.channel, Membership(*parts)


def _short(value: Any) -> Any:
    return value[:TEXT_CHARS] if isinstance(value, str) else value
