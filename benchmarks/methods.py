"""Methods that train the same model on a few hosts: torch DDP and its hooks, DiLoCo as a bare loop, ours on the mesh plane.

A world of ranks holds one of them (`training`), and takes as many steps as it is told:

    with training("diloco, wan", config, size=2, network=network) as world:
        answer = steps_of(world, 30, val_samples=256)       # seconds, bytes sent by all, validation loss

Weights, order of samples, AdamW, clipping and learning rates are the same for all; only `muon` has another optimizer inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from benchmarks.dropped import Dropping, drop_contributions
from benchmarks.network import Network
from benchmarks.peers.bare_diloco import BareDiLoCo
from benchmarks.peers.ddp import DDPTraining
from benchmarks.peers.work import CPU, Work
from benchmarks.tasks.counted import kernel_bytes
from benchmarks.workload import Shape, make_config, make_strategy
from benchmarks.world import Message, World, serve
from smolcluster.comm.group import Group
from smolcluster.compute.device import choose_device
from smolcluster.compute.replica import Batch
from smolcluster.config.schema import Config
from smolcluster.errors import SmolclusterError

DDP, BARE, MUON = "torch DDP", "bare DiLoCo", "muon"
MUON_PEER = "allreduce, muon"  # the synchronous run of that optimizer
PLAIN = "diloco, wan, plain SGD"  # SparseLoCo's outer optimizer


@dataclass(frozen=True, slots=True)
class Method:
    strategy: str = "allreduce"
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"

    def overrides(self) -> dict[str, Any]:
        options = {f"strategy.{key}": value for key, value in self.options.items()}
        return {"strategy.name": self.strategy, "training.optimizer": self.optimizer, **options}


def diloco(preset: str | None = None, *, optimizer: str = "adamw", **options: Any) -> Method:
    return Method("diloco", {"preset": preset, **options}, optimizer)


PEERS: dict[str, dict[str, Any]] = {DDP: {}, "DDP, fp16": {"hook": "fp16"}, "DDP, PowerSGD 4": {"hook": "powersgd"}}
OURS = {
    "allreduce": Method(),
    "diloco, fp32": diloco(),
    "diloco, lan": diloco("lan"),
    "diloco, wan": diloco("wan"),
    PLAIN: diloco("wan", outer_lr=1.0, outer_momentum=0.0),
    "diloco, wan, H 30, k 512": diloco("wan", inner_steps=30, codec_k=512, outer_momentum=0.7),
    MUON_PEER: Method(optimizer=MUON),
    "diloco, fp32, muon": diloco(optimizer=MUON),
    "diloco, lan, muon": diloco("lan", optimizer=MUON),
    "diloco, wan, muon": diloco("wan", optimizer=MUON),
    "diloco, wan, muon, H 20": diloco("wan", optimizer=MUON, inner_steps=20),
    "diloco, wan, muon, H 30, k 192": diloco("wan", optimizer=MUON, inner_steps=30, codec_k=192),
}
OF_BYTES = ("diloco, wan, H 30, k 512", "diloco, wan, muon, H 20", "diloco, wan, muon, H 30, k 192")  # for P3 alone
METHODS = [*PEERS, BARE, *OURS]


def training(
    name: str | Method,
    shape: Shape,
    *,
    steps: int,
    size: int,
    seed: int = 42,
    dropped: float = 0.0,
    network: Network | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> World:
    """A world that trains with this method; `steps` are those of the learning rate's schedule.

    `dropped`: the share of contributions to rounds of `diloco` that does not arrive. `overrides`: of the configuration;
    a device other than the CPU is for ours.
    """
    method, peer = (name, None) if isinstance(name, Method) else (OURS.get(name, Method()), name)
    common = {"training.seed": seed, "training.device": "cpu", **method.overrides()}
    config = make_config(shape, steps=steps, overrides={**common, **(overrides or {})})
    spec = {"config": config.model_dump(mode="json"), "method": peer, "dropped": dropped}
    return World("benchmarks.methods", size=size, spec=spec, network=network)


def steps_of(world: World, steps: int, *, val_samples: int | None = 0, last: bool = False) -> Message:
    """Take steps. `val_samples`: of the validation set, 0: none, None: all. `last`: end a round that is not full."""
    answers = world.ask({"steps": steps, "val_samples": val_samples, "last": last})
    total, first = (sum(int(answer[key]) for answer in answers) for key in ("sent", "before"))
    if total == 0 and world.size > 1:
        raise SmolclusterError("this kernel does not count the bytes of sockets (TCP_INFO of Linux is needed)")
    seconds = max(float(answer["seconds"]) for answer in answers)
    return {"bytes": total, "bytes_now": total - first, "seconds": seconds, "val_loss": answers[0]["val_loss"]}


class Ours:
    """Our strategy, stepped as the engine does it."""

    def __init__(self, work: Work, group: Group, *, dropped: float = 0.0) -> None:
        self.device = choose_device(work.config.training.device)
        self._strategy = make_strategy(work.config, work.task, group=group, device=self.device)
        self._step = 0
        self._dropping: Dropping | None = None
        if dropped:
            self._dropping = drop_contributions(
                self._strategy, group, share=dropped, seed=work.config.training.seed or 0
            )

    @property
    def model(self) -> nn.Module:
        return self._strategy.replica.model

    def run(self, batches: list[Any]) -> None:
        for part in batches:
            self._step += 1
            if self._dropping is not None:
                self._dropping.before_step()
            self._strategy.step(Batch(parts=[part], samples=len(part[0]), tokens=part[0].numel(), step=self._step))

    def finish(self) -> None:
        self._strategy.drain()


def setup(spec: Message, group: Group) -> Callable[[Message], Message]:
    """One rank."""
    work = Work(Config.model_validate(spec["config"]), rank=group.rank, size=group.size)
    name = spec["method"]
    method: Any
    if name in PEERS:
        method = DDPTraining(work.model, work.recipe, gradient_as_bucket_view=True, **PEERS[name])
    else:
        method = BareDiLoCo(work.model, work.recipe) if name == BARE else Ours(work, group, dropped=spec["dropped"])

    def handle(message: Message) -> Message:
        group.barrier()
        (before, _), started = kernel_bytes(), time.perf_counter()
        for _ in range(message["steps"]):
            method.run([work.batch()])
        if message["last"] and hasattr(method, "finish"):
            method.finish()
        seconds, (sent, _) = time.perf_counter() - started, kernel_bytes()
        group.barrier()  # nobody closes a connection before everybody has counted
        wanted = message["val_samples"]
        device, val_loss = getattr(method, "device", CPU), None
        if group.rank == 0 and wanted != 0:
            val_loss = work.validation_loss(method.model, samples=wanted, device=device)
        method.model.train()
        return {"before": before, "sent": sent, "seconds": seconds, "val_loss": val_loss}

    return handle


if __name__ == "__main__":
    serve(setup)
