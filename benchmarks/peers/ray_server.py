"""A parameter server on Ray, as in its documentation: actors that pass each other objects.

python -m benchmarks.peers.ray_server '{"config": ..., "machines": [1, 2], "mode": "sync", "steps": 100, "every": 1, ...}'

The server has the weights and the optimizer; a worker receives the weights, and returns the gradient of its next batch. `sync`:
the server averages one gradient of every worker. `async`: it applies each gradient as soon as it arrives (`ray.wait`), and only
the worker that sent it receives new weights. Every machine is a Ray node with daemons of its own (`ray.cluster_utils`), so that
objects are sent by TCP between nodes, and through shared memory within one. The server is on machine 0, worker r on
`machines[r]`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster

from benchmarks.peers.work import Row, Work, converse
from smolcluster.config.schema import Config

Arrays = list[np.ndarray[Any, Any]]


class Actor:
    def __init__(self, config: Row, rank: int, size: int) -> None:
        self.work = Work(Config.model_validate(config), rank=rank, size=size)
        self.parameters = list(self.work.model.parameters())

    def ready(self) -> bool:
        return True


class Server(Actor):
    def __init__(self, config: Row, size: int) -> None:
        super().__init__(config, 0, size)  # it has the samples of worker 0, and uses none
        self.optimizer = self.work.recipe.adamw(self.work.model)
        self.updates = 0

    def weights(self) -> Arrays:
        return [p.detach().numpy() for p in self.parameters]

    def apply(self, *gradients: Arrays) -> Arrays:
        """Take a step with the mean of these gradients. Return the weights."""
        for parameter, *parts in zip(self.parameters, *gradients, strict=True):
            parameter.grad = torch.from_numpy(np.mean(parts, axis=0))
        torch.nn.utils.clip_grad_norm_(self.parameters, self.work.recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.work.recipe.rate(self.updates)
        self.optimizer.step()
        self.updates += 1
        return self.weights()

    def validation_loss(self) -> float:
        return self.work.validation_loss()


class Worker(Actor):
    def gradient(self, weights: Arrays) -> tuple[Arrays, float]:
        for parameter, value in zip(self.parameters, weights, strict=True):
            np.copyto(parameter.detach().numpy(), value)
        self.work.model.zero_grad()
        loss = self.work.gradient()
        return [p.grad.numpy() for p in self.parameters if p.grad is not None], loss


def start_nodes(count: int, cores: Sequence[int] | None) -> list[list[int]]:
    """Start one node per machine, each with its own resource. Return the first pids of each; machine 0 has this process."""
    cluster, pids = Cluster(), []
    for number in range(count):
        if cores is not None:
            os.sched_setaffinity(0, {cores[number]})  # what is started next inherits it
        node = cluster.add_node(resources={f"machine{number}": 100}, include_dashboard=False)
        pids.append([info.process.pid for group in node.all_processes.values() for info in group])
    if cores is not None:
        os.sched_setaffinity(0, {cores[0]})
    ray.init(address=cluster.address, log_to_driver=False)
    return [[os.getpid()], *pids[1:]]


def actor(kind: type[Any], machine: int, *arguments: Any) -> Any:
    return ray.remote(kind).options(num_cpus=0, resources={f"machine{machine}": 1}).remote(*arguments)


def sync_losses(server: Any, workers: Sequence[Any]) -> Iterator[float]:
    """Yield the mean loss of each step."""
    weights = server.weights.remote()
    while True:
        gradients, losses = zip(*(w.gradient.options(num_returns=2).remote(weights) for w in workers), strict=True)
        weights = server.apply.remote(*gradients)
        ray.wait([weights], fetch_local=False)
        yield float(np.mean(ray.get(list(losses))))


def async_losses(server: Any, workers: Sequence[Any]) -> Iterator[float]:
    """Yield the loss of each gradient after it is applied."""
    weights = server.weights.remote()
    waiting = {}
    for worker in workers:
        gradient, loss = worker.gradient.options(num_returns=2).remote(weights)
        waiting[gradient] = worker, loss
    while True:
        (ready,), _ = ray.wait(list(waiting), num_returns=1, fetch_local=False)
        worker, loss = waiting.pop(ready)
        weights = server.apply.remote(ready)
        gradient, next_loss = worker.gradient.options(num_returns=2).remote(weights)
        waiting[gradient] = worker, next_loss
        yield ray.get(loss)


def main() -> None:
    order, tell = converse()
    machines: list[int] = order["machines"]
    pids = start_nodes(1 + max(machines), order.get("cores"))
    server = actor(Server, 0, order["config"], len(machines))
    workers = [actor(Worker, m, order["config"], r, len(machines)) for r, m in enumerate(machines)]
    ray.get([each.ready.remote() for each in (server, *workers)])
    tell({"machines": pids})
    losses = (sync_losses if order["mode"] == "sync" else async_losses)(server, workers)
    for step, loss in zip(range(1, order["steps"] + 1), losses, strict=False):
        if step % order["every"] == 0:
            tell({"step": step, "loss": loss})
    tell({"val_loss": ray.get(server.validation_loss.remote())})


if __name__ == "__main__":
    main()
