"""Which machines there are, for `smolcluster cluster init`: this one, those that ssh knows, those that offer themselves."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smolcluster.errors import SmolclusterError
from smolcluster.launch.cluster import control
from smolcluster.launch.cluster.layout import LOCAL, Machine

MOST_HOSTS = 64


@dataclass(frozen=True, slots=True)
class Found:
    name: str
    address: str | None  # null: ssh knows it by its name
    facts: dict[str, Any]
    problem: str = ""


def find_machines(ssh_config: Path | None, *, told: Callable[[str], None]) -> list[Found]:
    here = socket.gethostname().partition(".")[0] or "here"
    machines = {here: Machine(name=here, address=LOCAL)}
    for name in hosts_of_ssh(ssh_config or Path("~/.ssh/config").expanduser()):
        machines.setdefault(name, Machine(name=name, address=name))
    offers = _offers()
    told(f"looking at {len(machines)} machine(s), and {len(offers)} that offer themselves")
    found = asyncio.run(_ask(machines))
    for offer in offers:
        if offer.name not in machines:
            facts = {"system": offer.system, "machine": ""}
            found.append(Found(offer.name, offer.addresses[0], facts, "it offers itself: smolcluster cluster accept"))
    for machine in found:
        told(f"{machine.name}: {machine.problem or _describe(machine.facts)}")
    return found


def hosts_of_ssh(path: Path) -> list[str]:
    """Names of single hosts in an ssh configuration; patterns are no machines."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    names: list[str] = []
    for line in text.splitlines():
        match = re.match(r"\s*host[\s=]+(.+)", line, re.IGNORECASE)
        for name in match[1].split() if match is not None else []:
            if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) and name not in names:
                names.append(name)
    return names[:MOST_HOSTS]


def _offers() -> list[Any]:
    try:
        from smolcluster.launch.discovery import find_offers

        return list(find_offers(within_s=2.0))
    except (ImportError, SmolclusterError):
        return []


async def _ask(machines: dict[str, Machine]) -> list[Found]:
    found: list[Found] = []
    async with control.connected(machines) as (hosts, problems):
        for name, machine in machines.items():
            address = machine.address if machine.local else None
            if name in problems:
                found.append(Found(name, address, {}, problems[name].what))
                continue
            try:
                facts = await hosts[name].ask("look", folder=machine.folder, name="none")
                found.append(Found(name, address, facts))
            except SmolclusterError as error:
                found.append(Found(name, address, {}, str(error)))
    return found


def _describe(facts: dict[str, Any]) -> str:
    memory = f", {facts['memory'] / 1e9:.0f} GB" if facts.get("memory") else ""
    gpus = f", {', '.join(facts['gpus'])}" if facts.get("gpus") else ""
    return f"{facts['system']} {facts['machine']}, {facts['cpus']} cores{memory}{gpus}"


def write_file(found: list[Found]) -> str:
    """The text of a cluster file. Machines that did not answer stand there as comments, with the reason."""
    lines = [
        "# The machines of a cluster; `smolcluster up cluster.yaml` trains on them. See docs/cluster.md.",
        "hosts:",
    ]
    for machine in found:
        entry = f"  {machine.name}: " + ("{}" if machine.address is None else f"{{address: {machine.address}}}")
        lines.append(
            f"  # {entry.strip()}  # {machine.problem}" if machine.problem else f"{entry}  # {_describe(machine.facts)}"
        )
    good = [machine for machine in found if not machine.problem]
    alone = len(good) == 1
    lines += ["", f"server: {good[0].name if good else 'NAME'}  # it should be one that is always on"]
    if good and good[0].address == LOCAL and not alone:
        lines.append(
            "# Others must reach this machine: say where, instead of `local`, or as server_address of each host."
        )
    lines += [
        "strategy: edp  # machines may differ, come and go; see `smolcluster strategies`",
        "",
        "run:",
        "  train: gpt",
    ]
    return "\n".join(lines) + "\n"
