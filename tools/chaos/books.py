"""Results of a run: goodput, stalls, rules that were broken."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.elastic_history import Lines, changes, commits, instances, lines_of
from tests.world import ElasticWorld, Life

from smolcluster.engine.elastic import history
from smolcluster.observe.events import RunStarted
from tools.chaos.plan import ALLOWED, BATCH, METHODS, Plan, Victim


@dataclass(slots=True)
class Books:
    """Results of a run."""

    seconds: float
    step_s: float
    samples: int
    compute_s: float  # per sample
    alive_s: float  # of all workers
    round_s: float = 0.0  # between two commits; 0 where a round is a step
    stalled_s: float = 0.0  # of that: until faults were detected, at most ALLOWED each
    loss: float = float("nan")

    @property
    def goodput(self) -> float:
        return self.samples * self.compute_s / self.alive_s

    @property
    def goodput_outside(self) -> float:
        return self.samples * self.compute_s / (self.alive_s - self.stalled_s)


def keep_books(world: ElasticWorld, victims: Sequence[Victim] = ()) -> Books:
    lines = commits(lines_of(world))
    first, last = lines[0]["time"], lines[-1]["time"]
    round_s = 0.0
    if any(line.get("steps", 1) > 1 for line in lines):
        round_s = statistics.median(b["time"] - a["time"] for a, b in itertools.pairwise(lines))
    rows = [row for worker in world.workers for row in worker.rows()]
    away = [interval for victim in victims for interval in victim.away]
    alive_s = 0.0
    for rank, seat in enumerate(world.workers):
        for life in seat.lives:
            alive_s += _alive_s(life, [(a, b) for r, a, b in away if r == rank], since=first, until=last)
    stalled_s = 0.0
    for victim in victims:
        if victim.stall_s is not None:
            others = len(world.workers) - (victim.fault.kind != "server")
            stalled_s += others * min(max(0.0, victim.stall_s - round_s), ALLOWED[victim.fault.kind])
    return Books(
        seconds=last - first,
        step_s=(last - first) / (lines[-1]["step"] - lines[0]["step"]),
        samples=sum(part["samples"] for line in lines[1:] for part in line["contributors"]),
        compute_s=statistics.median(row.compute_s for row in rows) / BATCH,
        alive_s=alive_s,
        round_s=round_s,
        stalled_s=stalled_s,
        loss=float(world.summary["val_loss"]),
    )


def _alive_s(life: Life, away: Sequence[tuple[float, float]], *, since: float, until: float) -> float:
    """Return the time from ready to killed, without the time in which it was frozen or cut off."""
    to_wall = time.time() - time.monotonic()
    ready = [when for event, when in zip(life.events, life.times, strict=True) if isinstance(event, RunStarted)]
    if not ready:
        return 0.0
    # Its last event is at most a step before its end.
    start, end = max(since, ready[0] + to_wall), min(until, life.times[-1] + to_wall)
    lost = sum(max(0.0, min(end, b) - max(start, a)) for a, b in away)
    return max(0.0, end - start - lost)


def measure_stalls(lines: Lines, victims: Sequence[Victim]) -> None:
    for victim in victims:
        # A worker that leaves finishes its round.
        left = [line["time"] for line in changes(lines, "left") if line["instance"] == victim.instance]
        since = left[0] if left and victim.fault.kind == "join" else victim.time
        # A worker that was away for less than the time limits may count as soon as it is back.
        back = [end for _, _, end in victim.away]
        found = (
            line["time"] - since
            for line in commits(lines)
            if line["time"] >= since
            and (victim.instance not in instances(line) or any(line["time"] >= end for end in back))
        )
        victim.stall_s = next(found, None)  # None: the run was over


def violations(
    world: ElasticWorld,
    plan: Plan,
    victims: Sequence[Victim],
    books: Books,
    calm: Books,
    *,
    least: float,
    margin: float,
) -> list[str]:
    """Return the broken rules. `least`: goodput as a share of that without faults. `margin`: of the loss."""
    lines = lines_of(world)
    found = history.check(lines)
    rounds = [range(line["step"] - line.get("steps", 1) + 1, line["step"] + 1) for line in commits(lines)]
    if [step for steps_of in rounds for step in steps_of] != list(range(1, plan.steps + 1)):
        found.append("not every step was committed once, in order")
    if world.summary["status"] != "finished":
        found.append(f"the run ended as {world.summary['status']}")
    if METHODS[plan.strategy].replicas and world.summary["replicas_agree"] is not True:
        found.append("the replicas differ at the end")
    for victim in victims:
        kind, stall_s, allowed = victim.fault.kind, victim.stall_s, ALLOWED[victim.fault.kind] + books.round_s
        if stall_s is not None and stall_s > allowed:
            found.append(
                f"{kind} at {victim.fault.at_s:.0f} s: a stall of {stall_s:.2f} s, allowed are {allowed:.1f} s"
            )
    kills_only = all(victim.fault.kind == "kill" for victim in victims)
    goodput = books.goodput if kills_only else books.goodput_outside
    if goodput < least * calm.goodput:
        found.append(f"goodput is {goodput / calm.goodput:.1%} of a run without faults, less than {least:.0%}")
    if not books.loss <= calm.loss + margin:
        found.append(f"the loss is {books.loss:.4f}, without faults {calm.loss:.4f}; allowed is {margin} more")
    return found
