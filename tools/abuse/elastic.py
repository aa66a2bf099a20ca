"""Attacks on a listening socket of the elastic plane, by unauthenticated clients and by clients that passed the handshake."""

from __future__ import annotations

import contextlib
import gzip
import hmac
import os
import random
import select
import socket
import ssl
import statistics
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch

from smolcluster.comm.elastic.transport import frames
from smolcluster.comm.elastic.transport.frames import FrameError
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.elastic.transport.parser import Parser
from smolcluster.comm.elastic.transport.security import Credentials, Keyring, new_token
from tools.abuse.doors import (
    HANG_S,
    TO_NOTICE_S,
    Door,
    Ended,
    Guest,
    nowhere,
    peak_bytes,
    resident_bytes,
    until_the_end,
)
from tools.abuse.report import GROWTH_BYTES, Attacks, Result
from tools.fuzz import mutated, refit

REFUSED_S, REFUSED_BYTES = 0.010, 1 << 20
NUM_IDLE, NUM_LORIS = 1000, 100
THREADS = 6
ASKED = 0.5  # of the guests, where a connection begins with an ASK


@dataclass(frozen=True, kw_only=True)
class Speech:
    """The messages of a kind of run, to be damaged and forged."""

    honest: Sequence[Message]
    large: Message  # its lengths are what a monster changes
    written: Sequence[Kind]  # with meta of every sort
    tensors: Sequence[Kind]  # with payloads of every sort
    hoards: Sequence[Callable[[int], Message]]  # numbered messages, which the server would have to buffer


def harm(canary: Path) -> bytes:
    """Return a pickle that executes a command."""
    return f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode()


class Abuse(Attacks):
    """All attacks on the elastic plane."""

    names: tuple[str, ...] = ("flood", "monsters", "json", "bombs", "idle", "loris", "impostors", "hoard")

    def __init__(self, canary: Path, speech: Speech) -> None:
        super().__init__(canary)
        self._speech = speech
        self._honest = [_to_bytes(message) for message in speech.honest]
        self._counting = threading.Lock()

    def flood(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        in_threads(rng, count, lambda own_rng, share: self._flood(door, result, own_rng, share))

    def _flood(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        with contextlib.suppress(OSError):
            os.nice(10)  # this thread alone, on Linux
        for _ in range(count):
            if result.wrong or time.monotonic() > self.deadline:
                return
            data = self._damaged(rng, door.credentials.cluster)
            guest = rng.random() < 0.5
            if guest and door.asks and rng.random() < ASKED:
                data = _to_bytes(Message(kind=Kind.ASK), door) + data
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
                result.wrong.append("the socket refuses connections")
            except (ConnectionError, ssl.SSLError, Ended):
                pass  # closed before all was sent
            with self._counting:
                result.count += 1

    def _damaged(self, rng: random.Random, cluster: bytes) -> bytes:
        data = bytearray(rng.choice(self._honest))
        data[16:24] = cluster
        how = rng.random()
        if how < 0.4:  # one bit, and a wrong checksum
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
        base = bytearray(_to_bytes(self._speech.large))
        meta = bytes(base[128 : 128 + struct.unpack_from("<I", base, 44)[0]])
        for _ in range(60):  # the cost of as many valid connections does not count
            until_the_end(Guest(door).greet().sock)
        took, before = [], peak_bytes(door.pid, anew=True)
        cases = [(48, "Q", 2**63), (48, "Q", 2**64 - 1), (48, "Q", 2**32 + 1), (48, "Q", 2**32), (44, "I", 2**32 - 1)]
        for number in range(12 * len(cases)):
            offset, layout, value = cases[number % len(cases)]
            data = bytearray(base)
            struct.pack_into("<" + layout, data, offset, value)
            if value == 2**32:  # a shape that fits: within the limit, but not expected
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
        for kind in self._speech.written:
            for text in texts:
                head = bytearray(_to_bytes(Message(kind=kind), door))
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
            harm(self.canary),
        ]
        for kind in self._speech.tensors:
            for bomb in bombs:
                payload = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
                for codec in frames.CODECS:
                    message = Message(kind=kind, codec=codec, epoch=1, payload=payload)
                    self._provoke(door, result, _to_bytes(message, door))

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
            result.wrong.append(f"refused before: {error!r}")

    def idle(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        outstay(door, result, [door.connect for _ in range(NUM_IDLE)], say=b"")

    def loris(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        outstay(door, result, [door.connect for _ in range(NUM_LORIS)], say=self._opening(door))

    def _opening(self, door: Door) -> bytes:
        """Return the first bytes of a valid connection."""
        if door.keyring is None:
            return self._honest[0]
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = door.keyring.current.client_context().wrap_bio(
            incoming, outgoing, server_hostname=door.keyring.current.server_name
        )
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        return outgoing.read()

    def impostors(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        cases = _open_impostors(door) if door.keyring is None else _token_impostors(door, door.keyring)
        for name, heard in cases:
            result.count += 1
            if heard is None:
                result.wrong.append(f"{name}: no end within {HANG_S:g} s")
            elif _kinds(heard) & {Kind.ACCEPT, Kind.PROOF, Kind.PLAN}:
                result.wrong.append(f"{name}: was let in")

    def hoard(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        """Send messages that the server would have to buffer, for some seconds each."""
        before = resident_bytes(door.pid)
        most = before
        for make in self._speech.hoards:
            guest = Guest(door).greet(_to_bytes(Message(kind=Kind.ASK), door) if door.asks else b"")
            deadline = time.monotonic() + 3.0
            guest.sock.settimeout(1.0)
            with contextlib.suppress(OSError):
                for number in range(200 if make(0).kind is not Kind.ASK else 20_000):
                    guest.sock.sendall(guest.encoded(make(number)))
                    result.count += 1
                    if time.monotonic() > deadline:
                        break
            time.sleep(0.2)  # until what is in flight has arrived
            most = max(most, resident_bytes(door.pid))
            guest.sock.close()
        result.figures = {"rose_mb": (most - before) / 2**20}
        if most - before > GROWTH_BYTES:
            result.wrong.append(f"it kept {(most - before) / 2**20:.0f} MB for clients that are not members")


def in_threads(rng: random.Random, count: int, work: Callable[[random.Random, int], None]) -> None:
    """Call `work` in several threads, each with random numbers of its own and its share of the count."""
    shares = [count // THREADS + (number < count % THREADS) for number in range(THREADS)]
    threads = [threading.Thread(target=work, args=(random.Random(rng.random()), share)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def outstay(door: Door, result: Result, makers: Sequence[Callable[[], socket.socket]], *, say: bytes) -> None:
    """Measure how long each connection stays open. `say`: send one byte of it now and then."""
    began: dict[int, tuple[socket.socket, float]] = {}
    poll, longest, said = select.poll(), 0.0, 0
    for make in makers:
        sock = make()
        sock.setblocking(False)
        began[sock.fileno()] = (sock, time.monotonic())
        poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    deadline = time.monotonic() + door.gone_s + HANG_S
    while began and time.monotonic() < deadline:
        for number, _ in poll.poll(200):
            sock, since = began[number]
            with contextlib.suppress(ConnectionError, BlockingIOError):
                if sock.recv(1 << 12):
                    continue  # the last bytes before the end
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
        result.wrong.append(f"{len(began)} of {len(makers)} were still there after {door.gone_s + HANG_S:g} s")
    elif longest > door.gone_s + TO_NOTICE_S:
        result.wrong.append(f"one of them was there for {longest:.2f} s")
    for sock, _ in began.values():
        sock.close()


def _to_bytes(message: Message, door: Door | None = None) -> bytes:
    cluster = frames.NO_CLUSTER if door is None else door.credentials.cluster
    return b"".join(frames.encode(message, cluster=cluster).chunks())


def _kinds(heard: bytes) -> set[Kind]:
    """Return the kinds of the valid frames at its beginning."""
    parser, kinds = Parser(place=nowhere, cluster=None), set()
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
    hello = _to_bytes(Message(kind=Kind.HELLO, meta={"nonce": "00" * 32}), door)
    yield "no TLS", _answer(door.connect(), hello)

    other = Credentials(new_token())
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    wrong, bare, old = other.client_context(), plain, other.client_context()
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    for context in (wrong, bare, old):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    cases = [
        ("a wrong token", wrong, keyring.current.server_name),
        ("a wrong token, and its name", wrong, other.server_name),
    ]
    cases += [("no certificate", bare, keyring.current.server_name), ("TLS 1.2", old, keyring.current.server_name)]
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
    """Replay what a valid client has sent, byte for byte, on another connection."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = keyring.current.client_context().wrap_bio(incoming, outgoing, server_hostname=keyring.current.server_name)
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
    client.write(_to_bytes(Message(kind=Kind.HELLO), door))
    recorded += outgoing.read()
    sock.close()
    return _answer(door.connect(), recorded)
