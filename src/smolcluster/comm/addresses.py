"""Properties of an address, and a plain TCP connection to it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket


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


def reach(host: str, port: int, *, within_s: float) -> socket.socket:
    """Connect. A connection to itself counts as refused (see `refuse_itself`)."""
    sock = socket.create_connection((host, port), timeout=within_s)
    try:
        refuse_itself(sock)
    except OSError:
        sock.close()
        raise
    return sock


def refuse_itself(sock: socket.socket) -> None:
    """Raise ConnectionRefusedError if this socket is connected to itself.

    That happens when no process listens on a local port and the system picks the same number as the source port (TCP
    simultaneous open). Such a connection would keep the server from listening there.
    """
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
