"""The run on the launcher's console: a live picture on a terminal, plain lines anywhere else.

step 50/300  loss 2.3104  val 2.4012  12.3k tok/s  eta 0:41
"""

from __future__ import annotations

import os
import sys
from typing import Protocol, TextIO

from smolcluster.observe.board import Board, StepLine, evaluation_words, message, quantity, rate
from smolcluster.observe.events import Event, Notice, Progress, RunFinished, StepLogged
from smolcluster.observe.text import clock, encodable, number, printable


class Screen(Protocol):
    """One way of showing a board."""

    def step(self, line: StepLine) -> None:
        """A step was closed."""

    def show(self, event: Event) -> None:
        """The board has taken this event."""

    def close(self) -> None:
        """Give the terminal back as it was."""


class ConsoleSink:
    """Shows the events of all ranks. `live` None: live on a terminal that can, unless NO_COLOR or TERM=dumb is set.

    `alone`: there are only those of one worker of many.
    A `Failed` event only marks its worker: what became of the run is for the launcher to say, once.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None, alone: bool = False) -> None:
        stream = stream or sys.stdout
        self._board = Board(alone=alone)
        make = _live_screen if _wants_live(stream, live) else PlainScreen
        self._screen: Screen | None = make(stream, self._board)
        self._noticed: dict[str, int | None] = {}  # before the first step: what was said, and by which rank first
        self._training = False

    def handle(self, event: Event) -> None:
        if self._screen is None:
            return
        if self._was_said_by_another(event):
            return
        closed = self._board.apply(event)
        if isinstance(event, RunFinished):
            closed += self._board.flush()
        for line in closed:
            self._screen.step(line)
        self._screen.show(event)

    def _was_said_by_another(self, event: Event) -> bool:
        """Ranks that begin have the same settings, and the same warnings about them: one is enough."""
        self._training |= isinstance(event, StepLogged)
        if not isinstance(event, Notice) or event.rank is None or self._training:
            return False
        return self._noticed.setdefault(event.message, event.rank) != event.rank

    def close(self) -> None:
        screen, self._screen = self._screen, None
        if screen is None:
            return
        try:
            for line in self._board.flush():
                screen.step(line)
        finally:
            screen.close()


class PlainScreen:
    """Lines of text without any escape codes."""

    def __init__(self, stream: TextIO, board: Board) -> None:
        self._stream = stream
        self._board = board
        self._headed = False
        self._announced: set[str] = set()

    def step(self, line: StepLine) -> None:
        self._head()
        self._print("  ".join(fields_of(line)))

    def show(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._progress(event)
        elif text := message(event):
            self._print(text)
        if self._board.all_started:
            self._head()

    def close(self) -> None:
        """Every line is out already."""

    def _head(self) -> None:
        if not self._headed and (header := self._board.header()):
            self._headed = True
            self._print(header)

    def _progress(self, event: Progress) -> None:
        """A line at the start and one at the end; the steps between are for terminals."""
        if event.total is not None and event.done >= event.total:
            self._announced.discard(event.name)
            self._print(f"{event.name}: done, {quantity(event.total, event.unit)}")
        elif event.name not in self._announced:
            self._announced.add(event.name)
            self._print(f"{event.name}: " + ("..." if event.total is None else quantity(event.total, event.unit)))

    def _print(self, text: str) -> None:
        self._stream.write(encodable(printable(text, keep="\t\n"), self._stream) + "\n")
        self._stream.flush()


def fields_of(line: StepLine) -> list[str]:
    """`step 50/300`, `loss 2.3104`, `val 2.4012`, `12.3k tok/s`, `eta 0:41`: those that are known."""
    fields = [line.label, f"loss {number(line.loss)}"]
    fields += [*evaluation_words(line.evaluation), *rate(line)]
    if line.eta_s is not None:
        fields.append(f"eta {clock(line.eta_s)}")
    return fields


def _wants_live(stream: TextIO, live: bool | None) -> bool:
    if live is not None:
        return live
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return stream.isatty() and not plain


def _live_screen(stream: TextIO, board: Board) -> Screen:
    # rich is imported only where it is used: a run in a pipe starts without it.
    from rich.console import Console

    from smolcluster.observe.live import LiveScreen

    console = Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
    return LiveScreen(console, board)
