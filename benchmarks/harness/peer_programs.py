"""Peers that are programs of their own, hivemind and Ray: started, listened to, counted.

    with ray_server(config, machines=[1, 2], mode="sync", steps=100) as program:
        for row in program.rows():      # a step each; the last one has the validation loss
            program.bytes_sent()        # between machines, so far; the program waits meanwhile

Both come with `pip install 'smolcluster[bench]'`. Nothing here imports them: `missing` says why they cannot be used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.network import Network
from benchmarks.harness.processes import bytes_between, descendants, started
from benchmarks.harness.world import Message
from smolcluster.config.schema import Config
from smolcluster.errors import SmolclusterError

MATCHMAKING_S = 0.5  # how long hivemind looks for peers in each epoch; its guide says 3 and more
SILENT_S = 180.0  # a program that says nothing for so long stands still


def usable(named: Mapping[str, tuple[str, Any]]) -> list[str]:
    """Of these names, with their packages, those that can run. Of the others it is said why not."""
    reasons = {package: missing(package) for package, _ in named.values()}
    for reason in filter(None, reasons.values()):
        print(f"  {reason}: left out", flush=True)
    return [name for name, (package, _) in named.items() if reasons[package] is None]


def missing(package: str) -> str | None:
    """Why a peer is left out; None: it can run."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed (pip install 'smolcluster[bench]')"
    return None if shutil.which("ss") else f"ss of iproute2 is not installed, which counts the bytes of {package}"


class Program:
    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], roots: Sequence[Sequence[int]]) -> None:
        """`roots`: the first processes of each machine. What they start is of the same machine, unless it is a root too."""
        self._processes, self._roots = processes, roots

    def rows(self) -> Iterator[Message]:
        """Until the one with the validation loss. It goes on when the next one is asked for."""
        while True:
            row = listen(self._processes[0])
            yield row
            if "val_loss" in row:
                return
            answer(self._processes[0])

    def machine(self, number: int) -> set[int]:
        """All its processes."""
        family = {pid for root in self._roots[number] for pid in (root, *descendants(root))}
        return family.difference(*(self.machine(later) for later in range(number + 1, len(self._roots))))

    def bytes_sent(self) -> int:
        return bytes_between([self.machine(number) for number in range(len(self._roots))])


@contextlib.contextmanager
def hivemind_peers(
    config: Config, *, size: int, cores: Sequence[int | None] = (), network: Network | None = None, **order: Any
) -> Iterator[Program]:
    """Peers of hivemind, one on each machine. `order`: see `peers/hivemind_peer.py`. With a network peer r is on host r."""
    with contextlib.ExitStack() as stack:
        peers: list[subprocess.Popen[bytes]] = []
        addresses: list[str] = []
        common = {"config": config.model_dump(mode="json"), "size": size, "matchmaking_s": MATCHMAKING_S, **order}
        for rank in range(size):
            words = {**common, "rank": rank, "addresses": addresses, "core": cores[rank] if cores else None}
            words["host"] = "127.0.0.1" if network is None else network.address(rank)
            with contextlib.nullcontext() if network is None else network.inside(rank):
                peers.append(_start(stack, "benchmarks.peers.hivemind_peer", words))
            addresses += listen(peers[-1])["addresses"]
            answer(peers[-1])
        for peer in peers:
            listen(peer)
        for peer in peers:  # all at once
            answer(peer)
        yield Program(peers, [[peer.pid] for peer in peers])


@contextlib.contextmanager
def ray_server(config: Config, *, machines: Sequence[int], **order: Any) -> Iterator[Program]:
    """A parameter server on Ray and its workers. `order`: see `peers/ray_server.py`."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="smolbench-", ignore_cleanup_errors=True))
        words = {"config": config.model_dump(mode="json"), "machines": list(machines), **order}
        environ = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        process = _start(stack, "benchmarks.peers.ray_server", words, environ)
        roots = listen(process)["machines"]
        answer(process)
        yield Program([process], roots)


def _start(
    stack: contextlib.ExitStack, module: str, words: Message, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, json.dumps(words)]
    return stack.enter_context(started(command, environ=environ, listen=True))


def listen(process: subprocess.Popen[bytes]) -> Message:
    """The next row."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], SILENT_S)[0]:  # it writes one row, then waits: none lies in a buffer
        raise SmolclusterError(f"a peer wrote no row for {SILENT_S:g} s")
    line = process.stdout.readline()
    if not line:
        raise SmolclusterError("a peer ended")
    row: Message = json.loads(line)
    return row


def answer(process: subprocess.Popen[bytes]) -> None:
    """It may go on."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
