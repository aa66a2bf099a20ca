"""Check a server by HOST:PORT: name, route, firewall, port, server, token, in this order, up to the first failure.

The doctor sends a TLS ClientHello; the response identifies the kind of server:

    TLS, a smolcluster certificate      a server with a token; the same token if the certificate is the same
    a smolcluster frame                 a server without a token; the frame has its version
    anything else, or nothing           another program
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from smolcluster.comm.addresses import join_address
from smolcluster.comm.elastic.transport.frames import MAGIC, PREFIX, VERSION, encode
from smolcluster.comm.elastic.transport.handshake import Handshake
from smolcluster.comm.elastic.transport.security import DOMAIN, Credentials, load_keyring
from smolcluster.engine.identity import new_peer
from smolcluster.errors import SmolclusterError
from smolcluster.launch.cluster.agent.machine import layer_of, problem_of
from smolcluster.launch.doctor.layers import Finding, Layer, bad, good, known_remedy
from smolcluster.observe.text import printable

RESPONSE_S = 5.0
_NO_TOKEN = "0" * 16  # the id of no token; a server still responds to the handshake
_TLS = b"\x16"  # first byte of a TLS handshake record
_MAX_CHARACTERS = 60  # characters of another program's response to print

Address = tuple[str, int]
T = TypeVar("T")


def examine(host: str, port: int) -> Iterator[Finding]:
    place = join_address(host, port)
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError) as error:
        yield bad(Layer.NAME, f"the name {host} does not resolve ({getattr(error, 'strerror', None) or error})")
        return
    yield good(Layer.NAME, f"{host} is {', '.join(addresses)}")
    try:
        with socket.create_connection((host, port), timeout=RESPONSE_S) as line:
            yield good(Layer.ROUTE, f"from {line.getsockname()[0]} to {line.getpeername()[0]}")
            yield good(Layer.PORT, f"{place} accepts connections")
        yield from _check_handshake((host, port))
    except OSError as error:
        yield bad(Layer(layer_of(error)), f"{place}: {problem_of(error)}")


def _check_handshake(place: Address) -> Iterator[Finding]:
    """Check whether this machine could join the server, with each of its tokens."""
    own: tuple[Credentials, ...] = ()
    probe, problem = None, ""
    try:
        if (keyring := load_keyring(None, os.environ)) is not None:
            own = keyring.credentials
        for known in own:
            probe = ask(place, known)
            if probe.same is not None or not probe.wants_token:
                break
    except SmolclusterError as error:  # an unreadable token, or a missing package
        problem = str(error)
    probe = probe or ask(place)
    if probe.problem:
        yield bad(Layer.SERVER, f"not a smolcluster server: {probe.problem}")
        return
    if probe.version not in (None, VERSION):
        what = f"the server speaks protocol version {probe.version}, this machine version {VERSION}"
        yield bad(Layer.SERVER, what, known_remedy(Layer.SERVER, 1))
        return
    yield good(Layer.SERVER, f"a smolcluster server with{'' if probe.wants_token else 'out'} a token")
    yield bad(Layer.TOKEN, problem) if problem else _tokens(probe, own)


def _tokens(probe: ServerProbe, own: tuple[Credentials, ...]) -> Finding:
    names = ", ".join(known.name for known in own)
    if probe.same is not None:
        return good(Layer.TOKEN, f"both have {probe.same.name}")
    if not own:
        if probe.wants_token:
            remedy = "copy the server's: there `smolcluster token show --secret`, here `smolcluster token add`"
            return bad(Layer.TOKEN, "the server requires a token, and this machine has none", remedy)
        return good(Layer.TOKEN, "no token, and none is required")
    if probe.wants_token:
        return bad(Layer.TOKEN, f"the server's token is not among this machine's: {names}")
    remedy = "start the server with this token, or remove it here: smolcluster token show"
    return bad(Layer.TOKEN, f"the server has no token, and this machine would use {names}", remedy)


# What listens there


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProbe:
    wants_token: bool = False
    same: Credentials | None = None  # the token that both have
    version: int | None = None  # of the protocol, if known
    problem: str = ""  # response of another program


def ask(place: Address, known: Credentials | None = None) -> ServerProbe:
    """Begin a TLS handshake with this token or none, and classify the response. Raises OSError if the connection fails."""
    context = known.client_context() if known is not None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate is compared below
    name = known.server_name if known is not None else _NO_TOKEN + DOMAIN
    with socket.create_connection(place, timeout=RESPONSE_S) as line:
        secure = _Secure(line, context, name)
        first = secure.begin()
        if (version := _version(first)) is not None:
            return ServerProbe(version=version)
        if not first.startswith(_TLS):
            return ServerProbe(problem=_describe_reply(first))
        certificate = secure.certificate()
        if certificate is None or DOMAIN.encode() not in certificate:  # its name is in there as plain text
            return ServerProbe(problem="it speaks TLS without a smolcluster certificate")
        if known is None or certificate != known.certificate:
            return ServerProbe(wants_token=True)
        with contextlib.suppress(OSError):
            me = new_peer(role="worker", rank=0, host="doctor")
            (hello,) = Handshake(me, credentials=known).begin()
            version = _version(secure.exchange(encode(hello, cluster=known.cluster).head))
        return ServerProbe(wants_token=True, same=known, version=version)


class _Secure:
    """TLS on a connection that exposes the raw bytes of the first response."""

    def __init__(self, line: socket.socket, context: ssl.SSLContext, name: str) -> None:
        self._line = line
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)

    def begin(self) -> bytes:
        """Return the peer's first bytes; empty if it closed the connection or sent nothing for RESPONSE_S."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        first = b""
        with contextlib.suppress(OSError):
            self._line.sendall(self._outgoing.read())
            while len(first) < PREFIX.size and (more := self._line.recv(1 << 14)):
                first += more
        self._incoming.write(first)
        return first

    def certificate(self) -> bytes | None:
        """Return the peer's certificate; None if the handshake fails."""
        try:
            self._until(self._tls.do_handshake)
        except OSError:
            return None
        return self._tls.getpeercert(binary_form=True)

    def exchange(self, data: bytes) -> bytes:
        self._tls.write(data)
        return self._until(lambda: self._tls.read(PREFIX.size))

    def _until(self, work: Callable[[], T]) -> T:
        """Repeat `work` until it needs no more data from the peer. Raises OSError."""
        while True:
            try:
                done = work()
            except ssl.SSLWantReadError:
                self._line.sendall(self._outgoing.read())
                if not (more := self._line.recv(1 << 14)):
                    raise ConnectionError("the peer closed the connection") from None
                self._incoming.write(more)
            else:
                self._line.sendall(self._outgoing.read())
                return done


def _version(first: bytes) -> int | None:
    """Return the protocol version of a peer that responds with frames."""
    if len(first) < PREFIX.size or not first.startswith(MAGIC):
        return None
    return int(PREFIX.unpack(first[: PREFIX.size])[1])


def _describe_reply(first: bytes) -> str:
    text = printable(first.split(b"\n")[0].decode("ascii", "replace")).strip()[:_MAX_CHARACTERS]
    return f"it sent '{text}'" if first else "it does not respond"
