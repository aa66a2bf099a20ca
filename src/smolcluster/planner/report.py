"""Compute the plan of `smolcluster plan --memory`, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from smolcluster.compute.device import choose_device
from smolcluster.compute.memory import parse_size
from smolcluster.config.schema import Config
from smolcluster.config.strategies import check_name, record_of
from smolcluster.planner.candidates import Choice, as_configured, choices
from smolcluster.planner.estimate_pool import forecast_all
from smolcluster.planner.forecast import WAYS, Forecast, MemoryPlan, SeatMemory, Workload, limit_per_rank
from smolcluster.planner.memory_estimate import Activations
from smolcluster.tasks.find import find_task


def plan_memory(
    config: Config,
    *,
    ranks: int,
    plane: str,
    only: Sequence[str] = (),
    limit: str | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Return the memory of each strategy on this number of ranks, and which fit. `only`: names of strategies."""
    limit_bytes = None if limit is None else parse_size(limit, what="--limit")
    requested = choose(config, ranks=ranks, plane=plane, only=only)
    device = choose_device(config.training.device)
    workload = Workload.open(config, find_task(config), num_ranks=ranks, device=device)
    configured = Activations(checkpointing=config.training.gradient_checkpointing)
    ways = [configured, *(way for way in WAYS if way != configured)]
    available, source = limit_per_rank(device, ranks, limit_bytes)
    plan = MemoryPlan(
        parameters=workload.shape.parameters,
        ranks=ranks,
        device=str(device),
        limit=available,
        limit_source=source,
        configured=configured,
        rows=forecast_all(workload, requested, ways, on_progress=on_progress),
    )
    return to_dict(plan)


def choose(config: Config, *, ranks: int, plane: str, only: Sequence[str]) -> list[Choice]:
    """Return the named strategies, or all; first the configured one if the configuration sets options of it."""
    names = [check_name(name) for name in only]
    found = [choice for choice in choices(ranks, every=bool(only)) if not names or choice.strategy in names]
    known = {choice.strategy for choice in found}
    found += [Choice(label=name, strategy=name) for name in dict.fromkeys(names) if name not in known]
    if config.strategy.given() and (not names or config.strategy.name in names):
        found.insert(0, as_configured(config, plane))
    return found


def to_dict(plan: MemoryPlan) -> dict[str, Any]:
    best = plan.recommended
    return {
        "parameters": plan.parameters,
        "ranks": plan.ranks,
        "device": plan.device,
        "checkpointing": plan.configured.checkpointing,
        "limit_bytes": plan.limit,
        "limit": plan.limit_source,
        "strategies": [_row(plan, row) for row in plan.rows],
        "recommended": None if best is None else _advice(*best),
    }


def _row(plan: MemoryPlan, row: Forecast) -> dict[str, Any]:
    choice, way = row.choice, plan.configured
    found: dict[str, Any] = {
        "name": choice.label,
        "strategy": choice.strategy,
        "plane": choice.plane,
        "options": choice.options,
        "runs": not row.cannot,
        "reason": row.cannot,
    }
    if row.cannot:
        return found
    worst, less = row.worst(way), way._replace(checkpointing=True)
    return found | {
        "fits": plan.fits(row, way),
        "fits_with_checkpointing": less in row.ways and plan.fits(row, less),
        "peak_bytes": row.peak(way),
        "at_peak": dataclasses.asdict(worst.ways[way].at_peak if way in worst.ways else worst.states),
        "bytes_sent": [cost.bytes_sent for cost in row.costs],
        "activations_travel": any(cost.activations_travel for cost in row.costs),
        "seats": [_seat(seat, way) for seat in row.seats],
    }


def _seat(seat: SeatMemory, configured: Activations) -> dict[str, Any]:
    held = seat.states
    return {
        "ranks": seat.ranks,
        "role": seat.role,
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "start_bytes": seat.start,
        "peak_bytes": seat.peak(configured),
        "note": seat.note,
        "journal_step_bytes": seat.journal_step,
        "journal_bytes": seat.journal_limit,
        "ways": [
            {
                "checkpointing": way.checkpointing,
                "attention": "plain" if way.plain_attention else "fused",
                "activations": peak.of_each_kind.other,
                "peak_bytes": seat.peak(way),
            }
            for way, peak in seat.ways.items()
        ],
    }


def _advice(row: Forecast, way: Activations) -> dict[str, Any]:
    choice = row.choice
    flags = [f"--strategy {choice.strategy}"]
    if choice.plane == "elastic" and record_of(choice.strategy).planes[0] != "elastic":
        flags.append("--plane elastic")
    overrides = [f"strategy.{key}={value}" for key, value in choice.options.items() if value is not None]
    if overrides:
        flags.append(f"--override {' '.join(overrides)}")
    return {"name": choice.label, "checkpointing": way.checkpointing, "flags": " ".join(flags)}
