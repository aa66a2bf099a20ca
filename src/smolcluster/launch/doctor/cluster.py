"""Check every layer of every machine of a cluster file, and the paths to the lead's machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smolcluster.launch.cluster import control
from smolcluster.launch.cluster.archive import requirements
from smolcluster.launch.cluster.host import Host, HostError
from smolcluster.launch.cluster.layout import ClusterLayout
from smolcluster.launch.cluster.request import requirements_of
from smolcluster.launch.doctor.layers import Finding, Layer, Verdict, bad, good, warning
from smolcluster.observe.text import size

_LOST = "check that it is on and its network is up"  # remedy for a lost connection


async def examine(layout: ClusterLayout, *, accept_new: bool = False) -> list[Finding]:
    found: list[Finding] = []
    async with control.connected(layout.machines, accept_new=accept_new) as (hosts, problems):
        facts, failed = await control.gathered({name: control.inspect(host, layout) for name, host in hosts.items()})
        found += [_problem(error) for error in (problems | failed).values()]
        found += [finding for name, seen in facts.items() for finding in _machine(layout, name, seen)]
        torches = await _torches({name: hosts[name] for name in facts}, requirements_of(layout))
        found += _versions(torches)
        if layout.lead.host in facts:
            found += await _paths(layout, {name: hosts[name] for name in facts})
    return found


def _problem(error: HostError) -> Finding:
    layer = Layer(error.layer)
    remedy = error.remedy or (_LOST if layer is Layer.ROUTE else "")
    return Finding(layer=layer, verdict=Verdict.BAD, what=error.what, remedy=remedy, host=error.host)


def _machine(layout: ClusterLayout, name: str, seen: Mapping[str, Any]) -> list[Finding]:
    wrong = [_problem(problem) for problem in control.problems_of(layout, name, seen)]
    layers = {finding.layer for finding in wrong}
    fine = {
        Layer.SSH: f"{layout.machines[name].place}, {seen['system']} {seen['machine']}",
        Layer.PYTHON: f"Python {'.'.join(map(str, seen['python']))}",
        Layer.DISK: f"{size(seen['disk_free'])} free",
        Layer.CLOCK: f"within {max(1, round(abs(control.clock_off(seen))))} s of this machine",
    }
    found = [good(layer, what, host=name) for layer, what in fine.items() if layer not in layers]
    gpus = seen["gpus"]
    if gpus and gpus[0].startswith("driver: "):
        found.append(bad(Layer.GPU, f"nvidia-smi fails: {gpus[0].removeprefix('driver: ')}", host=name))
    elif gpus:
        found.append(good(Layer.GPU, ", ".join(gpus), host=name))
    return wrong + found


async def _torches(hosts: Mapping[str, Host], needs: list[str]) -> dict[str, dict[str, str | None]]:
    """Return each host's torch version: `used`, or the one that is `there` but lacks other requirements."""
    requests = {
        name: host.call("version_of", package="torch", wanted=control.wanted(host, needs))
        for name, host in hosts.items()
    }
    versions, _ = await control.gathered(requests)
    return {name: versions.get(name, {"used": None, "there": None}) for name in hosts}


def _versions(torches: Mapping[str, Mapping[str, str | None]]) -> list[Finding]:
    found = []
    known = {version["used"].partition("+")[0] for version in torches.values() if version["used"]}
    for name, versions in torches.items():
        version, there = versions["used"], versions["there"]
        if version is None:
            wanted = next(text for text in requirements(extras=[]) if text.startswith("torch"))
            now = "not installed" if there is None else f"torch {there} is installed, other requirements are missing"
            found.append(good(Layer.TORCH, f"{now}; `up` makes an environment with {wanted}", host=name))
        elif len(known) > 1:
            others = ", ".join(sorted(known - {version.partition("+")[0]}))
            found.append(warning(Layer.TORCH, f"torch {version}, and others have {others}", host=name))
        else:
            found.append(good(Layer.TORCH, f"torch {version}", host=name))
    return found


async def _paths(layout: ClusterLayout, hosts: Mapping[str, Host]) -> list[Finding]:
    """Listen on the lead for a moment, and connect from the others."""
    lead = layout.lead.host
    bind, port = layout.listens
    found: list[Finding] = []
    others = [host for name, host in hosts.items() if name != lead]
    if not others:
        return found
    async with hosts[lead].agent() as listener:
        talk = listener.stream_call("listen", bind=bind, port=port, timeout_s=20.0)
        opened = await anext(talk)
        if "listening" not in opened:
            return found  # the server runs already, or the port is taken, which `problems_of` reports
        probes, failed = await control.gathered(
            {host.name: host.call("probe", address=layout.addresses[host.name], port=port) for host in others}
        )
    found += [_problem(error) for error in failed.values()]
    for name, probe in probes.items():
        address = f"{layout.addresses[name]}:{port}"
        if "seconds" in probe:
            what = f"reaches {lead} at {address} in {1e3 * probe['seconds']:.1f} ms"
            found.append(good(Layer.ROUTE, what, host=name))
        else:
            layer = Layer(probe["layer"])
            path = next((path for path in layout.paths if path.source == name), None)
            lost = layer in (Layer.ROUTE, Layer.FIREWALL)  # a refusal proves the path
            remedy = "; ".join(path.commands()) if lost and path is not None else ""
            found.append(bad(layer, f"cannot reach {lead} at {address}: {probe['problem']}", remedy, host=name))
    return found
