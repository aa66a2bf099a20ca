"""Connections to the listening sockets of a run, and figures of its processes from /proc."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import ssl
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from smolcluster.comm.elastic.transport import frames
from smolcluster.comm.elastic.transport.messages import Head, Kind, Message
from smolcluster.comm.elastic.transport.parser import Parser
from smolcluster.comm.elastic.transport.security import Credentials, Keyring, NoToken

GONE_S, TO_NOTICE_S = 5.0, 0.5  # the second: until the attacker notices, on a machine that is busy with the attack
HANG_S = 20.0


# Connections


class Ended(Exception):
    """The server has closed the connection."""


@dataclass(frozen=True, slots=True)
class Door:
    """A listening socket of a run."""

    name: str
    pid: int
    port: int
    keyring: Keyring | None = None
    role: str = "worker"  # of a guest
    asks: bool = False  # a connection begins with an ASK
    gone_s: float = GONE_S  # a silent connection is closed after this
    key: str | None = None  # of an HTTP port

    def connect(self) -> socket.socket:
        """Connect from one of many addresses of this machine, so that ports do not run out."""
        sock = socket.socket()
        sock.settimeout(HANG_S)
        sock.bind((f"127.{random.randrange(1, 255)}.{random.randrange(256)}.{random.randrange(1, 255)}", 0))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no TIME_WAIT
        sock.connect(("127.0.0.1", self.port))
        return sock

    @property
    def credentials(self) -> Credentials:
        return NoToken() if self.keyring is None else self.keyring.current


def nowhere(_: Head) -> None:
    """Provide no buffer for a payload."""


class Guest:
    """A client that does the handshake itself, and then sends any bytes."""

    _contexts: dict[str, ssl.SSLContext] = {}

    def __init__(self, door: Door) -> None:
        self._role = door.role
        self.credentials = door.credentials
        self.said: list[bytes] = []
        self.sock: socket.socket = door.connect()
        if door.keyring is not None:
            name = self.credentials.server_name
            context = self._contexts.setdefault(name, door.keyring.current.client_context())
            self.sock = context.wrap_socket(self.sock, server_hostname=name)
        self._parser = Parser(place=nowhere, cluster=self.credentials.cluster)
        self._heard: deque[Message] = deque()
        self._nonce = secrets.token_bytes(32)

    def greet(self, then: bytes = b"") -> Guest:
        """Do the handshake. `then`: sent together with the proof."""
        self.say(self.hello())
        theirs = bytes.fromhex(self.hear().meta["nonce"])
        proof = self.credentials.prove("client", mine=self._nonce, theirs=theirs)
        self.say(self.encoded(Message(kind=Kind.PROOF, meta={"proof": proof.hex()})) + then)
        return self

    def hello(self) -> bytes:
        """Return a HELLO with a rank and a host that no member has."""
        who = {"role": self._role, "rank": random.randrange(100, 1 << 20), "host": secrets.token_hex(8), "versions": {}}
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
    """Return what the server still sends. Raises TimeoutError when it does not close the connection."""
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


# Figures of a process


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(pid: int, *, anew: bool = False) -> int:
    """Return the peak of resident memory. `anew`: reset it."""
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


def alive(pid: int) -> bool:
    """Return True if this process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
