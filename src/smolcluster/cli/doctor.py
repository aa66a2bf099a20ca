"""`smolcluster doctor`: find what fails, and its remedy."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smolcluster.cli.screen import print_text

if TYPE_CHECKING:
    from smolcluster.config import Overrides
    from smolcluster.launch.doctor.layers import Finding

EXAMPLES = """Examples:
smolcluster doctor
smolcluster doctor 192.168.1.10
smolcluster doctor mini1:5000
smolcluster doctor cluster.yaml
"""


def doctor(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[CLUSTER.yaml|HOST[:PORT]]",
            help="A cluster, or a server (default port: 65432). Default: this machine.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> int:
    if what is None:
        from smolcluster.launch.doctor import machine

        found = list(machine.examine())
    elif what.endswith((".yaml", ".yml")):
        found = examine_cluster(Path(what))
    else:
        from smolcluster.launch.doctor import server

        found = list(server.examine(*parse_place(what)))
    return report(found, as_json=as_json)


def parse_place(text: str) -> tuple[str, int]:
    """Parse `host` or `host:port`; an IPv6 address needs brackets before a port."""
    from smolcluster.comm.addresses import join_address, split_address
    from smolcluster.config.schema import ClusterConfig

    if text.count(":") == 1 or "]:" in text:
        return split_address(text)
    host = text.removeprefix("[").removesuffix("]")
    return split_address(join_address(host, ClusterConfig.model_fields["port"].default))


def examine_cluster(
    file: Path,
    *,
    train: Sequence[str] = (),
    overrides: Overrides = (),
    accept_new: bool = False,
) -> list[Finding]:
    """Check the machines of a cluster file, with the arguments of `up`: the strategy decides which machine leads."""
    from smolcluster.launch.cluster.layout import plan_layout
    from smolcluster.launch.cluster.request import read_cluster
    from smolcluster.launch.doctor import cluster

    request = read_cluster(file, train=train, overrides=overrides)
    layout = plan_layout(request.config, name=request.name, run="check")
    return asyncio.run(cluster.examine(layout, accept_new=accept_new))


def report(found: list[Finding], *, as_json: bool) -> int:
    from smolcluster.launch.doctor.layers import Verdict

    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in found], indent=1))
    else:
        heads = [(finding.host, str(finding.layer), str(finding.verdict)) for finding in found]
        widths = [max(map(len, column)) for column in zip(*heads, strict=True)]
        for finding, cells in zip(found, heads, strict=True):
            head = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True) if width)
            print_text(f"{head}  {finding.what}")
            if finding.remedy and finding.verdict is not Verdict.GOOD:
                print_text(f"{' ' * len(head)}  -> {finding.remedy}")
    return 1 if any(finding.verdict is Verdict.BAD for finding in found) else 0
