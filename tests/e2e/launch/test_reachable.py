"""Which sockets of each command another machine can reach: a second network namespace connects to every one that listens."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.harness.network import Network
from tests.e2e.command import TINY, Running, Smol, children, read_rows
from tests.places import eventually, free_port, separate_hosts

from smolcluster.comm.elastic.transport.security import new_token

LISTEN = "0A"  # the state in /proc/net/tcp
FOREVER = ("--steps", "1000000", "--run-dir", "run", "--override", *TINY)
# Prints which of these ports of a host accept a connection. Refused and unreachable are no.
CONNECT = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=20).close()
        print(port)
    except OSError:
        pass
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with separate_hosts(2) as network:
        yield network


def tree(pid: int) -> Iterator[int]:
    yield pid
    for child in children(pid):
        yield from tree(child.pid)


def listening(pid: int) -> set[int]:
    """Ports at which a process and its descendants listen."""
    ports: set[int] = set()
    for each in tree(pid):
        try:
            links = {str(fd.readlink()) for fd in Path(f"/proc/{each}/fd").iterdir()}
        except OSError:  # it has ended, or a descriptor was closed meanwhile: the next look finds the rest
            continue
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{each}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and f"socket:[{fields[9]}]" in links:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def reachable(network: Network, ports: set[int]) -> set[int]:
    """Those that host 1 can connect to on host 0."""
    command = [sys.executable, "-c", CONNECT, network.address(0), *map(str, sorted(ports))]
    said = network.run(1, command, capture_output=True, text=True, check=True, timeout=120)
    return set(map(int, said.stdout.split()))


def trains(running: Running, folder: Path, *, ranks: int) -> None:
    running.until(lambda: len({row["rank"] for row in read_rows(folder / "run")}) >= ranks, what="the first steps")


def check(network: Network, running: Running, *, at_least: int, expected: set[int]) -> None:
    pid = running.process.pid
    ports = eventually(lambda: len(found := listening(pid)) >= at_least and found, what=f"{at_least} listeners")
    assert reachable(network, ports) == expected, f"of {sorted(ports)}"


def test_a_port_that_is_open_to_all_is_found(network: Network) -> None:
    """The test of the test: one open socket, one on loopback."""
    serve = (
        "import socket, time; a = socket.create_server(('', 0)); b = socket.create_server(('127.0.0.1', 0)); "
        "print(a.getsockname()[1], flush=True); time.sleep(600)"
    )
    process = network.popen(0, [sys.executable, "-c", serve], stdout=subprocess.PIPE)
    try:
        port = int(process.stdout.readline())
        ports = listening(process.pid)
        assert len(ports) == 2
        assert reachable(network, ports) == {port}
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("options", "ranks", "at_least"),
    [
        # The store and a listener of gloo for each rank; the page; a page of metrics for each rank.
        pytest.param(("--workers", "2", "--dashboard"), 2, 6, id="mesh"),
        pytest.param(("--elastic", "2:2", "--workers", "2", "--rdzv-endpoint", "127.0.0.1:{port}"), 2, 6, id="restart"),
        # The server, and links between the workers.
        pytest.param(("--plane", "elastic", "--workers", "2"), 1, 3, id="elastic"),
    ],
)
def test_training_on_loopback_cannot_be_reached(
    network: Network, smol: Smol, tmp_path: Path, options: tuple[str, ...], ranks: int, at_least: int
) -> None:
    here = {"cwd": tmp_path, "inside": network.namespace(0)}
    said = (option.format(port=free_port()) for option in options)
    metrics = () if "--plane" in options else (f"logging.prometheus_port={free_port()}",)
    running = smol.start("train", "gpt", *said, *FOREVER, *metrics, **here)  # type: ignore[arg-type]
    try:
        trains(running, tmp_path, ranks=ranks)
        check(network, running, at_least=at_least, expected=set())
    finally:
        running.close()


def test_a_server_is_reached_where_it_was_bound(network: Network, smol: Smol, tmp_path: Path) -> None:
    port = free_port()
    where = ("--bind", network.address(0), "--port", str(port), "--strategy", "edp", "--workers", "1")
    settings = (*FOREVER, f"logging.prometheus_port={free_port()}")
    here = {"cwd": tmp_path, "inside": network.namespace(0), "env": {"SMOLCLUSTER_TOKEN": new_token()}}
    running = smol.start("server", "gpt", *where, *settings, **here)  # type: ignore[arg-type]
    try:
        running.until(lambda: f":{port}; 1 worker expected" in running.output, what="the server")
        check(network, running, at_least=1, expected={port})
    finally:
        running.close()


def test_pages_and_models_are_reached_where_they_were_bound(network: Network, smol: Smol, tmp_path: Path) -> None:
    made = ("--workers", "1", "--steps", "1", "--run-dir", "run", "--override", *TINY)
    smol.run("train", "gpt", *made, cwd=tmp_path).ok()
    here = {"cwd": tmp_path, "inside": network.namespace(0)}
    serve = ("serve", "run", "--stages", "1", "--no-browser", "--device", "cpu")
    port = free_port()
    closed, opened = (
        smol.start(*serve, "--port", "0", **here),  # type: ignore[arg-type]
        smol.start(
            *serve, "--port", str(port), "--bind", network.address(0), "--api-key", "a-key-for-the-test", **here
        ),  # type: ignore[arg-type]
    )
    page = smol.start("dashboard", "run", "--port", "0", "--no-browser", **here)  # type: ignore[arg-type]
    try:
        for running in (closed, opened, page):
            running.until(lambda running=running: re.search(r"http://\S+:\d+/", running.output), what="the address")  # type: ignore[misc]
        check(network, page, at_least=1, expected=set())
        check(network, closed, at_least=2, expected=set())
        check(network, opened, at_least=2, expected={port})
    finally:
        for running in (closed, opened, page):
            running.close()
