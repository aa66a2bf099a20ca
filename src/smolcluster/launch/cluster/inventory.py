"""Find machines for `smolcluster cluster init`: this one, the hosts of ~/.ssh/config, those that run `join`.

A host of ~/.ssh/config is written out (HostName, Port, User, IdentityFile, ProxyJump): other machines lack that file. A host
with options that a cluster file lacks is written as its name alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from smolcluster.comm.addresses import join_address, local_address_towards
from smolcluster.config.strategies import UNLIKE
from smolcluster.errors import SmolclusterError
from smolcluster.launch.cluster import control
from smolcluster.launch.cluster.layout import LOCAL, ClusterMachine

MAX_HOSTS = 64
_ONLY_SSH = ("proxycommand", "hostkeyalias")


@dataclass(frozen=True, slots=True)
class FoundMachine:
    name: str
    entry: dict[str, Any]  # for the file; empty: ssh resolves its name
    facts: dict[str, Any]
    problem: str = ""


def find_machines(
    ssh_config: Path | None, *, accept_new: bool = False, report: Callable[[str], None]
) -> list[FoundMachine]:
    own_name = socket.gethostname().partition(".")[0] or "here"
    known: dict[str, ClusterMachine] = {}
    with contextlib.suppress(OSError):
        text = (ssh_config or Path("~/.ssh/config").expanduser()).read_text(encoding="utf-8", errors="replace")
        known = machines_of_ssh(text)
    machines = {own_name: ClusterMachine(name=own_name, address=LOCAL)} | {
        n: m for n, m in known.items() if n != own_name
    }
    aliases = _aliases(machines)
    offers = _offers()
    more = f"; {len(offers)} more running `smolcluster join`" if offers else ""
    report(f"probing {len(machines) - len(aliases)} machine(s){more}")
    probed = {name: machine for name, machine in machines.items() if name not in aliases}
    results = asyncio.run(_probe(probed, accept_new=accept_new))
    found = [
        FoundMachine(
            name, entry_of(machines, name), *results.get(name, ({}, f"the same machine as {aliases.get(name)}"))
        )
        for name in machines
    ]
    for offer in offers:
        if offer.name not in machines:
            facts = {"system": offer.system, "machine": ""}
            entry = {"address": offer.addresses[0]}
            found.append(
                FoundMachine(offer.name, entry, facts, "running `join`; accept it with `smolcluster cluster accept`")
            )
    for machine in found:
        report(f"{machine.name}: {machine.problem or _describe(machine.facts)}")
    return found


# The ssh configuration


def hosts_of_ssh(text: str) -> list[str]:
    """Return the hosts of an ssh configuration, without patterns."""
    names: list[str] = []
    for key, values in _lines(text):
        for name in values if key == "host" else ():
            if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) and name not in names:
                names.append(name)
    return names[:MAX_HOSTS]


def ssh_options(text: str, name: str) -> dict[str, str]:
    """Return the options of one host: the first value of each key, as ssh does. `Match` and `Include` are ignored."""
    options: dict[str, str] = {}
    applies = True
    for key, values in _lines(text):
        if key == "host":
            matching = [word for word in values if fnmatch.fnmatchcase(name, word.removeprefix("!"))]
            applies = bool(matching) and not any(word.startswith("!") for word in matching)
        elif key == "match":
            applies = False
        elif applies and values:
            options.setdefault(key, values[0] if key != "proxycommand" else " ".join(values))
    return options


def _lines(text: str) -> list[tuple[str, list[str]]]:
    """Parse the lines into lower-case keys and their values, without quotes."""
    matches = (re.match(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.+)", line) for line in text.splitlines())
    return [
        (match[1].lower(), [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', match[2])])
        for match in matches
        if match is not None
    ]


def machines_of_ssh(text: str) -> dict[str, ClusterMachine]:
    """Return the hosts of an ssh configuration, each with its resolved address."""
    hosts = {name: ssh_options(text, name) for name in hosts_of_ssh(text)}
    given = {name: options.get("proxyjump", "none") for name, options in hosts.items()}
    jumps = {name: None if jump in ("none", name) else jump for name, jump in given.items()}
    return {name: _machine(name, options, jumps) for name, options in hosts.items()}


def _machine(name: str, options: Mapping[str, str], jumps: Mapping[str, str | None]) -> ClusterMachine:
    if not _listed(name, jumps) or any(key in options for key in _ONLY_SSH):
        return ClusterMachine(name=name, address=name)
    port = options.get("port", "")
    return ClusterMachine(
        name=name,
        address=options.get("hostname", name).replace("%h", name),
        port=int(port) if port.isdecimal() else None,
        user=options.get("user"),
        key=options.get("identityfile"),
        via=jumps[name],
    )


def _listed(name: str, jumps: Mapping[str, str | None]) -> bool:
    """Return whether all its jump hosts are known, without a cycle."""
    passed = [name]
    while passed[-1] in jumps and (jump := jumps[passed[-1]]) is not None:
        if jump in passed:
            return False
        passed.append(jump)
    return passed[-1] in jumps


def _aliases(machines: Mapping[str, ClusterMachine]) -> dict[str, str]:
    """Return aliases of machines that an earlier name has, with that name."""
    first: dict[tuple[str, int | None, str | None], str] = {}
    places = {name: (machine.address, machine.port, machine.via) for name, machine in machines.items()}
    return {name: other for name, place in places.items() if (other := first.setdefault(place, name)) != name}


def _offers() -> list[Any]:
    try:
        from smolcluster.launch.join.discovery import find_offers

        return list(find_offers(timeout_s=2.0))
    except (ImportError, SmolclusterError):
        return []


# Probing the machines


async def _probe(machines: Mapping[str, ClusterMachine], *, accept_new: bool) -> dict[str, tuple[dict[str, Any], str]]:
    """Return facts, or the problem and its remedy, for each machine."""
    async with control.connected(machines, accept_new=accept_new) as (hosts, problems):
        facts, failed = await control.gathered(
            {name: host.call("inspect", name="none") for name, host in hosts.items()}
        )
    found: dict[str, tuple[dict[str, Any], str]] = {name: (seen, "") for name, seen in facts.items()}
    return found | {name: ({}, str(error).removeprefix(f"{name}: ")) for name, error in (problems | failed).items()}


# The cluster file


def entry_of(machines: Mapping[str, ClusterMachine], name: str) -> dict[str, Any]:
    """Return a machine's entry for the file, with this machine's address as seen from there: this one leads."""
    machine = machines[name]
    if machine.local:
        return {"address": LOCAL}
    entry = {} if machine == ClusterMachine(name=name, address=name) else {"address": machine.address}
    entry |= {key: value for key in ("port", "user", "key", "via") if (value := getattr(machine, key)) is not None}
    return entry | {"server_address": _own_address(list(control.jump_chain(machines, name).values())[-1])}


def _own_address(first: ClusterMachine) -> str:
    """Return this machine's address on the connection to `first`."""
    from smolcluster.launch.join.discovery import own_addresses

    with contextlib.suppress(OSError, SmolclusterError):
        address = local_address_towards(join_address(first.address, first.port or 22))
        if not address.startswith("fe80:"):  # link-local: useless without its interface
            return address
    return own_addresses()[0]


def _describe(facts: Mapping[str, Any]) -> str:
    memory = f", {facts['memory'] / 1e9:.0f} GB" if facts.get("memory") else ""
    gpus = f", {', '.join(facts['gpus'])}" if facts.get("gpus") else ""
    return f"{facts['system']} {facts['machine']}, {facts['cpus']} cores{memory}{gpus}"


def write_file(found: list[FoundMachine]) -> str:
    """Return the text of a cluster file, with unreachable machines as comments and the reason."""
    lines = [
        "# The machines of a cluster; `smolcluster up cluster.yaml` trains on them. See docs/cluster.md.",
        "hosts:",
    ]
    good = [machine for machine in found if not machine.problem]
    lead = good[0] if good else None
    for machine in found:
        entry = dict(machine.entry)
        if lead is None or lead.entry.get("address") != LOCAL:
            entry.pop("server_address", None)
        text = yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=1000).strip()
        note = " ".join((machine.problem or _describe(machine.facts)).split())
        lines.append(f"  {'# ' if machine.problem else ''}{machine.name}: {text}  # {note}")
    lines += ["", f"server: {lead.name if lead is not None else 'NAME'}  # choose a machine that is always on"]
    if any("server_address" in machine.entry for machine in found) and lead is not None:
        lines.append(
            "# server_address: this machine's address as that host sees it; remove it if another machine is the server."
        )
    lines += [
        f"strategy: {UNLIKE}  # machines may differ, come and go; see `smolcluster strategies`",
        "",
        "run:",
        "  train: gpt",
    ]
    return "\n".join(lines) + "\n"
