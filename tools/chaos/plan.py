"""The schedule of faults, and the result of each."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smolcluster.errors import UserError


@dataclass(frozen=True, slots=True)
class Method:
    """A strategy and its options."""

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    loss_margin: float = 0.02
    replicas: bool = True  # every worker has the whole model


METHODS = {
    "syncps": Method("syncps", replicas=False),
    "edp": Method("edp", loss_margin=0.05, replicas=False),
    "allreduce": Method("allreduce"),
    "fsdp": Method("fsdp", {"strategy.fsdp_stage": 1}),
    "diloco": Method("diloco"),
    "diloco-wan": Method("diloco", {"strategy.preset": "wan"}),
}
ALLOWED = {
    **{"kill": 1.5, "server": 5.0, "freeze": 2.5, "cut": 2.5, "join": 1.0},
    **{"partial": 10.0, "oneway": 10.0, "slow": 10.0},  # a worker may come back before its links do
}  # seconds
LINKS = ("cut", "partial", "oneway", "slow")  # need network namespaces
SLOW_RATE = "1mbit"
GOODPUT = 0.95
PACE_S = 0.04
BATCH = 8
RATE_STEPS = 100  # to measure the steps of a minute
LEAVE_S = 5.0  # for a worker to leave
RESTART_S = 1.0  # from a death to the start of the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float  # since the first committed step
    kind: str
    worker: int  # the victim; not used by `server`
    lasts_s: float = 0.0


def schedule(seed: int, *, seconds: float, period_s: float, workers: int, kinds: Sequence[str]) -> list[Fault]:
    """Return one fault for every period, of each kind equally often, on random workers."""
    dice = random.Random(f"chaos {seed}")
    faults: list[Fault] = []
    bag: list[str] = []
    for number in range(int(seconds / period_s)):
        if not bag:
            bag = dice.sample(list(kinds), len(kinds))
        kind, worker = bag.pop(), dice.randrange(workers)
        at_s = period_s * (number + 0.25 * dice.random())
        lasts_s = dice.uniform(0.15, 0.4) * period_s if kind in ("freeze", *LINKS) else 0.0
        faults.append(Fault(at_s=round(at_s, 3), kind=kind, worker=worker, lasts_s=round(lasts_s, 3)))
    return faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that determines a run with faults; --replay reads it."""

    strategy: str  # of METHODS
    staleness_bound: int
    workers: int
    seed: int
    steps: int
    period_s: float
    faults: list[Fault]

    @classmethod
    def read(cls, path: Path) -> Plan:
        try:
            plan = json.loads(path.read_text())["plan"]
            return cls(**plan | {"faults": [Fault(**fault) for fault in plan["faults"]]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a schedule that this program wrote ({error})") from error


@dataclass(slots=True, eq=False)
class Victim:
    """A fault that happened."""

    fault: Fault
    time: float
    instance: str = ""
    away: list[tuple[int, float, float]] = field(default_factory=list)  # a worker that was not alive: rank, from, to
    stall_s: float | None = None
