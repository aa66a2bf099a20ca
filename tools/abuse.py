"""Everything a stranger can throw at a run's listening sockets, while it trains.

    python -m tools.abuse                                  10^6 damaged frames and all the rest, with and without a token
    python -m tools.abuse --frames 20000 --run syncps      fewer, at one of the runs
    python -m tools.abuse --attack idle loris              some of the attacks

    run                  workers   listening sockets
    syncps               1         the server's
    allreduce            2         the coordinator's, and one of each worker for the other
    syncps-token, allreduce-token: the same behind TLS

    attack
    flood       damaged frames, one a connection: bits flipped, fields and lengths changed with checksums that fit, noise;
                from strangers, and from processes that went through the handshake but are no members
    monsters    headers that announce up to 2^64 - 1 bytes
    json        meta that is deep, huge, or full of huge numbers
    bombs       payloads that would be large if anybody unpacked them, and objects that would run if anybody unpickled them
    idle        a thousand connections that say nothing
    loris       a hundred that say a byte now and then
    impostors   no token, a wrong one, another cluster's id, TLS 1.2, a recorded handshake
    hoard       a process that is no member sends what is in order and leaves it to the other side to keep it, or asks and
                never reads the answers

What must hold, or the exit status is 1:

    every connection is ended by the other side; nobody dies; nothing is executed
    a process grows by at most 16 MB                                                     (all attacks together)
    an announcement that is too large is refused within 10 ms, and costs less than 1 MB  (median; monsters)
    who does not prove itself is gone after 5 s                                          (idle, loris)
    no impostor hears anything but a refusal
    nobody joins, nobody is lost, no gradient is refused, and the history keeps its rules
    the weights at the end are those of a run that nobody disturbed, to the last bit
    training slows by at most 2 % under idle, loris and monsters, if it can be told from the noise between quiet spells

Only Linux tells so much about other processes. Attackers share the machine with the run, so a flood slows it for want of
processors: that is shown, and held against nothing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gzip
import hmac
import json
import os
import random
import secrets
import select
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from tests.faults.elastic_history import changes, lines_of
from tests.world import ElasticWorld, Who, run_elastic_world

import smolcluster
from smolcluster.comm.elastic import frames
from smolcluster.comm.elastic.frames import FrameError, Parser
from smolcluster.comm.elastic.messages import Head, Kind, Message
from smolcluster.comm.elastic.security import Credentials, Keyring, new_token, open_credentials
from smolcluster.engine import history
from smolcluster.errors import UserError
from tools.fuzz import mutated, refit

RUNS = {"syncps": 1, "allreduce": 2, "syncps-token": 1, "allreduce-token": 2}  # workers
GROWTH_BYTES = 16 << 20
REFUSED_S, REFUSED_BYTES = 0.010, 1 << 20
GONE_S, TO_NOTICE_S = 5.0, 0.5  # the second: for us to see it, on a machine that is busy with the attack
SLOWER = 0.02
HANG_S = 20.0
NUM_IDLE, NUM_LORIS = 1000, 100
PACE_S = 0.02  # a step of a worker takes so long, at least
QUIET_S = 3.0  # between attacks
THREADS = 6
PARAMETERS = 1010  # of tests.tasks.Tiny: a gradient of the right size is tried, too


# Connections


class Ended(Exception):
    """The other side has hung up."""


@dataclass(frozen=True, slots=True)
class Door:
    """A listening socket of a run."""

    name: str
    pid: int
    port: int
    keyring: Keyring | None

    def connect(self) -> socket.socket:
        """From one of many addresses of this machine, so that ports do not run out."""
        sock = socket.socket()
        sock.settimeout(HANG_S)
        sock.bind((f"127.{random.randrange(1, 255)}.{random.randrange(256)}.{random.randrange(1, 255)}", 0))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves nothing behind
        sock.connect(("127.0.0.1", self.port))
        return sock

    @property
    def credentials(self) -> Credentials:
        return open_credentials() if self.keyring is None else self.keyring.current


def _nowhere(_: Head) -> None:
    """Where an attacker wants payloads."""


class Guest:
    """Goes through the handshake, by hand, and then says what it likes."""

    _contexts: dict[str, ssl.SSLContext] = {}

    def __init__(self, door: Door) -> None:
        self.credentials = door.credentials
        self.said: list[bytes] = []
        self.sock: socket.socket = door.connect()
        if door.keyring is not None:
            name = self.credentials.server_name
            context = self._contexts.setdefault(name, door.keyring.client_context())
            self.sock = context.wrap_socket(self.sock, server_hostname=name)
        self._parser = Parser(place=_nowhere, cluster=self.credentials.cluster)
        self._heard: deque[Message] = deque()
        self._nonce = secrets.token_bytes(32)

    def greet(self, then: bytes = b"") -> Guest:
        """`then` leaves together with the proof."""
        self.say(self.hello())
        theirs = bytes.fromhex(self.hear().meta["nonce"])
        proof = self.credentials.prove("client", mine=self._nonce, theirs=theirs)
        self.say(self.encoded(Message(kind=Kind.PROOF, meta={"proof": proof.hex()})) + then)
        return self

    def hello(self) -> bytes:
        """A rank and a host that nobody else has: names are for the taking."""
        who = {"role": "worker", "rank": random.randrange(100, 1 << 20), "host": secrets.token_hex(8), "versions": {}}
        meta = {"nonce": self._nonce.hex(), "instance": secrets.token_hex(8), "run": "", **who}
        return self.encoded(Message(kind=Kind.HELLO, meta=meta))

    def encoded(self, message: Message) -> bytes:
        checked = not isinstance(self.sock, ssl.SSLSocket)
        return b"".join(frames.encode(message, cluster=self.credentials.cluster, checked=checked).chunks())

    def say(self, data: bytes) -> None:
        self.said.append(data)
        self.sock.sendall(data)

    def hear(self) -> Message:
        while not self._heard:
            count = self.sock.recv_into(self._parser.buffer())
            if count == 0:
                raise Ended
            self._heard += self._parser.fed(count)
        return self._heard.popleft()


def until_the_end(sock: socket.socket, *, half_close: bool = True) -> bytes:
    """What the other side still says. Raises TimeoutError when it does not hang up."""
    heard = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError, OSError) if half_close else contextlib.nullcontext():
        if half_close:
            socket.socket.shutdown(sock, socket.SHUT_WR)
    try:
        while data := sock.recv(1 << 16):
            heard = (heard + data)[-4096:]
    except (ConnectionError, ssl.SSLError):
        pass
    finally:
        sock.close()
    return heard


# What is known of a process from outside


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(pid: int, *, anew: bool = False) -> int:
    """The most that was ever resident. `anew`: count from now on."""
    if anew:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def listening_ports(pid: int) -> list[int]:
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


# Attacks


@dataclass(slots=True)
class Result:
    """What became of one attack on one socket."""

    attack: str
    door: str
    count: int = 0
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    window: tuple[float, float] = (0.0, 0.0)  # by the wall clock


Attack = Callable[[Door, Result, random.Random, int], None]


def _frames(canary: Path) -> list[bytes]:
    """Honest ones, as the strategies send them, to be damaged."""
    command = f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode()
    spoken = [
        Message(kind=Kind.BEAT),
        Message(kind=Kind.ASK),
        Message(kind=Kind.JOIN, meta={"batch_size": 4, "samples": 256, "layout": [["0.weight", "float32", [24, 12]]]}),
        Message(kind=Kind.EVENT, meta={"event": '{"event":"step"}', "x": "x" * 3000}),
        Message(kind=Kind.EVENT, meta={"event": command.decode(), "__reduce__": ["os.system", f"touch {canary}"]}),
        Message(kind=Kind.REPORT, meta={"bytes_sent": 2**63, "weights_sha256": "0" * 64}),
        Message(
            kind=Kind.PUSH,
            step=3,
            epoch=2,
            meta={"samples": 4, "loss": "0.1"},
            payload=torch.ones(4 * PARAMETERS).byte(),
        ),
        Message(
            kind=Kind.DONE,
            step=4,
            epoch=3,
            meta={"mine": "0.1", "held": "0.2", "loss": "0.3", "compute_s": 0.1, "apply_s": 0.1},
        ),
        Message(kind=Kind.SUSPECT, epoch=3, meta={"rank": 1, "reason": "x"}),
        Message(
            kind=Kind.STATE,
            meta={"tensors": [["w/0.weight", "float32", [24, 12]]], "meta": {"epoch": 3, "numbers": {}}},
        ),
        Message(kind=Kind.STATE, payload=torch.frombuffer(bytearray(command), dtype=torch.uint8)),
        Message(kind=Kind.CHUNK, step=1, epoch=2, payload=torch.ones(900)),
        Message(kind=Kind.VIEW, epoch=99, meta={"view": {"epoch": 99, "step": 0, "members": []}}),
        Message(kind=Kind.STOP),
    ]
    return [b"".join(frames.encode(message).chunks()) for message in spoken]


class Abuse:
    """All attacks, by name; `run` tries one on one socket."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary
        self._honest = _frames(canary)
        self.attacks: dict[str, Attack] = {
            name: getattr(self, name)
            for name in ("flood", "monsters", "json", "bombs", "idle", "loris", "impostors", "hoard")
        }

    def run(self, name: str, door: Door, *, seed: int, count: int) -> Result:
        result = Result(name, door.name)
        began, result.window = time.monotonic(), (time.time(), 0.0)
        try:
            self.attacks[name](door, result, random.Random(f"{name} {door.name} {seed}"), count)
        except ConnectionRefusedError:
            result.wrong.append("nobody listens any more")
        result.seconds = time.monotonic() - began
        result.window = (result.window[0], time.time())
        return result

    def flood(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        shares = [count // THREADS + (number < count % THREADS) for number in range(THREADS)]
        seeds = [rng.random() for _ in shares]
        threads = [
            threading.Thread(target=self._flood, args=(door, result, random.Random(seed), share))
            for seed, share in zip(seeds, shares, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        result.count = count

    def _flood(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        with contextlib.suppress(OSError):
            os.nice(10)  # this thread alone, on Linux
        for _ in range(count):
            if result.wrong:
                return
            data = self._damaged(rng, door.credentials.cluster)
            guest = rng.random() < 0.5
            try:
                if guest:
                    sock = Guest(door).greet(data).sock
                else:
                    sock = door.connect()
                    sock.sendall(data)
                until_the_end(sock)
            except TimeoutError:
                result.wrong.append(f"no end within {HANG_S:g} s of {data[:200]!r}")
            except ConnectionRefusedError:
                result.wrong.append("nobody listens any more")
            except (ConnectionError, ssl.SSLError, Ended):
                pass  # it was put out before it had said everything

    def _damaged(self, rng: random.Random, cluster: bytes) -> bytes:
        data = bytearray(rng.choice(self._honest))
        data[16:24] = cluster
        how = rng.random()
        if how < 0.4:  # one bit, and no checksum made to fit
            refit(data)
            at = rng.randrange(8 * len(data))
            data[at // 8] ^= 1 << at % 8
            return bytes(data)
        if how < 0.45:
            return rng.randbytes(rng.randint(1, 400))
        data = bytearray(mutated(rng, bytes(data), self._honest))
        if how < 0.9:
            refit(data, lengths=rng.random() < 0.5)
        return bytes(data)

    def monsters(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        base = bytearray(self._honest[6])  # a PUSH
        meta = bytes(base[128 : 128 + struct.unpack_from("<I", base, 44)[0]])
        for _ in range(60):  # what as many honest guests cost does not count
            until_the_end(Guest(door).greet().sock)
        took, before = [], peak_bytes(door.pid, anew=True)
        cases = [(48, "Q", 2**63), (48, "Q", 2**64 - 1), (48, "Q", 2**32 + 1), (48, "Q", 2**32), (44, "I", 2**32 - 1)]
        for number in range(12 * len(cases)):
            offset, layout, value = cases[number % len(cases)]
            data = bytearray(base)
            struct.pack_into("<" + layout, data, offset, value)
            if value == 2**32:  # a shape that fits it: within the limit, and nobody wants it
                struct.pack_into("<Q", data, 56, value)
            data[16:24] = door.credentials.cluster
            struct.pack_into("<I", data, 124, crc32(data[:124]))
            try:
                guest = Guest(door).greet()
                while guest.hear().kind is not Kind.ACCEPT:
                    pass
                began = time.perf_counter()
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    guest.sock.sendall(data[:128] + meta)
                until_the_end(guest.sock, half_close=False)
                took.append(time.perf_counter() - began)
            except TimeoutError:
                result.wrong.append(f"{value} bytes announced: no end within {HANG_S:g} s")
                return
        grown = peak_bytes(door.pid) - before
        result.count = len(took)
        result.figures = {
            "median_ms": 1e3 * statistics.median(took),
            "max_ms": 1e3 * max(took),
            "peak_mb": grown / 2**20,
        }
        if statistics.median(took) > REFUSED_S:
            result.wrong.append(f"refused after {1e3 * statistics.median(took):.1f} ms (median)")
        if grown > REFUSED_BYTES:
            result.wrong.append(f"its memory rose by {grown} bytes meanwhile")

    def json(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        million = 1_000_000
        texts = [
            b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
            b'{"a":' * 150_000,
            b'{"a":[' + b"{}," * 330_000 + b"{}]}",
            b'{"a":' + b"9" * million + b"}",
            b'{"a":"' + b"\\" * million + b'"}',
            b'{"a":"' + b"\\ud800" * 160_000 + b'"}',
            b'{"samples":"' + "\u2028".encode() * 340_000 + b'"}',
            b'{"layout":["' + "\u2028".encode() * 340_000 + b'",1,1,1,1,1,1,1]}',
            b"{" + b",".join(b'"%d":1e308' % n for n in range(60_000)) + b"}",
            b'"' * million,
        ]
        for kind in (Kind.EVENT, Kind.JOIN, Kind.STATE, Kind.ASK):
            for text in texts:
                head = bytearray(b"".join(frames.encode(Message(kind=kind), cluster=door.credentials.cluster).chunks()))
                struct.pack_into("<I", head, 44, len(text))
                struct.pack_into("<I", head, 120, crc32(text))
                struct.pack_into("<I", head, 124, crc32(head[:124]))
                self._provoke(door, result, bytes(head) + text)

    def bombs(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        zeros = bytes(8 << 20)
        bombs = [
            zlib.compress(zeros, 9),
            gzip.compress(zeros),
            gzip.compress(gzip.compress(zeros)),
            self._honest[10][128:-4],
        ]
        for kind in (Kind.PUSH, Kind.STATE, Kind.CHUNK):
            for bomb in bombs:
                payload = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
                for codec in frames.CODECS:
                    message = Message(kind=kind, codec=codec, epoch=1, payload=payload)
                    self._provoke(
                        door, result, b"".join(frames.encode(message, cluster=door.credentials.cluster).chunks())
                    )
        if self.canary.exists():
            result.wrong.append("code was executed")

    def _provoke(self, door: Door, result: Result, data: bytes) -> None:
        result.count += 1
        try:
            guest = Guest(door).greet()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                guest.sock.sendall(data)
            until_the_end(guest.sock)
        except TimeoutError:
            result.wrong.append(f"no end within {HANG_S:g} s of {data[:64]!r}...")
        except (ConnectionError, Ended) as error:
            result.wrong.append(f"not let in for it: {error!r}")

    def idle(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        self._outstay(door, result, [door.connect for _ in range(NUM_IDLE)], say=b"")

    def loris(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        self._outstay(door, result, [door.connect for _ in range(NUM_LORIS)], say=self._opening(door))

    def _opening(self, door: Door) -> bytes:
        """The first bytes of an honest connection."""
        if door.keyring is None:
            return self._honest[0]
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = door.keyring.client_context().wrap_bio(incoming, outgoing, server_hostname=door.keyring.server_name)
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        return outgoing.read()

    def _outstay(
        self, door: Door, result: Result, makers: Sequence[Callable[[], socket.socket]], *, say: bytes
    ) -> None:
        """See how long each is borne. `say`: one byte of it now and then."""
        began: dict[int, tuple[socket.socket, float]] = {}
        poll, longest, said = select.poll(), 0.0, 0
        for make in makers:
            sock = make()
            sock.setblocking(False)
            began[sock.fileno()] = (sock, time.monotonic())
            poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
        deadline = time.monotonic() + GONE_S + HANG_S
        while began and time.monotonic() < deadline:
            for number, _ in poll.poll(200):
                sock, since = began[number]
                with contextlib.suppress(ConnectionError, BlockingIOError):
                    if sock.recv(1 << 12):
                        continue  # the last words before the end
                longest = max(longest, time.monotonic() - since)
                poll.unregister(sock)
                sock.close()
                del began[number]
            if said < len(say):
                for sock, _ in began.values():
                    with contextlib.suppress(OSError):
                        sock.send(say[said : said + 1])
                said += 1
        result.count, result.figures = len(makers), {"longest_s": longest}
        if began:
            result.wrong.append(f"{len(began)} of {len(makers)} were still there after {GONE_S + HANG_S:g} s")
        elif longest > GONE_S + TO_NOTICE_S:
            result.wrong.append(f"one of them was there for {longest:.2f} s")
        for sock, _ in began.values():
            sock.close()

    def impostors(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        cases = _open_impostors(door) if door.keyring is None else _token_impostors(door, door.keyring)
        for name, heard in cases:
            result.count += 1
            if heard is None:
                result.wrong.append(f"{name}: no end within {HANG_S:g} s")
            elif _kinds(heard) & {Kind.ACCEPT, Kind.PROOF, Kind.PLAN}:
                result.wrong.append(f"{name}: was let in")

    def hoard(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        """Three processes that leave it to the other side to keep what they send; each ends within seconds, or is ended."""
        before = resident_bytes(door.pid)
        most = before
        large = {"tensors": [], "meta": {"a": "x" * 500_000}}
        hoards: list[Callable[[int], Message]] = [
            lambda n: Message(kind=Kind.CHUNK, epoch=2**32 - 1, step=n, payload=torch.zeros(100_000)),
            lambda _: Message(kind=Kind.STATE, meta=large),
            lambda _: Message(kind=Kind.ASK),
        ]
        for make in hoards:
            guest = Guest(door).greet()
            deadline = time.monotonic() + 3.0
            guest.sock.settimeout(1.0)
            with contextlib.suppress(OSError):
                for number in range(200 if make(0).kind is not Kind.ASK else 20_000):
                    guest.sock.sendall(guest.encoded(make(number)))
                    result.count += 1
                    if time.monotonic() > deadline:
                        break
            time.sleep(0.2)  # what is on its way arrives, and stays there as long as the link does
            most = max(most, resident_bytes(door.pid))
            guest.sock.close()
        result.figures = {"rose_mb": (most - before) / 2**20}
        if most - before > GROWTH_BYTES:
            result.wrong.append(f"it kept {(most - before) / 2**20:.0f} MB for processes that are no members")


def _kinds(heard: bytes) -> set[Kind]:
    """Of the frames in it, as far as they are any."""
    parser, kinds = Parser(place=_nowhere, cluster=None), set()
    rest = memoryview(heard)
    with contextlib.suppress(FrameError):
        while rest:
            buffer = parser.buffer()
            taken = min(len(buffer), len(rest))
            buffer[:taken] = rest[:taken]
            rest = rest[taken:]
            for message in parser.fed(taken):
                kinds.add(message.kind)
    return kinds


def _answer(sock: socket.socket, data: bytes) -> bytes | None:
    try:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            sock.sendall(data)
        return until_the_end(sock)
    except TimeoutError:
        return None


def _open_impostors(door: Door) -> Iterator[tuple[str, bytes | None]]:
    guest = Guest(door).greet()
    until_the_end(guest.sock)
    yield "a recorded handshake", _answer(door.connect(), b"".join(guest.said))
    hello = bytearray(guest.said[0])
    hello[16:24] = b"others'!"
    struct.pack_into("<I", hello, 124, crc32(hello[:124]))
    yield "another cluster's id", _answer(door.connect(), bytes(hello) + guest.said[1])
    yield "nothing but a proof", _answer(door.connect(), guest.said[1])
    yield "an ACCEPT of its own", _answer(door.connect(), guest.encoded(Message(kind=Kind.ACCEPT)) + guest.said[1])
    zero = hmac.digest(b"", b"", "sha256").hex()
    yield (
        "a made-up proof",
        _answer(door.connect(), guest.said[0] + guest.encoded(Message(kind=Kind.PROOF, meta={"proof": zero}))),
    )


def _token_impostors(door: Door, keyring: Keyring) -> Iterator[tuple[str, bytes | None]]:
    hello = b"".join(
        frames.encode(Message(kind=Kind.HELLO, meta={"nonce": "00" * 32}), cluster=keyring.current.cluster).chunks()
    )
    yield "no TLS", _answer(door.connect(), hello)

    other = Keyring([new_token()])
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    wrong, bare, old = other.client_context(), plain, other.client_context()
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    for context in (wrong, bare, old):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    cases = [("a wrong token", wrong, keyring.server_name), ("a wrong token, and its name", wrong, other.server_name)]
    cases += [("no certificate", bare, keyring.server_name), ("TLS 1.2", old, keyring.server_name)]
    for name, context, server in cases:
        yield name, _over_tls(door, context, server, hello)
    yield "a recorded handshake", _replayed(door, keyring)


def _over_tls(door: Door, context: ssl.SSLContext, server: str, data: bytes) -> bytes | None:
    sock = door.connect()
    try:
        sock = context.wrap_socket(sock, server_hostname=server)
    except (ssl.SSLError, ConnectionError):
        sock.close()
        return b""
    except TimeoutError:
        sock.close()
        return None
    return _answer(sock, data)


def _replayed(door: Door, keyring: Keyring) -> bytes | None:
    """What an honest client has sent, byte for byte, on another connection."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = keyring.client_context().wrap_bio(incoming, outgoing, server_hostname=keyring.server_name)
    recorded, sock = b"", door.connect()
    while True:
        try:
            client.do_handshake()
        except ssl.SSLWantReadError:
            part = outgoing.read()
            recorded += part
            sock.sendall(part)
            incoming.write(sock.recv(1 << 16))
            continue
        break
    client.write(b"".join(frames.encode(Message(kind=Kind.HELLO), cluster=keyring.current.cluster).chunks()))
    recorded += outgoing.read()
    sock.close()
    return _answer(door.connect(), recorded)


# A run, and what was done to it


@dataclass(slots=True)
class Report:
    run: str
    results: list[Result] = field(default_factory=list)
    growth_mb: dict[str, float] = field(default_factory=dict)
    slower: dict[str, float] = field(default_factory=dict)  # by attack: 0.01 is 1 %
    noise: float = float("nan")
    steps: int = 0
    wrong: list[str] = field(default_factory=list)


def attack(
    run: str, folder: Path, *, attacks: Sequence[str], frames_each: int, seed: int, quiet_s: float = QUIET_S
) -> Report:
    """`frames_each`: damaged frames at each listening socket. `quiet_s`: between attacks, to hold them against."""
    strategy, _, behind_tls = run.partition("-")
    token = new_token() if behind_tls else ""
    keyring = Keyring([token]) if token else None
    report, canary = Report(run), folder / f"{run}-canary"
    abuse = Abuse(canary)
    quiet: list[tuple[float, float]] = []

    def rest() -> None:
        began = time.time()
        time.sleep(quiet_s)
        quiet.append((began, time.time()))

    def script(world: ElasticWorld) -> None:
        seats: list[Who] = ["server", *range(RUNS[run])]
        world.wait_for_step(20, within_s=120.0)
        doors = [door for who in seats for door in _doors(world, who, keyring)]
        for door in doors:  # so that what is loaded late is loaded
            for name in attacks:
                if name not in ("idle", "loris", "hoard"):
                    abuse.run(name, door, seed=seed - 1, count=200)
        before = {who: resident_bytes(_pid(world, who)) for who in seats}
        rest()
        for name in attacks:
            for door in doors:
                report.results.append(abuse.run(name, door, seed=seed, count=frames_each))
                print(f"  {name} at {door.name}: {report.results[-1].seconds:.1f} s", file=sys.stderr, flush=True)
                rest()
        for who in seats:
            if not world.alive(who):
                report.wrong.append(f"{who} is dead: {world.story()[-2000:]}")
            else:
                grown = report.growth_mb[str(who)] = (resident_bytes(_pid(world, who)) - before[who]) / 2**20
                if grown > GROWTH_BYTES / 2**20:
                    report.wrong.append(f"{who} grew by {grown:.1f} MB")
        world.ask_to_stop()

    world = _run(run, folder / run, token=token, steps=10**8, script=script, pace_s=PACE_S)
    if world.server.failed is not None:
        report.wrong.append(f"the server failed: {world.server.failed.message}\n{world.server.failed.traceback}")
        return report
    report.steps = int(world.summary["steps"])
    calm = _run(run, folder / f"{run}-calm", token=token, steps=report.steps)
    _judge(report, world, calm, strategy, canary)
    _time(report, world, quiet)
    return report


def _judge(report: Report, world: ElasticWorld, calm: ElasticWorld, strategy: str, canary: Path) -> None:
    """The run itself: was anything different from one that nobody disturbed?"""
    lines, summary = lines_of(world), world.summary
    report.wrong += history.check(lines)
    workers = len(world.workers)
    if len(changes(lines, "joined")) != workers:
        report.wrong.append(f"{len(changes(lines, 'joined'))} joined, where {workers} workers took part")
    if summary["members_lost"] or summary["stale_rejected"]:
        report.wrong.append(f"{summary['members_lost']} members lost, {summary['stale_rejected']} gradients refused")
    if summary["weights_sha256"] != calm.summary["weights_sha256"]:
        report.wrong.append(f"the weights after {report.steps} steps are not those of a run that nobody disturbed")
    if strategy == "allreduce" and summary["replicas_agree"] is False:
        report.wrong.append("the replicas differ")
    if canary.exists():
        report.wrong.append("code was executed")


def _time(report: Report, world: ElasticWorld, quiet: Sequence[tuple[float, float]]) -> None:
    """How long steps took during each attack, against the quiet spells before and after."""
    times = [row.time for row in world.server.rows()]
    spells = [s for s in (_step_s(times, window) for window in quiet) if s]
    if not spells:
        return
    calm = statistics.median(spells)
    report.noise = (max(spells) - min(spells)) / calm / 2
    for name in dict.fromkeys(result.attack for result in report.results):
        under = [s for r in report.results if r.attack == name and (s := _step_s(times, r.window))]
        if under:
            report.slower[name] = statistics.median(under) / calm - 1
    for name in ("monsters", "idle", "loris"):
        slower = report.slower.get(name, 0.0)
        if slower > SLOWER + report.noise:
            report.wrong.append(f"{name}: training slowed by {slower:.1%}; quiet spells differ by {report.noise:.1%}")


def _step_s(times: Sequence[float], window: tuple[float, float]) -> float:
    """Mean seconds between committed steps in this window; 0 where there are too few."""
    inside = [t for t in times if window[0] <= t <= window[1]]
    return (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 10 else 0.0


def _run(
    run: str,
    folder: Path,
    *,
    token: str,
    steps: int,
    script: Callable[[ElasticWorld], None] | None = None,
    pace_s: float = 0.0,
) -> ElasticWorld:
    strategy = run.partition("-")[0]
    config: dict[str, Any] = {
        "training.steps": steps,
        "training.batch_size": 8,
        "training.learning_rate": 1e-5,  # slow enough not to learn the few samples by heart
        "lr_schedule.warmup_iters": 0,  # a constant rate: the weights after n steps do not depend on where the run ends
        "lr_schedule.min_lr": 1e-5,
        "training.eval_steps": 0,
        "training.checkpoint_steps": 0,
        "training.seed": 1,
        "cluster.plane": "elastic",
    }
    if strategy == "syncps":
        config["strategy.worker_update_interval"] = 1
    return run_elastic_world(
        RUNS[run],
        folder,
        config,
        task="Tiny",
        strategy=strategy,
        script=script,
        slow={0: pace_s},
        environ={"SMOLCLUSTER_TOKEN": token},
        timeout_s=120.0 + 0.2 * (0 if script else steps),
    )


def _pid(world: ElasticWorld, who: Who) -> int:
    pid = world.seat(who).lives[-1].process.pid
    assert pid is not None
    return pid


def _doors(world: ElasticWorld, who: Who, keyring: Keyring | None) -> list[Door]:
    pid = _pid(world, who)
    name = who if who == "server" else f"worker {who}"
    return [Door(name, pid, port, keyring) for port in listening_ports(pid)]


def opens_without_a_token(folder: Path) -> list[str]:
    """A server that is told to listen on all addresses and has no token refuses to start. Returns what is wrong."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SMOLCLUSTER_")}
    environ["XDG_CONFIG_HOME"] = str(folder / "no-token")
    command = [sys.executable, "-m", "smolcluster", "server", "--bind", "0.0.0.0"]
    try:
        done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return ["a server without a token listens on 0.0.0.0"]
    refused = done.returncode != 0 and "token" in done.stderr + done.stdout
    return [] if refused else [f"status {done.returncode} of a server on 0.0.0.0 without a token: {done.stderr[-200:]}"]


def unpacks_nothing() -> list[str]:
    """There is no decompression on the wire: nothing in `comm` could do it. Returns the offenders."""
    found = []
    for path in sorted((Path(smolcluster.__file__).parent / "comm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            roots = {name.partition(".")[0] for name in (names if not module else [module])}
            packing = roots & {
                "zlib",
                "gzip",
                "bz2",
                "lzma",
                "zstandard",
                "lz4",
                "zipfile",
                "tarfile",
                "pickle",
                "marshal",
            }
            if packing and not (module == "zlib" and names == ["crc32"]):
                found.append(f"{path.name} imports {', '.join(sorted(packing))}")
    return found


# The program


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    _check_possible()
    folder = Path(tempfile.mkdtemp(prefix="abuse-")) if options.out is None else options.out
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    print(f"seed {options.seed}; runs are in {folder}", flush=True)
    sockets = sum(1 if run.startswith("syncps") else 3 for run in options.run)
    reports = []
    for run in options.run:
        report = attack(
            run, folder, attacks=options.attack, frames_each=-(-options.frames // sockets), seed=options.seed
        )
        reports.append(report)
        show(report)
        (folder / f"abuse-{run}.json").write_text(json.dumps(asdict(report), indent=1) + "\n")
    found = [*opens_without_a_token(folder), *unpacks_nothing()]
    for sentence in found or ["without a token nobody listens beyond loopback; nothing on the wire is decompressed"]:
        print(f"VIOLATION: {sentence}" if found else sentence)
    wrong = len(found) + sum(len(r.wrong) + sum(len(result.wrong) for result in r.results) for r in reports)
    frames_sent = sum(result.count for r in reports for result in r.results if result.attack == "flood")
    print(f"{frames_sent} damaged frames; " + ("all rules kept" if not wrong else f"{wrong} violations"), flush=True)
    return 1 if wrong else 0


def show(report: Report) -> None:
    print(f"\n{report.run}: {report.steps} steps; quiet spells differ by {report.noise:.1%}")
    print(f"  {'attack':<10} {'socket':<10} {'count':>8} {'per s':>7}  {'slower':>7}  figures")
    for result in report.results:
        rate = result.count / max(result.seconds, 1e-9)
        figures = ", ".join(f"{name} {value:.2f}" for name, value in result.figures.items())
        slower = f"{report.slower[result.attack]:+.1%}" if result.attack in report.slower else ""
        print(f"  {result.attack:<10} {result.door:<10} {result.count:>8} {rate:>7.0f}  {slower:>7}  {figures}")
        for sentence in result.wrong:
            print(f"    VIOLATION: {sentence}")
    growth = ", ".join(f"{who} {grown:+.1f} MB" for who, grown in report.growth_mb.items())
    print(f"  memory: {growth}")
    for sentence in report.wrong:
        print(f"  VIOLATION: {sentence}")
    sys.stdout.flush()


def _check_possible() -> None:
    if not Path("/proc/self/fd").is_dir():
        raise UserError("abuse needs Linux: it looks at other processes' memory and sockets in /proc")
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3 * NUM_IDLE:
        raise UserError(f"abuse needs {3 * NUM_IDLE} open files at once and {hard} are allowed; raise `ulimit -n`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * NUM_IDLE), hard))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = ("flood", "monsters", "json", "bombs", "idle", "loris", "impostors", "hoard")
    parser = argparse.ArgumentParser(prog="abuse", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=10**6, help="damaged ones, spread over all listening sockets")
    parser.add_argument("--run", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--attack", nargs="+", choices=names, default=list(names))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, help="folder for the runs; default: a new one in the system's temporary folder"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
