"""Which strategies could run on a number of ranks: what a plan looks at, in the order in which it recommends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smolcluster.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy with some of its options."""

    label: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    plane: str = "mesh"


ALONE = Choice(label="one worker", strategy="single", plane="alone")


def choices(num_ranks: int, *, every_schedule: bool = False) -> list[Choice]:
    """Those that exchange least and keep every rank busy come first, those that save most last; then the elastic plane."""
    if num_ranks == 1:
        return [Choice(label="single", strategy="single")]
    schedules = ("1f1b", "gpipe", *(("interleaved", "zero-bubble", "zbv") if every_schedule else ()))
    half = [n for n in range(2, num_ranks) if num_ranks % n == 0]
    return [
        Choice(label="single", strategy="single"),
        Choice(label="allreduce", strategy="allreduce"),
        *(_fsdp(stage) for stage in (0, 1, 2)),
        *(_fsdp(3, shard_size=size) for size in half[-1:]),
        _fsdp(3),
        *(Choice(label=f"pipeline {name}", strategy="pipeline", options={"schedule": name}) for name in schedules),
        *(_mesh(num_ranks, **axes) for axes in ({"pp": 2}, {"tp": 2}, {"pp": 2, "tp": 2}) if num_ranks > 2),
        Choice(label="tensor", strategy="tensor"),
        *(Choice(label=name, strategy=name, plane="elastic") for name in ("syncps", "edp")),
        Choice(label="allreduce, elastic", strategy="allreduce", plane="elastic"),
        Choice(label="fsdp 1, elastic", strategy="fsdp", options={"fsdp_stage": 1}, plane="elastic"),
    ]


def _fsdp(stage: int, **options: Any) -> Choice:
    hybrid = f", hybrid {options['shard_size']}" if options else ""
    return Choice(
        label=f"fsdp {stage}{hybrid}", strategy="fsdp", options={"fsdp_stage": stage, "shard_size": None, **options}
    )


def _mesh(num_ranks: int, *, pp: int = 1, tp: int = 1) -> Choice:
    dp = num_ranks // (pp * tp)
    parts = [f"{name} {n}" for name, n in (("dp", dp), ("tp", tp), ("pp", pp)) if n > 1]
    options = {"pp": pp, "tp": tp, "cp": None, "dp": None, "fsdp_stage": 0, "shard_size": None}
    return Choice(label=f"mesh {' x '.join(parts)}", strategy="mesh", options=options)


def as_configured(config: Config, plane: str) -> Choice:
    name = config.strategy.name
    return Choice(label=f"{name}, as configured", strategy=name, plane=plane)
