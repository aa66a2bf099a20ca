"""Cost of the exchange of a round of diloco on one device, beside the local steps of that round.

Work: GPT-2 124 M on random tokens, bf16, AdamW, one worker of a group of 4. Its 30 local steps are real, and so are its
exchanges: the strategy `diloco` encodes its pseudo-gradient, decodes the payloads of all 4, takes the mean and the outer step.
The other three workers are simulated: their payloads are real encodings of random pseudo-gradients, made before the clock
starts. No network is used.

    compute     30 local steps, without an exchange
    exchange    from the end of the last local step until the next one may begin, as the strategy reports it
    ratio       exchange / compute

Its parts, measured in another exchange that synchronizes the device between them:

    pseudo-gradient    the start of the round less the weights
    encode             with error feedback, and the norm of what is sent
    copy               payloads between device and host: one out, four in
    decode             four payloads
    mean               over the four
    outer step         of the outer optimizer, and the weights set to the result

The time on the wire is computed: the bytes that a worker sends and receives, at 1, 10 and 100 Mbit/s each way. Writing received
bytes to memory belongs to the network, and is not in the time of the exchange. Per token: of this worker.

Target: the exchange takes at most 2 % of the compute of a round of 30 steps, with preset wan and with preset lan.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.harness import Session
from benchmarks.harness.workload import SHAPES, Shape, make_config, make_strategy
from smolcluster.comm.codecs import FlatEncoding, chosen_codec
from smolcluster.comm.gathered_mean import GatheredMean
from smolcluster.comm.group import Done, Group, Traffic, Work
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.compute.device import choose_device, synchronize
from smolcluster.compute.replica import Batch
from smolcluster.strategies.base import StepReport
from smolcluster.strategies.diloco import DiLoCo
from smolcluster.tasks.find import find_task

EXAMPLE = "python -m benchmarks exchange --device cuda"
WORKERS, LOCAL_STEPS, AT_MOST = 4, 30, 0.02
LINKS = {f"wire at {rate} Mbit/s": rate for rate in (1, 10, 100)}
METHODS: dict[str, dict[str, Any]] = {
    "wan": {"preset": "wan"},
    "lan": {"preset": "lan"},
    "bf16": {"codec": "bf16"},
    "fp32": {},
}
TARGETS = ("wan", "lan")
PARTS = ("pseudo-gradient", "encode", "copy", "decode", "mean", "outer step")
TINY = Shape("tiny", 64, 2, 2, 32, 2, vocab_size=256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is a GPU; quick: cpu)")
    parser.add_argument("--only", choices=METHODS, nargs="+", help="(default: all)")
    parser.add_argument("--batch", type=int, help="sequences in a micro-batch (default: 12)")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a local step (default: 4)")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--threads", type=int, help="of torch on the CPU (default: torch's)")


def run(session: Session, arguments: argparse.Namespace) -> None:
    device = choose_device(arguments.device or ("cpu" if session.quick else None))
    shape = TINY if session.quick else SHAPES["124m"]
    threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads or threads)
    batch = arguments.batch or (shape.batch_size if session.quick else 12)
    tokens = batch * arguments.micro_batches * shape.max_seq_len
    session.parameters = {
        **shape.overrides(),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "batch_size": batch,
        "micro_batches": arguments.micro_batches,
        "tokens_per_step": tokens,
        "compile": arguments.compile,
        "workers": WORKERS,
        "local_steps": LOCAL_STEPS,
    }
    try:
        rows = [_measure(session, name, shape, device, batch) for name in arguments.only or METHODS]
    finally:
        torch.set_num_threads(threads)
    where = f"{device.type}, {tokens:,} tokens per step, {WORKERS} workers, seconds"
    session.show(
        f"a round of {LOCAL_STEPS} steps: {where}",
        rows,
        ["method", "step", "compute", "exchange", "ratio", "verdict"],
    )
    session.show("the parts of an exchange", rows, ["method", *PARTS])
    session.show("seconds per token", rows, ["method", "bytes", "compute per token", "exchange per token", *LINKS])


def _measure(session: Session, name: str, shape: Shape, device: torch.device, batch: int) -> dict[str, Any]:
    steps = 4 if session.quick else LOCAL_STEPS
    worker = Worker(name, shape, device, batch=batch, steps=steps, parameters=session.parameters)
    worker.round()  # memory, kernels and error feedback as later in a run
    times = [worker.round() for _ in range(session.repeats)]
    parts = worker.parts()
    step, exchange = (statistics.median(each) for each in zip(*times, strict=True))
    compute, tokens = LOCAL_STEPS * step, LOCAL_STEPS * session.parameters["tokens_per_step"]
    met = exchange <= AT_MOST * compute
    return {
        "method": name,
        "step": step,
        "compute": compute,
        "exchange": exchange,
        "ratio": exchange / compute,
        "verdict": ("met" if met else "missed") if name in TARGETS else "",
        **parts,
        "compute per token": compute / tokens,
        "exchange per token": exchange / tokens,
        **{of: 8 * parts["bytes"] / (link * 1e6) / tokens for of, link in LINKS.items()},
        "samples": times,
    }


class SimulatedGroup(Group):
    """Rank 0 of a simulated group. The others send what is in `others`; while that is empty, what rank 0 sends."""

    def __init__(self) -> None:
        self.rank, self.size, self.traffic = 0, WORKERS, Traffic()
        self.others: Sequence[Tensor] = ()
        self.seconds = 0.0  # for what the network does in a run

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        started = time.perf_counter()
        rows = output.view(self.size, -1)
        for row, message in zip(rows, [tensor, *(self.others or [tensor] * (self.size - 1))], strict=True):
            row.copy_(message)
        moved = (self.size - 1) * tensor.nbytes
        self.traffic.add(moved, moved)
        self.seconds += time.perf_counter() - started
        return Done()

    def all_reduce(self, tensor: Tensor) -> Work:
        moved = 2 * (self.size - 1) / self.size * tensor.nbytes
        self.traffic.add(moved, moved)
        return Done()

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        return Done()

    def gather_json(self, value: Any) -> list[Any]:
        return [value] * self.size

    def buffer_device(self, device: torch.device) -> torch.device:
        return device

    def close(self) -> None:
        return None

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        raise NotImplementedError

    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Work:
        raise NotImplementedError

    def recv(self, tensor: Tensor, *, source: int, tag: int = 0) -> Work:
        raise NotImplementedError

    def sub(self, ranks: Sequence[int]) -> Group | None:
        raise NotImplementedError


class Worker:
    """Rank 0 of the simulated group."""

    def __init__(
        self, name: str, shape: Shape, device: torch.device, *, batch: int, steps: int, parameters: Mapping[str, Any]
    ):
        overrides = {
            "strategy.name": "diloco",
            **{f"strategy.{key}": value for key, value in METHODS[name].items()},
            "strategy.inner_steps": steps,
            "training.device": str(device),
            "training.batch_size": batch,
            "training.grad_accumulation": parameters["micro_batches"],
            "training.compile": parameters["compile"],
        }
        config = make_config(shape, steps=10**6, overrides=overrides)
        self._device, self._steps, self._step, self._group = device, steps, 0, SimulatedGroup()
        strategy = make_strategy(config, find_task(config), group=self._group, device=device)
        assert isinstance(strategy, DiLoCo)
        self._strategy, self._samples = strategy, batch * parameters["micro_batches"]
        generator = torch.Generator().manual_seed(0)
        vocabulary, length = shape.vocab_size or 256, shape.max_seq_len + 1
        drawn = torch.randint(vocabulary, (parameters["micro_batches"], batch, length), generator=generator).to(device)
        self._parts = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in drawn]
        if not chosen_codec(strategy.options).lossless:
            self._group.others = [self._message(generator) for _ in range(1, WORKERS)]

    def _message(self, generator: torch.Generator) -> Tensor:
        """Return what a worker with another pseudo-gradient sends: its payload, and that it does not ask to stop."""
        (group,) = MemoryGroup.world(1)
        options = self._strategy.options
        other = GatheredMean(self._strategy.trained, group, codec=chosen_codec(options), decay=options.feedback_decay)
        for parameter in self._strategy.trained.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).mul_(1e-3).to(self._device)
        other.start(0, weight=1 / WORKERS)
        other.finish(0)
        return torch.cat([other.shares(0)[0], torch.zeros(1, dtype=torch.uint8)])

    def round(self) -> tuple[float, float]:
        """Return the seconds of a local step without an exchange, and of the exchange."""
        self._take_step()  # not timed: it completes the last exchange
        synchronize(self._device)
        started = time.perf_counter()
        for _ in range(self._steps - 2):
            self._take_step()
        synchronize(self._device)
        seconds = (time.perf_counter() - started) / (self._steps - 2)
        before = self._group.seconds
        report = self._take_step()
        assert report.comm is not None, "a round ends with this step"
        return seconds, report.comm.seconds() - (self._group.seconds - before)

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part of an exchange, and the bytes that a worker sends in it."""
        for _ in range(self._steps - 1):
            self._take_step()
        before, placing, clock = self._group.traffic.bytes_sent, self._group.seconds, Clock(self._device)
        with ExitStack() as stack:
            for kind, name in (
                (DiLoCo, "_contribute"),
                (GatheredMean, "finish"),
                (GatheredMean, "wait"),
                (FlatEncoding, "decode"),
                (DiLoCo, "_await_due"),
            ):
                stack.enter_context(clock.of(kind, name))
            self._take_step()
        seconds, nbytes = clock.seconds, self._group.traffic.bytes_sent - before
        parts = {"bytes": float(nbytes), "outer step": seconds["_await_due"] - seconds["_await_due/wait"]}
        if not self._group.others:  # all-reduced
            return parts | {"pseudo-gradient": seconds["_contribute"]}
        placing = self._group.seconds - placing
        out, into = self._copies(nbytes // (WORKERS - 1))
        decode = seconds["_await_due/wait/decode"]
        return parts | {
            "pseudo-gradient": seconds["_contribute"] - seconds["_contribute/finish"],
            "encode": seconds["_contribute/finish"] - out - placing,
            "copy": out + into,
            "decode": decode,
            "mean": seconds["_await_due/wait"] - decode - into,
        }

    def _take_step(self) -> StepReport:
        self._step += 1
        tokens = sum(inputs.numel() for inputs, _ in self._parts)
        return self._strategy.step(Batch(parts=self._parts, samples=self._samples, tokens=tokens, step=self._step))

    def _copies(self, nbytes: int) -> tuple[float, float]:
        """Return the seconds to copy one payload out of the device, and all into it."""
        if self._device.type == "cpu":
            return 0.0, 0.0
        payload = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        copies: tuple[Callable[[], object], ...] = (
            functools.partial(host.copy_, payload),
            functools.partial(_to_device, host, self._device),
        )
        seconds = []
        for copy in copies:
            copy()
            synchronize(self._device)
            started = time.perf_counter()
            copy()
            synchronize(self._device)
            seconds.append(time.perf_counter() - started)
        return seconds[0], seconds[1]


def _to_device(payload: Tensor, device: torch.device) -> None:
    for _ in range(WORKERS):
        payload.to(device)


class Clock:
    """Times methods, one inside the other: `seconds["wait/decode"]` is that of `decode` inside `wait`."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device, self._inside = device, [""]

    def of(self, kind: type, name: str) -> AbstractContextManager[object]:
        """Time this method of all objects; of one that returns an iterator, with all that it yields."""
        method = getattr(kind, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            synchronize(self._device)
            path = f"{self._inside[-1]}/{name}".removeprefix("/")
            self._inside.append(path)
            started = time.perf_counter()
            try:
                result = method(*arguments, **keywords)
                result = list(result) if isinstance(result, Iterator) else result
                synchronize(self._device)
            finally:
                self._inside.pop()
            self.seconds[path] += time.perf_counter() - started
            return result

        return patch.object(kind, name, timed)
