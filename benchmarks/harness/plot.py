"""Curves as SVG: panels side by side, one line for each name, the horizontal axis logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from smolcluster.observe.text import short

Curve = Sequence[Sequence[float]]  # (x, y) of each point
COLOURS = (
    *("#333333", "#999999", "#bcbd22", "#8c564b", "#17becf", "#9467bd"),
    *("#1f77b4", "#2ca02c", "#ff7f0e", "#d62728", "#e377c2", "#7f7f00"),
)
PANEL, HEIGHT, TOP, BOTTOM, LEFT, LEGEND, ROW = 290, 400, 56, 52, 48, 190, 20


def draw(panels: Mapping[str, Mapping[str, Curve]], *, title: str, across: str) -> str:
    """`panels`: by title; in each the points of every line, by its name. x must be above 0."""
    points = [point for lines in panels.values() for curve in lines.values() for point in curve]
    first, last = math.floor(math.log10(min(x for x, _ in points))), math.ceil(math.log10(max(x for x, _ in points)))
    low, high = min(y for _, y in points), max(y for _, y in points)
    names = dict.fromkeys(name for lines in panels.values() for name in lines)
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    width, bottom = (LEFT + PANEL) * len(panels) + LEGEND, HEIGHT - BOTTOM

    def x_of(x: float) -> float:
        return PANEL * (math.log10(x) - first) / max(1, last - first)

    def y_of(y: float) -> float:
        return TOP + (bottom - TOP) * (high - y) / ((high - low) or 1.0)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for number, (name, lines) in enumerate(panels.items()):
        out.append(f'<g transform="translate({LEFT + (LEFT + PANEL) * number} 0)">')
        out.append(f'<text x="0" y="{TOP - 10}">{escape(name)}</text>')
        out.append(f'<rect x="0" y="{TOP}" width="{PANEL}" height="{bottom - TOP}" fill="none" stroke="#999"/>')
        for power in range(first, last + 1):
            x = x_of(10.0**power)
            out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#ddd"/>')
            out.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{short(10.0**power)}</text>')
        for y in ticks(low, high):
            out.append(f'<line x1="0" x2="{PANEL}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}" stroke="#ddd"/>')
            out.append(f'<text x="-6" y="{y_of(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
        for line, curve in lines.items():
            path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in curve)
            style = f'fill="none" stroke="{colours[line]}" stroke-width="1.6"'
            out.append(f'<polyline points="{path}" {style}><title>{escape(line)}</title></polyline>')
        out.append(f'<text x="{PANEL / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(across)}</text>')
        out.append("</g>")
    for number, (line, colour) in enumerate(colours.items()):
        x, y = width - LEGEND + 16, TOP + 8 + ROW * number
        out.append(f'<line x1="{x}" x2="{x + 20}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
        out.append(f'<text x="{x + 28}" y="{y + 4}">{escape(line)}</text>')
    return "\n".join([*out, "</svg>", ""])


def ticks(low: float, high: float) -> list[float]:
    """Multiples of 0.1, 0.2, 0.5, 1 ... between the two, at most eight."""
    step = next((s * 10.0**p for p in range(-1, 9) for s in (1, 2, 5) if (high - low) / (s * 10.0**p) <= 7), 1e9)
    return [round(n * step, 6) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
