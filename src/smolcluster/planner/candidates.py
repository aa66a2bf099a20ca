"""The strategies that a plan considers for a number of ranks, in order of preference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smolcluster.config import strategies
from smolcluster.config.schema import Config
from smolcluster.config.strategies import BUILT_IN, PlanRequest, Record, all_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy with some of its options."""

    label: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    plane: str = "mesh"


ALONE = Choice(label="one worker", strategy=strategies.ALONE)


def choices(num_ranks: int, *, every: bool = False) -> list[Choice]:
    """Return the choices in the order of the records, mesh plane first. `every`: include uncommon variants."""
    records = list(all_records().values())
    if num_ranks == 1:
        records = [record for record in records if record.name == strategies.ALONE or record.name not in BUILT_IN]
    elastic = [record for record in records if "elastic" in record.planes and num_ranks > 1]
    rows = [(record, "mesh") for record in records if "mesh" in record.planes]
    rows += [(record, "elastic") for record in sorted(elastic, key=lambda record: "mesh" in record.planes)]
    return [
        Choice(label=_label(record, plane, variant), strategy=record.name, options=dict(options), plane=plane)
        for record, plane in rows
        for variant, options in record.variants(PlanRequest(plane=plane, num_ranks=num_ranks, every=every))
    ]


def _label(record: Record, plane: str, variant: str) -> str:
    label = f"{record.name} {variant}".rstrip()
    return f"{label}, elastic" if plane == "elastic" and record.planes != ("elastic",) else label


def as_configured(config: Config, plane: str) -> Choice:
    name = config.strategy.name
    return Choice(label=f"{name}, as configured", strategy=name, plane=plane)
