"""What follows from an address by itself, and a plain connection to it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Names other than localhost are not looked up: they count as reachable."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def is_address(host: str) -> bool:
    """Whether `host` is a number, not a name."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def reach(host: str, port: int, *, within_s: float) -> socket.socket:
    """Connect; a connection to itself counts as refused."""
    sock = socket.create_connection((host, port), timeout=within_s)
    try:
        refuse_itself(sock)
    except OSError:
        sock.close()
        raise
    return sock


def refuse_itself(sock: socket.socket) -> None:
    """A port of this machine where nobody listens may be the very one that the system gives to who asks for it. TCP then
    connects the asker with itself, and nobody else can listen there any more. It counts as what it would have been: refused."""
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
