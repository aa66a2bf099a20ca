"""Connect the launchers of `train --elastic` at --rdzv-endpoint. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from smolcluster.comm.addresses import is_loopback, join_address
from smolcluster.comm.elastic.transport.security import Keyring
from smolcluster.comm.mesh.heartbeats import MembershipClient, MembershipServer
from smolcluster.errors import UserError
from smolcluster.launch.restart.rendezvous import SILENT_S

SAME_TOKEN = "give every machine the same cluster token (`smolcluster token show --secret`, `smolcluster token add`)"


@contextlib.contextmanager
def join_endpoint(
    endpoint: tuple[str, int] | None, *, timeout_s: float, keyring: Keyring | None = None
) -> Iterator[tuple[MembershipClient | None, bool]]:
    """Join the launchers at the endpoint. Yield this machine's membership and whether it leads.

    Without an endpoint this machine runs alone: no membership, and it leads. `timeout_s` bounds the wait for the leader.
    """
    if endpoint is None:
        yield None, True
        return
    (host, port), leads = endpoint, False
    check_token(endpoint, keyring)
    with contextlib.ExitStack() as stack:
        if is_local_endpoint(endpoint):
            with contextlib.suppress(UserError):  # another launcher on this machine already serves it
                server = MembershipServer(host, port, silent_s=SILENT_S, keyring=keyring)
                stack.callback(server.close)
                leads = True
        fields = {"host": socket.gethostname(), "workers": 0}
        client = MembershipClient(join_address(host, port), fields, silent_s=SILENT_S, keyring=keyring)
        stack.callback(client.close)
        if not client.wait(lambda: client.number >= 0, timeout_s=timeout_s):
            raise UserError(_problem(client, endpoint, timeout_s))
        yield client, leads


def _problem(client: MembershipClient, endpoint: tuple[str, int], timeout_s: float) -> str:
    """Return why the leader could not be joined."""
    host, port = endpoint
    where = f"--rdzv-endpoint {host}:{port}"
    if client.refusal:
        return f"{where}: {client.refusal}; {SAME_TOKEN}"
    if client.lost:
        return f"{where} has refused this machine; {SAME_TOKEN}"
    if not resolves(host):
        return (
            f"{where}: this machine cannot resolve the name {host}; use the address of the leading machine, such as "
            "192.168.1.10"
        )
    return (
        f"no response from {where} in {timeout_s:g} s (cluster.join_timeout): {client.problem or 'timeout'}; start the same "
        "command on that machine, with this address, and let the port through its firewall"
    )


def check_token(endpoint: tuple[str, int], keyring: Keyring | None) -> None:
    """Require the cluster token for an endpoint that other machines can reach."""
    host, port = endpoint
    if keyring is None and not is_loopback(host):
        raise UserError(
            f"--rdzv-endpoint {host}:{port} can be reached from other machines and needs a cluster token; make one with "
            "`smolcluster token new` and give it to every machine (`smolcluster token add`, or SMOLCLUSTER_TOKEN)"
        )


def resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


def is_local_endpoint(endpoint: tuple[str, int] | None) -> bool:
    """Return whether this machine has the endpoint's address, or there is no endpoint."""
    if endpoint is None:
        return True
    host = endpoint[0]
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except (OSError, UnicodeError):
        return False
    return True
