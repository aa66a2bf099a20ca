"""One rank that trains with a method of `harness/methods.py`, as many steps at a time as it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.harness.methods import BARE, PEERS
from benchmarks.harness.pipes import Message
from benchmarks.harness.workload import make_strategy
from benchmarks.harness.world import serve
from benchmarks.peers.bare_diloco import BareDiLoCo
from benchmarks.peers.ddp import DDPTraining
from benchmarks.peers.work import CPU, Work
from benchmarks.programs.dropped import Dropping, drop_contributions
from benchmarks.tasks.counted import kernel_bytes
from smolcluster.comm.group import Group
from smolcluster.compute.device import choose_device
from smolcluster.compute.replica import Batch
from smolcluster.config.schema import Config


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
        group.barrier()  # no rank closes a connection before all have counted
        wanted = message["val_samples"]
        device, val_loss = getattr(method, "device", CPU), None
        if group.rank == 0 and wanted != 0:
            val_loss = work.validation_loss(method.model, samples=wanted, device=device)
        method.model.train()
        return {"before": before, "sent": sent, "seconds": seconds, "val_loss": val_loss}

    return handle


if __name__ == "__main__":
    serve(setup)
