"""A listening transport under attack: no invalid message is delivered, and other links are not affected.

SMOLCLUSTER_FUZZ_FRAMES sets how many mutated streams are sent; a million take about half an hour.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import struct
import threading
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.places import eventually
from tests.unit.comm.test_transport import Recorder, make_peer
from tools.fuzz import mutated, refit, to_bytes
from torch import Tensor

from smolcluster.comm.addresses import split_address
from smolcluster.comm.elastic.transport import frames, payloads
from smolcluster.comm.elastic.transport.api import Head, Kind, Link, Message
from smolcluster.comm.elastic.transport.connection import TcpLink
from smolcluster.comm.elastic.transport.handshake import Handshake
from smolcluster.comm.elastic.transport.parser import Parser
from smolcluster.comm.elastic.transport.security import Keyring, NoToken, new_token
from smolcluster.comm.elastic.transport.tcp import LinkLimits, TcpTransport

COUNT = int(os.environ.get("SMOLCLUSTER_FUZZ_FRAMES", "2500"))
WAIT_S = 120.0
GROWTH_BYTES = 16 << 20


def place(head: Head) -> Tensor | None:
    """As a real receiver would: only what is expected."""
    return torch.empty(head.shape, dtype=payloads.DTYPES[head.dtype]) if head.nbytes <= 1 << 20 else None


class Server:
    """A handler that records its callbacks by the sender's instance."""

    def __init__(self) -> None:
        self.messages: dict[str, list[Message]] = defaultdict(list)
        self.ends: dict[str, str] = {}
        self.refusals: list[str] = []
        self.linked_ones: set[str] = set()
        self.changed = threading.Condition()

    def linked(self, link: Link) -> None:
        with self.changed:
            self.linked_ones.add(link.peer.instance)
            self.changed.notify_all()

    def place(self, link: Link, head: Head) -> Tensor | None:
        return place(head)

    def received(self, link: Link, message: Message) -> None:
        with self.changed:
            self.messages[link.peer.instance].append(message)
            self.changed.notify_all()
        if message.kind is Kind.PULL:
            link.send(Message(kind=Kind.WEIGHTS, step=message.step, payload=torch.full((1000,), float(message.step))))

    def unlinked(self, link: Link, reason: str) -> None:
        with self.changed:
            self.ends[link.peer.instance] = reason
            self.changed.notify_all()

    def refused(self, address: str, reason: str) -> None:
        self.refusals.append(reason)

    def end_of(self, instance: str) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: instance in self.ends, WAIT_S), "the link did not end"
        return self.ends[instance]


class Witness:
    """A correct member, which must stay connected and be answered throughout."""

    def __init__(self, address: str, keyring: Keyring | None = None) -> None:
        self.transport, self._seen = TcpTransport(make_peer(), keyring=keyring), Recorder(place)
        self.transport.dial(address, self._seen)
        self._link = self._seen.link()

    @property
    def ends(self) -> list[object]:
        return [*self._seen.ends, *self._seen.refusals]

    def ask(self) -> None:
        """One question, answered in full."""
        step = len(self._seen.messages) + 1
        self._link.send(Message(kind=Kind.PULL, step=step))
        self._seen.wait(lambda seen: len(seen.messages) == step)
        payload = self._seen.messages[-1].payload
        assert payload is not None
        assert (payload == step).all()


class Field:
    """A server under fire, and its witness."""

    def __init__(self, *, tokens: list[str] | None = None, uvloop: bool = True, **limits: float) -> None:
        keyring = Keyring(tokens) if tokens else None
        self.server = Server()
        self.transport = TcpTransport(
            make_peer("server"),
            keyring=keyring,
            limits=LinkLimits(**limits),  # type: ignore[arg-type]
            uvloop=uvloop,
        )
        self.address = self.transport.listen("127.0.0.1", 0, self.server)
        self.witness = Witness(self.address, Keyring(tokens) if tokens else None)

    def connect(self) -> socket.socket:
        return socket.create_connection(split_address(self.address), timeout=WAIT_S)

    def close(self) -> None:
        try:
            self.witness.ask()
            assert self.witness.ends == []
        finally:
            self.witness.transport.close()
            self.transport.close()


@pytest.fixture
def field() -> Iterator[Field]:
    field = Field()
    yield field
    field.close()


class RawMember:
    """Makes the handshake by hand, to send arbitrary bytes afterwards."""

    def __init__(self, field: Field) -> None:
        self.me = make_peer()
        self.said = b""
        self.sock = field.connect()
        self._handshake = Handshake(self.me, credentials=NoToken())
        self._parser = Parser(place=place)

    def greet(self) -> RawMember:
        for message in self._handshake.begin():
            self.say(to_bytes(message))
        while self._handshake.peer is None:
            for message in self.hear():
                for answer in self._handshake.handle(message, cluster=frames.NO_CLUSTER):
                    self.say(to_bytes(answer))
        self._parser.authenticated = True
        return self

    def say(self, data: bytes) -> None:
        self.said += data
        self.sock.sendall(data)

    def hear(self) -> list[Message]:
        count = self.sock.recv_into(self._parser.buffer())
        if count == 0:
            raise EOFError
        return list(self._parser.fed(count))

    def last_words(self) -> list[Message]:
        """Everything until the other side hangs up."""
        heard: list[Message] = []
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                heard += self.hear()
        self.sock.close()
        return heard


def counted_links() -> int:
    """How many objects there are for connections, those included that only wait for the garbage collector."""
    return sum(1 for thing in gc.get_objects() if type(thing) is TcpLink)


def open_files() -> int:
    """Of this process; 0 where the system does not tell."""
    folder = Path("/proc/self/fd")
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def hung_up(sock: socket.socket) -> bytes:
    """What the other side said before it hung up."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            said += data
    sock.close()
    return said


def provoke(sock: socket.socket, data: bytes) -> None:
    """Say this and nothing more, and see that the other side hangs up. It may do so before we are through."""
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    hung_up(sock)


def resident_bytes() -> int:
    gc.collect()
    if not Path("/proc/self/statm").exists():
        return 0  # only Linux tells so cheaply
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


HELLO = to_bytes(Message(kind=Kind.HELLO, meta={"nonce": "00" * 32, "role": "worker", "rank": 0}))
PUSH = Message(kind=Kind.PUSH, step=3, channel=1, meta={"samples": 4}, payload=torch.arange(100, dtype=torch.float32))
CORPUS = [
    Message(kind=Kind.BEAT),
    Message(kind=Kind.JOIN, meta={"batch_size": 4, "layout": [["weight", [3, 4]], ["bias", [3]]]}),
    Message(kind=Kind.EVENT, meta={"line": "x" * 20_000}),
    PUSH,
    Message(kind=Kind.STATE, payload=torch.tensor([[True, False]])),
    Message(kind=Kind.CHUNK, step=2**40, codec="int8", payload=torch.ones(70_000, dtype=torch.int8)),
]
FRAMES = [to_bytes(message) for message in CORPUS]


def damaged(rng: random.Random, *, honest: bool) -> bytes:
    """Some frames of the corpus, damaged in one of many ways; `honest`: checksums fit."""
    whole = b"".join(to_bytes(rng.choice(CORPUS)) for _ in range(rng.randint(1, 3)))
    data = bytearray(mutated(rng, HELLO + whole if rng.random() < 0.15 else whole, FRAMES, most=len(whole) + 1000))
    if honest:
        refit(data)
    return bytes(data) or b"S"


class TestStrangers:
    """Before the handshake."""

    @pytest.mark.parametrize(
        "data",
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
            bytes(4096),
            b"SMOL",
            HELLO[:100],
            HELLO[:-1],
            HELLO[:4] + b"\x09\x00" + HELLO[6:],
            to_bytes(PUSH),
            to_bytes(Message(kind=Kind.STOP)),
            to_bytes(Message(kind=Kind.PROOF, meta={"proof": "00" * 32})),
            to_bytes(Message(kind=Kind.ACCEPT, meta={})),
            to_bytes(Message(kind=Kind.HELLO)),
            to_bytes(Message(kind=Kind.HELLO, meta={"x": "y" * 5000})),
        ],
        ids=range(13),
    )
    def test_bytes_that_are_no_handshake_end_the_connection(self, data: bytes) -> None:
        with contextlib.closing(Field(handshake_s=10 * WAIT_S)) as field:
            provoke(field.connect(), data)
            assert len(field.server.linked_ones) == 1  # the witness

    @pytest.mark.parametrize(
        ("offset", "layout", "value"), [(44, "I", 2**32 - 1), (48, "Q", 2**63), (48, "Q", 2**64 - 1)]
    )
    def test_a_monstrous_length_costs_nothing(self, field: Field, offset: int, layout: str, value: int) -> None:
        data = bytearray(to_bytes(PUSH))
        struct.pack_into("<" + layout, data, offset, value)
        refit(data)
        for member in (None, RawMember(field).greet()):
            sock = member.sock if member is not None else field.connect()
            tracemalloc.start()
            try:
                sock.sendall(bytes(data))
                hung_up(sock)
                assert tracemalloc.get_traced_memory()[1] < 1 << 20
            finally:
                tracemalloc.stop()

    def test_a_recorded_handshake_is_worth_nothing(self, field: Field) -> None:
        member = RawMember(field).greet()
        recording = member.said
        member.sock.close()
        before = len(field.server.linked_ones)
        again = RawMember(field)
        again.say(recording)
        (hello, refusal) = again.last_words()
        assert (hello.kind, refusal.kind) == (Kind.HELLO, Kind.REFUSE)
        assert "token" in refusal.meta["reason"]
        assert len(field.server.linked_ones) == before
        assert field.server.refusals == [refusal.meta["reason"]]

    def test_a_thousand_idle_connections_are_closed(self) -> None:
        allow_files(3000)
        with contextlib.closing(Field(handshake_s=1.0, unauthenticated=100)) as field:
            idle: list[socket.socket] = []
            try:
                before = resident_bytes()
                for number in range(1000):
                    idle.append(field.connect())
                    if number % 100 == 0:
                        field.witness.ask()
                RawMember(field).greet().sock.close()  # a member still gets in
                for sock in idle:
                    assert hung_up(sock) == b""
                assert resident_bytes() - before < GROWTH_BYTES
            finally:
                for sock in idle:
                    sock.close()

    def test_a_silent_connection_costs_only_a_file_descriptor(self) -> None:
        """A thousand of them must not be felt by a run: nothing is made for one before it says something."""
        with contextlib.closing(Field(handshake_s=0.5)) as field:
            made = counted_links()
            files = open_files()
            silent = [field.connect() for _ in range(50)]
            assert [hung_up(sock) for sock in silent] == [b""] * 50
            assert counted_links() == made
            field.connect().close()  # nor for one who goes without a word
            assert eventually(lambda: open_files() <= files)
            member = RawMember(field).greet()
            assert counted_links() > made  # while it is there
            member.sock.close()

    @pytest.mark.parametrize("kind", ["uvloop", "asyncio", "tls"])
    def test_ended_connections_are_freed_without_the_garbage_collector(self, kind: str) -> None:
        """A collection of everything is rare where torch is loaded: a flood would pile up megabytes until then."""
        if kind == "tls":
            pytest.importorskip("cryptography")
        tokens = [new_token()] if kind == "tls" else None
        with contextlib.closing(Field(uvloop=kind != "asyncio", tokens=tokens)) as field:
            gc.collect()
            gc.disable()
            try:
                before = counted_links()
                for number in range(60):
                    if tokens:
                        provoke(field.connect(), HELLO)
                        continue
                    member = RawMember(field)
                    if number % 3:
                        member.greet()
                    member.say(b"nonsense" * 40 if number % 2 else to_bytes(PUSH)[:300])
                    member.sock.close()
                assert eventually(lambda: counted_links() <= before)
            finally:
                gc.enable()

    def test_a_byte_at_a_time_does_not_extend_the_handshake(self) -> None:
        with contextlib.closing(Field(handshake_s=0.5)) as field:
            began = time.monotonic()
            with field.connect() as sock, contextlib.suppress(ConnectionError):
                sock.settimeout(0.02)
                for byte in HELLO[:-1]:
                    sock.sendall(bytes([byte]))
                    with contextlib.suppress(TimeoutError):
                        if not sock.recv(100):
                            break
                else:
                    pytest.fail("all but the last byte was heard")
            assert time.monotonic() - began > 0.4

    def test_noise_at_a_listener_with_a_token(self) -> None:
        pytest.importorskip("cryptography")
        with contextlib.closing(Field(tokens=[new_token()], handshake_s=1.0)) as field:
            rng = random.Random(1)
            for number in range(150):
                start = rng.choice((b"", b"\x16\x03\x01", HELLO))
                provoke(field.connect(), start + rng.randbytes(rng.randint(1, 3000)))
                if number % 30 == 0:
                    field.witness.ask()
            assert len(field.server.linked_ones) == 1


class TestMembers:
    """After the handshake."""

    def test_a_damaged_payload_is_told_to_both_sides(self, field: Field) -> None:
        changed = bytearray(to_bytes(PUSH))
        changed[-10] ^= 1
        member = RawMember(field).greet()
        member.say(to_bytes(PUSH) + changed + to_bytes(PUSH))
        *_, bye = member.last_words()
        assert bye.kind is Kind.BYE
        assert "the checksum of the payload of a PUSH does not match" in bye.meta["reason"]
        assert field.server.end_of(member.me.instance) == "the checksum of the payload of a PUSH does not match"
        assert len(field.server.messages[member.me.instance]) == 1  # only what came before

    def test_half_a_frame_and_then_nothing(self, field: Field) -> None:
        member = RawMember(field).greet()
        member.say(to_bytes(PUSH)[:300])
        member.sock.close()
        assert field.server.end_of(member.me.instance) == "the connection was closed"
        assert member.me.instance not in field.server.messages


@pytest.mark.timeout(max(600, COUNT // 50))
def test_fuzz(field: Field) -> None:
    """Thousands of damaged streams from strangers and members: no crash, no hang, no growth, nothing false delivered."""
    rng = random.Random(3)
    strict: set[str] = set()
    before = 0
    for number in range(COUNT):
        if number == COUNT // 5:  # by then everything that is loaded late is loaded
            before = resident_bytes()
        honest = rng.random() < 0.5
        data = damaged(rng, honest=honest)
        if rng.random() < 0.5:
            sock = field.connect()
        else:
            member = RawMember(field).greet()
            sock = member.sock
            if not honest:
                strict.add(member.me.instance)
        provoke(sock, data)
        if number % 100 == 0:
            field.witness.ask()
            for instance in strict & field.server.messages.keys():
                for message in field.server.messages[instance]:
                    assert to_bytes(message) in FRAMES, message
            strict.clear()
            field.server.messages.clear()
            field.server.ends.clear()
            field.server.linked_ones.clear()
    assert resident_bytes() - before < GROWTH_BYTES


def test_a_dialer_is_as_careful_as_a_listener() -> None:
    """What waits at the other end may be anything too."""
    rng = random.Random(4)
    said: list[bytes] = [damaged(rng, honest=rng.random() < 0.5) for _ in range(40)]

    handler = Server()
    worker = TcpTransport(make_peer())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        host, port = listener.getsockname()
        try:
            for data in said:
                dialer = worker.dial(f"{host}:{port}", handler)
                sock, _ = listener.accept()
                provoke(sock, data)
                dialer.close()
            assert not handler.linked_ones
        finally:
            worker.close()


def test_the_raw_member_is_one() -> None:
    """Otherwise all of the above would prove nothing."""
    with contextlib.closing(Field()) as field:
        member = RawMember(field).greet()
        member.say(to_bytes(Message(kind=Kind.PULL, step=7)))
        heard = member.hear()
        while not any(message.kind is Kind.WEIGHTS for message in heard):
            heard += member.hear()
        member.sock.close()
        field.server.end_of(member.me.instance)


def allow_files(count: int) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        if hard < count:
            pytest.skip(f"only {hard} open files are allowed here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
