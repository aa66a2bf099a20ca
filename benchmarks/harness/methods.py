"""Methods that train the same model on a few hosts: torch DDP and its hooks, DiLoCo as a bare loop, ours on the mesh plane.

`training` starts a world of ranks with one of them, `steps_of` takes steps in it:

    with training("diloco, wan", config, size=2, network=network) as world:
        answer = steps_of(world, 30, val_samples=256)       # seconds, bytes sent by all, validation loss

Weights, order of samples, AdamW, clipping and learning rates are the same for all; only `muon` has another optimizer inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.network import Network
from benchmarks.harness.pipes import Message
from benchmarks.harness.workload import Shape, make_config
from benchmarks.harness.world import World
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
    """Return a world that trains with this method; `steps`: of the learning rate's schedule.

    `dropped`: the share of contributions to rounds of `diloco` that is lost. `overrides`: of the configuration; only ours uses
    a device other than the CPU.
    """
    method, peer = (name, None) if isinstance(name, Method) else (OURS.get(name, Method()), name)
    common = {"training.seed": seed, "training.device": "cpu", **method.overrides()}
    config = make_config(shape, steps=steps, overrides={**common, **(overrides or {})})
    spec = {"config": config.model_dump(mode="json"), "method": peer, "dropped": dropped}
    return World("benchmarks.programs.methods_rank", size=size, spec=spec, network=network)


def steps_of(world: World, steps: int, *, val_samples: int | None = 0, last: bool = False) -> Message:
    """Take steps. `val_samples`: evaluate on so many samples, 0: do not, None: on all. `last`: end a round that is not full."""
    answers = world.ask({"steps": steps, "val_samples": val_samples, "last": last})
    total, first = (sum(int(answer[key]) for answer in answers) for key in ("sent", "before"))
    if total == 0 and world.size > 1:
        raise SmolclusterError("this kernel does not count the bytes of sockets (TCP_INFO of Linux is needed)")
    seconds = max(float(answer["seconds"]) for answer in answers)
    return {"bytes": total, "bytes_now": total - first, "seconds": seconds, "val_loss": answers[0]["val_loss"]}
