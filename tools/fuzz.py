"""Fuzz every parser of received bytes: frames, HTTP bodies, files of weights. Invalid input must be refused, nothing else.

    python -m tools.fuzz                                        every target, a minute each
    python -m tools.fuzz parser roster --seconds 600            these, longer
    python -m tools.fuzz meta --replay FILE ...                 inputs that an earlier run wrote
    python -m tools.fuzz --distil FOLDER                        keep the smallest input of each outcome found there

    parser      parser.Parser, in any pieces, before and after the handshake, with and without checksums
    meta        the decoder of meta
    handshake   both sides of it hear arbitrary messages between those of an honest peer
    view        View.from_meta
    codecs      every codec decodes arbitrary payloads
    roster      strangers, newcomers and members of a server say anything in any order
    line        a worker's server says anything
    plan        a worker adopts any configuration of its server
    peers       one that is no member says anything to a worker
    serving     what fronts and stages of inference read: models, offers, assignments, batches, answers
    requests    HTTP bodies of every route of inference
    gguf        files of weights

A target turns bytes into such a situation and raises if something happens that must not. It returns what did happen in a few
words: inputs with the same words are alike, so one of each is kept in tests/corpus, where the tests play them again.

With atheris (the extra `fuzz`) the search is guided by coverage; without it the same targets get mutations of the corpus from
a seeded generator, and an input that gives new words joins the corpus. Checksums are no obstacle: a bit of the input says
whether they are made to fit. An input that fails is written to --crashes, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import logging
import random
import re
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from zlib import crc32

GUIDED = importlib.util.find_spec("atheris") is not None and __name__ == "__main__"
if GUIDED:
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

with (
    atheris.instrument_imports(
        include=[
            "smolcluster.comm",
            "smolcluster.serve",
            "smolcluster.web",
            "smolcluster.models",
            "smolcluster.engine.elastic.adopted_config",
        ]
    )
    if GUIDED
    else contextlib.nullcontext()
):
    import torch
    from torch import Tensor

    from smolcluster.comm.codecs import CODECS, CodecError, Packer, make_codec
    from smolcluster.comm.elastic.collectives.peers import Peers
    from smolcluster.comm.elastic.membership.mailbox import Mailbox, Payload
    from smolcluster.comm.elastic.membership.roster import Member, MemberGone, MemberMessage, Roster
    from smolcluster.comm.elastic.membership.server_link import ServerLink, Stopped
    from smolcluster.comm.elastic.transport import frames, payloads
    from smolcluster.comm.elastic.transport.api import Link
    from smolcluster.comm.elastic.transport.frames import FrameError
    from smolcluster.comm.elastic.transport.handshake import MAX_HOST, MAX_RANK, ROLES, Handshake
    from smolcluster.comm.elastic.transport.handshake import Refusal as HandshakeRefusal
    from smolcluster.comm.elastic.transport.messages import Head, Kind, Message, Peer
    from smolcluster.comm.elastic.transport.parser import Parser
    from smolcluster.comm.elastic.transport.security import NoToken
    from smolcluster.comm.group import PeerLost
    from smolcluster.comm.view import View, ViewMember
    from smolcluster.config import load_config, public_dict, resolve
    from smolcluster.config.names import known_keys
    from smolcluster.config.schema import Config
    from smolcluster.config.strategies import BUILT_IN
    from smolcluster.engine.elastic.admission import Admission, RowQuota
    from smolcluster.engine.elastic.adopted_config import FROM_SERVER, adopt, read_plan
    from smolcluster.engine.elastic.server import Server
    from smolcluster.engine.identity import instance_of
    from smolcluster.errors import UserError
    from smolcluster.models.gguf import GGUF
    from smolcluster.serve.engine import wire
    from smolcluster.serve.http import request_parsing, response_bodies
    from smolcluster.serve.http.service import BadRequest
    from smolcluster.web.bodies import BadBody, parse_object
    from tools.memory_transport import MemoryTransport, Switchboard

CORPUS = Path(__file__).parent.parent / "tests" / "corpus"
MAX_INPUTS = 60  # of a target in the corpus
MAX_BYTES = 4096  # of an input
FAILED = "failed-"  # begins the name of an input that once went wrong
SLOW_S = 5.0  # of processor time, for one input

KINDS = tuple(Kind)
# After the handshake; BEAT and BYE never leave the connection.
SPOKEN = tuple(k for k in KINDS if k not in frames.ONLY_IN_THE_HANDSHAKE and k not in (Kind.BEAT, Kind.BYE))
SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (24,), (4, 2), (0,), (2, 0, 3), (100,), (1,) * 8)
PAYLOAD_BYTES = 1 << 16


class Wrong(AssertionError):
    """Something happened that must not."""


def insist(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


class Source:
    """The input, piece by piece; zeros when it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        self._at += count
        return piece

    def byte(self) -> int:
        return (self.take(1) or b"\0")[0]

    def rest(self) -> bytes:
        return self.take(len(self._data))

    def meta(self) -> dict[str, Any]:
        """A length in two bytes, then JSON. What is none is an empty object."""
        try:
            return _blown_up(frames.decode_meta(self.take(int.from_bytes(self.take(2), "little") % 2048)))
        except FrameError:
            return {}

    def message(self) -> Message:
        kind = SPOKEN[self.byte() % len(SPOKEN)]
        step, channel, epoch, form = self.byte(), self.byte(), self.byte(), self.byte()
        # The largest numbers that a header can say are among them.
        message = Message(
            kind=kind, step=step if step < 255 else 2**64 - 8, channel=channel if channel < 255 else 2**32 - 1
        )
        message.epoch = epoch if epoch < 255 else 2**32 - 1
        if form and kind in frames.WITH_PAYLOAD:
            dtype, shape = payloads.DTYPES[frames.DTYPE_NAMES[form % 10]], SHAPES[form // 10 % len(SHAPES)]
            message.payload = torch.zeros(shape, dtype=dtype)
            message.codec = frames.CODECS[form % len(frames.CODECS)]
        message.meta = self.meta()
        return message


def _blown_up(meta: dict[str, Any]) -> dict[str, Any]:
    """A string such as "~300000" becomes one of that length, in letters that a message shows as escapes: inputs stay small."""

    def grown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: grown(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [grown(inner) for inner in value]
        if isinstance(value, str) and re.fullmatch(r"~\d{1,6}", value, re.ASCII):
            return "\u2028" * int(value[1:])
        return value

    large = cast(dict[str, Any], grown(meta))
    return large if len(frames.encode_meta(large)) <= frames.META_BYTES else meta


def words(error: BaseException) -> str:
    """An error without what is particular to the input."""
    text = re.sub(r"b?'.*|\".*|\[.*|[0-9a-f]{16}", "", str(error), flags=re.DOTALL)
    return f"{type(error).__name__} {re.sub(r'[0-9.]+', 'N', text)[:60]}".strip()


def to_bytes(message: Message, **options: Any) -> bytes:
    return b"".join(frames.encode(message, **options).chunks())


# The wire


def refit(stream: bytearray, *, lengths: bool = False) -> None:
    """Make every checksum fit, frame after frame, so that what is behind it is tried too. `lengths`: those of payloads too."""
    at, size = 0, frames.HEADER.size
    while len(stream) - at >= size:
        stream[at : at + 6] = frames.PREFIX.pack(frames.MAGIC, frames.VERSION)
        dtype, ndim, flags = stream[at + 7], stream[at + 9], stream[at + 10]
        if lengths and 0 < dtype <= len(frames.DTYPE_NAMES) and ndim <= frames.MAX_DIMS:
            shape = struct.unpack_from(f"<{ndim}Q", stream, at + 56)
            count = payloads.DTYPES[frames.DTYPE_NAMES[dtype - 1]].itemsize
            for length in shape:
                count = min(count * length, 2**63)
            struct.pack_into("<Q", stream, at + 48, count)
        meta_bytes, payload_bytes = struct.unpack_from("<IQ", stream, at + 44)
        body = at + size + meta_bytes
        struct.pack_into("<I", stream, at + 120, crc32(stream[at + size : body]))
        struct.pack_into("<I", stream, at + 124, crc32(stream[at : at + 124]))
        end = body + (payload_bytes if dtype else 0)
        if dtype and flags & frames.CHECKED and end + 4 <= len(stream):
            if payload_bytes < payloads.BLOCK_BYTES:
                struct.pack_into("<I", stream, end, crc32(stream[body:end]))
            end += 4
        if end > len(stream):
            return
        at = end


FIT, LENGTHS, OPEN, OPENS, UNCHECKED, UNWANTED, ANY_CLUSTER, RUN = (1 << bit for bit in range(8))


def parser(data: bytes) -> str:
    """Any stream gives the same messages and the same end in any pieces; only what was sent whole is given."""
    source = Source(data)
    flags, pieces = source.byte(), source.byte()
    stream = bytearray(source.rest())
    if flags & FIT:
        refit(stream, lengths=bool(flags & LENGTHS))
    rng = random.Random(pieces)
    whole, end = _parse(stream, flags, lambda: len(stream))
    parts, parts_end = _parse(stream, flags, lambda: rng.choice((1, 3, 128, rng.randint(1, 400))))
    insist(end == parts_end, f"in one piece it ends with '{end}', in several with '{parts_end}'")
    insist([to_bytes(m) for m in whole] == [to_bytes(m) for m in parts], "other pieces, other messages")
    for message in whole:
        (again,), _ = _parse(
            to_bytes(message), OPEN if message.kind not in frames.ONLY_IN_THE_HANDSHAKE else 0, lambda: 10**6
        )
        insist(to_bytes(again) == to_bytes(message), "what was received is not what would be sent")
    return " ".join([*(m.kind.name for m in whole[:1]), end or "waits"])


def _parse(stream: bytes | bytearray, flags: int, piece: Callable[[], int]) -> tuple[list[Message], str]:
    asked: list[Head] = []

    def place(head: Head) -> Tensor | None:
        asked.append(head)
        insist(machine.authenticated, f"a place for a {head.kind.name} before the handshake")
        insist(head.kind in frames.WITH_PAYLOAD and head.nbytes <= PAYLOAD_BYTES, f"a place for {head}")
        if flags & UNWANTED and head.channel:
            return None
        return torch.empty(head.shape, dtype=payloads.DTYPES[head.dtype])

    machine = Parser(
        place=place,
        run=lambda: b"this run" if flags & RUN else frames.NO_RUN,
        cluster=None if flags & ANY_CLUSTER else frames.NO_CLUSTER,
        payload_bytes=PAYLOAD_BYTES,
        checked=not flags & UNCHECKED,
    )
    machine.authenticated = bool(flags & OPEN)
    messages: list[Message] = []
    rest, end = memoryview(bytes(stream)), ""
    while rest:
        buffer = machine.buffer()
        insist(len(buffer) > 0, "there is no room for the next byte")
        count = min(len(buffer), len(rest), piece())
        buffer[:count] = rest[:count]
        rest = rest[count:]
        try:
            for message in machine.fed(count):
                insist(not end, "a message after an error")
                messages.append(message)
                machine.authenticated = machine.authenticated or bool(flags & OPENS)
        except FrameError as error:
            end = words(error)
            break
    if end:
        insist(list(machine.fed(0)) == [], "a message after an error")
    placed = sum(message.payload is not None for message in messages)
    insist(placed <= len(asked) <= placed + 1, "a payload without a place, or places for nothing")
    return messages, end


def meta(data: bytes) -> str:
    """What is let in can be written again, anywhere, and is the same then."""
    try:
        found = frames.decode_meta(data)
    except FrameError as error:
        return words(error)
    insist(isinstance(found, dict), "meta that is no object")
    insist(frames.decode_meta(frames.encode_meta(found)) == found, "another meaning when it is sent on")
    insist(_depth(found) <= frames.META_DEPTH, "deeper than the limit")
    return f"{len(found)} fields, {min(3, _depth(found))} deep"


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + max(map(_depth, inner), default=0)


class _Key(NoToken):
    """A token whose certificate nobody needs."""

    cluster, _proof_key = b"fuzzings", b"known to the honest only"


HONEST, ALTERED = 0x80, 0x40


def handshake(data: bytes) -> str:
    """Nobody is met without the proof that only the token's holder can make, for these nonces."""
    source = Source(data)
    listening = bool(source.byte() & 1)
    me, other = _peer("server", 9), _peer("worker", 1)
    find = lambda cluster: _Key() if cluster == _Key.cluster else None  # noqa: E731
    if listening:
        subject, honest = Handshake(me, find=find), Handshake(other, credentials=_Key())
    else:
        subject, honest = Handshake(other, credentials=_Key()), Handshake(me, find=find)
    from_honest, proofs = honest.begin(), set()
    _tell(honest, subject.begin(), from_honest)
    heard: list[str] = []
    while source and subject.peer is None:
        how = source.byte()
        if how & HONEST and from_honest:
            message = from_honest.pop(0)
            proofs |= {message.meta.get("proof")} - {None}
            if how & ALTERED:
                message = Message(kind=message.kind, meta=message.meta | source.meta())
        else:
            message = Message(kind=KINDS[how % 4], meta=source.meta())
        heard.append(message.kind.name)
        try:
            answers = subject.handle(message, cluster=_Key.cluster if how & 0x20 == 0 else bytes(8))
        except HandshakeRefusal as error:
            return " ".join([*heard[-2:], words(error)])
        for answer in answers:
            to_bytes(answer, meta_bytes=frames.HANDSHAKE_META_BYTES)
        if message.kind is Kind.PROOF:
            insist(message.meta["proof"] in proofs, "a proof that the honest side has not made was accepted")
        _tell(honest, answers, from_honest)
    if subject.peer is None:
        return f"{' '.join(heard[-2:])} waits"
    insist(bool(proofs), "somebody was met without any proof")
    peer = subject.peer
    sound = (
        peer.role in ROLES and 0 <= peer.rank < MAX_RANK and 0 < len(peer.host) <= MAX_HOST and peer.host.isprintable()
    )
    insist(sound and len(peer.instance) == 16 and len(peer.run) in (0, 16), f"{peer} cannot be")
    return f"{' '.join(heard[-2:])} met"


def _tell(honest: Handshake, messages: Sequence[Message], answers: list[Message]) -> None:
    with contextlib.suppress(HandshakeRefusal):
        for message in messages:
            if honest.peer is None:
                answers += honest.handle(message, cluster=_Key.cluster)


def _peer(role: str, number: int) -> Peer:
    return Peer(role=role, rank=number, host=f"host{number}", instance=instance_of(f"secret {number}"))


def view(data: bytes) -> str:
    try:
        found = View.from_meta(frames.decode_meta(data))
    except FrameError:
        return "not meta"
    except ValueError as error:
        return words(error)
    insist(View.from_meta(found.to_meta()) == found, "another view when it is sent on")
    insist(frames.decode_meta(frames.encode_meta(found.to_meta())) == found.to_meta(), "a view that cannot be sent on")
    return f"{min(3, len(found.members))} members"


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "topk": {"fraction": 0.1},
    "randk": {"fraction": 0.1},
    "powersgd": {"rank": 1},
    "int8": {"block": 16},
}
CODED = ((1,), (40,), (8, 9), (3, 5, 7), (300,), (0,))


def codecs(data: bytes) -> str:
    """Finite numbers come out of a lossy codec, always the same ones, or a refusal."""
    source = Source(data)
    name, choice = list(CODECS)[source.byte() % len(CODECS)], source.byte()
    shape = CODED[choice % len(CODED)]
    codec = make_codec(name, **(OPTIONS.get(name, {}) if choice & 0x40 else {}))
    packer = Packer([("a", shape), ("b", (5,))], codec)
    raw = source.rest()
    if not choice & 0x80:
        raw = raw[: packer.nbytes].ljust(packer.nbytes, b"\0")
    payload = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    decoded = [torch.full(s, 7.0) for s in (shape, (5,))]
    again = [torch.full(s, 8.0) for s in (shape, (5,))]
    try:
        packer.decode(payload, decoded)
    except CodecError as error:
        return f"{name} {words(error)}"
    packer.decode(payload, again)
    for first, second in zip(decoded, again, strict=True):
        insist(
            bytes(payloads.memory(first)) == bytes(payloads.memory(second)),
            f"{name} decodes differently the second time",
        )
        insist(codec.lossless or bool(first.isfinite().all()), f"{name} let a number through that is not finite")
    return f"{name} {len(shape)} dims decoded"


# The conversation


class _Party:
    """A process at the other end of a link in memory; keeps its link, and accepts any payload."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.link: Link | None = None

    def linked(self, link: Link) -> None:
        self.link = link

    def place(self, link: Link, head: Head) -> Tensor | None:
        return torch.empty(head.shape, dtype=payloads.DTYPES[head.dtype])

    def received(self, link: Link, message: Message) -> None:
        pass

    def unlinked(self, link: Link, reason: str) -> None:
        self.link = None

    def refused(self, address: str, reason: str) -> None:
        pass


class _Box(Mailbox):
    """Knows how many events nobody has looked at."""

    waiting = 0

    def linked(self, link: Link) -> None:
        self.waiting += 1
        super().linked(link)

    def unlinked(self, link: Link, reason: str) -> None:
        self.waiting += 1
        super().unlinked(link, reason)

    def received(self, link: Link, message: Message) -> None:
        self.waiting += 1
        super().received(link, message)


LAYOUT = [["w", "float32", [2, 3]], ["b", "float32", [3]]]
SAMPLES = 256
JOIN = {"layout": LAYOUT, "samples": SAMPLES, "batch_size": 8, "address": "h:1"}
NUM_PARTIES = 8  # the first one is a member that does nothing wrong


class _RosterServer:
    """A server's roster and those who talk to it."""

    def __init__(self) -> None:
        self.network = Switchboard()
        self.rows: list[Any] = []
        self.box = _Box()
        # What the real server makes of a JOIN and of an EVENT.
        server = cast(Server, SimpleNamespace())
        admission = Admission(LAYOUT, SAMPLES, hosts=[], exchanging=True)  # then addresses are looked at, too
        server.metrics = cast(Any, SimpleNamespace(handle=lambda row: self.rows.append(row)))
        server.rows, server.record = RowQuota(tensors=len(LAYOUT)), cast(Any, SimpleNamespace(samples=0))
        self.roster = Roster(
            self.box,
            plan={"run": "0" * 16},
            admit=admission.admit,
            on_event=lambda member, said: Server._on_event(server, member, said),
            on_change=lambda *_: None,
        )
        self.roster.expect(Kind.PUSH, [Payload(torch.uint8, (24,)), Payload(torch.float32, (3,))])
        self.roster.allow(Kind.STATE, max_bytes=256)
        self.address = self.network.transport(_peer("server", 99)).listen("here", 0, self.box)
        # Two ranks are claimed twice.
        self.parties = [_Party(self.network.transport(_peer("worker", n))) for n in range(NUM_PARTIES - 2)]
        self.parties += [
            _Party(self.network.transport(dataclasses.replace(_peer(role, 90 + rank), rank=rank, host="h")))
            for role, rank in (("worker", 0), ("server", 1))
        ]
        numbers = [*range(NUM_PARTIES - 2), 90, 91]
        self.secrets = [f"secret {number}" for number in numbers]
        self.members: dict[int, Member] = {}
        self.heard: list[str] = []
        self.epoch = 0
        self.say(0, Message(kind=Kind.JOIN, meta=dict(JOIN)))
        self.welcome()

    def say(self, number: int, message: Message) -> None:
        party = self.parties[number]
        if party.link is None:
            party.transport.dial(self.address, party)
            self.network.advance(0.05)
        if party.link is not None:
            message.step = message.step - message.step % NUM_PARTIES + number  # who it is from
            if message.kind is Kind.JOIN:
                message.meta = {"secret": self.secrets[number]} | message.meta
            party.link.send(message)
        self.listen()

    def welcome(self) -> None:
        for member in list(self.roster.newcomers):
            self.roster.welcome(member)
            self.members[member.rank] = member
        self.listen()

    def listen(self) -> None:
        """The server's thread, as often as there is something to hear."""
        roster = self.roster
        self.network.advance(0.05)
        while self.box.waiting:
            self.box.waiting -= 1
            self._take(roster.get(0))
            self.network.advance(0.0)
        while (event := roster.get(0)) is not None:  # goings that were put off
            self._take(event)
        insist(roster.epoch >= self.epoch, "the epoch went down")
        self.epoch = roster.epoch
        insist(len(roster.refused) <= 2 * NUM_PARTIES, "more names of refused peers than there are peers")

    def _take(self, event: MemberMessage | MemberGone | None) -> None:
        if isinstance(event, MemberGone):
            insist(self.members.pop(event.member.rank) is event.member, "somebody has left who was not there")
        elif isinstance(event, MemberMessage):
            number = [party.transport.me.instance for party in self.parties].index(event.member.instance)
            insist(
                self.members.get(event.member.rank) is event.member, f"{event.member.name} is heard and is no member"
            )
            insist(event.message.step % NUM_PARTIES == number, f"{event.member.name} is heard for another")
            self.heard.append(event.message.kind.name)


def roster(data: bytes) -> str:
    """No exception, whoever says what; only members are heard, and one that does nothing wrong is not disturbed."""
    source, server = Source(data), _RosterServer()
    for _ in range(40):
        if not source:
            break
        what = source.byte()
        number = 1 + (what >> 3) % (NUM_PARTIES - 1)
        party, links = server.parties[number], server.parties[number].link
        match what & 7:
            case 0:
                server.welcome()
            case 1 if links is not None:
                links.close("by itself")
                server.listen()
            case 2 if (member := server.members.get(party.transport.me.rank)) is not None and member.rank:
                server.roster.evict(member, "no reason")
                server.listen()
            case 3:
                server.say(number, Message(kind=Kind.JOIN, meta=JOIN | source.meta()))
            case _:
                server.say(number, source.message())
    before = len(server.heard)
    server.say(0, Message(kind=Kind.DONE, step=8))
    insist(server.heard[before:] == ["DONE"], "the honest member is not heard any more")
    members, refused = len(server.roster.members), sum(server.roster.refused.values())
    return f"{min(3, members)} members, {min(2, refused)} refused, heard {' '.join(sorted(set(server.heard))[:1])}"


def line(data: bytes) -> str:
    """A worker hears its server: messages, or an end that says whose fault it is."""
    source = Source(data)
    network = Switchboard()
    server = _Party(network.transport(_peer("server", 99)))
    address = server.transport.listen("here", 0, server)
    flags = source.byte()
    subject = ServerLink(network.transport(_peer("worker", 1)), address, stop_requested=lambda: True)
    subject.allow(Kind.STATE, max_bytes=256)
    subject.expect(Kind.AVERAGE, [Payload(torch.float32, (3,))])
    if flags & 1:
        subject.join = lambda: dict(JOIN)
    network.advance(0.05)
    insist(subject.get(0) is None and server.link is not None, "there is no link")
    heard: list[str] = []
    try:
        for _ in range(40):
            if not source or server.link is None:
                break
            server.link.send(source.message())
            network.advance(0.05)
            while (message := subject.get(0)) is not None:
                heard.append(message.kind.name)
                if message.kind is Kind.WELCOME and flags & 2:
                    subject.state(2)
        for lease in subject.leases:
            insist(type(lease.step) is int and lease.samples >= 0, f"{lease} cannot be")
    except (UserError, PeerLost, Stopped) as error:
        return f"{' '.join(heard[-1:])} {words(error)}"
    return f"{' '.join(heard[-1:])}, {min(2, len(subject.leases))} leases, {min(1, subject.losses)} losses"


OWNERS: tuple[Mapping[str, Any], ...] = (
    {},
    {"data.root": "/owner/data"},
    {"data.name": "wikitext", "logging.loki_url": "http://owner:3100"},
    {"data.tokenizer": "/owner/tokenizer.json", "task": "/owner/task.py:Task"},
)
SERVED = public_dict(resolve(load_config([])))


def plan(data: bytes) -> str:
    """A worker takes over the keys of the allow-list alone; what touches its files, network or code stays its owner's."""
    source = Source(data)
    given = OWNERS[source.byte() % len(OWNERS)]
    own = resolve(load_config([], overrides=dict(given))) if source.byte() & 1 else None
    try:
        said = frames.decode_meta(source.rest())
        served = {name: dict(SERVED[name]) | part for name, part in said.pop("with", {}).items()}
        found = read_plan({"run": "0" * 16, "total_steps": 1, "config": SERVED | served} | said)
        config = adopt(found.config, own=own, given=given, rank=0, server="h:1")
    except FrameError:
        return "not meta"
    except (AttributeError, KeyError, TypeError) as error:
        insist("said" in locals() and "served" not in locals(), f"{error!r}")  # of this target, not of what it tries
        return "not a plan"
    except (UserError, ValueError) as error:
        insist(len(str(error)) < 2000, "an endless message")
        return words(error)
    mine = (own or Config.model_validate({})).model_dump(mode="json")
    for key in set(known_keys()) - FROM_SERVER - {"data.tokenizer", "strategy.options"}:
        section, _, name = key.rpartition(".")
        value = given.get(key, mine[section][name] if section else mine[name])
        insist(getattr(getattr(config, section) if section else config, name) == value, f"{key} is the server's")
    insist(config.strategy.options == {} or config.strategy.name in BUILT_IN, "options of another package's strategy")
    free = config.data.tokenizer in (None, "bytes", "chars", given.get("data.tokenizer"))
    insist(free or (config.data.tokenizer == "gpt2" and bool(given)), f"tokenizer {config.data.tokenizer}")
    insist(config.data.name == "embedded" or bool(given), f"data {config.data.name}")
    return f"{config.data.name[:8]} {config.data.tokenizer} {config.strategy.name[:8]} {bool(own)}"


def peers(data: bytes) -> str:
    """Two workers sum a tensor while one that is no member says anything: the sum is right all the same."""
    source = Source(data)
    network = Switchboard()
    transports = [network.transport(_peer("worker", n)) for n in range(2)]
    both = [Peers(transport) for transport in transports]
    addresses = [peers.listen("here", 0) for peers in both]
    members = tuple(ViewMember(t.me.rank, t.me.instance, "h", a) for t, a in zip(transports, addresses, strict=True))
    stranger = _Party(network.transport(_peer("worker", 7)))
    stranger.transport.dial(addresses[0], stranger)
    groups = [_formed(peers, View(epoch=5, step=0, members=members), network) for peers in both]
    tensors = [torch.full((7,), float(n + 1)) for n in range(2)]
    works = [groups[0].all_reduce(tensors[0])]
    said: list[str] = []
    for _ in range(20):
        if not source:
            break
        message = source.message()
        said.append(message.kind.name)
        if stranger.link is not None:
            stranger.link.send(message)
        network.advance(0.05)
    works.append(groups[1].all_reduce(tensors[1]))
    network.advance(1.0)
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        insist(tensor.tolist() == [3.0] * 7, f"the sum is {tensor.tolist()}")
    return f"{' '.join(said[-1:])}{'' if stranger.link else ' and was put out'}"


def _formed(peers: Peers, view: View, network: Switchboard) -> Any:
    """`form` waits for the transport's thread, which is this one."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(peers.form(view)))
    thread.start()
    while thread.is_alive():
        network.advance(0.01)
        thread.join(0.0005)
    return made[0]


# Inference

NUM_LAYERS = 6
READERS: Mapping[str, tuple[Callable[[dict[str, Any]], Any], Callable[[Any], dict[str, Any]]]] = {
    "model": (wire.read_model, wire.model_meta),
    "offer": (wire.read_offer, wire.meta_of),
    "assignment": (lambda meta: wire.read_assignment(meta, num_layers=NUM_LAYERS), wire.meta_of),
    "batch": (wire.read_batch, wire.meta_of),
    "chosen": (wire.read_chosen, lambda value: wire.chosen_meta(*value)),
    "sequences": (wire.read_sequences, lambda value: {"sequences": value}),
}


def serving(data: bytes) -> str:
    """What is let in can be sent on, and is the same then; its numbers are whole where they count something."""
    source = Source(data)
    name = list(READERS)[source.byte() % len(READERS)]
    read, write = READERS[name]
    try:
        found = read(_blown_up(frames.decode_meta(source.rest())))
    except FrameError:
        return "not meta"
    except ValueError as error:
        return f"{name} {words(error)}"
    again = frames.decode_meta(frames.encode_meta(write(found)))
    insist(read(again) == found, f"another {name} when it is sent on")
    if isinstance(found, wire.ServedModel):
        sizes = (found.config.vocab_size, found.config.model_dim, found.config.num_layers, found.config.max_seq_len)
        insist(all(type(size) is int for size in sizes), f"a model of {sizes}")
    if isinstance(found, wire.Assignment):
        insist(found.first_layer + found.num_layers <= NUM_LAYERS, f"{found} of {NUM_LAYERS} layers")
    if isinstance(found, wire.StageBatch):
        insist(0 < found.num_tokens <= wire.MAX_TOKENS, f"a batch of {found.num_tokens} tokens")
    return f"{name} read, {min(2, len(again.get('rows', again)))} in it"


ROUTES: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "chat": request_parsing.read_chat,
    "completion": request_parsing.read_completion,
    "simple chat": request_parsing.read_simple_chat,
    "simple query": request_parsing.read_simple_query,
    "key": request_parsing.read_key,
}


def requests(data: bytes) -> str:
    """A request whose texts can be written anywhere, or a refusal that can be told."""
    source = Source(data)
    name = list(ROUTES)[source.byte() % len(ROUTES)]
    try:
        found = ROUTES[name](parse_object(source.rest()))
    except (BadBody, BadRequest) as error:
        field = error.field if isinstance(error, BadRequest) else None
        json.dumps(response_bodies.error_body(str(error), status=400, field=field), ensure_ascii=False).encode()
        insist(len(str(error)) < 2000, "a refusal that is longer than what it refuses")
        return f"{name} {words(error)}"
    if isinstance(found, str):
        found.encode()
        return f"{name} read"
    request = found.request
    json.dumps([request.messages, request.prompts, request.stop, request.model], ensure_ascii=False).encode()
    insist(type(request.n) is int, f"{request.n} choices")
    return f"{name} read, {'messages' if request.messages else 'prompts'}{', streamed' if found.stream else ''}"


def gguf(data: bytes) -> str:
    """Weights that are numbers, all of a model and no more, or a refusal with the file's name."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(data)
        try:
            file = GGUF(path)
            found = file.load(range(file.config.num_layers), first=True, last=True)
        except ValueError as error:
            insist(str(error).startswith(f"{path}: "), f"a refusal without the file's name: {error}")
            told = str(error).removeprefix(f"{path}: ").partition(":")[0]
            return " ".join(word for word in told.split() if word.isascii() and word.isalpha())[:60]  # without names
    for name, tensor in found.items():
        insist(bool(tensor.isfinite().all()), f"{name} has numbers that are none")
        insist(tensor.numel() <= 8 * len(data), f"{name} is larger than the file")
    return f"{file.architecture} read, {len(found)} tensors"


TARGETS: Mapping[str, Callable[[bytes], str]] = {
    target.__name__: target
    for target in (parser, meta, handshake, view, codecs, roster, line, plan, peers, serving, requests, gguf)
}


# Searching without atheris

TOKENS = (
    b"SMOL\x01\x00",
    b'"',
    b"{",
    b"[",
    b"]}",
    b":",
    b",",
    b"null",
    b"1e9",
    b"\\u",
    b'"~300000"',
    b"\xff" * 8,
    bytes(8),
)


def mutated(rng: random.Random, data: bytes, others: Sequence[bytes], *, most: int = MAX_BYTES) -> bytes:
    """Damage these bytes in one to four of many ways."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(result) + 1) if rng.random() < 0.6 else rng.randrange(min(len(result), 160) + 1)
        match rng.randrange(8):
            case 0 if at < len(result):
                result[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(result):
                result[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del result[at : at + rng.randint(1, 100)]
            case 3:
                result[at:at] = rng.randbytes(rng.randint(1, 20))
            case 4:
                start = rng.randrange(len(result) + 1)
                result[at:at] = result[start : start + rng.randint(1, 300)]
            case 5:
                result[at : at + 8] = struct.pack("<Q", rng.choice((2**63, 2**32, 2**64 - 1, 0, 255, len(result))))
            case 6:
                other = rng.choice(others)
                result[at:] = other[rng.randrange(len(other) + 1) :]
            case _:
                result[at:at] = rng.choice(TOKENS)
    return bytes(result[:most])


def search(name: str, found: list[bytes], *, seconds: float, seed: int) -> Iterator[tuple[bytes, BaseException]]:
    """Failing inputs. What gives new words is added to `found`, and looked around in turn."""
    target, rng = TARGETS[name], random.Random(f"{name} {seed}")
    known: set[str] = set()
    queue = [*found, b""]
    deadline, tries = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        data = queue[tries] if tries < len(queue) else mutated(rng, rng.choice(found), found)
        tries += 1
        try:
            outcome = timed(target, data)
        except Exception as error:  # noqa: BLE001 - whatever it is, it should not be
            outcome = f"{type(error).__name__} {words(error)}"
            if outcome not in known:
                yield data, error
        if outcome not in known:
            known.add(outcome)
            found.append(data)
    print(f"{name}: {tries} inputs, {len(known)} outcomes", flush=True)


def timed(target: Callable[[bytes], str], data: bytes) -> str:
    began = time.process_time()
    outcome = target(data)
    insist(time.process_time() - began < SLOW_S, f"{len(data)} bytes took more than {SLOW_S:g} s")
    return outcome


def distil(folder: Path, name: str) -> int:
    """Keep the smallest input of each outcome, and all that are named after a failure. Returns how many there are."""
    paths = [path for path in sorted(folder.glob("*")) if not path.name.startswith(FAILED)]
    best: dict[str, bytes] = {}
    for data in [path.read_bytes() for path in paths]:
        outcome = TARGETS[name](data)
        if len(data) <= MAX_BYTES and (outcome not in best or len(data) < len(best[outcome])):
            best[outcome] = data
    for path in paths:
        path.unlink()
    room = MAX_INPUTS - len(list(folder.glob("*")))
    for data in sorted(best.values(), key=len)[:room]:
        (folder / _name(data)).write_bytes(data)
    return len(list(folder.glob("*")))


def _name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# The program


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    logging.disable(logging.CRITICAL)  # refusals are logged, a million of them
    torch.set_num_threads(1)
    if options.replay:
        for path in options.replay:
            print(f"{path}: {TARGETS[options.target[0]](Path(path).read_bytes())}")
        return 0
    if options.distil is not None:
        for name in options.target:
            print(f"{name}: {distil(options.distil / name, name)} inputs kept")
        return 0
    options.crashes.mkdir(parents=True, exist_ok=True)
    if options.guided:
        return _guided(options)
    wrong = 0
    for name in options.target:
        found = [path.read_bytes() for path in sorted((options.corpus / name).glob("*"))]
        for data, error in search(name, found, seconds=options.seconds, seed=options.seed):
            path = options.crashes / f"{name}-{_name(data)}"
            path.write_bytes(data)
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}\n  {path}", flush=True)
            wrong += 1
        if options.keep is not None:
            (options.keep / name).mkdir(parents=True, exist_ok=True)
            for data in found:
                (options.keep / name / _name(data)).write_bytes(data)
    return 1 if wrong else 0


def _guided(options: argparse.Namespace) -> int:
    """One process for each target: libFuzzer does not come back."""
    if len(options.target) > 1:
        statuses = []
        for name in options.target:
            own = [
                sys.executable,
                "-m",
                "tools.fuzz",
                name,
                "--seconds",
                str(options.seconds),
                "--seed",
                str(options.seed),
            ]
            own += ["--corpus", str(options.corpus), "--crashes", str(options.crashes)]
            statuses.append(
                subprocess.run([*own, *(["--keep", str(options.keep)] if options.keep else [])], check=False)
            )
        return 1 if any(status.returncode for status in statuses) else 0
    (name,) = options.target
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        work = Path(folder) if options.keep is None else options.keep / name
        work.mkdir(parents=True, exist_ok=True)
        flags = [
            f"-max_total_time={options.seconds:.0f}",
            f"-seed={options.seed}",
            f"-max_len={MAX_BYTES}",
            "-timeout=20",
        ]
        flags += [f"-artifact_prefix={options.crashes}/{name}-", "-print_final_stats=1", "-verbosity=0"]
        (options.corpus / name).mkdir(parents=True, exist_ok=True)
        target = TARGETS[name]
        atheris.Setup(
            [sys.argv[0], *flags, str(work), str(options.corpus / name)], lambda data: (target(data), None)[1]
        )
        atheris.Fuzz()
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", nargs="*", help=f"some of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where the search begins; default: tests/corpus")
    parser.add_argument("--keep", type=Path, help="folder for every input that led to something new")
    parser.add_argument("--crashes", type=Path, default=Path(tempfile.gettempdir()) / "smolcluster-fuzz")
    parser.add_argument("--plain", dest="guided", action="store_false", help="without atheris, though it is there")
    parser.add_argument("--replay", nargs="+", help="inputs of one target to try again")
    parser.add_argument("--distil", type=Path, help="a folder of corpora to be reduced in place, e.g. tests/corpus")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.target if name not in TARGETS]
    if unknown:
        parser.error(f"there is no target '{unknown[0]}'; known: {', '.join(TARGETS)}")
    options.target = options.target or list(TARGETS)
    options.guided = options.guided and GUIDED
    return options


if __name__ == "__main__":
    sys.exit(main())
