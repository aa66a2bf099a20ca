"""Who sits where, what a step costs each of them, and why it cannot be so: what `Strategy.plan` gives, without side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from smolcluster.comm.group import Group
from smolcluster.compute.muon import split_parameters
from smolcluster.compute.precision import DTYPES
from smolcluster.config.schema import Config, TrainingConfig
from smolcluster.errors import UserError
from smolcluster.parallel.timeline import Drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine that can hold seats."""

    name: str
    batch_size: int = 1
    machine: str = ""  # that it is on; empty: one of its own, of that name
    stays: bool = True  # False: it may leave, as on the elastic plane


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Who sits where. A parameter server is a seat whose role is `server`; it has no data shard."""

    rank: int
    node: str
    machine: str = ""  # as in Node
    role: str = "worker"
    coords: dict[str, int] = field(default_factory=dict)
    shard: int | None = None
    stream: int | None = None  # of random numbers; None: one of its own, numbered as its rank


class Rank(Protocol):
    """What a part of a model must know of the process it is in, and of the others."""

    config: Config
    seat: Seat
    seats: Sequence[Seat]
    group: Group
    device: torch.device

    @property
    def part_sizes(self) -> list[int]:
        """Samples of one part of a step, of every data shard."""

    def example(self, count: int, /) -> Any:
        """A batch of so many samples, to measure with."""

    def tell(self, text: str, /) -> None: ...

    def draw(self, drawing: Drawing, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What `cost` needs to know of a model."""

    parameters: int
    tensors: Sequence[Sequence[int]] = ()  # the shape of each; what a codec makes of them depends on it
    bytes_per_parameter: int = 4
    used_bytes: int = 4  # of a parameter where it is gathered to be used: 2 in mixed precision
    optimizer_states: float = 2  # tensors of the parameters' size that the optimizer keeps: 2 for Adam
    model: nn.Module | None = None  # on the meta device, where layers that differ are dealt out

    @classmethod
    def of(cls, model: nn.Module, config: TrainingConfig) -> Shape:
        """Of a model (on any device) that is trained as `config` says."""
        parameters = list(model.parameters())
        matrices = sum(p.numel() for p in split_parameters(model)[0]) if config.optimizer == "muon" else 0
        count = sum(p.numel() for p in parameters)
        kept = {"adamw": 2, "sgd": 1 if config.momentum else 0, "muon": 2 - matrices / max(1, count)}
        return cls(
            parameters=count,
            tensors=[tuple(p.shape) for p in parameters],
            bytes_per_parameter=max((p.element_size() for p in parameters), default=4),
            used_bytes=DTYPES[config.precision].itemsize,
            optimizer_states=kept[config.optimizer],
            model=model,
        )

    def optimizer_bytes(self, parameter_bytes: int) -> int:
        """Return what the optimizer keeps for so many bytes of parameters."""
        return round(parameter_bytes * self.optimizer_states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One step of one worker, by the formulas in the strategy's docstring: of the one that holds most, where they differ.

    Activations are not counted here, nor what is gathered for a moment; `planner/memory_estimate.py` finds those.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    bytes_sent: int
    bytes_received: int
    messages: int
    activations_travel: bool = False  # too; how much depends on the samples, and is not in these numbers
    journal_bytes: int = 0  # of a server: written to its journal
    offloaded: bool = False  # parameters, gradients and optimizer state are in the machine's memory, not the GPU's

    @property
    def states_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A strategy's plan for these nodes."""

    seats: Sequence[Seat] = ()
    costs: Sequence[Cost] = ()  # of every worker, in rank order; without a model there are none
    server: Cost | None = None  # of the server, where there is one that holds a model
    refusals: Sequence[str] = ()  # why it cannot run like this, each with its remedy

    @property
    def cost(self) -> Cost:
        """Of the worker that holds most."""
        return max(self.costs, key=lambda cost: cost.states_bytes)

    @property
    def num_shards(self) -> int:
        """Into how many data shards the samples of a step are divided."""
        return len({seat.shard for seat in self.seats if seat.shard is not None})

    def checked(self) -> Placement:
        """Return it, or raise UserError with the first refusal."""
        if self.refusals:
            raise UserError(self.refusals[0])
        return self


def worker_on_each(nodes: Sequence[Node]) -> list[Seat]:
    """Every node is a worker with a data shard of its own."""
    return [Seat(rank=r, node=node.name, coords={"dp": r}, shard=r) for r, node in enumerate(nodes)]


def workers_and_server(nodes: Sequence[Node]) -> list[Seat]:
    """A worker on every node, and the server behind the last."""
    return [*worker_on_each(nodes), Seat(rank=len(nodes), node=nodes[0].name if nodes else "", role="server")]


def with_coordinator(placement: Placement, nodes: Sequence[Node], shape: Shape | None) -> Placement:
    """Add what rounds need where members come and go: a coordinator, and their own gradients kept until a round is committed.

    The coordinator holds the state that came last, the next one as it comes, and the evaluator's weights.
    """
    if all(node.stays for node in nodes):
        return placement
    costs = [
        replace(cost, gradient_bytes=2 * cost.gradient_bytes, messages=cost.messages + 2) for cost in placement.costs
    ]
    server = None
    if shape is not None:
        size = shape.parameters * shape.bytes_per_parameter
        server = Cost(
            parameter_bytes=3 * size,
            gradient_bytes=0,
            optimizer_bytes=2 * shape.optimizer_bytes(size),
            bytes_sent=0,
            bytes_received=0,
            messages=0,
        )
    return replace(placement, seats=workers_and_server(nodes), costs=costs, server=server)
