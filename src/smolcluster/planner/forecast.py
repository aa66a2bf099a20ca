"""Forecast the memory of every strategy, and which strategies fit. A seat is the role and place of a rank in a strategy.

mesh plane       an estimate (memory_estimate.py) of each kind of seat: the first and the last stage of a pipeline, one of
                 several equal ranks
elastic plane    weights, gradients and optimizer state by the formula (`Strategy.plan`), activations as estimated for one
                 worker
If the estimate fails, the formula without activations is used, with a note.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from smolcluster.compute.memory import PROCESS_BYTES, memory_bytes, workspace_bytes
from smolcluster.compute.memory_tracker import MemoryUse, Peak
from smolcluster.config.schema import Config
from smolcluster.data.dataset import as_dataset
from smolcluster.engine.checks import batch_size_of
from smolcluster.engine.elastic.wal.journal import disk_bound
from smolcluster.errors import UserError
from smolcluster.observe.text import size
from smolcluster.parallel.placement import Cost, Node, Seat, Shape
from smolcluster.planner.candidates import ALONE, Choice
from smolcluster.planner.memory_estimate import Activations, CannotEstimate, MemoryEstimate, PlannedRun, estimate_memory
from smolcluster.strategies.registry import find_strategy, read_options
from smolcluster.tasks.base import Task

WAYS = (Activations(), Activations(True, False), Activations(False, True))
UNPICKED = "strategy.preset is chosen by the measured link when the run begins; shown without a preset"
EstimateRank = Callable[[Choice, int, Sequence[Activations]], MemoryEstimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatMemory:
    """The memory of one seat, or of several equal ones."""

    ranks: list[int]
    role: str
    states: MemoryUse  # the peak of each kind
    ways: dict[Activations, Peak]  # empty: not estimated
    start: int = 0  # peak while the model is built and sharded
    note: str = ""  # which part is not estimated, and why
    journal_step: int = 0  # bytes that a server writes to disk in every step
    journal_limit: int = 0  # maximum size of its journal on disk

    def peak(self, way: Activations) -> int:
        """Return the peak in bytes, of a step or of `setup`."""
        step = self.ways[way].at_peak.total if way in self.ways else self.states.total
        return max(step, self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    choice: Choice
    seats: list[SeatMemory] = field(default_factory=list)
    costs: Sequence[Cost] = ()  # of every worker, in rank order
    cannot: str = ""  # why it cannot run

    def peak(self, way: Activations) -> int:
        """Return the peak of the worker with the largest."""
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
    limit: int  # bytes available for the tensors of one rank
    limit_source: str  # an explanation of that number
    configured: Activations
    rows: list[Forecast]

    def fits(self, row: Forecast, way: Activations) -> bool:
        return bool(row.seats) and all(seat.peak(way) <= self.limit for seat in row.seats)

    @property
    def recommended(self) -> tuple[Forecast, Activations] | None:
        """The first forecast that fits, as configured or else with checkpointing."""
        for way in (self.configured, self.configured._replace(checkpointing=True)):
            for row in self.rows:
                if (way in row.ways or way == self.configured) and self.fits(row, way):
                    return row, way
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The model and data of a run, opened once for all forecasts."""

    config: Config
    task: Task
    part: Callable[[int], Any]  # returns a micro-batch of the given number of samples
    shape: Shape
    device: torch.device
    nodes: Sequence[Node]

    @classmethod
    def open(cls, config: Config, task: Task, *, num_ranks: int, device: torch.device) -> Workload:
        data = as_dataset(task.train_data())
        try:
            with torch.device("meta"):
                model = task.model()
        except (RuntimeError, OverflowError, MemoryError) as error:
            why = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"the model cannot be built, even on the meta device: {why[0][:200]}") from error
        return cls(
            config=config,
            task=task,
            part=lambda size: data.batch(np.arange(size) % len(data)),
            shape=Shape.of(model, config.training),
            device=device,
            nodes=nodes_of(config, num_ranks),
        )

    def with_choice(self, choice: Choice) -> PlannedRun:
        """Return the run with this choice. Raises UserError if the strategy cannot run."""
        section = self.config.strategy.with_options(choice.options, name=choice.strategy)
        # A run measures it at its start; for equal machines it is about even.
        if section.given().get("layer_distribution") == "auto":
            section = section.with_options({"layer_distribution": None})
        options, _ = read_options(section, plane=choice.plane)
        strategy = find_strategy(choice.strategy, choice.plane, options)
        nodes = self.nodes[:1] if choice == ALONE else self.nodes
        nodes = [dataclasses.replace(node, stays=choice.plane != "elastic") for node in nodes]
        config = self.config.model_copy(update={"strategy": section})
        return PlannedRun(
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
    workload: Workload,
    choice: Choice,
    *,
    ways: Sequence[Activations],
    every_seat: bool = False,
    estimate: EstimateRank | None = None,
) -> Forecast:
    """Forecast one choice. `estimate` estimates one rank, possibly in another process."""
    estimate = estimate or (lambda c, rank, w: estimate_rank(workload, c, rank, w))
    try:
        run = workload.with_choice(choice)
        if choice.plane == "elastic":
            seats = _elastic_seats(workload, run, ways, estimate)
        else:
            seats = _mesh_seats(choice, run, ways, estimate, every_seat)
        if run.options.picks_preset:
            seats = [dataclasses.replace(seat, note=f"{seat.note}; {UNPICKED}".lstrip("; ")) for seat in seats]
        return Forecast(choice=choice, seats=seats, costs=run.placement.costs)
    except UserError as error:
        return Forecast(choice=choice, cannot=str(error))


def estimate_rank(workload: Workload, choice: Choice, rank: int, ways: Sequence[Activations]) -> MemoryEstimate:
    run = workload.with_choice(choice)
    return estimate_memory(run, rank=rank, part=workload.part(workload.nodes[rank].batch_size), ways=ways)


def _mesh_seats(
    choice: Choice,
    run: PlannedRun,
    ways: Sequence[Activations],
    estimate: EstimateRank,
    every_seat: bool,
) -> list[SeatMemory]:
    found = []
    for group in equal_seats(run, every_seat=every_seat):
        rank = group[0].rank
        ranks = sorted(seat.rank for seat in group)
        try:
            seen = estimate(choice, rank, ways)
        except CannotEstimate as error:
            note = f"activations are not known: the memory estimate failed ({error})"
            states = _by_formula(run.placement.cost)
            found.append(SeatMemory(ranks=ranks, role="worker", states=states, ways={}, note=note))
            continue
        first = next(iter(seen.ways.values()))
        found.append(
            SeatMemory(ranks=ranks, role="worker", states=first.of_each_kind, ways=seen.ways, start=seen.start)
        )
    return found


def equal_seats(run: PlannedRun, *, every_seat: bool) -> list[list[Seat]]:
    """Return groups of equal seats, each sorted by memory, largest first; of a pipeline only both ends, unless `every_seat`."""
    groups: dict[tuple[int, int], list[Seat]] = {}
    for seat in run.placement.seats:
        groups.setdefault((seat.coords.get("pp", 0), run.nodes[seat.rank].batch_size), []).append(seat)
    stages = {stage for stage, _ in groups}
    ends = stages if every_seat else {min(stages), max(stages)}
    return [
        sorted(seats, key=lambda seat: -run.placement.costs[seat.rank].states_bytes)
        for (stage, _), seats in groups.items()
        if stage in ends
    ]


def _elastic_seats(
    workload: Workload,
    run: PlannedRun,
    ways: Sequence[Activations],
    estimate: EstimateRank,
) -> list[SeatMemory]:
    """Return the states by the formula, with the activations of a single worker."""
    states = _by_formula(run.placement.cost)
    workers = [seat.rank for seat in run.placement.seats if seat.role == "worker"]
    try:
        alone = estimate(ALONE, 0, ways).ways
        peaks = {way: _with_activations(states, peak) for way, peak in alone.items()}
        note = "by the formula, with the activations of one worker"
    except CannotEstimate as error:
        peaks, note = {}, f"by the formula; activations are not known: the memory estimate failed ({error})"
    found = [SeatMemory(ranks=workers, role="worker", states=states, ways=peaks, note=note)]
    serving = run.placement.server
    servers = [seat.rank for seat in run.placement.seats if seat.role == "server"]
    if serving is not None and servers:
        held = _by_formula(serving)
        every = dict.fromkeys(peaks, Peak(at_peak=held, of_each_kind=held))
        shape = workload.shape
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
                journal_limit=disk_bound(
                    state_bytes=state if serving.journal_bytes else 0, record_bytes=serving.journal_bytes
                ),
            )
        )
    return found


def _by_formula(cost: Cost) -> MemoryUse:
    return MemoryUse(parameters=cost.parameter_bytes, gradients=cost.gradient_bytes, optimizer=cost.optimizer_bytes)


def _with_activations(states: MemoryUse, alone: Peak) -> Peak:
    """Return the peak as if all states existed when activations are largest: an upper bound."""
    each = dataclasses.replace(states, other=alone.of_each_kind.other)
    return Peak(at_peak=each, of_each_kind=each)


def limit_per_rank(device: torch.device, num_ranks: int, given: int | None) -> tuple[int, str]:
    """Return the bytes available for the tensors of one rank, and an explanation. `given`: memory of a rank."""
    process = PROCESS_BYTES.get(device.type, PROCESS_BYTES["cpu"]) + workspace_bytes(device)
    if given is not None:
        return given - process, f"{size(given)} for each rank, as given, less {size(process)} for its process"
    total = memory_bytes(device)
    if device.type == "cuda":
        return total - process, f"{size(total)} on each GPU, less {size(process)} for its context and libraries"
    each = total // num_ranks
    return each - process, (
        f"this machine has {size(total)}: {size(each)} for each of {num_ranks}, less {size(process)} for its process"
        if num_ranks > 1
        else f"this machine has {size(total)}, less {size(process)} for the process"
    )
