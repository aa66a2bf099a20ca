"""A forecast of the memory that every strategy needs, and which fit.

mesh plane       each kind of seat is estimated (memory_estimate.py): first and last stage of a pipeline, one rank of all
                 that are alike
elastic plane    weights, gradients and optimizer state by the formula (`Strategy.plan`), activations as estimated for one
                 worker
what cannot be estimated has the formula, without activations, and says so
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from smolcluster.compute.ledger import Held, Peak
from smolcluster.compute.memory import PROCESS_BYTES, memory_bytes, workspace_bytes
from smolcluster.config.schema import Config
from smolcluster.data.dataset import as_dataset
from smolcluster.engine.checks import batch_size_of
from smolcluster.engine.elastic.wal.journal import disk_bound
from smolcluster.errors import UserError
from smolcluster.parallel.placement import Cost, Node, Seat, Shape
from smolcluster.planner.candidates import ALONE, Choice
from smolcluster.planner.memory_estimate import Activations, CannotEstimate, MemoryEstimate, Scene, estimate_memory
from smolcluster.strategies.registry import find_strategy, read_options
from smolcluster.tasks.base import Task

WAYS = (Activations(), Activations(True, False), Activations(False, True))
Ask = Callable[[Choice, int, Sequence[Activations]], MemoryEstimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatMemory:
    """One seat, or several that are alike."""

    ranks: list[int]
    role: str
    states: Held  # the most of each kind at any moment
    ways: dict[Activations, Peak]  # empty: not estimated
    start: int = 0  # the most while the model is built and cut up
    note: str = ""  # what is not estimated here, and why
    journal_step: int = 0  # bytes that a server writes to its disk in every step
    journal_most: int = 0  # bytes that its journal takes there

    def peak(self, way: Activations) -> int:
        """The most bytes: of a step, or of setting up."""
        step = self.ways[way].at.total if way in self.ways else self.states.total
        return max(step, self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    choice: Choice
    seats: list[SeatMemory] = field(default_factory=list)
    costs: Sequence[Cost] = ()  # of every worker, in rank order
    cannot: str = ""  # why it cannot run

    def peak(self, way: Activations) -> int:
        """Of the worker that needs most."""
        return max((seat.peak(way) for seat in self.seats if seat.role == "worker"), default=0)

    def worst(self, way: Activations) -> SeatMemory:
        return max((s for s in self.seats if s.role == "worker"), key=lambda seat: seat.peak(way))

    @property
    def ways(self) -> list[Activations]:
        return list(self.seats[0].ways) if self.seats else []


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    parameters: int
    ranks: int
    device: str
    limit: int  # bytes that the tensors of one rank may take
    limit_said: str  # where that number comes from
    configured: Activations
    rows: list[Forecast]

    def fits(self, row: Forecast, way: Activations) -> bool:
        return bool(row.seats) and all(seat.peak(way) <= self.limit for seat in row.seats)

    @property
    def recommended(self) -> tuple[Forecast, Activations] | None:
        """The first of the list that fits, as configured or, if none does, with checkpointing."""
        for way in (self.configured, self.configured._replace(checkpointing=True)):
            for row in self.rows:
                if (way in row.ways or way == self.configured) and self.fits(row, way):
                    return row, way
        return None


# Asking


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is trained, opened once for all forecasts."""

    config: Config
    task: Task
    part: Callable[[int], Any]  # a micro-batch of so many samples
    shape: Shape
    device: torch.device
    nodes: Sequence[Node]

    @classmethod
    def open(cls, config: Config, task: Task, *, num_ranks: int, device: torch.device) -> Subject:
        data = as_dataset(task.train_data())
        try:
            with torch.device("meta"):
                model = task.model()
        except (RuntimeError, OverflowError, MemoryError) as error:
            why = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"the model cannot be laid out, even without memory: {why[0][:200]}") from error
        return cls(
            config=config,
            task=task,
            part=lambda size: data.batch(np.arange(size) % len(data)),
            shape=Shape.of(model, config.training),
            device=device,
            nodes=nodes_of(config, num_ranks),
        )

    def scene(self, choice: Choice) -> Scene:
        """Raises UserError where the strategy cannot run like this."""
        section = self.config.strategy.with_options(choice.options, name=choice.strategy)
        # Measured when a run begins; about even where machines are alike.
        if section.given().get("layer_distribution") == "auto":
            section = section.with_options({"layer_distribution": None})
        options, _ = read_options(section, plane=choice.plane)
        strategy = find_strategy(choice.strategy, choice.plane, options)
        nodes = self.nodes[:1] if choice == ALONE else self.nodes
        nodes = [dataclasses.replace(node, stays=choice.plane != "elastic") for node in nodes]
        config = self.config.model_copy(update={"strategy": section})
        return Scene(
            config=config,
            task=self.task,
            strategy=strategy,
            options=options,
            nodes=nodes,
            placement=strategy.plan(options, nodes, self.shape).checked(),
            device=self.device,
        )


def nodes_of(config: Config, num_ranks: int) -> list[Node]:
    names = [*config.cluster.workers, *(f"worker-{rank}" for rank in range(num_ranks))]
    return [Node(name=names[rank], batch_size=batch_size_of(config, rank)) for rank in range(num_ranks)]


def forecast(
    subject: Subject,
    choice: Choice,
    *,
    ways: Sequence[Activations],
    every_seat: bool = False,
    ask: Ask | None = None,
) -> Forecast:
    """`ask` estimates one rank of a choice, perhaps elsewhere; by default here."""
    here = ask or (lambda c, rank, w: rehearse_rank(subject, c, rank, w))
    try:
        scene = subject.scene(choice)
        if choice.plane == "elastic":
            seats = _elastic_seats(subject, scene, ways, here)
        else:
            seats = _mesh_seats(choice, scene, ways, here, every_seat)
        return Forecast(choice=choice, seats=seats, costs=scene.placement.costs)
    except UserError as error:
        return Forecast(choice=choice, cannot=str(error))


def rehearse_rank(subject: Subject, choice: Choice, rank: int, ways: Sequence[Activations]) -> MemoryEstimate:
    scene = subject.scene(choice)
    return estimate_memory(scene, rank=rank, part=subject.part(subject.nodes[rank].batch_size), ways=ways)


def _mesh_seats(
    choice: Choice,
    scene: Scene,
    ways: Sequence[Activations],
    ask: Ask,
    every_seat: bool,
) -> list[SeatMemory]:
    found = []
    for alike in alike_seats(scene, every_seat=every_seat):
        rank = alike[0].rank
        ranks = sorted(seat.rank for seat in alike)
        try:
            seen = ask(choice, rank, ways)
        except CannotEstimate as error:
            note = f"activations are not known: the memory estimate failed ({error})"
            states = _by_formula(scene.placement.cost)
            found.append(SeatMemory(ranks=ranks, role="worker", states=states, ways={}, note=note))
            continue
        first = next(iter(seen.ways.values()))
        found.append(SeatMemory(ranks=ranks, role="worker", states=first.each, ways=seen.ways, start=seen.start))
    return found


def alike_seats(scene: Scene, *, every_seat: bool) -> list[list[Seat]]:
    """Seats that hold the same, the one that holds most first. Of a pipeline only the ends, unless `every_seat`."""
    groups: dict[tuple[int, int], list[Seat]] = {}
    for seat in scene.placement.seats:
        groups.setdefault((seat.coords.get("pp", 0), scene.nodes[seat.rank].batch_size), []).append(seat)
    stages = {stage for stage, _ in groups}
    ends = stages if every_seat else {min(stages), max(stages)}
    return [
        sorted(seats, key=lambda seat: -scene.placement.costs[seat.rank].states_bytes)
        for (stage, _), seats in groups.items()
        if stage in ends
    ]


def _elastic_seats(
    subject: Subject,
    scene: Scene,
    ways: Sequence[Activations],
    ask: Ask,
) -> list[SeatMemory]:
    """The formula, and the activations of a worker that is alone."""
    states = _by_formula(scene.placement.cost)
    workers = [seat.rank for seat in scene.placement.seats if seat.role == "worker"]
    try:
        alone = ask(ALONE, 0, ways).ways
        peaks = {way: _with_activations(states, peak) for way, peak in alone.items()}
        note = "by the formula, with the activations of one worker"
    except CannotEstimate as error:
        peaks, note = {}, f"by the formula; activations are not known: the memory estimate failed ({error})"
    found = [SeatMemory(ranks=workers, role="worker", states=states, ways=peaks, note=note)]
    serving = scene.placement.server
    servers = [seat.rank for seat in scene.placement.seats if seat.role == "server"]
    if serving is not None and servers:
        held = _by_formula(serving)
        every = dict.fromkeys(peaks, Peak(at=held, each=held))
        shape = subject.shape
        size = shape.parameters * shape.bytes_per_parameter
        state = size + shape.optimizer_bytes(size)
        found.append(
            SeatMemory(
                ranks=servers,
                role="server",
                states=held,
                ways=every,
                note="by the formula",
                journal_step=serving.journal_bytes,
                journal_most=disk_bound(
                    state_bytes=state if serving.journal_bytes else 0, record_bytes=serving.journal_bytes
                ),
            )
        )
    return found


def _by_formula(cost: Cost) -> Held:
    return Held(parameters=cost.parameter_bytes, gradients=cost.gradient_bytes, optimizer=cost.optimizer_bytes)


def _with_activations(states: Held, alone: Peak) -> Peak:
    """Of the gradients it counts that nothing is there yet when activations are most: no more is sure of these strategies."""
    each = dataclasses.replace(states, other=alone.each.other)
    return Peak(at=each, each=each)


# What fits


def limit_per_rank(device: torch.device, num_ranks: int, said: int | None) -> tuple[int, str]:
    """What the tensors of one rank may take, and in words where that comes from."""
    from smolcluster.observe.text import size

    process = PROCESS_BYTES.get(device.type, PROCESS_BYTES["cpu"]) + workspace_bytes(device)
    if said is not None:
        return said - process, f"{size(said)} for each rank, as you say, less {size(process)} for its process"
    there = memory_bytes(device)
    if device.type == "cuda":
        return there - process, f"{size(there)} on each GPU, less {size(process)} for its context and libraries"
    each = there // num_ranks
    return each - process, (
        f"this machine has {size(there)}: {size(each)} for each of {num_ranks}, less {size(process)} for its process"
        if num_ranks > 1
        else f"this machine has {size(there)}, less {size(process)} for the process"
    )


def make_plan(
    subject: Subject,
    asked: Sequence[Choice],
    *,
    limit: int | None = None,
    rows: Callable[[Sequence[Choice], Sequence[Activations]], list[Forecast]] | None = None,
) -> MemoryPlan:
    """`rows` makes the forecasts, by default here and one after the other."""
    configured = Activations(checkpointing=subject.config.training.gradient_checkpointing)
    ways = [configured, *(way for way in WAYS if way != configured)]
    there, words = limit_per_rank(subject.device, len(subject.nodes), limit)
    made = rows(asked, ways) if rows else [forecast(subject, choice, ways=ways) for choice in asked]
    return MemoryPlan(
        parameters=subject.shape.parameters,
        ranks=len(subject.nodes),
        device=str(subject.device),
        limit=there,
        limit_said=words,
        configured=configured,
        rows=made,
    )
