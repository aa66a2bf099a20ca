"""How commands for many machines print: which machine, which process, what it says."""

from __future__ import annotations

import sys

import typer

from smolcluster.observe.text import printable

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red")
_given: dict[str, str] = {}


def print_line(host: str, process: str, line: str) -> None:
    """A line that a process printed."""
    colour = _given.setdefault(process, _COLOURS[len(_given) % len(_COLOURS)])
    name = process if process.endswith(host) else f"{process}@{host}"
    typer.echo(f"{typer.style(name, fg=colour) if _coloured() else name} | {printable(line)}")


def print_note(host: str, text: str) -> None:
    """What we do ourselves, on that machine or on all."""
    typer.echo(f"{host}: {printable(text)}" if host else printable(text))


def _coloured() -> bool:
    import os

    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
