"""The result of `Strategy.plan`: which rank runs where, what a step costs it, and reasons to refuse. No side effects."""

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
    """A place for a rank."""

    name: str
    batch_size: int = 1
    machine: str = ""  # the machine it is on; empty: its own, with the name of the node
    stays: bool = True  # False on the elastic plane, where it may leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of a rank in a strategy. A parameter server has the role `server` and no data shard."""

    rank: int
    node: str
    machine: str = ""  # as in Node
    role: str = "worker"
    coords: dict[str, int] = field(default_factory=dict)
    shard: int | None = None
    stream: int | None = None  # random stream; None: the number of its rank


class Rank(Protocol):
    """The process of a part of a model, and its peers."""

    config: Config
    seat: Seat
    seats: Sequence[Seat]
    group: Group
    device: torch.device

    @property
    def part_sizes(self) -> list[int]:
        """Samples of a micro-batch, by data shard."""

    def example(self, count: int, /) -> Any:
        """Return a batch of this many samples, for measurements."""

    def notify(self, text: str, /) -> None: ...

    def draw(self, drawing: Drawing, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model, from which costs follow."""

    parameters: int
    tensors: Sequence[Sequence[int]] = ()  # the shape of each; encoded sizes depend on it
    bytes_per_parameter: int = 4
    used_bytes: int = 4  # of a parameter gathered for forward: 2 in mixed precision
    optimizer_states: float = 2  # tensors of the parameters' size that the optimizer keeps: 2 for Adam
    model: nn.Module | None = None  # on the meta device; needed where layers are distributed

    @classmethod
    def of(cls, model: nn.Module, config: TrainingConfig) -> Shape:
        """Return the shape of a model, on any device, trained with `config`."""
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

    @property
    def parameter_bytes(self) -> int:
        return self.parameters * self.bytes_per_parameter

    def optimizer_bytes(self, parameter_bytes: int) -> int:
        """Return the bytes of optimizer state for this many bytes of parameters."""
        return round(parameter_bytes * self.optimizer_states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a step for one worker, by the formulas in the strategy's docstring.

    Activations and temporarily gathered parameters are not included; `planner/memory_estimate.py` finds those.
    """

    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    bytes_at_once: int = 0  # sent in the largest exchange, where not every step has one
    bytes_at_end: int = 0  # and in the last one, which is of all fragments
    activations_travel: bool = False  # also sent; they depend on the samples and are not in these numbers
    journal_bytes: int = 0  # written by a server
    offloaded: bool = False  # parameters, gradients and optimizer state are in host memory

    @property
    def states_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A strategy's plan for a list of nodes."""

    seats: Sequence[Seat] = ()
    costs: Sequence[Cost] = ()  # of every worker, in rank order; without a model there are none
    server: Cost | None = None  # of a server that holds a model
    refusals: Sequence[str] = ()  # reasons why it cannot run, each with its remedy

    @property
    def cost(self) -> Cost:
        """The cost of the worker that holds most."""
        return max(self.costs, key=lambda cost: cost.states_bytes)

    @property
    def num_shards(self) -> int:
        """The number of data shards."""
        return len({seat.shard for seat in self.seats if seat.shard is not None})

    def checked(self) -> Placement:
        """Return it, or raise UserError with the first refusal."""
        if self.refusals:
            raise UserError(self.refusals[0])
        return self


def worker_on_each(nodes: Sequence[Node]) -> list[Seat]:
    """Return a worker with its own data shard on every node."""
    return [Seat(rank=r, node=node.name, coords={"dp": r}, shard=r) for r, node in enumerate(nodes)]


def workers_and_server(nodes: Sequence[Node]) -> list[Seat]:
    """Return a worker on every node and a server as the last rank."""
    return [*worker_on_each(nodes), Seat(rank=len(nodes), node=nodes[0].name if nodes else "", role="server")]


def with_coordinator(placement: Placement, nodes: Sequence[Node], shape: Shape | None) -> Placement:
    """Add the costs of the elastic plane: a coordinator, and gradients that are kept until their round is committed.

    The coordinator holds the last state, the next one as it arrives, and the evaluator's weights.
    """
    if all(node.stays for node in nodes):
        return placement
    costs = [
        replace(cost, gradient_bytes=2 * cost.gradient_bytes, messages=cost.messages + 2) for cost in placement.costs
    ]
    server = None
    if shape is not None:
        size = shape.parameter_bytes
        server = Cost(parameter_bytes=3 * size, optimizer_bytes=2 * shape.optimizer_bytes(size))
    return replace(placement, seats=workers_and_server(nodes), costs=costs, server=server)
