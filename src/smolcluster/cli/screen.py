"""Print the output of commands for many machines, with machine and process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import typer

from smolcluster.observe.text import number, printable

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red")
_given: dict[str, str] = {}


def print_line(host: str, process: str, line: str) -> None:
    """Print a line of a process's output."""
    colour = _given.setdefault(process, _COLOURS[len(_given) % len(_COLOURS)])
    name = process if process.endswith(host) else f"{process}@{host}"
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        name = typer.style(name, fg=colour)
    typer.echo(f"{name} | {printable(advised(line))}")


def print_note(host: str, text: str) -> None:
    """Print the command's own progress on one machine, or on all."""
    typer.echo(f"{host}: {printable(text)}" if host else printable(text))


def print_text(text: str, *, err: bool = False) -> None:
    """Print text that may quote another machine or a file, without control characters."""
    typer.echo(printable(text, keep="\t\n"), err=err)


def advised(line: str) -> str:
    """Replace the command that resumes a process by hand with `up --resume`."""
    return re.sub(r"(continue with: smolcluster) (?:server|train) .*", r"\1 up --resume", line)


def outcome(summary: Mapping[str, Any]) -> str:
    """Return how a run ended, in one line."""
    loss = summary.get("val_loss")
    return f"{summary['status']}: {summary['steps']} steps" + ("" if loss is None else f", val loss {number(loss)}")
