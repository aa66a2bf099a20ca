"""Start hivemind and Ray, the peers that are programs of their own; receive their rows; count their bytes.

    with ray_server(config, machines=[1, 2], mode="sync", steps=100) as program:
        for row in program.rows():      # one for each step; the last one has the validation loss
            program.bytes_sent()        # between machines, so far; the program waits meanwhile

Both come with `pip install 'smolcluster[bench]'`. They are not imported here: `missing` returns why one cannot be used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.network import Network
from benchmarks.harness.pipes import Message, receive, send
from benchmarks.harness.processes import bytes_between, descendants, started
from smolcluster.config.schema import Config

MATCHMAKING_S = 0.5  # how long hivemind looks for peers in each epoch; its guide says 3 and more
SILENT_S = 180.0  # a program that writes nothing for so long hangs


def usable(named: Mapping[str, tuple[str, Any]]) -> list[str]:
    """Return the names whose packages are installed. Print why the others are left out."""
    reasons = {package: missing(package) for package, _ in named.values()}
    for reason in filter(None, reasons.values()):
        print(f"  {reason}: left out", flush=True)
    return [name for name, (package, _) in named.items() if reasons[package] is None]


def missing(package: str) -> str | None:
    """Return why a peer cannot run; None if it can."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed (pip install 'smolcluster[bench]')"
    return None if shutil.which("ss") else f"ss of iproute2 is not installed, which counts the bytes of {package}"


class Program:
    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], roots: Sequence[Sequence[int]]) -> None:
        """`roots`: the first processes of each machine. Their descendants belong to the same machine, except other roots."""
        self._processes, self._roots = processes, roots

    def rows(self) -> Iterator[Message]:
        """Yield rows up to the one with the validation loss. The program continues when the next one is requested."""
        while True:
            row = _receive(self._processes[0])
            yield row
            if "val_loss" in row:
                return
            _resume(self._processes[0])

    def machine(self, number: int) -> set[int]:
        """Return all processes of a machine."""
        family = {pid for root in self._roots[number] for pid in (root, *descendants(root))}
        return family.difference(*(self.machine(later) for later in range(number + 1, len(self._roots))))

    def bytes_sent(self) -> int:
        return bytes_between([self.machine(number) for number in range(len(self._roots))])


@contextlib.contextmanager
def hivemind_peers(
    config: Config, *, size: int, cores: Sequence[int | None] = (), network: Network | None = None, **order: Any
) -> Iterator[Program]:
    """Start hivemind peers, one on each machine; with a network, peer r on host r. `order`: see `peers/hivemind_peer.py`."""
    with contextlib.ExitStack() as stack:
        peers: list[subprocess.Popen[bytes]] = []
        addresses: list[str] = []
        common = {"config": config.model_dump(mode="json"), "size": size, "matchmaking_s": MATCHMAKING_S, **order}
        for rank in range(size):
            words = {**common, "rank": rank, "addresses": addresses, "core": cores[rank] if cores else None}
            words["host"] = "127.0.0.1" if network is None else network.address(rank)
            peers.append(_start(stack, "benchmarks.peers.hivemind_peer", words, network=network, host=rank))
            addresses += _receive(peers[-1])["addresses"]
            _resume(peers[-1])
        for peer in peers:
            _receive(peer)
        for peer in peers:  # all at once
            _resume(peer)
        yield Program(peers, [[peer.pid] for peer in peers])


@contextlib.contextmanager
def ray_server(config: Config, *, machines: Sequence[int], **order: Any) -> Iterator[Program]:
    """Start a parameter server on Ray and its workers. `order`: see `peers/ray_server.py`."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="smolbench-", ignore_cleanup_errors=True))
        words = {"config": config.model_dump(mode="json"), "machines": list(machines), **order}
        environ = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        process = _start(stack, "benchmarks.peers.ray_server", words, environ=environ)
        roots = _receive(process)["machines"]
        _resume(process)
        yield Program([process], roots)


def _start(stack: contextlib.ExitStack, module: str, words: Message, **how: Any) -> subprocess.Popen[bytes]:
    return stack.enter_context(started([sys.executable, "-m", module, json.dumps(words)], listen=True, **how))


def _receive(process: subprocess.Popen[bytes]) -> Message:
    return receive(process, timeout_s=SILENT_S)


def _resume(process: subprocess.Popen[bytes]) -> None:
    send(process, {})
