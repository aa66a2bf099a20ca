"""P10: how long a checkpoint stops training.

Work: a GPT of 350 M parameters with AdamW (4.2 GB of weights and moments), on a GPU where there is one. Every sample follows a
training step, so all state has just changed and nothing is cached.

Compared: the time until training continues,

    torch.save          of weights and optimizer state, when the file is written
    DCP async           `torch.distributed.checkpoint.async_save`, when it returns
    smolcluster         one copy of the state, as the loop makes it; a thread writes, hashes and flushes it

and, beside them, one copy of the state to allocated host memory, which is the limit. All writing ends before the next sample.
Ours is also flushed to the disk and hashed; the peers' files are not.

Target: 20 times shorter than torch.save.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.harness import Comparison, Session, Target, Variant
from smolcluster.compute.optim import named_state
from smolcluster.engine.checkpoint.async_saver import Saver
from smolcluster.engine.checkpoint.snapshot import Snapshot
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.errors import SmolclusterError
from smolcluster.models import GPT, GPTConfig

EXAMPLE = "python -m benchmarks p10 --device cpu --layers 4"
TARGET = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    parser.add_argument("--layers", type=int, help="of width 1024 (default: 24, which is 350 M parameters; quick: 1)")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")


def run(session: Session, arguments: argparse.Namespace) -> None:
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    state = State(device, layers=arguments.layers or (1 if session.quick else 24))
    session.parameters = {"device": device.type, "parameters": state.parameters, "bytes": state.nbytes}
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="p10-"))
    try:
        room = shutil.disk_usage(folder).free
        if room < 4 * state.nbytes:
            raise SmolclusterError(f"{4 * state.nbytes / 1e9:.0f} GB of disk are needed and {room / 1e9:.0f} are free")
        with Ours(state, folder / "ours") as ours:
            variants = [
                Variant(name="torch.save", run=lambda: torch_save(state, folder), role="peer"),
                Variant(name="DCP async", run=lambda: dcp_async(state, folder), role="extra"),
                Variant(name="smolcluster", run=ours.save, target=Target(limit=1 / TARGET)),
                Variant(name="one copy", run=Copy(state).run, role="extra"),
            ]
            name = f"{state.parameters / 1e6:.0f} M parameters on {device.type}, {state.nbytes / 1e9:.1f} GB"
            measured = session.compare(Comparison(name=name, variants=variants))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        dist.destroy_process_group()
    for other in ("torch.save", "DCP async"):
        times = measured.median(other) / measured.median("smolcluster")
        print(f"{other} stops training {times:.1f} times as long")


class State:
    """A model and its optimizer after a step."""

    def __init__(self, device: torch.device, *, layers: int) -> None:
        self.device = device
        shape = GPTConfig(vocab_size=50304, model_dim=1024, num_layers=layers, num_heads=16, max_seq_len=1024)
        with device:
            self.model = GPT(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.change()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.nbytes = sum(t.nbytes for t in self.weights().values()) + sum(t.nbytes for t in self.moments().values())

    def change(self) -> None:
        """Take an optimizer step, and wait until the device is idle."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights, tied ones once."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def moments(self) -> dict[str, Tensor]:
        return named_state(self.model, self.optimizer)

    def timed(self, save: Callable[[], None]) -> float:
        self.change()
        started = time.perf_counter()
        save()
        return time.perf_counter() - started


def torch_save(state: State, folder: Path) -> float:
    path = folder / "peer.pt"
    seconds = state.timed(lambda: torch.save({"model": state.weights(), "optimizer": state.moments()}, path))
    _settle(path)
    return seconds


def dcp_async(state: State, folder: Path) -> float:
    path, pending = folder / "dcp", []

    def save() -> None:
        tensors: dict[str, Any] = {"model": state.weights(), "optimizer": state.moments()}
        pending.append(async_save(tensors, checkpoint_id=path))

    seconds = state.timed(save)
    assert isinstance(pending[0], Future)
    pending[0].result()
    _settle(path)
    return seconds


class Ours:
    """The saver as the loop uses it: memory for the copy is allocated beforehand."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state, self._step = state, 0
        self._problems: list[str] = []
        self._saver = Saver(
            CheckpointStore(folder, keep=1),
            on_saved=lambda event: None,
            on_failed=lambda event: self._problems.append(event.reason),
        )
        self._saver.reserve(state.weights())
        self._saver.reserve(state.moments())

    def save(self) -> float:
        self._step += 1

        def save() -> None:
            saver, state = self._saver, self._state
            snapshot = Snapshot(
                step=self._step,
                weights=saver.snapshot_tensors(state.weights()),
                optimizer=saver.snapshot_tensors(state.moments()),
            )
            saver.submit(snapshot)

        seconds = self._state.timed(save)
        self._saver.wait()
        if self._problems:
            raise SmolclusterError(self._problems[0])
        return seconds

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *_: object) -> None:
        self._saver.close()


class Copy:
    """Copy the state to allocated memory; pinned for a GPU."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._targets: list[Tensor] = []

    def run(self) -> float:
        tensors = [*self._state.weights().values(), *self._state.moments().values()]
        if not self._targets:
            pinned = self._state.device.type == "cuda"
            self._targets = [torch.zeros(t.shape, dtype=t.dtype, pin_memory=pinned) for t in tensors]

        def copy() -> None:
            for target, tensor in zip(self._targets, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            if self._state.device.type == "cuda":
                torch.cuda.synchronize()

        return self._state.timed(copy)


def _settle(path: Path) -> None:
    """Remove a file or folder and flush the disk, so that this is not in the time of the next sample."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()
