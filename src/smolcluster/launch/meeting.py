"""Where the launchers of `train --elastic` find each other: at --rdzv-endpoint. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from smolcluster.comm.rollcall import Keeper, Member, dial
from smolcluster.errors import UserError
from smolcluster.launch.rounds import SILENT_S


@contextlib.contextmanager
def met(endpoint: tuple[str, int] | None, *, within_s: float) -> Iterator[tuple[Member | None, bool]]:
    """This machine's place among the launchers, and whether it leads. Without an endpoint it is alone, and has none.

    Machines that start together find each other `within_s`.
    """
    if endpoint is None:
        yield None, True
        return
    (host, port), keeper = endpoint, None
    if is_here(endpoint):
        with contextlib.suppress(OSError):  # another launcher on this machine was first
            keeper = Keeper(host, port, silent_s=SILENT_S)
    try:
        line = dial(host, port, within_s=within_s)
        if line is None and not is_known(host):
            raise UserError(
                f"--rdzv-endpoint {host}:{port}: this machine does not know the name {host}; use the address of the machine "
                "that leads, such as 192.168.1.10"
            )
        if line is None:
            raise UserError(
                f"nobody answers at --rdzv-endpoint {host}:{port} in {within_s:g} s (cluster.join_timeout); is the command "
                "started on that machine, with this address, and does a firewall let it through?"
            )
        member = Member(line, {"host": socket.gethostname(), "workers": 0}, silent_s=SILENT_S)
        with contextlib.closing(member):
            yield member, keeper is not None
    finally:
        if keeper is not None:
            keeper.close()


def is_known(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


def is_here(endpoint: tuple[str, int] | None) -> bool:
    """Whether this machine has that address; where there is none, this machine is all there is."""
    if endpoint is None:
        return True
    host = endpoint[0]
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except (OSError, UnicodeError):  # also a name that cannot be one
        return False
    return True
