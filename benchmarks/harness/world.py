"""Rank processes that wait for messages, so that variants take turns in one and the same world.

The parent sends all ranks the same message at once and gets one answer from each (`pipes.py`). Ranks meet as in a real run
(`comm.mesh.rendezvous.connect`), on loopback or across the hosts of a `Network`.

    parent    with World("benchmarks.programs.ddp_rank", size=2, spec={...}) as world:
                  answers = world.ask({"variant": "ddp", "steps": 10})
    rank      serve(lambda spec, group: handler)      # handler(message) -> answer
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from benchmarks.harness.network import Network
from benchmarks.harness.pipes import Message, answer_each, open_answers, receive, send
from benchmarks.harness.processes import started
from smolcluster.comm.group import Group
from smolcluster.comm.mesh.rendezvous import RankPlace, connect


class World:
    """`size` processes that run `module`. With a network, rank r runs on host r."""

    def __init__(self, module: str, *, size: int, spec: Mapping[str, Any], network: Network | None = None) -> None:
        self.size = size
        self._module, self._spec, self._network = module, spec, network

    def __enter__(self) -> World:
        network, size = self._network, self.size
        command = [sys.executable, "-m", self._module]
        with contextlib.ExitStack() as stack:
            self._ranks = [
                stack.enter_context(started(command, listen=True, network=network, host=rank)) for rank in range(size)
            ]
            place = {"world_size": size, "master_addr": "127.0.0.1" if network is None else network.address(0)}
            for rank, process in enumerate(self._ranks):
                send(process, {**self._spec, **place, "rank": rank})
            if size > 1:
                port = receive(self._ranks[0])["port"]
                for process in self._ranks[1:]:
                    send(process, {"port": port})
            for process in self._ranks:
                receive(process)  # it is ready
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def ask(self, message: Message) -> list[Message]:
        """Send the same message to every rank. Return their answers, in rank order."""
        for process in self._ranks:
            send(process, message)
        return [receive(process) for process in self._ranks]

    def pid(self, rank: int) -> int:
        return self._ranks[rank].pid


def serve(setup: Callable[[Message, Group], Callable[[Message], Message]]) -> None:
    """Run a rank: meet the others, set up, then answer until the input ends."""
    answer = open_answers()
    spec = json.loads(sys.stdin.buffer.readline())
    rank = spec["rank"]
    place = RankPlace(
        rank=rank,
        world_size=spec["world_size"],
        local_rank=rank,
        local_world_size=spec["world_size"],
        master_addr=spec["master_addr"],
        master_port=0 if rank == 0 else json.loads(sys.stdin.buffer.readline())["port"],
    )
    group = connect(place, device=torch.device("cpu"), announce=lambda port: answer({"port": port}))
    answer_each(answer, setup(spec, group))
    sys.stderr.flush()
    os._exit(0)  # threads of a backend may still wait for a rank that has ended
