"""Fronts and stages for tests: tiny random models, over real sockets in one process, or each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smolcluster.comm.elastic.transport.tcp import TcpTransport
from smolcluster.engine.identity import new_peer
from smolcluster.models import GPT, GPTConfig, Qwen3Config
from smolcluster.models.parts import part_of
from smolcluster.serve.engine.front import LINKS, Front
from smolcluster.serve.engine.layout import LayoutOptions
from smolcluster.serve.engine.model_source import ModelSource
from smolcluster.serve.engine.scheduler import SchedulerLimits
from smolcluster.serve.engine.stage import StageWorker
from smolcluster.serve.engine.types import SamplingParams, SequenceRequest, Token
from smolcluster.serve.text.conversation import ChatTokenizer
from tests.places import eventually

GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")


def llama(layers: int = 6, **said: int) -> GPTConfig:
    shape = {"vocab_size": 97, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 256, "ff_dim": 64}
    return GPTConfig.llama(num_layers=layers, **(shape | said))


def gpt2(layers: int = 6) -> GPTConfig:
    return GPTConfig(vocab_size=97, model_dim=32, num_layers=layers, num_heads=4, max_seq_len=256)


def qwen3(layers: int = 6) -> Qwen3Config:
    shape = {"vocab_size": 97, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 256, "ff_dim": 64}
    return Qwen3Config(num_layers=layers, head_dim=16, **shape)


class RandomSource(ModelSource):
    """A model out of thin air: the same wherever it is made from the same seed."""

    def __init__(self, config: GPTConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.name, self.config = "random", config
        self.fingerprint, self.reference = f"random-{seed}", {"kind": "nowhere", "path": "none"}
        self.model = GPT(config)
        self.model.init_weights(generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for parameter in self.model.parameters():  # else the text of a random model is one token again and again
                parameter.mul_(3.0)
        self.model.to(dtype).eval()
        self.loaded: list[range] = []

    def text(self) -> ChatTokenizer:
        raise NotImplementedError

    def _load(
        self, layers: range, *, first: bool, last: bool, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        self.loaded.append(layers)
        state = self.model.state_dict()
        names = part_of(state, self.config, layers, first=first, last=last)
        return {name: state[name].to(device, dtype, copy=True) for name in names}

    def greedy(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """What one process would say."""
        return self.model.generate(torch.tensor([prompt]), count, temperature=0.0)[0, len(prompt) :].tolist()


@dataclass
class Cluster:
    """A front and its stages, each with a transport of its own, in this process."""

    source: RandomSource
    front: Front
    stages: dict[str, tuple[StageWorker, TcpTransport, threading.Thread]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        *,
        files: bool = True,
        host: str = "here",
        dtype: torch.dtype = torch.float32,
        memory_bytes: int = 1 << 30,
        called: str | None = None,
    ) -> None:
        transport = TcpTransport(new_peer(role="stage", rank=0, host=name), limits=LINKS)
        worker = StageWorker(
            transport,
            self.front.address,
            name=called or name,
            host=host,
            listen=("127.0.0.1", 0),
            device=CPU,
            dtype=dtype,
            memory_bytes=memory_bytes,
        )
        if files:
            worker._weights._source = self.source
        thread = threading.Thread(target=worker.run, name="smolcluster-stage", daemon=True)
        thread.start()
        self.stages[name] = (worker, transport, thread)

    def remove(self, name: str) -> None:
        worker, transport, thread = self.stages.pop(name)
        worker.stop()
        thread.join(300)
        transport.close()

    async def ask(
        self,
        prompt: tuple[int, ...],
        count: int,
        *,
        sampling: SamplingParams = GREEDY,
        stop: frozenset[int] = frozenset(),
    ) -> list[Token]:
        wanted = SequenceRequest(tokens=prompt, max_tokens=count, sampling=sampling, stop_tokens=stop)
        return [token async for token in self.front.stream(wanted)]

    def settled(self, count: int) -> bool:
        """Whether so many machines have offered themselves, and those that are to hold layers do."""
        offered = [machine for machine in list(self.front._machines.values()) if machine.offer is not None]
        holders = [machine for stage in self.front.state()["stages"] for machine in stage["machines"]]
        return len(offered) == count and all(machine["state"] == "ready" for machine in holders)

    def text(self, prompt: tuple[int, ...], count: int, *, sampling: SamplingParams = GREEDY) -> list[int]:
        return [token.token for token in asyncio.run(self.ask(prompt, count, sampling=sampling))]


@contextlib.contextmanager
def cluster(
    source: RandomSource,
    *names: str,
    stages: int | None = None,
    replicas: int = 1,
    codec: str = "fp32",
    limits: SchedulerLimits | None = None,
    files: bool = True,
    dtype: torch.dtype = torch.float32,
    memory_bytes: int = 1 << 30,
    distribution: str | None = None,
    ready: bool = True,
) -> Iterator[Cluster]:
    """Start a front and its stages; with `ready`, wait until all layers are loaded."""
    transport = TcpTransport(new_peer(role="front", rank=0, host="front"), limits=LINKS)
    options = LayoutOptions(stages=stages or len(names), replicas=replicas, distribution=distribution)
    front = Front(transport, source, options=options, codec=codec, limits=limits, dtype=dtype)
    made = Cluster(source, front)
    try:
        for name in names:
            made.add(name, files=files, dtype=dtype, memory_bytes=memory_bytes)
        if ready:
            assert front.wait_ready(300), front.problems()
            eventually(lambda: made.settled(len(names)), what="every stage")
        yield made
    finally:
        front.close()
        for name in list(made.stages):
            made.remove(name)


class StageProcesses:
    """Stages as processes of their own, without files: the front sends them what they hold."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        for name in names:
            command = [sys.executable, "-m", "smolcluster", "stage", "--server", self._front.address, "--name", name]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.processes[name] = subprocess.Popen(
                [*command, "--device", "cpu", "--with-parent"], stdin=subprocess.PIPE, env=environment
            )

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
            process.stdin.close()


@contextlib.contextmanager
def fronted(
    source: RandomSource, *names: str, stages: int, limits: SchedulerLimits | None = None, codec: str = "fp32"
) -> Iterator[tuple[Front, StageProcesses]]:
    """A front in this process, ready, with stages in others."""
    transport = TcpTransport(new_peer(role="front", rank=0, host="front"), limits=LINKS)
    front = Front(transport, source, options=LayoutOptions(stages=stages), codec=codec, limits=limits)
    processes = StageProcesses(front)
    try:
        processes.start(*names)
        assert front.wait_ready(300), front.problems()
        yield front, processes
    finally:
        front.close()
        processes.close()
