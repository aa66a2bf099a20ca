"""Sockets and their options."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import math
import os
import socket
import struct
import sys
from typing import Any

from smolcluster.comm.addresses import join_address, reject_self_connection
from smolcluster.errors import UserError

BACKLOG = 1024
# TCP_KEEPALIVE is the macOS name of TCP_KEEPIDLE.
KEEPALIVE_S = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
UNSENT_BYTES = 1 << 19  # TCP_NOTSENT_LOWAT: a larger kernel buffer would only hide how far the peer is behind


# BBR underestimates the bandwidth of bursty, bidirectional collectives and leaves a part of a local link idle
# (`benchmarks p1`). Connections to private addresses use the first of these that is available instead.
INSTEAD_OF_BBR = (b"cubic", b"reno")


def set_options(sock: socket.socket, *, buffer_size: int | None) -> None:
    """Set those options that this system has."""
    options = [(socket.IPPROTO_TCP, "TCP_NODELAY", 1), (socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", UNSENT_BYTES)]
    options += [(socket.SOL_SOCKET, "SO_KEEPALIVE", 1)]
    options += [(socket.IPPROTO_TCP, name, value) for name, value in KEEPALIVE_S.items()]
    if buffer_size is not None:
        options += [(socket.SOL_SOCKET, name, buffer_size) for name in ("SO_SNDBUF", "SO_RCVBUF")]
    for level, name, value in options:
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(level, getattr(socket, name), value)
    if _is_local(sock):
        _replace_bbr(sock)


def _is_local(sock: socket.socket) -> bool:
    try:
        return ipaddress.ip_address(sock.getpeername()[0].partition("%")[0]).is_private
    except (OSError, ValueError):
        return False


def _replace_bbr(sock: socket.socket) -> None:
    if sys.platform != "linux":
        return
    for algorithm in INSTEAD_OF_BBR:
        with contextlib.suppress(OSError):  # not available, or not permitted
            if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm)


def wake_at(sock: socket.socket, *, nbytes: int) -> bool:
    """Wake the reader only when `nbytes` have arrived or the peer has closed. Returns False if this system cannot."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
    except (AttributeError, OSError):
        return False
    return True


def unanswered_s(sock: socket.socket) -> float | None:
    """Return for how long the peer's kernel has not acknowledged sent data; infinity after repeated retransmissions.

    None where the system does not report it (only Linux does). The kernel acknowledges for a stopped or busy process, not
    when its machine or the network is gone.
    """
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    except OSError:
        return None
    retransmits, unacked, last_ack_ms = (
        info[2],
        *struct.unpack_from("=I", info, 24),
        *struct.unpack_from("=I", info, 56),
    )
    if retransmits > 1:
        return math.inf  # although packets may still arrive, as when the network is cut in one direction
    return last_ack_ms / 1000 if unacked else 0.0


def listen_on(host: str, port: int, *, buffer_size: int | None) -> list[socket.socket]:
    """Listen on every address that `host` resolves to, IPv4 and IPv6, all on one port. Port 0: any free one."""
    where = join_address(host, port)
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UserError(
            f"cannot listen on {where}: '{host}' is no address of this machine ({error.strerror})"
        ) from error
    sockets: list[socket.socket] = []
    problem, absent = "no address", True
    for family, kind, protocol, _, name in dict.fromkeys(found):
        port = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_listener(family, kind, protocol, (name[0], port, *name[2:]), buffer_size))
        except OSError as error:
            problem = error.strerror or str(error)
            absent = error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # such as IPv6: skip it
            if not absent:
                for sock in sockets:
                    sock.close()
                sockets.clear()
                break
    if not sockets:
        busy = "another process may be using it; choose another port, or 0 for any free one"
        remedy = f"'{host}' is no address of this machine" if absent else busy
        raise UserError(f"cannot listen on {where}: {problem}; {remedy}")
    return sockets


def _listener(family: int, kind: int, protocol: int, name: Any, buffer_size: int | None) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        elif hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # on Windows SO_REUSEADDR would let other processes take the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if buffer_size is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_size)  # before listen: sets the window scale
        sock.bind(name)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


async def dial(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
    """Connect to the first address of `host` that accepts."""
    problem: OSError | None = None
    for family, kind, protocol, _, name in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, name)
            reject_self_connection(sock)
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:  # cancelled
            sock.close()
            raise
        else:
            return sock
    raise problem or OSError(f"'{host}' has no address")
