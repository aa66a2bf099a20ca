"""Rank processes that wait for orders, so that variants can take turns in one and the same world.

The parent asks all ranks for the same thing at once and gets one answer from each, as JSON lines on their standard input
and output. Ranks meet as in a real run (`comm.rendezvous.connect`), on loopback or across the hosts of a `Network`.

    parent    with World("benchmarks.programs.ddp_rank", size=2, spec={...}) as world:
                  answers = world.ask({"variant": "ddp", "steps": 10})
    rank      serve(lambda spec, group: handler)      # handler(message) -> answer
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness.network import Network
from benchmarks.harness.workload import child_environment
from smolcluster.comm.group import Group
from smolcluster.comm.mesh.rendezvous import RankPlace, connect
from smolcluster.compute.device import choose_device
from smolcluster.errors import SmolclusterError

Message = dict[str, Any]


class World:
    """`size` processes that run `module`. With a network, rank r lives on host r."""

    def __init__(self, module: str, *, size: int, spec: Mapping[str, Any], network: Network | None = None) -> None:
        self.size = size
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the ranks
        self._ranks = [self._start(module, rank, network) for rank in range(size)]
        address = "127.0.0.1" if network is None else network.address(0)
        try:
            for rank in range(size):
                self._tell(rank, {**spec, "rank": rank, "world_size": size, "master_addr": address})
            if size > 1:
                port = self._answer(0)["port"]
                for rank in range(1, size):
                    self._tell(rank, {"port": port})
            self.ready = [self._answer(rank) for rank in range(size)]
        except BaseException:
            self.close()
            raise

    def _start(self, module: str, rank: int, network: Network | None) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        if network is not None:
            return network.popen(rank, command, env=child_environment(), **pipes)
        return subprocess.Popen(command, env=child_environment(), **pipes)

    def ask(self, message: Message) -> list[Message]:
        """The same order to every rank; their answers, in rank order."""
        for rank in range(self.size):
            self._tell(rank, message)
        return [self._answer(rank) for rank in range(self.size)]

    def pid(self, rank: int) -> int:
        return self._ranks[rank].pid

    def _tell(self, rank: int, message: Message) -> None:
        pipe = self._ranks[rank].stdin
        assert pipe is not None
        pipe.write(json.dumps(message).encode() + b"\n")
        pipe.flush()

    def _answer(self, rank: int) -> Message:
        pipe = self._ranks[rank].stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            self._errors.seek(0)
            words = self._errors.read().decode(errors="replace").strip()[-3000:]
            raise SmolclusterError(f"rank {rank} of the benchmark ended; its world said:\n{words}")
        answer: Message = json.loads(line)
        return answer

    def close(self) -> None:
        """The end of its input ends a rank; one that does not listen is killed."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._errors.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(setup: Callable[[Message, Group], Callable[[Message], Message]]) -> None:
    """The life of a rank: meet the others, set up, then answer until the input ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # backends print; standard output is for answers
    orders = sys.stdin.buffer

    def answer(message: Message) -> None:
        answers.write(json.dumps(message).encode() + b"\n")

    spec = json.loads(orders.readline())
    rank = spec["rank"]
    place = RankPlace(
        rank=rank,
        world_size=spec["world_size"],
        local_rank=rank,
        local_world_size=spec["world_size"],
        master_addr=spec["master_addr"],
        master_port=0 if rank == 0 else json.loads(orders.readline())["port"],
    )
    device = choose_device(spec.get("device", "cpu"), local_rank=rank)
    group = connect(place, device=device, announce=lambda port: answer({"port": port}))
    handle = setup(spec, group)
    answer({"ready": True})
    for line in orders:
        answer(handle(json.loads(line)))
    sys.stderr.flush()
    os._exit(0)  # threads of a backend may still wait for a rank that has left
