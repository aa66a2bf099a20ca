"""The time line of one step of a pipeline, as numbers and as an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

# Fills of equal lightness under black text.
COLOURS = {"forward": "#9ecae1", "backward": "#fdae6b", "input": "#fdd0a2", "weights": "#a1d99b"}
NAMES = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward, activations only",
    "weights": "backward, weights only",
}
WIDTH, ROW, LEFT, TOP, GAP = 1000, 34, 70, 46, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    name: str  # of the files, without extension
    svg: str
    caption: str
    numbers: dict[str, Any]  # the data that is drawn


class WorkItem(NamedTuple):
    """One forward or backward; in seconds since the start of the step."""

    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


def idle_share(ranks: Sequence[Sequence[WorkItem]]) -> float:
    """Return the idle share of the ranks' time, between the first and the last work item."""
    items = [item for rank in ranks for item in rank]
    if not items:
        return 0.0
    length = max(p.end_s for p in items) - min(p.start_s for p in items)
    worked = sum(p.end_s - p.start_s for p in items)
    return 1.0 - worked / (length * len(ranks)) if length > 0 else 0.0


def draw(ranks: Sequence[Sequence[WorkItem]], *, title: str) -> str:
    """Return an SVG with a row per rank. Numbers are micro-batches; later stages of a rank are paler."""
    items = [item for rank in ranks for item in rank]
    begin, end = min(p.start_s for p in items), max(p.end_s for p in items)
    scale = (WIDTH - LEFT - 10) / max(end - begin, 1e-9)
    height = TOP + len(ranks) * (ROW + GAP) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="24" font-size="15">{escape(title)}</text>',
    ]
    for number, rank in enumerate(ranks):
        top = TOP + number * (ROW + GAP)
        lines.append(f'<text x="10" y="{top + ROW / 2 + 5}">rank {number}</text>')
        lines.append(f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 10}" height="{ROW}" fill="#f0f0f0"/>')
        stages = sorted({item.stage for item in rank})
        for item in rank:
            left, width = LEFT + (item.start_s - begin) * scale, max((item.end_s - item.start_s) * scale, 0.5)
            opacity = 1.0 - 0.35 * stages.index(item.stage) / max(len(stages) - 1, 1)
            text = f"{NAMES[item.kind]}, stage {item.stage}, micro-batch {item.microbatch}"
            lines.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" fill="{COLOURS[item.kind]}" '
                f'fill-opacity="{opacity:.2f}" stroke="white" stroke-width="0.5"><title>{text}, '
                f"{1e3 * (item.end_s - item.start_s):.2f} ms</title></rect>"
            )
            if width > 14:
                middle = left + width / 2
                lines.append(
                    f'<text x="{middle:.1f}" y="{top + ROW / 2 + 5}" text-anchor="middle">{item.microbatch}</text>'
                )
    bottom, left = height - 18, LEFT
    for kind in dict.fromkeys(item.kind for item in items):
        lines.append(f'<rect x="{left}" y="{bottom - 11}" width="14" height="14" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{left + 20}" y="{bottom + 1}">{NAMES[kind]}</text>')
        left += 40 + 8 * len(NAMES[kind])
    lines.append(f'<text x="{WIDTH - 10}" y="{bottom + 1}" text-anchor="end">{1e3 * (end - begin):.1f} ms</text>')
    return "\n".join([*lines, "</svg>", ""])


def expected_idle(schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> float | None:
    """Return the idle share by formula, for equal stage times; None for a schedule without one."""
    bubble = {
        "sequential": (ranks - 1) / 1,
        "gpipe": (ranks - 1) / microbatches,
        "1f1b": (ranks - 1) / microbatches,
        "interleaved": (ranks - 1) / (stages_per_rank * microbatches),
    }.get(schedule)
    return None if bubble is None else bubble / (1 + bubble)
