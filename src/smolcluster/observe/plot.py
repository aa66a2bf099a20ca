"""A line plot in text: braille dots (2 x 4 per character), or ASCII."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from smolcluster.observe.text import supports

# Bit of each dot of a braille character, by row and column.
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MIN_WIDTH, _MIN_HEIGHT = 36, 3

Point = tuple[float, float]
Cell = tuple[int, int]  # column, row; row 0 at the top


def loss_plot(
    steps: Sequence[float],
    losses: Sequence[float],
    *,
    width: int = 72,
    height: int = 12,
    val: Sequence[Point] = (),
    unicode: bool | None = None,
) -> str:
    """Plot the training loss as a line and validation losses, given as (step, loss), as marks.

    Non-finite values leave a gap. `unicode` None: if the encoding of stdout has braille.
    """
    if len(steps) != len(losses):
        raise ValueError(f"{len(steps)} steps but {len(losses)} losses")
    unicode = supports(sys.stdout, "⣿●┤└─") if unicode is None else unicode
    runs = _finite_runs(list(zip(steps, losses, strict=True)))
    marks = [point for point in val if math.isfinite(point[1])]
    points = [point for run in runs for point in run] + marks
    if not points:
        return "(no finite losses to plot)"

    # Frame: labels at the left, the plot to their right, a line of steps below.
    rows = max(_MIN_HEIGHT, height)
    labels = _labels([y for _, y in points], rows)
    margin = max(map(len, labels.values())) + 1
    columns = max(_MIN_WIDTH, width) - margin - 1

    # Draw.
    dots = (2, 4) if unicode else (1, 1)
    scale = _Scale(points, columns * dots[0], rows * dots[1])
    canvas = _Canvas(columns, rows, dots)
    for run in runs:
        places = [scale(point) for point in run]
        for start, end in zip(places, places[1:] or places, strict=False):
            canvas.line(start, end)
    for point in marks:
        canvas.mark(scale(point), "●" if unicode else "o")
    return _framed(canvas.lines(), labels, margin, [x for x, _ in points], unicode=unicode, legend=bool(marks))


def _labels(ys: list[float], rows: int) -> dict[int, str]:
    """Return the losses at the top, the middle and the bottom, by row; a single one for a constant."""
    low, high, middle = min(ys), max(ys), rows // 2
    if low == high:
        return {middle: f"{low:.4g}"}
    share = middle / (rows - 1)
    return {0: f"{high:.4g}", middle: f"{high * (1 - share) + low * share:.4g}", rows - 1: f"{low:.4g}"}


def _finite_runs(points: list[Point]) -> list[list[Point]]:
    """Split the points at gaps."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


class _Scale:
    """Maps (step, loss) to a dot; a range of zero width to the middle."""

    def __init__(self, points: list[Point], width: int, height: int) -> None:
        self._x = (min(x for x, _ in points), max(x for x, _ in points), width)
        self._y = (min(y for _, y in points), max(y for _, y in points), height)

    def __call__(self, point: Point) -> Cell:
        return self._place(point[0], *self._x), self._y[2] - 1 - self._place(point[1], *self._y)

    @staticmethod
    def _place(value: float, low: float, high: float, size: int) -> int:
        span = high / 2 - low / 2  # halved so that the span of two huge values does not overflow
        if span <= 0:
            return size - 1 - size // 2
        return min(size - 1, int((value / 2 - low / 2) / span * (size - 1) + 0.5))


class _Canvas:
    """A grid of characters with dots."""

    def __init__(self, columns: int, rows: int, dots: tuple[int, int]) -> None:
        self._dots = dots
        self._bits = [[0] * columns for _ in range(rows)]
        self._marks: dict[Cell, str] = {}

    def line(self, start: Cell, end: Cell) -> None:
        """Draw a line, one dot per unit along its longer side."""
        length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for i in range(length + 1):
            x = start[0] + round((end[0] - start[0]) * i / length)
            y = start[1] + round((end[1] - start[1]) * i / length)
            bit = _BRAILLE[y % 4][x % 2] if self._dots == (2, 4) else 1
            self._bits[y // self._dots[1]][x // self._dots[0]] |= bit

    def mark(self, place: Cell, character: str) -> None:
        self._marks[place[0] // self._dots[0], place[1] // self._dots[1]] = character

    def lines(self) -> list[str]:
        def character(column: int, row: int, bits: int) -> str:
            if (column, row) in self._marks:
                return self._marks[column, row]
            if self._dots == (1, 1):
                return "*" if bits else " "
            return chr(0x2800 + bits) if bits else " "

        return ["".join(character(x, y, bits) for x, bits in enumerate(row)) for y, row in enumerate(self._bits)]


def _framed(
    lines: list[str], labels: dict[int, str], margin: int, xs: list[float], *, unicode: bool, legend: bool
) -> str:
    tick, side, corner, floor = "┤│└─" if unicode else "||+-"
    text = [
        f"{labels.get(row, ''):>{margin - 1}} {tick if row in labels else side}{line}".rstrip()
        for row, line in enumerate(lines)
    ]
    text.append(" " * margin + corner + floor * len(lines[0]))
    first, last = f"{min(xs):g}", f"{max(xs):g}"
    ends = first if first == last else first + last.rjust(len(lines[0]) - len(first))
    text.append(" " * (margin + 1) + ends)
    if legend:
        text.append(" " * (margin + 1) + ("line: train   ●: val" if unicode else "*: train   o: val"))
    return "\n".join(text)
