"""Place processes on the machines of a cluster file. Pure: nothing is contacted here.

    serving         `smolcluster serve` on one host, `smolcluster stage` for every worker
    elastic plane   `smolcluster server` on one host, `smolcluster worker` for every worker; each is restarted when it dies
    mesh plane      `smolcluster train --rank R` for every worker; with `run.elastic` one `train --elastic` for each host

A file without `hosts` names its machines by `host_ip`, `workers` and `server`; ssh must know each machine by its name, and
`host_ip` is the server's address as that machine sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from smolcluster.comm.addresses import is_address, is_loopback, join_address
from smolcluster.config.schema import Config, HostConfig
from smolcluster.config.strategies import ALONE
from smolcluster.errors import UserError
from smolcluster.launch.cluster.links import NetworkPath, find_path
from smolcluster.launch.join.worker import local_override_args
from smolcluster.launch.prepare import choose_plane
from smolcluster.launch.restart.plan import parse_elastic

CONFIG = "config.yaml"  # in the working directory of processes
TOKENIZER = "tokenizer"  # folder of tokenizer files, in the same place
LOCAL = "local"
MESH_PORT = 29500
SERVING = "serving"  # `ClusterLayout.plane` of a served model


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMachine:
    """How to connect to a machine, and its settings."""

    name: str
    address: str
    port: int | None = None
    user: str | None = None
    key: str | None = None
    via: str | None = None
    python: str | None = None
    folder: str = "~/.smolcluster"
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def local(self) -> bool:
        return self.address == LOCAL

    @property
    def place(self) -> str:
        """Return its address for messages."""
        if self.local:
            return "this machine"
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.address}" + (f" port {self.port}" if self.port else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProcess:
    """A process: its name, its host and the arguments after `smolcluster`."""

    name: str
    host: str
    arguments: tuple[str, ...]
    again: tuple[str, ...] = ()  # the arguments of a restart; empty: the same
    restart: bool = False  # when it dies
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLayout:
    name: str
    run: str  # the name of its run directory, on the lead's machine
    plane: str
    machines: dict[str, ClusterMachine]
    processes: list[ClusterProcess]  # in the order in which they start; the first is the lead
    config: Config  # as the processes read it
    paths: list[NetworkPath] = field(default_factory=list)  # from each machine to the lead's, where `links` give one
    addresses: dict[str, str] = field(default_factory=dict)  # of the lead, as each machine sees it
    listens: tuple[str, int] = ("", 0)  # where the lead listens
    needs_token: bool = False

    @property
    def lead(self) -> ClusterProcess:
        return self.processes[0]

    def on(self, host: str) -> list[ClusterProcess]:
        return [process for process in self.processes if process.host == host]


def plan_layout(config: Config, *, name: str, run: str) -> ClusterLayout:
    """Place the processes of a resolved configuration with hosts. `run`: the name of its run directory."""
    hosts = hosts_of(config)
    if not hosts:
        raise UserError(
            "this file has no hosts; add them, for example:\n  hosts:\n    mini1: 192.168.1.10\n"
            "    pi5: 192.168.1.20\nor write a file with `smolcluster cluster init`"
        )
    workers = [host for host, section in hosts.items() for _ in range(section.workers)]
    if not workers:
        raise UserError("no host has a worker: set workers: 1 for a host, or list hosts as workers")
    if config.run.elastic is not None:
        parse_elastic(config.run.elastic, endpoint=f"lead:{MESH_PORT}")  # raises UserError
    local = [host for host, section in hosts.items() if section.address == LOCAL]
    if len(local) > 1:
        raise UserError(
            f"cluster.hosts: {' and '.join(local)} are both this machine (address: local); keep one, with more workers"
        )
    if config.strategy.name == ALONE and len(workers) > 1 and config.run.serve is None:
        raise UserError(
            f"strategy {ALONE} has one worker, not {len(workers)}; remove it, or choose another: `smolcluster strategies`"
        )
    config = _for_processes(config, hosts, workers)
    plane = SERVING if config.run.serve is not None else choose_plane(config)
    lead = _lead(config, hosts, workers, plane)
    own = {"port", "user", "key", "via", "python", "folder", "environment"}
    machines = {
        host: ClusterMachine(name=host, address=section.address or host, **section.model_dump(include=own))
        for host, section in hosts.items()
    }
    paths = [
        path for host in hosts if host != lead and (path := find_path(config.cluster.links, host, lead)) is not None
    ]
    draft = _ProcessPlanner(
        config=config,
        directory=f"runs/{run}",
        lead=lead,
        workers=workers,
        hosts=hosts,
        addresses={host: _server_address(host, lead, hosts, paths) for host in hosts},
        port=MESH_PORT if plane == "mesh" else config.cluster.port,
    )
    mesh = draft.mesh if config.run.elastic is None else draft.restarting
    processes = list({SERVING: draft.serving, "elastic": draft.elastic, "mesh": mesh}[plane]())
    config.cluster.hosts, config.cluster.links = {}, {}
    return ClusterLayout(
        name=name,
        run=run,
        plane=plane,
        machines=machines,
        processes=processes,
        config=config,
        paths=paths,
        addresses=dict(draft.addresses),
        listens=(draft.bind, draft.port),
        needs_token=draft.needs_token(plane),
    )


def hosts_of(config: Config) -> dict[str, HostConfig]:
    """The machines, also where the file names them by `workers` and `server`."""
    cluster = config.cluster
    if cluster.hosts:
        return dict(cluster.hosts)
    named = [*([cluster.server] if cluster.server else []), *cluster.workers]
    per_host = cluster.batch_size if isinstance(cluster.batch_size, dict) else {}
    return {
        host: HostConfig.model_validate(
            {
                "workers": cluster.workers.count(host),
                "server_address": cluster.host_ip.get(host),
                "batch_size": per_host.get(host),
                "buffer_size": cluster.buffer_size.get(host),
            }
        )
        for host in dict.fromkeys(named)
    }


def _for_processes(config: Config, hosts: Mapping[str, HostConfig], workers: list[str]) -> Config:
    """Return the run's configuration: workers in rank order, and the batch and buffer size of each host."""
    config = config.model_copy(deep=True)
    cluster = config.cluster
    cluster.workers, cluster.num_workers, cluster.host_ip = workers, len(workers), {}
    if not isinstance(cluster.batch_size, str):
        sizes = {host: options.batch_size for host, options in hosts.items()}
        own = {host: size for host, size in sizes.items() if size is not None and host in workers}
        cluster.batch_size = {**{h: s for h, s in cluster.batch_size.items() if h in workers}, **own}
    buffers = {host: options.buffer_size for host, options in hosts.items()}
    cluster.buffer_size = {host: size for host, size in buffers.items() if size is not None}
    return config


def _lead(config: Config, hosts: Mapping[str, HostConfig], workers: list[str], plane: str) -> str:
    server = config.cluster.server
    if plane == "mesh":
        return workers[0]
    config.cluster.server = server or next(iter(hosts))
    return config.cluster.server


def _server_address(host: str, lead: str, hosts: Mapping[str, HostConfig], paths: list[NetworkPath]) -> str:
    """Return the lead's address as this host sees it."""
    given = hosts[host].server_address
    if given is not None:
        return given
    path = next((path for path in paths if path.source == host), None)
    if path is not None:
        return path.address
    address = hosts[lead].address or lead
    if host == lead:
        return "127.0.0.1"
    if address == LOCAL:
        raise UserError(
            f"cluster.hosts.{lead} leads and has address: local, which {host} cannot reach: set hosts.{host}.server_address, "
            f"or give {lead} its address"
        )
    return address


# The processes


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProcessPlanner:
    config: Config
    directory: str
    lead: str
    workers: list[str]  # the host of each, in rank order
    hosts: Mapping[str, HostConfig]
    addresses: Mapping[str, str]  # of the lead, as each host sees it
    port: int

    @property
    def run(self) -> tuple[str, str]:
        return "--run-dir", self.directory

    @property
    def bind(self) -> str:
        """Return the address that the lead binds: loopback for one machine; its address if all use the same; else 0.0.0.0."""
        others = {address for host, address in self.addresses.items() if host != self.lead}
        if not others or all(is_loopback(address) for address in others):
            return "127.0.0.1"
        only = next(iter(others))
        return only if len(others) == 1 and is_address(only) else "0.0.0.0"

    def meeting_point(self, host: str) -> str:
        """Return the lead's address as this host sees it; on the lead the one that other hosts use, if there are any."""
        others = sorted({self.addresses[other] for other in self.workers if other != self.lead})
        return others[0] if host == self.lead and others else self.addresses[host]

    def _server_of(self, host: str) -> str:
        """Return the server's address for processes of this host. On the server's machine it is the one that others use:
        workers give their peers the local address of that connection."""
        if host != self.lead:
            return self.addresses[host]
        return self.bind if self.bind != "0.0.0.0" else self.meeting_point(host)

    def elastic(self) -> Iterator[ClusterProcess]:
        serve = ("server", CONFIG, "--bind", self.bind, "--port", str(self.port), *self.run)
        again = (*serve, "--resume", "auto")
        yield ClusterProcess(name="server", host=self.lead, arguments=serve, again=again, restart=True)
        for rank, host in enumerate(self.workers):
            join = ["worker", str(rank), host, "--server", join_address(self._server_of(host), self.port)]
            join += ["--log-dir", logs_of(self.directory), *self._device(host)]
            join += ["--task", self.config.task] if self.config.task is not None else []
            join += local_override_args(self.config, same_machine=host == self.lead)
            name, local = f"worker-{rank}", self._local(rank)
            yield ClusterProcess(name=name, host=host, arguments=tuple(join), restart=True, environment=local)

    def serving(self) -> Iterator[ClusterProcess]:
        """Yield a front on the lead's machine, and a stage for every worker."""
        run = self.config.run
        stages = run.stages or max(1, len(self.workers) // run.replicas)
        serve = ["serve", str(run.serve), "--stages", str(stages), "--replicas", str(run.replicas), "--workers", "0"]
        serve += ["--listen", join_address(self.bind, self.port), "--bind", run.bind, "--port", str(run.page_port)]
        serve += ["--layers", run.layers] if run.layers is not None else []
        yield ClusterProcess(name="front", host=self.lead, arguments=(*serve, "--no-browser"), restart=True)
        for number, host in enumerate(self.workers):
            local, several = str(self.workers[:number].count(host)), self.workers.count(host) > 1
            hold = ["stage", "--server", join_address(self._server_of(host), self.port)]
            hold += ["--name", f"{host}-{local}" if several else host, "--model", str(run.serve), *self._device(host)]
            hold += ["--local-rank", local] if several else []
            yield ClusterProcess(name=f"stage-{number}", host=host, arguments=tuple(hold), restart=True)

    def mesh(self) -> Iterator[ClusterProcess]:
        size = ("--world-size", str(len(self.workers)))
        for rank, host in enumerate(self.workers):
            master = ("--master-addr", self.meeting_point(host), "--master-port", str(self.port))
            run = ("train", CONFIG, *size, "--rank", str(rank), *master, *self.run, *self._own(host))
            yield ClusterProcess(name=f"worker-{rank}", host=host, arguments=run, environment=self._local(rank))

    def restarting(self) -> Iterator[ClusterProcess]:
        hosts = dict.fromkeys([self.lead, *self.workers])
        for number, host in enumerate(hosts):
            meet = ("--rdzv-endpoint", join_address(self.meeting_point(host), self.port))
            count = ("--elastic", str(self.config.run.elastic), "--workers", str(self.hosts[host].workers))
            run = ("train", CONFIG, *count, *meet, *self.run, *self._own(host))
            again = (*run, "--resume", "auto") if host == self.lead else run
            yield ClusterProcess(name=f"launcher-{number}", host=host, arguments=run, again=again, restart=True)

    def needs_token(self, plane: str) -> bool:
        """Return whether other machines can connect to something that requires the token."""
        if plane == "mesh":
            meet = {self.meeting_point(host) for host in self.workers}
            return self.config.run.elastic is not None and not all(map(is_loopback, meet))
        return not is_loopback(self.bind)

    def _local(self, rank: int) -> dict[str, str]:
        """Return its local rank and world size, which divide a machine's GPUs, cores and metrics ports."""
        host = self.workers[rank]
        return {
            "LOCAL_RANK": str(self.workers[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(self.workers.count(host)),
        }

    def _device(self, host: str) -> list[str]:
        device = self.hosts[host].device
        return ["--device", device] if device is not None else []

    def _own(self, host: str) -> tuple[str, ...]:
        device = self.hosts[host].device
        return ("--override", f"training.device={device}") if device is not None else ()


def logs_of(directory: str) -> str:
    """Return the log folder of workers: outside the run directory, which is on the lead's machine."""
    return f"logs/{PurePosixPath(directory).name}"


def with_run(layout: ClusterLayout, run: str) -> ClusterLayout:
    """Return the same layout for an existing run."""
    old, new = f"runs/{layout.run}", f"runs/{run}"
    renamed = {old: new, logs_of(old): logs_of(new)}

    def other(arguments: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(renamed.get(argument, argument) for argument in arguments)

    processes = [
        replace(process, arguments=other(process.again or process.arguments), again=other(process.again))
        for process in layout.processes
    ]
    return replace(layout, run=run, processes=processes)


def describe(layout: ClusterLayout) -> list[str]:
    """Return the lines of `up --dry-run`."""
    lines: list[str] = []
    for name, machine in layout.machines.items():
        processes = ", ".join(process.name for process in layout.on(name)) or "nothing"
        lines.append(f"{name} ({machine.place}): {processes}")
    for path in layout.paths:
        if path.through:
            lines.append(f"{path.source} reaches {path.target} at {path.address} through {', '.join(path.through)}:")
            lines += [f"  {command}" for command in path.commands()]
    return lines


def as_record(layout: ClusterLayout) -> dict[str, Any]:
    """Return the record for `status`, `logs` and `down`, without secrets."""
    return {
        "name": layout.name,
        "run": layout.run,
        "plane": layout.plane,
        "server": _reachable(layout),
        "machines": {
            name: {key: getattr(machine, key) for key in ClusterMachine.__dataclass_fields__ if key != "environment"}
            for name, machine in layout.machines.items()
        },
        "seats": [{"name": process.name, "host": process.host} for process in layout.processes],
    }


def _reachable(layout: ClusterLayout) -> str | None:
    """Return an address of the server for other machines; None without one."""
    bind, port = layout.listens
    if layout.plane != "elastic":
        return None
    if bind != "0.0.0.0":
        return join_address(bind, port)
    others = sorted({address for host, address in layout.addresses.items() if host != layout.lead.host})
    return join_address(others[0], port) if others else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """A cluster that was started before."""

    name: str
    run: str
    machines: dict[str, ClusterMachine]
    hosts: dict[str, str]  # of each process; the first leads

    @property
    def lead(self) -> str:
        return next(iter(self.hosts))

    @property
    def run_place(self) -> str:
        """Return its run directory, for messages."""
        machine = self.machines[self.hosts[self.lead]]
        place = f"{machine.folder}/clusters/{self.name}/runs/{self.run}"
        return place if machine.local else f"{machine.name}:{place}"


def from_record(record: Mapping[str, Any]) -> ClusterRecord:
    """Parse a record. Raises ValueError."""
    try:
        if not record["seats"]:
            raise ValueError("not the record of a cluster: it has no processes")
        return ClusterRecord(
            name=str(record["name"]),
            run=str(record["run"]),
            machines={name: ClusterMachine(**fields) for name, fields in record["machines"].items()},
            hosts={str(process["name"]): str(process["host"]) for process in record["seats"]},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the record of a cluster: {error}") from error
