"""One rank of p6: steps of a strategy, or of FSDP2 alone, with every storage recorded.

It is a rank of a real world (`harness/world.py`), or runs alone on a GPU in a fake group, whose collectives do nothing; there
the count of torch's allocator is the result.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.harness.pipes import Message, open_answers
from benchmarks.harness.workload import make_strategy
from benchmarks.harness.world import serve
from smolcluster.comm.group import Group
from smolcluster.compute.device import choose_device
from smolcluster.compute.memory import workspace_bytes
from smolcluster.compute.memory_tracker import MemoryTracker
from smolcluster.compute.replica import Batch, to_device
from smolcluster.compute.rng import seed_everything
from smolcluster.config.schema import Config
from smolcluster.data.dataset import as_dataset
from smolcluster.parallel.fsdp2 import blocks_of
from smolcluster.planner.fake_group import fake_world
from smolcluster.planner.memory_estimate import States
from smolcluster.tasks.base import Task
from smolcluster.tasks.find import find_task

STEPS = 3


class FSDP2:
    """FSDP2 as in its tutorial: `fully_shard` on every block and on the model, AdamW, forward, backward, step."""

    def __init__(self, config: Config, task: Task, *, group: Group, device: torch.device) -> None:
        seed_everything(config.training.seed or 0, "weights", device=device)
        self._task, self._device = task, device
        self.model = task.model().to(device)
        mesh = init_device_mesh(device.type, (group.size,), mesh_dim_names=("dp",))
        half = config.training.precision == "bf16"
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32 if half else None
        )
        reshard = config.strategy.given().get("fsdp_stage") == 3
        for module in [*blocks_of(self.model), self.model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, part: Any) -> None:
        self._task.loss(self.model, to_device(part, self._device)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


def prepare(
    who: str, config: Config, group: Group, device: torch.device
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], Any]]:
    """Return a model, its optimizer, and a function that takes a step."""
    task = find_task(config)
    assert config.training.batch_size is not None
    part = as_dataset(task.train_data()).batch(np.arange(config.training.batch_size))
    if who == "FSDP2":
        peer = FSDP2(config, task, group=group, device=device)
        return peer.model, peer.optimizer, lambda: peer.step(part)
    strategy = make_strategy(config, task, group=group, device=device)
    replica = strategy.replica
    return (
        strategy.replica.model,
        replica.optimizer,
        lambda: strategy.step(Batch(parts=[part], samples=len(part[0]), tokens=0, step=1)),
    )


def small(config: Config) -> Config:
    """Return the configuration of a tiny model: a step of it loads all code."""
    config = config.model_copy(deep=True)
    for key, value in {"model_dim": 16, "num_layers": 4, "num_heads": 2, "ff_dim": 16, "num_kv_heads": 2}.items():
        setattr(config.model, key, value)
    return config


def measure(message: Message, config: Config, group: Group, device: torch.device) -> Message:
    """Return the peak of memory in the last of a few steps."""
    config = config.model_copy(deep=True)
    for key, value in message["options"].items():
        setattr(config.strategy, key, value)
    workspace = workspace_bytes(device)  # before anything else uses the libraries of a GPU
    _, _, step = prepare(message["who"], small(config), group, device)
    step()
    del step
    gc.collect()
    before = resident_bytes()
    with MemoryTracker(device) as tracker:
        model, optimizer, step = prepare(message["who"], config, group, device)
        states = States(model, optimizer, tracker)
        for _ in range(STEPS - 1):
            step()
        gc.collect()
        since = tracker.position
        forget_peak(device)
        step()
        peak = tracker.peak(since)
    answer: Message = {
        "peak": {"at": dataclasses.asdict(peak.at_peak), "each": dataclasses.asdict(peak.of_each_kind)},
        "states": dataclasses.asdict(states.held),
        "workspace": workspace,
    }
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        answer["allocated"] = torch.cuda.max_memory_allocated(device)
    elif (after := resident_bytes(peak=True)) is not None and before is not None:
        answer["resident"] = after - before
    return answer


def forget_peak(device: torch.device) -> None:
    """Reset the peak."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_bytes(*, peak: bool = False) -> int | None:
    """Return the resident memory of this process; None where the kernel does not report it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    key = "VmHWM:" if peak else "VmRSS:"
    found = [line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith(key)]
    return int(found[0].split()[1]) * 1024 if found else None


def setup(spec: Message, group: Group) -> Callable[[Message], Message]:
    torch.set_num_threads(1)
    config = Config.model_validate(spec["config"])
    return lambda message: measure(message, config, group, torch.device("cpu"))


def alone() -> None:
    """Read what to measure, as rank 0 of as many ranks as the message has; write the answer."""
    answer = open_answers()
    spec = json.loads(sys.stdin.buffer.readline())
    config = Config.model_validate(spec["config"])
    device = choose_device("cuda")
    torch.cuda.set_device(device)
    with fake_world(0, spec["size"]) as group:
        answer(measure(spec["message"], config, group, device))


if __name__ == "__main__":
    alone() if sys.argv[1:] == ["alone"] else serve(setup)
