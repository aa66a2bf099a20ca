"""Where the launchers of `train --elastic` find each other: at --rdzv-endpoint. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from smolcluster.comm.addresses import is_loopback
from smolcluster.comm.elastic.membership.heartbeats import MembershipClient, MembershipServer
from smolcluster.comm.elastic.transport.security import Keyring
from smolcluster.comm.elastic.transport.sockets import join_address
from smolcluster.errors import UserError
from smolcluster.launch.restart.rounds import SILENT_S

SAME_TOKEN = "give every machine the same cluster token (`smolcluster token show --secret`, `smolcluster token add`)"


@contextlib.contextmanager
def met(
    endpoint: tuple[str, int] | None, *, within_s: float, keyring: Keyring | None = None
) -> Iterator[tuple[MembershipClient | None, bool]]:
    """This machine's membership among the launchers, and whether it leads. Without an endpoint it is alone, and has none.

    Machines that start together find each other `within_s`. Beyond this machine they need the cluster token.
    """
    if endpoint is None:
        yield None, True
        return
    (host, port), leads = endpoint, False
    check_token(endpoint, keyring)
    with contextlib.ExitStack() as stack:
        if is_here(endpoint):
            with contextlib.suppress(UserError):  # another launcher on this machine was first
                server = MembershipServer(host, port, silent_s=SILENT_S, keyring=keyring)
                stack.callback(server.close)
                leads = True
        fields = {"host": socket.gethostname(), "workers": 0}
        client = MembershipClient(join_address(host, port), fields, silent_s=SILENT_S, keyring=keyring)
        stack.callback(client.close)
        if not client.wait(lambda: client.number >= 0, within_s=within_s):
            raise UserError(_problem(client, endpoint, within_s))
        yield client, leads


def _problem(client: MembershipClient, endpoint: tuple[str, int], within_s: float) -> str:
    """Why there is no membership."""
    host, port = endpoint
    where = f"--rdzv-endpoint {host}:{port}"
    if client.refusal:
        return f"{where}: {client.refusal}; {SAME_TOKEN}"
    if client.lost:
        return f"{where} has refused this machine; {SAME_TOKEN}"
    if not is_known(host):
        return (
            f"{where}: this machine does not know the name {host}; use the address of the machine that leads, such as "
            "192.168.1.10"
        )
    return (
        f"nobody answers at {where} in {within_s:g} s (cluster.join_timeout): {client.problem or 'no answer'}; is the command "
        "started on that machine, with this address, and does a firewall let it through?"
    )


def check_token(endpoint: tuple[str, int], keyring: Keyring | None) -> None:
    """Beyond this machine launchers meet with a token only."""
    host, port = endpoint
    if keyring is None and not is_loopback(host):
        raise UserError(
            f"--rdzv-endpoint {host}:{port} can be reached from other machines, and there is no cluster token to tell ours "
            "from others; make one with `smolcluster token new` and give it to every machine (`smolcluster token add`, or "
            "SMOLCLUSTER_TOKEN)"
        )


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
