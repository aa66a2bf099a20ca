"""`smolcluster doctor`: what is wrong, and how to mend it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from smolcluster.launch.doctor.layers import Finding

EXAMPLES = """Examples:

smolcluster doctor

smolcluster doctor 192.168.1.10:65432

smolcluster doctor cluster.yaml
"""


def doctor(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[CLUSTER.yaml|HOST:PORT]", help="A cluster, or a server. Default: this machine."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> int:
    """Name the layer that fails (name, route, firewall, port, ..., token) and the remedy. Changes nothing. Status 1 if any is
    bad."""
    from smolcluster.launch.doctor import here, there

    if what is None:
        found = list(here.examine())
    elif what.endswith((".yaml", ".yml")):
        found = examine_cluster(Path(what))
    else:
        from smolcluster.comm.elastic.sockets import split_address

        found = list(there.examine(*split_address(what)))
    return report(found, as_json=as_json)


def examine_cluster(file: Path, *, accept_new: bool = False) -> list[Finding]:
    import asyncio

    from smolcluster.launch.cluster.layout import lay_out
    from smolcluster.launch.cluster.read import read_cluster
    from smolcluster.launch.doctor import cluster

    wish = read_cluster(file)
    layout = lay_out(wish.config, name=wish.name, run="check")
    return asyncio.run(cluster.examine(layout, accept_new=accept_new))


def report(found: list[Finding], *, as_json: bool) -> int:
    import dataclasses

    from smolcluster.launch.doctor.layers import Verdict

    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in found], indent=1))
    else:
        widths = [max((len(part(finding)) for finding in found), default=0) for part in (_host, _layer, _verdict)]
        for finding in found:
            head = [
                part(finding).ljust(width)
                for part, width in zip((_host, _layer, _verdict), widths, strict=True)
                if width
            ]
            typer.echo("  ".join([*head, finding.what]))
            if finding.remedy and finding.verdict is not Verdict.GOOD:
                typer.echo("  ".join([" " * len(cell) for cell in head] + [f"-> {finding.remedy}"]))
    return 1 if any(finding.verdict is Verdict.BAD for finding in found) else 0


def _host(finding: Finding) -> str:
    return finding.host


def _layer(finding: Finding) -> str:
    return str(finding.layer)


def _verdict(finding: Finding) -> str:
    return str(finding.verdict)
