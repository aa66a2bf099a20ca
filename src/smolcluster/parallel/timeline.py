"""Who computed what when: the time line of one step of a pipeline, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

# Fills with black text on them; alike in lightness, told apart by hue.
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
    name: str  # of the files, without their endings
    svg: str
    says: str  # what it shows, in a line
    numbers: dict[str, Any]  # what it was drawn from


class Worked(NamedTuple):
    """One piece of work; seconds since the step began."""

    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


def idle_share(ranks: Sequence[Sequence[Worked]]) -> float:
    """The part of the ranks' time, from the first piece of work to the last, in which they did nothing."""
    pieces = [piece for rank in ranks for piece in rank]
    if not pieces:
        return 0.0
    length = max(p.end_s for p in pieces) - min(p.start_s for p in pieces)
    worked = sum(p.end_s - p.start_s for p in pieces)
    return 1.0 - worked / (length * len(ranks)) if length > 0 else 0.0


def draw(ranks: Sequence[Sequence[Worked]], *, title: str) -> str:
    """An SVG with one row for each rank. Numbers are micro-batches; a later stage on the same rank is paler."""
    pieces = [piece for rank in ranks for piece in rank]
    begin, end = min(p.start_s for p in pieces), max(p.end_s for p in pieces)
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
        stages = sorted({piece.stage for piece in rank})
        for piece in rank:
            left, width = LEFT + (piece.start_s - begin) * scale, max((piece.end_s - piece.start_s) * scale, 0.5)
            opacity = 1.0 - 0.35 * stages.index(piece.stage) / max(len(stages) - 1, 1)
            says = f"{NAMES[piece.kind]}, stage {piece.stage}, micro-batch {piece.microbatch}"
            lines.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" fill="{COLOURS[piece.kind]}" '
                f'fill-opacity="{opacity:.2f}" stroke="white" stroke-width="0.5"><title>{says}, '
                f"{1e3 * (piece.end_s - piece.start_s):.2f} ms</title></rect>"
            )
            if width > 14:
                middle = left + width / 2
                lines.append(
                    f'<text x="{middle:.1f}" y="{top + ROW / 2 + 5}" text-anchor="middle">{piece.microbatch}</text>'
                )
    bottom, left = height - 18, LEFT
    for kind in dict.fromkeys(piece.kind for piece in pieces):
        lines.append(f'<rect x="{left}" y="{bottom - 11}" width="14" height="14" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{left + 20}" y="{bottom + 1}">{NAMES[kind]}</text>')
        left += 40 + 8 * len(NAMES[kind])
    lines.append(f'<text x="{WIDTH - 10}" y="{bottom + 1}" text-anchor="end">{1e3 * (end - begin):.1f} ms</text>')
    return "\n".join([*lines, "</svg>", ""])


def expected_idle(schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> float | None:
    """By the formula, where forward and backward of all stages take as long as each other; None where there is none."""
    bubble = {
        "sequential": (ranks - 1) / 1,
        "gpipe": (ranks - 1) / microbatches,
        "1f1b": (ranks - 1) / microbatches,
        "interleaved": (ranks - 1) / (stages_per_rank * microbatches),
    }.get(schedule)
    return None if bubble is None else bubble / (1 + bubble)
