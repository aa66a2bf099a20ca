"""Parse, format and classify network addresses, and connect to one over plain TCP."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket

from smolcluster.errors import UserError

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # -> loopback


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`. Names other than localhost are not resolved: False."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def is_address(host: str) -> bool:
    """Return whether `host` is an IP address, not a name."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dial_address(bind: str, port: int) -> str:
    """Return the address by which this machine reaches a server that listens on `bind`."""
    return join_address(_WILDCARDS.get(bind, bind), port)


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`."""
    host, _, port = address.rpartition(":")
    try:
        valid = bool(host.encode("idna"))
    except UnicodeError:  # a label is empty or too long
        valid = False
    if not valid or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"'{address}' is not an address; write HOST:PORT, for example 192.168.1.10:5555")
    return host.removeprefix("[").removesuffix("]"), int(port)


def connect_tcp(host: str, port: int, *, timeout_s: float) -> socket.socket:
    """Connect over TCP. A connection to itself counts as refused (see `reject_self_connection`)."""
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        reject_self_connection(sock)
    except OSError:
        sock.close()
        raise
    return sock


def reject_self_connection(sock: socket.socket) -> None:
    """Raise ConnectionRefusedError if this socket is connected to itself.

    That happens when no process listens on a local port and the system picks the same number as the source port (TCP
    simultaneous open). Such a connection would keep the server from listening there.
    """
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def local_address_towards(address: str) -> str:
    """Return the local address that routes to `address`; other machines of that network can reach it."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(found)  # UDP: sends nothing, only chooses the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"no route from this machine to {address}: {error.strerror or error}") from error
