"""Run variants of the same work in turn and compare them.

A `Comparison` lists its variants: one or more peers, ours, and optionally the first peer a second time. How far that one lies
from the first is the noise of this machine. Every variant is a function that does the work once and returns one sample:
seconds, or a rate.

    repeat 1    round 1  A B C     round 2  C B A     round 3  A B C   ...
    repeat 2    round 1  C B A     ...

The order is reversed with every round, so that drift of the machine affects all alike. A ratio is taken within a round,
between samples made a moment apart; the value of a repeat is the median of its rounds; the result is the median over repeats.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Unit = Literal["s", "1/s"]
TOO_NOISY = 0.05
Role = Literal["peer", "noise", "ours", "extra"]  # extra: shown beside the others, without a target


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound on the ratio to every peer, or on the median itself. Seconds stay below it, rates above."""

    limit: float
    of: Literal["ratio", "median"] = "ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to do the work. `run` does it once and returns one sample, alone or with something to keep beside it."""

    name: str
    run: Callable[[], float | tuple[float, Any]]
    role: Role = "ours"
    target: Target | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    name: str
    variants: Sequence[Variant]
    unit: Unit = "s"
    rounds: int = 1  # per repeat
    warmup: int = 1  # rounds before the first repeat, not kept
    parameters: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [v.name for v in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"two variants have the same name: {names}")
        if not self.peers:
            raise ValueError(f"{self.name} has no peer among its variants: {names}")

    @property
    def peers(self) -> list[Variant]:
        return [v for v in self.variants if v.role == "peer"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A comparison and its results: samples by variant, repeat and round; what variants returned beside them, in order."""

    comparison: Comparison
    samples: dict[str, list[list[float]]]
    beside: dict[str, list[Any]] = field(default_factory=dict)

    def medians(self, name: str) -> list[float]:
        """Return the value of each repeat."""
        return [statistics.median(rounds) for rounds in self.samples[name]]

    def median(self, name: str) -> float:
        return statistics.median(self.medians(name))

    def ratios(self, name: str, peer: str) -> list[float]:
        """Return the ratio to a peer in each repeat: the median over its rounds."""
        repeats = zip(self.samples[name], self.samples[peer], strict=True)
        return [statistics.median(a / b for a, b in zip(mine, theirs, strict=True)) for mine, theirs in repeats]

    def ratio(self, name: str, peer: str) -> float:
        return statistics.median(self.ratios(name, peer))

    @property
    def noise(self) -> float | None:
        """The distance from 1 of the first peer's ratio to itself: the root mean square over repeats."""
        twins = [v.name for v in self.comparison.variants if v.role == "noise"]
        if not twins:
            return None
        apart = [r - 1 for twin in twins for r in self.ratios(twin, self.comparison.peers[0].name)]
        return float(statistics.mean(x * x for x in apart) ** 0.5)

    def verdict(self, variant: Variant) -> str:
        """Return met; within noise: missed by less than the noise; missed; or unclear: the noise is too high to tell."""
        if variant.target is None:
            return ""
        if variant.target.of == "median":
            values, noise = [self.median(variant.name)], 0.0
        else:
            values = [self.ratio(variant.name, peer.name) for peer in self.comparison.peers]
            noise = self.noise or 0.0
        limit, sign = variant.target.limit, 1.0 if self.comparison.unit == "s" else -1.0
        excess = max(sign * (value - limit) for value in values)
        if noise > TOO_NOISY and abs(excess) <= noise:
            return "unclear"
        return "met" if excess <= 0 else "within noise" if excess <= noise else "missed"

    def to_dict(self) -> dict[str, Any]:
        comparison = self.comparison
        return {
            "name": comparison.name,
            "unit": comparison.unit,
            "rounds": comparison.rounds,
            "warmup": comparison.warmup,
            "parameters": comparison.parameters,
            "noise": self.noise,
            "variants": {
                v.name: {
                    "role": v.role,
                    "median": self.median(v.name),
                    "spread": [min(self.medians(v.name)), max(self.medians(v.name))],
                    "ratio": {p.name: self.ratio(v.name, p.name) for p in comparison.peers},
                    "ratios": {p.name: self.ratios(v.name, p.name) for p in comparison.peers},
                    "target": None if v.target is None else {"limit": v.target.limit, "of": v.target.of},
                    "verdict": self.verdict(v) or None,
                    "samples": self.samples[v.name],
                }
                for v in comparison.variants
            },
        }


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """Return a function that does the work and returns its seconds."""

    def sample() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return sample


def orders(variants: Sequence[Variant], *, rounds: int) -> Iterator[list[Variant]]:
    """Yield the variants forwards, backwards, forwards, and so on."""
    for number in range(rounds):
        yield list(variants) if number % 2 == 0 else list(reversed(variants))


def measure(comparison: Comparison, *, repeats: int) -> Measured:
    """Run every variant `repeats` x `rounds` times, in turn."""
    for variants in orders(comparison.variants, rounds=comparison.warmup):
        for variant in variants:
            variant.run()
    samples: dict[str, list[list[float]]] = {v.name: [[] for _ in range(repeats)] for v in comparison.variants}
    beside: dict[str, list[Any]] = {v.name: [] for v in comparison.variants}
    for number, variants in enumerate(orders(comparison.variants, rounds=repeats * comparison.rounds)):
        for variant in variants:
            result = variant.run()
            if isinstance(result, tuple):
                result, more = result
                beside[variant.name].append(more)
            samples[variant.name][number // comparison.rounds].append(result)
    return Measured(comparison, samples, beside)


def table(measured: Measured, *, repeats: int) -> str:
    """Return one line for each variant: median, spread over repeats, ratio to each peer, target, verdict."""
    comparison = measured.comparison
    several = len(comparison.peers) > 1
    head = ["variant", "median", "spread", *(f"/ {p.name}" if several else "ratio" for p in comparison.peers)]
    rows = [head + ["target", ""]]
    for v in comparison.variants:
        low, high = min(measured.medians(v.name)), max(measured.medians(v.name))
        shown, scale = _scaled(measured.median(v.name), comparison.unit)
        ratios = [f"{measured.ratio(v.name, p.name):.3f}" for p in comparison.peers]
        target = v.role if v.role in ("peer", "noise") else _target(v, comparison.unit)
        rows.append([v.name, shown, f"{low * scale:.4g} - {high * scale:.4g}", *ratios, target, measured.verdict(v)])
    title = f"{comparison.name}   ({repeats} x {comparison.rounds} samples each)"
    noise = [] if measured.noise is None else [f"noise: a peer against itself differs by {measured.noise:.1%}"]
    return "\n".join([title, *aligned(rows), *noise, ""])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, its cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _scaled(value: float, unit: Unit) -> tuple[str, float]:
    if unit == "1/s":
        return f"{value:.4g} /s", 1.0
    return (f"{value:.3f} s", 1.0) if value >= 1 else (f"{value * 1e3:.4g} ms", 1e3)


def _target(variant: Variant, unit: Unit) -> str:
    if variant.target is None:
        return ""
    sign = "<=" if unit == "s" else ">="
    if variant.target.of == "ratio":
        return f"{sign} {variant.target.limit:g}"
    return f"{sign} {_scaled(variant.target.limit, unit)[0]}"
