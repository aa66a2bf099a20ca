"""`up`, `status`, `logs` and `down` on all machines at once.

    up      connect to all and inspect all; report every problem and stop before anything is changed
            send the package and the user's files, create missing environments, distribute the token
            start the lead, then the others; if one fails to start, stop those that did
    down    request that the lead saves and exits, then stop the others

The machines hold the state of what runs: this one may disconnect and reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from smolcluster.errors import SmolclusterError, UserError
from smolcluster.launch.cluster.archive import PackedFiles, requirements_key
from smolcluster.launch.cluster.host import Agent, Host, HostError, connect
from smolcluster.launch.cluster.layout import ClusterLayout, ClusterMachine, ClusterProcess, ClusterRecord, with_run
from smolcluster.observe.events import StepLogged, restore, restore_fields

CLOCK_S = 120.0  # larger clock differences are reported
MIN_FREE_BYTES = 500 << 20  # free disk needed to start
ENVIRONMENT_BYTES = 2 << 30  # to create an environment, too: torch for CPUs takes about one GiB, for GPUs about five
RECONNECT_S = 2.0

T = TypeVar("T")
Report = Callable[[str, str], None]  # host, progress there


class ClusterError(UserError):
    """Problems of some machines, one line each."""

    def __init__(self, problems: Iterable[HostError], *, also: str = "") -> None:
        super().__init__("\n".join([*map(str, problems), *([also] if also else [])]))


@contextlib.asynccontextmanager
async def connected(
    machines: Mapping[str, ClusterMachine], *, accept_new: bool = False
) -> AsyncIterator[tuple[dict[str, Host], dict[str, HostError]]]:
    """Connect to all machines. Yield those that can be reached, and the errors of the others."""
    pending: dict[str, asyncio.Task[Host]] = {}

    async def reach(name: str) -> Host:
        machine = machines[name]
        through = None
        if machine.via is not None:
            try:
                through = await pending[machine.via]
            except HostError as error:
                raise HostError(name, f"its jump host {machine.via} cannot be reached", layer="route") from error
        return await connect(machine, through=through, accept_new=accept_new)

    for name in machines:
        pending[name] = asyncio.create_task(reach(name))
    hosts, problems = await gathered(pending)
    try:
        yield hosts, problems
    finally:
        for host in reversed(hosts.values()):
            await host.close()


def jump_chain(machines: Mapping[str, ClusterMachine], name: str) -> dict[str, ClusterMachine]:
    """Return a machine and the jump hosts on the way to it."""
    found = {name: machines[name]}
    while (via := found[name].via) is not None:
        name = via
        found[name] = machines[name]
    return found


@contextlib.asynccontextmanager
async def connected_agent(machines: Mapping[str, ClusterMachine], name: str) -> AsyncIterator[Agent]:
    """Connect to one machine and start an agent on it. Raises HostError."""
    async with connected(jump_chain(machines, name)) as (hosts, problems):
        if name in problems:
            raise problems[name]
        async with hosts[name].agent() as agent:
            yield agent


async def gathered(work: Mapping[str, Awaitable[T]]) -> tuple[dict[str, T], dict[str, HostError]]:
    """Wait for the work on each machine. Return the results of those where it is done, and the errors of the others."""
    results: dict[str, T] = {}
    problems: dict[str, HostError] = {}
    done = await asyncio.gather(*work.values(), return_exceptions=True)
    for name, result in zip(work, done, strict=True):
        if isinstance(result, HostError):
            problems[name] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            results[name] = result
    return results, problems


async def on_all_hosts(hosts: Iterable[Host], work: Callable[[Host], Awaitable[T]]) -> dict[str, T]:
    """Run `work` on all hosts concurrently. When all are done, raise ClusterError with every problem."""
    results, problems = await gathered({host.name: work(host) for host in hosts})
    if problems:
        raise ClusterError(problems.values())
    return results


# Up


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What `up` starts."""

    layout: ClusterLayout
    package: PackedFiles
    files: PackedFiles
    requirements: list[str]
    token: str | None = None
    panes: bool = False  # one tmux window with a pane for each process
    resume: bool = False  # the lead resumes the existing run

    @property
    def fingerprint(self) -> str:
        """Return a digest of code, files, processes and machines, to detect a running cluster that differs."""
        processes = [
            (s.name, s.host, s.arguments, sorted(s.environment.items())) for s in with_run(self.layout, "").processes
        ]
        hosts = [(m.name, m.python, sorted(m.environment.items())) for m in self.layout.machines.values()]
        settings = hashlib.sha256(json.dumps([processes, hosts]).encode()).hexdigest()[:16]
        return f"{self.package.key}-{self.files.key}-{settings}"


async def up(
    deployment: Deployment, hosts: Mapping[str, Host], *, report: Report, on_begin: Callable[[], None] = lambda: None
) -> dict[str, list[str]]:
    """Start what does not run yet. Return what was started, by machine. `on_begin` is called before anything is changed."""
    layout = deployment.layout
    facts = await on_all_hosts(hosts.values(), lambda host: inspect(host, layout, deployment))
    problems = [problem for name, seen in facts.items() for problem in problems_of(layout, name, seen)]
    if problems:
        raise ClusterError(problems, also="nothing was changed on any machine")
    _check_same(deployment, facts)
    on_begin()
    mark = secrets.token_hex(8)
    await on_all_hosts(hosts.values(), lambda host: host.call("begin", mark=mark, name=layout.name))
    await on_all_hosts(hosts.values(), lambda host: _send(host, deployment, report))
    pythons = await on_all_hosts(hosts.values(), lambda host: _environment(host, deployment, report))
    if deployment.token is not None:
        secret = deployment.token.encode()
        await on_all_hosts(hosts.values(), lambda host: host.call("keep_secret", data=secret, name=layout.name))
    begun: dict[str, list[str]] = {}
    try:
        for first in (True, False):
            chosen = [process for process in layout.processes if (process is layout.lead) == first]
            started = await on_all_hosts(
                [host for host in hosts.values() if any(process.host == host.name for process in chosen)],
                lambda host, chosen=chosen: _start(host, deployment, pythons[host.name], chosen, mark),  # type: ignore[misc]
            )
            for name, processes in started.items():
                begun.setdefault(name, []).extend(processes)
    except (SmolclusterError, asyncio.CancelledError):
        await _roll_back(hosts, layout, mark)
        raise
    return begun


async def inspect(host: Host, layout: ClusterLayout, deployment: Deployment | None = None) -> dict[str, Any]:
    """Return facts about a machine and the time of the request. `deployment`: also whether it lacks an environment for it."""
    needs = None if deployment is None else wanted(host, deployment.requirements)
    listens = list(layout.listens) if layout.lead.host == host.name else None
    requested_at = time.time()
    found: dict[str, Any] = await host.call("inspect", listens=listens, wanted=needs, name=layout.name)
    return found | {"requested_at": requested_at, "replied_at": time.time()}


def wanted(host: Host, requirements: list[str]) -> dict[str, Any]:
    """Return the environment that a machine needs, as arguments for its agent."""
    return {"requirements": requirements, "key": requirements_key(requirements), "python": host.machine.python}


def _check_same(deployment: Deployment, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to add to processes that run with different code or files: their restarts would use ours."""
    others = [
        process
        for seen in facts.values()
        for process, state in seen["processes"].items()
        if state["alive"] and state.get("fingerprint") not in (None, deployment.fingerprint)
    ]
    if others:
        raise UserError(
            f"{', '.join(sorted(others))} of {deployment.layout.name} already run, with another configuration or other code; "
            "`smolcluster down` first, then up (--resume continues the run); nothing was changed on any machine"
        )


def problems_of(layout: ClusterLayout, name: str, seen: Mapping[str, Any]) -> Iterable[HostError]:
    running = {process for process, state in seen["processes"].items() if state["alive"]}
    wrong = functools.partial(HostError, name)
    off = clock_off(seen)
    if abs(off) > CLOCK_S:
        what = f"its clock is {_duration(abs(off))} {'ahead of' if off > 0 else 'behind'} this machine's"
        remedy = "set it: sudo timedatectl set-ntp true (macOS: sudo sntp -sS time.apple.com; Windows: w32tm /resync)"
        yield wrong(what, remedy, layer="clock")
    if not seen["writable"]:
        folder = layout.machines[name].folder
        yield wrong(f"{folder} is not writable", f"set hosts.{name}.folder to a writable folder", layer="disk")
    need = ENVIRONMENT_BYTES if seen.get("lacks_environment") else MIN_FREE_BYTES
    if seen["disk_free"] < need:
        why = " to make an environment with torch" if need > MIN_FREE_BYTES else ""
        what = f"{seen['disk_free'] >> 20} MiB of disk are free, {need >> 20} MiB are needed{why}"
        yield wrong(what, f"free some, or set hosts.{name}.folder to another disk", layer="disk")
    if seen.get("port_problem") and layout.lead.name not in running:
        bind, port = layout.listens
        key = "cluster.port" if layout.plane == "elastic" else "the port"
        remedy = f"stop the program that uses it (another run?), or choose another port with {key}"
        yield wrong(f"port {port} on {bind} cannot be used: {seen['port_problem']}", remedy, layer="port")


def clock_off(seen: Mapping[str, Any]) -> float:
    """Return by how many seconds a machine's clock is ahead of ours, beyond the round trip's uncertainty."""
    middle = (seen["requested_at"] + seen["replied_at"]) / 2
    off = float(seen["time"]) - middle
    slack = (seen["replied_at"] - seen["requested_at"]) / 2
    return 0.0 if abs(off) <= slack else off - slack if off > 0 else off + slack


def _duration(seconds: float) -> str:
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {int(seconds) % 60} s"


async def _send(host: Host, deployment: Deployment, report: Report) -> None:
    place = f"code/{deployment.package.key}"
    (installed,) = await host.call("has", places=[f"{place}/smolcluster/__init__.py"])
    if not installed:
        report(host.name, f"sending smolcluster, {len(deployment.package.data) >> 10} KiB")
        await host.call("unpack", place=place, fresh=True, data=deployment.package.data)
    home = f"clusters/{deployment.layout.name}"
    await host.call("unpack", place=home, data=deployment.files.data)


async def _environment(host: Host, deployment: Deployment, report: Report) -> str:
    made = await host.call(
        "environment",
        on_line=lambda line: report(host.name, line),
        **wanted(host, deployment.requirements),
        variables=dict(host.machine.environment),
    )
    if made["made"]:
        report(host.name, f"environment made in {made['seconds']:.0f} s")
    return str(made["python"])


async def _start(host: Host, deployment: Deployment, python: str, chosen: list[ClusterProcess], mark: str) -> list[str]:
    processes = [
        {
            "name": process.name,
            "arguments": list(process.again if deployment.resume and process.again else process.arguments),
            "again": list(process.again),
            "restart": process.restart,
            "environment": {**host.machine.environment, **process.environment},
        }
        for process in chosen
        if process.host == host.name
    ]
    begun: list[str] = await host.call(
        "start",
        processes=processes,
        python=python,
        code=deployment.package.key,
        fingerprint=deployment.fingerprint,
        panes=deployment.panes,
        mark=mark,
        name=deployment.layout.name,
    )
    return begun


async def _roll_back(hosts: Mapping[str, Host], layout: ClusterLayout, mark: str) -> None:
    """Stop what this `up` has started, and nothing else."""

    async def end(host: Host) -> None:
        with contextlib.suppress(HostError):
            await host.call("stop", mark=mark, now=True, timeout_s=10.0, name=layout.name)

    await asyncio.gather(*map(end, hosts.values()))


# What runs


async def states(cluster: ClusterLayout | ClusterRecord, hosts: Mapping[str, Host]) -> dict[str, dict[str, Any]]:
    """Return the keeper's state and the host of every process, by name."""
    found = await on_all_hosts(hosts.values(), lambda host: host.call("states", name=cluster.name))
    return {
        process: state | {"host": name} for name, processes in found.items() for process, state in processes.items()
    }


async def progress(cluster: ClusterRecord, hosts: Mapping[str, Host]) -> dict[str, Any]:
    """Return the last row of metrics.jsonl (the server's, if there is one), and the summary if there is one."""
    host = hosts.get(cluster.hosts[cluster.lead])
    if host is None:
        return {}
    base = f"clusters/{cluster.name}/runs/{cluster.run}"
    async with host.agent() as agent:
        summary = await agent.call("read", place=f"{base}/summary.json")
        rows = await agent.call("tail", place=f"{base}/metrics.jsonl")
    found: dict[str, Any] = {}
    # A diverged loss is stored as the string "nan"; `restore` makes it a float again.
    with contextlib.suppress(ValueError, TypeError, AttributeError, IndexError):
        read = [restore_fields(StepLogged, json.loads(row)) for row in rows]
        found["row"] = ([row for row in read if row.get("role") == "server"] or read)[-1]
    with contextlib.suppress(ValueError, TypeError):
        found["summary"] = restore(json.loads(summary))
    return found


async def follow(
    cluster: ClusterRecord,
    *,
    chosen: Iterable[str],
    processes: list[str],
    past: int,
    on: bool,
    show: Callable[[str, str, str], None],
    report: Report,
) -> None:
    """Call `show` with host, process and line for all output. With `on`, reconnect to a machine that is lost."""

    async def one(name: str) -> None:
        read: dict[str, list[int]] = {}  # position in the output of each process
        cut_off = False
        while True:
            try:
                async with connected_agent(cluster.machines, name) as agent:
                    if cut_off:
                        report(name, "reconnected")
                        cut_off = False
                    async for update in agent.stream_call(
                        "follow", name=cluster.name, processes=processes, past=past, on=on, at=read
                    ):
                        if "line" in update:
                            show(name, update["process"], update["line"])
                        if "at" in update:
                            read[update["process"]] = update["at"]
                    return
            except HostError as error:
                if not on:
                    raise
                if not cut_off:
                    report(name, f"{error.what}; reconnecting")
                    cut_off = True
                await asyncio.sleep(RECONNECT_S)

    await asyncio.gather(*map(one, chosen))


# Down


async def down(cluster: ClusterRecord, hosts: Mapping[str, Host], *, now: bool, report: Report) -> dict[str, list[str]]:
    """Stop all processes, the lead first. Return what was running, by machine."""
    lead = cluster.hosts[cluster.lead]
    stopped: dict[str, list[str]] = {}

    async def end(host: Host, processes: list[str] | None) -> None:
        done = await host.call("stop", processes=processes, now=now, timeout_s=10.0 if now else 90.0, name=cluster.name)
        stopped.setdefault(host.name, []).extend(done["stopped"])
        if done["killed"]:
            report(host.name, f"did not exit in time; killed: {', '.join(done['killed'])}")

    if lead in hosts:
        states = await hosts[lead].call("states", name=cluster.name)
        if states.get(cluster.lead, {}).get("alive"):
            how = "exit" if cluster.lead == "front" else "save and exit"
            report(lead, f"stopping {cluster.lead}" if now else f"asking {cluster.lead} to {how}")
        await end(hosts[lead], [cluster.lead])
    await on_all_hosts(hosts.values(), lambda host: end(host, None))
    return {name: sorted(set(processes)) for name, processes in stopped.items()}
