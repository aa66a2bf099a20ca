"""Run attacks one after the other, with quiet intervals between them, and report the result of each."""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.abuse.doors import Door, alive, resident_bytes

GROWTH_BYTES = 16 << 20
SLOWER = 0.02
QUIET_S = 3.0  # between attacks
WARMING = 200  # damaged frames at each socket before the measurement
HELD_AGAINST = ("monsters", "idle", "loris")  # cheap for the attacker: these must not slow the work
UNREPEATED = ("idle", "loris", "hoard", "bodies", "origins", "forge")  # too slow to run in the warm-up


@dataclass(slots=True)
class Result:
    """The result of one attack on one socket."""

    attack: str
    door: str
    count: int = 0
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    window: tuple[float, float] = (0.0, 0.0)  # by the wall clock


@dataclass(slots=True)
class Report:
    """`steps`: of training, or answers of a model that is served."""

    run: str
    results: list[Result] = field(default_factory=list)
    growth_mb: dict[str, float] = field(default_factory=dict)
    slower: dict[str, float] = field(default_factory=dict)  # by attack: 0.01 is 1 %
    noise: float = float("nan")
    steps: int = 0
    silences: int = 0  # stages that were lost for silence on a machine that is too busy, and came back
    wrong: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        return [*(sentence for result in self.results for sentence in result.wrong), *self.wrong]


Attack = Callable[[Door, Result, random.Random, int], None]


class Attacks:
    """Attacks by name; `run` runs one on one socket."""

    names: tuple[str, ...] = ()

    def __init__(self, canary: Path) -> None:
        """`canary`: a file that exists if code of an attack was executed."""
        self.canary = canary
        self.most_s = self.deadline = math.inf  # of a flood: its duration, and its end

    def run(self, name: str, door: Door, *, seed: int, count: int) -> Result:
        result = Result(name, door.name)
        attack: Attack = getattr(self, name)
        began, result.window = time.monotonic(), (time.time(), 0.0)
        self.deadline = began + self.most_s
        try:
            attack(door, result, random.Random(f"{name} {door.name} {seed}"), count)
        except ConnectionRefusedError:
            result.wrong.append("the socket refuses connections")
        if self.canary.exists():
            result.wrong.append("code was executed")
        result.seconds = time.monotonic() - began
        result.window = (result.window[0], time.time())
        return result


Target = tuple[Attacks, Door]


def besiege(
    report: Report,
    targets: Sequence[Target],
    pids: Mapping[str, int],
    *,
    attacks: Sequence[str],
    frames_each: int,
    seed: int,
    quiet_s: float,
) -> list[tuple[float, float]]:
    """Run every attack on every socket that it applies to. Return the quiet intervals, by the wall clock."""
    quiet: list[tuple[float, float]] = []

    def rest() -> None:
        began = time.time()
        time.sleep(quiet_s)
        quiet.append((began, time.time()))

    todo = [(name, abuse, door) for name in attacks for abuse, door in targets if name in abuse.names]
    for name, abuse, door in todo:  # warm up: load what is loaded late
        if name not in UNREPEATED:
            abuse.run(name, door, seed=seed - 1, count=min(WARMING, frames_each))
    before = {who: resident_bytes(pid) for who, pid in pids.items()}
    rest()
    for name, abuse, door in todo:
        report.results.append(abuse.run(name, door, seed=seed, count=frames_each))
        print(f"  {name} at {door.name}: {report.results[-1].seconds:.1f} s", file=sys.stderr, flush=True)
        rest()
    for who, pid in pids.items():
        if not alive(pid):
            report.wrong.append(f"{who} is dead")
            continue
        grown = report.growth_mb[who] = (resident_bytes(pid) - before[who]) / 2**20
        if grown > GROWTH_BYTES / 2**20:
            report.wrong.append(f"{who} grew by {grown:.1f} MB")
    if any(abuse.canary.exists() for abuse, _ in targets):
        report.wrong.append("code was executed")
    return quiet


def hold_times(report: Report, times: Sequence[float], quiet: Sequence[tuple[float, float]], *, what: str) -> None:
    """Compare the duration of steps or answers under each attack with the quiet intervals. `times`: their ends."""
    spells = [s for s in (_each_s(times, window) for window in quiet) if s]
    if not spells:
        return
    calm = statistics.median(spells)
    report.noise = (max(spells) - min(spells)) / calm / 2
    for name in dict.fromkeys(result.attack for result in report.results):
        under = [s for r in report.results if r.attack == name and (s := _each_s(times, r.window))]
        if under:
            report.slower[name] = statistics.median(under) / calm - 1
    for name in HELD_AGAINST:
        slower = report.slower.get(name, 0.0)
        if slower > SLOWER + report.noise:
            report.wrong.append(f"{name}: {what} slowed by {slower:.1%}; quiet intervals differ by {report.noise:.1%}")


def _each_s(times: Sequence[float], window: tuple[float, float]) -> float:
    """Return the mean seconds from one to the next in this window; 0 where there are too few."""
    inside = [t for t in times if window[0] <= t <= window[1]]
    return (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 10 else 0.0


def show(report: Report) -> None:
    steps = "answers" if report.run.startswith("serve") else "steps"
    print(f"\n{report.run}: {report.steps} {steps}; quiet intervals differ by {report.noise:.1%}")
    print(f"  {'attack':<10} {'socket':<10} {'count':>8} {'per s':>7}  {'slower':>7}  figures")
    for result in report.results:
        rate = result.count / max(result.seconds, 1e-9)
        figures = ", ".join(f"{name} {value:.2f}" for name, value in result.figures.items())
        slower = f"{report.slower[result.attack]:+.1%}" if result.attack in report.slower else ""
        print(f"  {result.attack:<10} {result.door:<10} {result.count:>8} {rate:>7.0f}  {slower:>7}  {figures}")
        for sentence in result.wrong:
            print(f"    VIOLATION: {sentence}")
    growth = ", ".join(f"{who} {grown:+.1f} MB" for who, grown in report.growth_mb.items())
    print(
        f"  memory: {growth}"
        + (f"; {report.silences} times a process heard nothing for too long" if report.silences else "")
    )
    for sentence in report.wrong:
        print(f"  VIOLATION: {sentence}")
    sys.stdout.flush()
