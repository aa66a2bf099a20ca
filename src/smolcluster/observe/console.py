"""Show the run on the launcher's console: live on a terminal, plain lines anywhere else.

step 50/300  loss 2.3104  val 2.4012  12.3k tok/s  eta 0:41
"""

from __future__ import annotations

import os
import sys
from typing import Protocol, TextIO

from smolcluster.observe.events import Event, Notice, Progress, RunFinished, StepLogged
from smolcluster.observe.run_state import RunState, StepLine, evaluation_parts, message, quantity, rate
from smolcluster.observe.text import clock, dumb_terminal, encodable, number, printable


class Screen(Protocol):
    """A way to display the state."""

    def step(self, line: StepLine) -> None:
        """Show a closed step."""

    def show(self, event: Event) -> None:
        """Show an event, after the state was updated with it."""

    def close(self) -> None:
        """Restore the terminal."""
        return


class ConsoleSink:
    """Shows the events of all ranks: live on a terminal, unless NO_COLOR or TERM=dumb is set.

    `alone`: only the events of one worker of several arrive. A `Failed` event only marks its worker: the launcher reports the
    outcome of the run.
    """

    def __init__(self, stream: TextIO | None = None, *, alone: bool = False) -> None:
        stream = stream or sys.stdout
        self._state = RunState(alone=alone)
        live = stream.isatty() and not os.environ.get("NO_COLOR") and not dumb_terminal()
        make = _live_screen if live else PlainScreen
        self._screen: Screen | None = make(stream, self._state)
        self._noticed: dict[str, int | None] = {}  # before the first step: each notice, and the first rank that sent it
        self._training = False

    def handle(self, event: Event) -> None:
        if self._screen is None:
            return
        if self._is_repeated(event):
            return
        closed = self._state.apply(event)
        if isinstance(event, RunFinished):
            closed += self._state.flush()
        for line in closed:
            self._screen.step(line)
        self._screen.show(event)

    def _is_repeated(self, event: Event) -> bool:
        """Return True for a notice that another rank has sent: at the start all ranks have the same warnings."""
        self._training |= isinstance(event, StepLogged)
        if not isinstance(event, Notice) or event.rank is None or self._training:
            return False
        return self._noticed.setdefault(event.message, event.rank) != event.rank

    def close(self) -> None:
        screen, self._screen = self._screen, None
        if screen is None:
            return
        try:
            for line in self._state.flush():
                screen.step(line)
        finally:
            screen.close()


class PlainScreen(Screen):
    """Lines of text without any escape codes."""

    def __init__(self, stream: TextIO, state: RunState) -> None:
        self._stream = stream
        self._state = state
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
        if self._state.all_started:
            self._head()

    def _head(self) -> None:
        if not self._headed and (header := self._state.header()):
            self._headed = True
            self._print(header)

    def _progress(self, event: Progress) -> None:
        """Print a line at the start and one at the end."""
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
    """Return `step 50/300`, `loss 2.3104`, `val 2.4012`, `12.3k tok/s`, `eta 0:41`, as far as known."""
    fields = [line.label, f"loss {number(line.loss)}"]
    fields += [*evaluation_parts(line.evaluation), *rate(line)]
    if line.eta_s is not None:
        fields.append(f"eta {clock(line.eta_s)}")
    return fields


def _live_screen(stream: TextIO, state: RunState) -> Screen:
    # A run in a pipe starts without rich.
    from rich.console import Console

    from smolcluster.observe.live import LiveScreen

    console = Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
    return LiveScreen(console, state)
