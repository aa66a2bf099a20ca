"""`smolcluster join`: offer this machine to a cluster found on the network."""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from smolcluster.cli.options import OwnerOptions, grouped
from smolcluster.cli.screen import print_text
from smolcluster.errors import UserError
from smolcluster.observe.text import printable

EXAMPLES = """Examples:
smolcluster join
smolcluster join pi5 --device cpu
smolcluster join --data-root ~/mnist
Then, where the cluster was started: smolcluster cluster accept
"""


@grouped
def join(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="What to call this machine. Default: its name.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Offer this machine at one address only, e.g. that of a link. Default: all.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Keep the cluster's token on this machine for later runs.")
    ] = True,
    *,
    own: OwnerOptions,
) -> int:
    from smolcluster.config.checks import HOST_NAME
    from smolcluster.launch.join.discovery import announced, own_addresses

    called = name or socket.gethostname().partition(".")[0]
    if not HOST_NAME.fullmatch(called):
        raise UserError(f"'{called}' is not a machine name; use letters, digits, '-', '_' and '.'")
    spec = own.spec(0, called, server="cluster:1")  # raises for wrong options
    facts = {"name": called, "system": f"{platform.system()} {platform.machine()}", "python": platform.python_version()}
    with _listen(address) as listener:
        addresses = [address] if address is not None else own_addresses()
        port = listener.getsockname()[1]
        with announced(called, port, addresses=addresses, system=facts["system"]):
            typer.echo(f"{called} is listening on {', '.join(addresses)}, port {port}")
            typer.echo(f"the cluster may use {describe_access(own, spec.overrides)}")
            typer.echo("accept it where the cluster was started: smolcluster cluster accept")
            given = PairingGrant.read(_wait_for_pairing(listener, facts))
    typer.echo(printable(f"accepted by {given.cluster}; its server is at {given.server}"))
    return _run_worker(called, given, own=own, keep=keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingGrant:
    """What a cluster sends to a machine that it accepts."""

    cluster: str
    server: str
    rank: int
    token: str | None

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> PairingGrant:
        """Check what came over the network. Raises UserError."""
        kinds: dict[str, Any] = {"cluster": str, "server": str, "rank": int, "token": str | None}
        given: dict[str, Any] = {name: fields.get(name) for name in kinds}
        for name, value in given.items():
            is_kind = isinstance(value, kinds[name]) and not isinstance(value, bool)
            if not is_kind or (isinstance(value, int) and value < 0):
                found = f"{value!r:.60}" if name in fields else "missing"
                expected = "an integer >= 0" if name == "rank" else "a string"
                problem = f"the cluster sent an invalid {name} ({found}; expected {expected})"
                raise UserError(f"{problem}; install the same version on both machines")
        return cls(**given)


def describe_access(own: OwnerOptions, given: Mapping[str, Any]) -> str:
    """Describe what the cluster may use of this machine. `given`: the worker's own values by dotted name."""
    root, name = given.get("data.root"), given.get("data.name", "embedded")
    if root is not None:
        access = [f"the files of {root}, whose content training can reveal"]
    elif name != "embedded":
        access = [f"the data {name} in its cache folder, downloaded if it is not there"]
    else:
        access = ["none of its files"]
    access += [f"the code of {own.task}"] if own.task else []
    access += [f"as you set it: {' '.join(own.override)}"] if own.override else []
    return f"its {given.get('training.device') or 'best device'} and memory, and {'; '.join(access)}"


def _listen(address: str | None) -> socket.socket:
    from smolcluster.launch.join.discovery import own_addresses

    try:
        wide = address is None or ipaddress.ip_address(address).version == 4
        return socket.create_server((address or "", 0), family=socket.AF_INET if wide else socket.AF_INET6)
    except (OSError, ValueError) as error:
        known = ", ".join(own_addresses())
        raise UserError(f"--address {address} is not an address of this machine; it has {known}") from error


def _wait_for_pairing(listener: socket.socket, facts: dict[str, Any]) -> dict[str, Any]:
    """Pair with a cluster that connects, and return what it sends. Raises UserError after MAX_CODES codes."""
    from smolcluster.launch.join.pairing import MAX_CODES, PairingFailed, offer

    shown: list[str] = []

    def show(code: str) -> None:
        shown.append(code)
        typer.echo(f"{peer[0]} wants to pair; type this code there:  {code}")

    while len(shown) < MAX_CODES:
        connection, peer = listener.accept()
        with connection:
            try:
                return offer(connection, facts, show=show)
            except PairingFailed as error:
                print_text(f"not accepted: {error}", err=True)
    raise UserError(f"not accepted after {MAX_CODES} codes; run `smolcluster join` again")


def _run_worker(name: str, given: PairingGrant, *, own: OwnerOptions, keep: bool) -> int:
    from smolcluster.cli.ending import leave_after
    from smolcluster.comm.elastic.transport.security import TokenEntry, token_file
    from smolcluster.launch.join.worker import run_joined

    spec = own.spec(given.rank, name, server=given.server)
    if given.token:
        if keep:
            file = token_file(os.environ)
            if given.token not in [entry.token for entry in file.entries()]:
                file.add([TokenEntry(given.token, note=f"of {given.cluster}")])
        os.environ["SMOLCLUSTER_TOKEN"] = given.token
    leave_after(lambda: run_joined(spec))
