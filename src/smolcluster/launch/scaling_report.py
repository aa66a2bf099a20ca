"""How well a strategy scales with the number of workers: efficiency as numbers, a table and an SVG.

    efficiency = (samples/s on N workers) / (N/n x samples/s on n workers),    n: the fewest, usually 1

Strong scaling keeps the samples of a step, weak scaling the samples of a worker. Rates are medians over repeats.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from smolcluster.observe.text import printable, short

LINE = 0.8  # efficiency that is worth more workers
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 64, 24, 56, 56  # of the SVG
BAR = 25  # characters for 100 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run, after its warm-up."""

    repeat: int
    samples_per_s: float
    tokens_per_s: float
    steps_per_s: float
    stretches: list[dict[str, float]]  # of every rank that counts samples: samples and duration between rows


@dataclass(slots=True, kw_only=True)
class Size:
    """The measurements with one number of workers."""

    workers: int
    shards: int = 0  # parts of the samples of a step
    batch_size: int = 0  # samples of a part
    reason: str = ""  # why it was not measured
    shared: bool = False  # there are fewer cores or GPUs than workers
    samples: list[Sample] = field(default_factory=list)

    def median(self, name: str) -> float:
        return float(statistics.median(getattr(sample, name) for sample in self.samples))

    @property
    def spread(self) -> float:
        """The range of the repeats, as a share of their median."""
        rates = [sample.samples_per_s for sample in self.samples]
        return (max(rates) - min(rates)) / statistics.median(rates)


@dataclass(slots=True, kw_only=True)
class Scaling:
    title: str
    weak: bool
    unit: str  # cores or GPUs
    units: int  # how many of them are here
    sizes: list[Size]
    about: dict[str, Any] = field(default_factory=dict)
    status: str = "running"

    @property
    def measured(self) -> list[Size]:
        return [size for size in self.sizes if size.samples]

    def efficiency(self, size: Size, *, repeat: int | None = None) -> float:
        """Return the efficiency relative to the fewest measured workers, of one repeat or of the medians."""
        base = self.measured[0]
        rate = size.median("samples_per_s")
        if repeat is not None:
            rate = next(sample.samples_per_s for sample in size.samples if sample.repeat == repeat)
        return rate / base.median("samples_per_s") * base.workers / size.workers

    def to_dict(self) -> dict[str, Any]:
        rows = []
        for size in self.sizes:
            row = asdict(size)
            if size.samples:
                names = ("samples_per_s", "tokens_per_s", "steps_per_s")
                row |= {f"median_{name}": size.median(name) for name in names}
                row |= {"spread": size.spread, "efficiency": self.efficiency(size)}
            rows.append(row)
        kind = "weak" if self.weak else "strong"
        about = {"title": self.title, "scaling": kind, "line": LINE, self.unit.lower(): self.units}
        return {"status": self.status, **about, **self.about, "sizes": rows}


# Text


def remarks(scaling: Scaling) -> list[str]:
    """Return notes on what the figures mean and on their limits."""
    if not scaling.measured:
        return []
    base = scaling.measured[0].workers
    same = "the same number of samples for each worker" if scaling.weak else "the same samples a step"
    part = "N x that of one" if base == 1 else f"N/{base} x that of {base}"
    notes = [f"efficiency: throughput on N workers / ({part}); {same}"]
    kept = [size.workers for size in scaling.measured if scaling.efficiency(size) >= LINE]
    notes.append(f"at or above {LINE:.0%}: {', '.join(map(str, kept))} workers")
    noisy = [size.workers for size in scaling.measured if size.spread > 0.1]
    if noisy:
        notes.append(
            f"repeats on {', '.join(map(str, noisy))} workers are more than 10 % apart: close other programs, or take "
            "more steps and repeats"
        )
    shared = [str(size.workers) for size in scaling.measured if size.shared]
    if shared:
        notes.append(
            f"* {', '.join(shared)} workers share {scaling.units} {scaling.unit}: these figures measure this machine, "
            "not the strategy"
        )
    return notes


def chart(scaling: Scaling, *, unicode: bool) -> list[tuple[str, str]]:
    """Return lines and their styles: the numbers of each size, and a bar for its efficiency with the 80 % mark."""
    rows = [["workers", "batch", "steps/s", "samples/s", "tokens/s", "spread", "efficiency"]]
    for size in scaling.sizes:
        row = [f"{size.workers}", f"{size.shards} x {size.batch_size}" if size.batch_size else ""]
        if size.samples:
            tokens = size.median("tokens_per_s")
            row += [f"{size.median('steps_per_s'):.3g}", short(size.median("samples_per_s"))]
            row += [short(tokens) if tokens else "-", f"{size.spread:.0%}"]
            row += [f"{scaling.efficiency(size):.0%}{'*' if size.shared else ' '}"]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    texts = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False)) for row in rows]
    lines = [(scaling.title, "bold"), (f"{texts[0]}  {' ' * round(LINE * BAR)}{LINE:.0%}", "dim")]
    for size, text in zip(scaling.sizes, texts[1:], strict=True):
        if size.samples:
            share = scaling.efficiency(size)
            lines.append((f"{text}  {bar(share, unicode=unicode)}", "green" if share >= LINE else "yellow"))
        else:
            reason = printable(size.reason.strip().partition("\n")[0])
            lines.append((f"{text}  {reason or 'not measured'}", "red"))
    return lines


def bar(share: float, *, unicode: bool) -> str:
    """Return a bar of the share, with a mark at 80 %."""
    full, line = ("█", "│") if unicode else ("#", "|")
    length, at = round(min(share, 1.2) * BAR), round(LINE * BAR)
    cells = [full if i < length else " " for i in range(max(length, at + 1))]
    cells[at] = line
    return "".join(cells)


# SVG


def draw(scaling: Scaling) -> str:
    """Return an SVG of efficiency over workers, with a whisker for the range of the repeats and a line at 80 %."""
    sizes = scaling.measured
    span_x, span_y = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    top = max(1.1, *(scaling.efficiency(s, repeat=x.repeat) for s in sizes for x in s.samples)) if sizes else 1.1

    def x_of(number: int) -> float:
        return LEFT + span_x * (number + 0.5) / max(len(sizes), 1)

    def y_of(share: float) -> float:
        return TOP + span_y * (1 - share / top)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="26" font-size="15">{escape(scaling.title)}</text>',
    ]
    for share, dash, colour in ((0.0, "", "#444"), (0.5, "2 4", "#bbb"), (LINE, "8 4", "#d95f02"), (1.0, "", "#999")):
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(share):.1f}" y2="{y_of(share):.1f}" stroke="{colour}"'
            + (f' stroke-dasharray="{dash}"/>' if dash else "/>")
        )
        lines.append(f'<text x="{LEFT - 8}" y="{y_of(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    points = " ".join(f"{x_of(i):.1f},{y_of(scaling.efficiency(s)):.1f}" for i, s in enumerate(sizes))
    lines.append(f'<polyline points="{points}" fill="none" stroke="#3182bd" stroke-width="2"/>')
    for number, size in enumerate(sizes):
        x, share = x_of(number), scaling.efficiency(size)
        shares = [scaling.efficiency(size, repeat=sample.repeat) for sample in size.samples]
        low, high = y_of(min(shares)), y_of(max(shares))
        rate, fill = f"{short(size.median('samples_per_s'))} samples/s", "white" if size.shared else "#3182bd"
        lines += [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="#3182bd"/>',
            f'<circle cx="{x:.1f}" cy="{y_of(share):.1f}" r="5" stroke="#3182bd" stroke-width="2" '
            f'fill="{fill}"><title>{size.workers} workers: {share:.1%}, {rate}</title></circle>',
            f'<text x="{x:.1f}" y="{y_of(share) - 12:.1f}" text-anchor="middle">{share:.0%}</text>',
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{size.workers}</text>',
        ]
    note = f"; hollow: fewer {scaling.unit} than workers" if any(size.shared for size in sizes) else ""
    lines.append(f'<text x="{LEFT}" y="{HEIGHT - 14}" fill="#444">workers{escape(note)}</text>')
    return "\n".join([*lines, "</svg>", ""])
