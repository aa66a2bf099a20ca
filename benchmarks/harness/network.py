"""Hosts on one machine: network namespaces on a bridge, each link limited in both directions.

    host 0  eth0 10.77.0.1 ---- port0 \\
    host 1  eth0 10.77.0.2 ---- port1  > bridge, in a namespace of its own
    host 2  eth0 10.77.0.3 ---- port2 /

`tc tbf` on eth0 limits what a host sends, on its port what it receives. The machine's own network is not changed and cannot
be reached from these namespaces. They are named smolbench-<pid>-<i> and are removed at the end, also after an error; those of
a killed process are removed by the next one that starts.

    with hosts(2, rate="100mbit") as network:
        server = network.popen(0, [sys.executable, "server.py"])
        network.run(1, ["ping", "-c", "1", network.address(0)])

Needs Linux, root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from smolcluster.errors import UserError

RATES = {"100mbit": 100e6, "1gbit": 1e9}  # bits per second, as `tc` spells them
MAX_HOSTS = 200
_NAME = re.compile(r"smolbench-(\d+)-(\d+|bridge)$")


class Network:
    """Namespaces `0 .. count-1`, created by `hosts`."""

    def __init__(self, count: int, rate: str | None) -> None:
        self.count, self.rate = count, rate
        self._processes: list[subprocess.Popen[bytes]] = []

    def namespace(self, host: int) -> str:
        return f"smolbench-{os.getpid()}-{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Add the interface that gloo must use."""
        return {**(os.environ if base is None else base), "GLOO_SOCKET_IFNAME": "eth0"}

    def popen(
        self, host: int, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host. It is killed when the network is removed."""
        command = ["ip", "netns", "exec", self.namespace(host), *command]
        process = subprocess.Popen(command, env=self.environment(env), **options)
        self._processes.append(process)
        return process

    def run(self, host: int, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command on a host and wait for it. Options are those of `subprocess.run`."""
        options["env"] = self.environment(options.get("env"))
        return subprocess.run(["ip", "netns", "exec", self.namespace(host), *command], **options)

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Start processes of this thread on that host."""
        home_path, path = Path("/proc/thread-self/ns/net"), Path("/var/run/netns") / self.namespace(host)
        with home_path.open() as home, path.open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def cut(self, host: int) -> None:
        """Drop all packets from and to this host. No connection is closed."""
        _ip("-n", self.namespace_of_bridge, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        _ip("-n", self.namespace_of_bridge, "link", "set", f"port{host}", "up")

    def block(self, source: int, target: int) -> None:
        """Drop all packets from `source` to `target`: they go to a hardware address that no host has."""
        neighbour = ("neigh", "replace", self.address(target), "lladdr", "02:00:00:00:00:01", "nud", "permanent")
        _ip("-n", self.namespace(source), *neighbour, "dev", "eth0")

    def unblock(self, source: int, target: int) -> None:
        _ip("-n", self.namespace(source), "neigh", "del", self.address(target), "dev", "eth0")

    def slow(self, host: int, rate: str) -> None:
        """Limit what this host sends, until `mend_rate`. Only where the network has no rate of its own."""
        assert self.rate is None
        _limit(self.namespace(host), "eth0", rate)

    def mend_rate(self, host: int) -> None:
        _tool("tc", "-n", self.namespace(host), "qdisc", "del", "dev", "eth0", "root")

    def _build(self) -> None:
        bridge = self.namespace_of_bridge
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for host in range(self.count):
            name, port = self.namespace(host), f"port{host}"
            _ip("netns", "add", name)
            _ip("-n", bridge, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", bridge, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
            if self.rate is not None:
                _limit(name, "eth0", self.rate)
                _limit(bridge, port, self.rate)

    def _remove(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for name in [*map(self.namespace, range(self.count)), self.namespace_of_bridge]:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)

    @property
    def namespace_of_bridge(self) -> str:
        return f"smolbench-{os.getpid()}-bridge"


@contextlib.contextmanager
def hosts(count: int, *, rate: str | None) -> Iterator[Network]:
    """Create `count` hosts that are connected at `rate` (as tc spells it: 100mbit, 1gbit; None: no limit)."""
    check_possible()
    if not 1 <= count <= MAX_HOSTS:
        raise UserError(f"{count} hosts were asked for; from 1 to {MAX_HOSTS} are possible")
    _remove_abandoned()
    network = Network(count, rate)
    with ended_by_sigterm():
        try:
            network._build()
            yield network
        finally:
            network._remove()


def check_possible() -> None:
    """Raise `UserError` with what is missing, before anything is created."""
    if sys.platform != "linux":
        raise UserError(
            f"limited links need Linux's network namespaces, and this is {sys.platform}; use --link loopback"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UserError(f"limited links need {' and '.join(missing)} (package iproute2); or use --link loopback")
    if os.geteuid() != 0:
        raise UserError("limited links need root, to make network namespaces; or use --link loopback")


def _limit(namespace: str, device: str, rate: str) -> None:
    """Add a token bucket of 1 ms: small beside every measured transfer, large enough to keep the link busy."""
    burst = max(16_000, int(parse_rate(rate) / 8 / 1000))
    _tool(
        *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root"),
        *("tbf", "rate", rate, "burst", str(burst), "latency", "50ms"),
    )


def parse_rate(rate: str) -> float:
    """Return the bits per second of a rate like `100mbit`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if match is None:
        raise UserError(f"link rate '{rate}' is not understood; write it like 100mbit or 1gbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def _enter(namespace: int) -> None:
    """Move this thread to a network namespace: os.setns of Python 3.12."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0) != 0:
        raise UserError(f"a network namespace cannot be entered: {os.strerror(ctypes.get_errno())}")


def _ip(*arguments: str) -> None:
    _tool("ip", *arguments)


def _tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
        raise UserError(f"`{' '.join(command)}` failed: {reason}; limited links are not possible here")


def _remove_abandoned() -> None:
    """Remove namespaces of processes that have ended."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        match = _NAME.match(line.split(" ")[0])
        if match is not None and not _alive(int(match[1])):
            subprocess.run(["ip", "netns", "delete", match[0]], stderr=subprocess.DEVNULL, check=False)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, so that context managers clean up as after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


# The rate that TCP reaches

_RECEIVER = """
import socket, sys, time
with socket.create_server((sys.argv[1], 7700)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    received, started = 0, None
    while chunk := connection.recv(1 << 20):
        started = started or time.perf_counter()
        received += len(chunk)
    print(received / (time.perf_counter() - started))
"""
_SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], 7700)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def measured_rate(network: Network, *, seconds: float = 1.0) -> float:
    """Measure the payload bits per second of plain TCP from host 1 to host 0."""
    size = int((parse_rate(network.rate) if network.rate else 10e9) / 8 * seconds)
    receiver = network.popen(0, [sys.executable, "-c", _RECEIVER, network.address(0)], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    network.run(1, [sys.executable, "-c", _SENDER, network.address(0), str(size)], check=True)
    rate = float(receiver.stdout.readline()) * 8
    receiver.wait()
    return rate
