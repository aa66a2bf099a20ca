"""`smolcluster cluster`: write or check a cluster file, accept a machine that runs `join`."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smolcluster.cli import options
from smolcluster.cli.screen import print_text
from smolcluster.errors import UserError, unknown_name
from smolcluster.observe.text import printable

if TYPE_CHECKING:
    from smolcluster.launch.join.discovery import MachineOffer

REACH_S = 5.0

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: smolcluster cluster init && smolcluster cluster check cluster.yaml",
)


@app.command("init", epilog="Example: smolcluster cluster init --out cluster.yaml")
def init(
    out: Annotated[Path, typer.Option(help="Where to write it. An existing file is not overwritten.")] = Path(
        "cluster.yaml"
    ),
    ssh_config: Annotated[Path | None, typer.Option(help="Whose hosts are tried. Default: ~/.ssh/config.")] = None,
    accept_new: options.AcceptNew = False,
) -> int:
    """Write a cluster file from what is found: this machine, hosts of ~/.ssh/config that respond, machines that `join`."""
    from smolcluster.launch.cluster.inventory import find_machines, write_file

    if out.exists():
        raise UserError(f"{out} already exists; choose another with --out")
    if not out.resolve().parent.is_dir():
        raise UserError(f"{out}: no folder {out.parent}; choose another with --out")
    if ssh_config is not None and not ssh_config.is_file():
        raise UserError(f"--ssh-config {ssh_config}: no such file")
    found = find_machines(ssh_config, accept_new=accept_new, report=print_text)
    try:
        out.write_text(write_file(found), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}; choose another with --out") from error
    reachable = [machine.name for machine in found if not machine.problem]
    print_text(f"written: {out}, with {', '.join(reachable)}; review it, then: smolcluster cluster check {out}")
    return 0


@app.command("check", epilog="Example: smolcluster cluster check cluster.yaml gpt --strategy edp")
def check(
    file: Annotated[Path, typer.Argument(metavar="CLUSTER.yaml")],
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="CONFIG", help="What `up` will train, instead of its run.train.")
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="As it will be given to `up`: it decides who leads.")] = None,
    override: options.Override = None,
    accept_new: options.AcceptNew = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> int:
    """Validate a cluster file and probe its machines: each layer, and the paths to the lead. Changes nothing."""
    from smolcluster.cli.doctor import examine_cluster, report

    found = examine_cluster(
        file,
        train=sources or [],
        overrides=[*(override or []), ("strategy.name", strategy)],
        accept_new=accept_new,
    )
    return report(found, as_json=as_json)


@app.command("accept", epilog="Example: smolcluster cluster accept pi5")
def accept(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="The machine. Default: the only machine that is running `join`."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where it finds the server. Default: of the cluster started last."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of the machine, if discovery does not find it.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="Its rank. Default: the next of a cluster started from here."),
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="Name or file of the cluster. Default: started last.")] = None,
) -> int:
    """Accept a machine that runs `smolcluster join`: type the code that it shows; it gets the token and joins the run."""
    from smolcluster.launch.join.pairing import PairingFailed
    from smolcluster.launch.join.pairing import accept as pair

    places = _places(name, address)
    given = _given(server, cluster, rank)
    try:
        with _reached(places) as connection:
            facts = pair(connection, given, ask=_ask)
    except PairingFailed as error:
        raise UserError(f"not accepted: {error}") from error
    typer.echo(f"{printable(str(facts.get('name')))[:60]} has the token, and joins as worker {given['rank']}")
    return 0


def _places(name: str | None, address: str | None) -> list[tuple[str, int]]:
    """Return the addresses at which the machine listens. One with several links announces all of them."""
    from smolcluster.comm.addresses import split_address
    from smolcluster.launch.join.discovery import find_offers

    if address is not None:
        return [split_address(address)]
    offers = find_offers(wanted=name)
    if not offers:
        raise UserError("no machine found on this network; run `smolcluster join` there, or give --address")
    if name is not None and name not in [offer.name for offer in offers]:
        raise unknown_name("machine", name, [offer.name for offer in offers])
    if name is None and len(offers) > 1:
        raise UserError(f"several machines run `join`; name one: {', '.join(offer.name for offer in offers)}")
    chosen: MachineOffer = next(offer for offer in offers if name in (None, offer.name))
    return [(each, chosen.port) for each in chosen.addresses]


def _reached(places: list[tuple[str, int]]) -> socket.socket:
    """Connect to the first address that this machine can reach."""
    from smolcluster.comm.addresses import join_address

    failed = []
    for place in places:
        try:
            return socket.create_connection(place, timeout=REACH_S)
        except OSError as error:
            failed.append(f"{join_address(*place)} ({error.strerror or error})")
    raise UserError(f"the machine cannot be reached at {', '.join(failed)}")


def _given(server: str | None, cluster: str | None, rank: int | None) -> dict[str, Any]:
    """Return the machine's grant: the cluster's name, its server, a token if needed, and a free rank."""
    from smolcluster.comm.addresses import is_loopback
    from smolcluster.comm.elastic.transport.security import find_tokens
    from smolcluster.launch.cluster.record import load_record, save_record
    from smolcluster.launch.cluster.request import known_cluster, own_tokens

    record: dict[str, Any] = {}
    if server is None or cluster is not None:
        record = load_record(known_cluster(cluster).name)
        server = server or record.get("server")
    if not server:
        raise UserError("the cluster has no server that other machines can reach; give --server HOST:PORT")
    found = find_tokens(None, os.environ)
    entries = found[1] if found is not None else own_tokens(record.get("name", "")).entries()
    token = entries[0].token if entries else None
    if token is None and not is_loopback(server.rpartition(":")[0]):
        raise UserError("this machine has no token, and the server needs one; see `smolcluster token`")
    if rank is None:
        if not record:
            raise UserError(
                f"the ranks of the workers at {server} are not known here: give an unused one with --rank N"
            )
        workers = [process for process in record.get("seats", []) if str(process.get("name")).startswith("worker")]
        rank = int(record.get("next_rank", len(workers)))
        save_record(record | {"next_rank": rank + 1})
    return {"cluster": record.get("name", "the cluster"), "server": server, "token": token, "rank": rank}


def _ask(facts: dict[str, Any]) -> str:
    name, system = (printable(str(facts.get(key, "")))[:60] for key in ("name", "system"))
    typer.echo(f"a pairing code is displayed on {name} ({system})")
    if sys.stdin.isatty():
        return str(typer.prompt("code"))
    return sys.stdin.readline()
