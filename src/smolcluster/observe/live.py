"""The live display on a terminal, drawn with rich.

    gpt | allreduce | 2 workers on 2 x cpu | 4.83M parameters | 300 steps
    step 50/300 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 17%
    loss 2.3104  val 2.4012  12.3k tok/s  elapsed 0:08  eta 0:41
    rank  host  device  step  loss    step time  comm  staleness
       0  mini  mps       50  2.3007  160 ms       4%          0
       1  pi5   cpu       50  2.3201  161 ms       4%          0

A frame is a frozen value, made by the thread of the events and drawn by rich's refresh thread, so the two share no lock.
On a small terminal columns and lines are left out, least important first.
"""

from __future__ import annotations

import atexit
import dataclasses
import time
from collections.abc import Callable, Mapping

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from smolcluster.observe.events import CheckpointSaved, Event, Progress
from smolcluster.observe.run_state import RankStatus, RunState, StepLine, evaluation_parts, message, quantity, rate
from smolcluster.observe.text import clock, duration, encodable, number, printable

COLUMNS = ("rank", "host", "device", "step", "loss", "step time", "comm", "staleness")
_BY_IMPORTANCE = ("rank", "step", "loss", "step time", "comm", "host", "staleness", "device")
_TEXT_COLUMNS = ("host", "device", "step time")
_STYLES = {"error": "bold red", "critical": "bold red", "warning": "yellow"}


class LiveScreen:
    """Draws the state in place; notices scroll above it."""

    def __init__(self, console: Console, state: RunState, *, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._state = state
        self._now = now
        self._started_s = now()
        self._line: StepLine | None = None
        self._line_s = self._started_s
        self._frame = self._draw()
        self._live = Live(console=console, get_renderable=lambda: self._frame, vertical_overflow="crop")

    def step(self, line: StepLine) -> None:
        if not line.late:
            self._line, self._line_s = line, self._now()

    def show(self, event: Event) -> None:
        if not self._live.is_started:
            self._live.start()
            atexit.register(self._stop)  # restores the cursor even if `close` is never called
        self._frame = self._draw()
        # Only problems get a line, not saved checkpoints.
        if (text := message(event)) and not isinstance(event, CheckpointSaved):
            self._console.print(Text(self._clean(text), style=_STYLES.get(text.split(":")[0], "")))

    def close(self) -> None:
        self._frame = self._draw()
        self._stop()

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        self._live.stop()

    def _clean(self, text: str) -> str:
        return encodable(printable(text, keep="\t\n"), self._console.file)

    def _draw(self) -> LiveFrame:
        state = self._state
        return LiveFrame(
            header=self._clean(state.header()),
            progress=tuple(dataclasses.replace(p, name=self._clean(p.name)) for p in state.progress.values()),
            line=self._line,
            evaluation=state.evaluation,
            workers=tuple(tuple(self._clean(cell) for cell in _cells(status)) for status in state.workers),
            failed=frozenset(i for i, status in enumerate(state.workers) if status.state == "failed"),
            started_s=self._started_s,
            line_s=self._line_s,
            now=self._now,
        )


def _cells(status: RankStatus) -> tuple[str, ...]:
    """Return the cells of one worker, by COLUMNS."""
    row = status.last
    if row is None:
        return (str(status.rank), status.host, status.device, status.state, "-", "-", "-", "-")
    comm = f"{row.comm_s / row.step_time_s:.0%}" if row.step_time_s > 0 else "-"
    step = str(row.step) if status.state == "training" else status.state
    return (
        str(status.rank),
        status.host,
        status.device,
        step,
        number(row.loss),
        duration(row.step_time_s),
        comm,
        f"{row.staleness:.3g}",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveFrame:
    """The contents of the screen. Only clocks change between two frames."""

    header: str = ""
    progress: tuple[Progress, ...] = ()
    line: StepLine | None = None
    evaluation: Mapping[str, float] = dataclasses.field(default_factory=dict)
    workers: tuple[tuple[str, ...], ...] = ()
    failed: frozenset[int] = frozenset()
    started_s: float
    line_s: float
    now: Callable[[], float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, console.size.height
        if self.header:
            yield _line(self.header, "bold")
        for item in self.progress:
            yield bar(item.name, item.done, item.total, _amount(item), width)
        if self.line is not None:
            steps = self.line.steps
            percent = f"{self.line.step / steps:.0%}" if steps else ""
            yield bar(self.line.label, self.line.step, steps, percent, width)
        yield _line("  ".join(self._numbers()))
        yield from self._worker_lines(width, max_lines=height - 4 - len(self.progress))

    def _numbers(self) -> list[str]:
        elapsed_s = self.now() - self.started_s
        if self.line is None:
            return [f"starting, {clock(elapsed_s)}"]
        numbers = [f"loss {number(self.line.loss)}", *evaluation_parts(self.evaluation)]
        numbers += [*rate(self.line), f"elapsed {clock(elapsed_s)}"]
        if self.line.eta_s is not None:
            numbers.append(f"eta {clock(max(0.0, self.line.eta_s - (self.now() - self.line_s)))}")
        return numbers

    def _worker_lines(self, width: int, *, max_lines: int) -> RenderResult:
        """Yield a line per worker, without columns and lines that do not fit."""
        # Two lines are for the header and the number of hidden workers.
        fits = len(self.workers) if len(self.workers) < max_lines else max_lines - 2
        if not self.workers or fits < 1:
            return
        table = [COLUMNS, *self.workers]
        widths = [max(cell_len(row[i]) for row in table) for i in range(len(COLUMNS))]
        shown: list[int] = []
        for name in _BY_IMPORTANCE:
            index = COLUMNS.index(name)
            if sum(widths[i] + 2 for i in shown) + widths[index] <= width:
                shown.append(index)
        shown.sort()
        for index, row in enumerate(table[: 1 + fits]):
            cells = [_cell(row[i], widths[i], left=COLUMNS[i] in _TEXT_COLUMNS) for i in shown]
            style = "dim" if index == 0 else "red" if index - 1 in self.failed else ""
            yield _line("  ".join(cells), style)
        if fits < len(self.workers):
            yield _line(f"and {len(self.workers) - fits} more workers", "dim")


def _line(text: str, style: str = "") -> Text:
    """Return a line that is cropped at the edge and not wrapped."""
    return Text(text, style=style, no_wrap=True, overflow="crop")


def _cell(text: str, width: int, *, left: bool) -> str:
    return set_cell_size(text, width) if left else " " * (width - cell_len(text)) + text


def _amount(item: Progress) -> str:
    done = quantity(item.done, item.unit)
    return done if item.total is None else f"{done} of {quantity(item.total, item.unit)}"


def bar(label: str, done: int, total: int | None, amount: str, width: int) -> Table | Text:
    """Return `label ━━━━━━━━ amount`, without the bar if it does not fit."""
    room = width - cell_len(label) - cell_len(amount) - 2
    if room < 6:
        return _line(f"{label} {amount}")
    grid = Table.grid(padding=(0, 1, 0, 0))
    progress = ProgressBar(total=total, completed=done, width=room, pulse=total is None)
    grid.add_row(_line(label), progress, _line(amount))
    return grid
