"""Print a memory estimate of every strategy: a table, a bar for each, and a recommendation.

The input is the output of `plan --memory --json`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smolcluster.observe.text import size

BAR = 60
# Letter, colour and name of each part of a bar.
PARTS = (
    ("p", "cyan", "parameters"),
    ("g", "yellow", "gradients"),
    ("o", "magenta", "optimizer"),
    ("a", "green", "other"),
)
ACTIVATIONS = ((False, "fused"), (True, "fused"), (False, "plain"))


def show_memory(plan: Mapping[str, Any], stream: IO[str] | None = None) -> None:
    """Print the estimate to a terminal or a file. Bars use letters, so colours are not needed."""
    stream = stream or sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else 144, highlight=False, soft_wrap=False)
    rows = [row for row in plan["strategies"] if row["runs"]]
    console.print(
        f"{plan['parameters']:,} parameters on {plan['ranks']} rank{'s' * (plan['ranks'] != 1)}, device {plan['device']}: "
        "bytes of the rank that needs most"
    )
    if rows:
        console.print(_table(rows))
        console.print(_bars(rows, plan))
    if any(row["activations_travel"] for row in rows):
        console.print(Text("* and activations, which depend on the samples", style="dim"))
    for row in plan["strategies"]:
        if not row["runs"]:
            console.print(Text(f"cannot run: {row['name']}: {row['reason']}"))
    notes: dict[str, list[str]] = {}
    for row in rows:
        notes.setdefault(largest_worker(row)["note"], []).append(row["name"])
    for note, names in notes.items():
        if note:
            console.print(Text(f"{note}: {'; '.join(names)}", style="dim"))
    for row in rows:
        for seat in row["seats"]:
            if seat["role"] == "server":
                console.print(Text(_server(row["name"], seat), style="dim"))
    console.print(Text(f"room: {size(plan['limit_bytes'])} ({plan['limit']})"))
    console.print(Text(_advice(plan), style="bold"))


def _server(name: str, seat: Mapping[str, Any]) -> str:
    step, total = size(seat["journal_step_bytes"]), size(seat["journal_bytes"])
    memory = f"{size(seat['peak_bytes'])} of memory"
    return f"the server of {name}: {memory}; its journal writes {step} a step, up to {total} of disk"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy", no_wrap=True)
    heads = ("parameters", "gradients", "optimizer", "activations", "checkpointed", "plain attention")
    for head in ("sent a step", *heads, "peak"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for row in rows:
        seat = largest_worker(row)
        sent = max(row["bytes_sent"], default=0)
        cells = [size(sent) + "*" * row["activations_travel"]]
        cells += [size(seat[key]) for key in ("parameters", "gradients", "optimizer")]
        for key in ACTIVATIONS:
            way = next((way for way in seat["ways"] if (way["checkpointing"], way["attention"]) == key), None)
            same = "same" if key[1] == "plain" and seat["ways"] else "-"  # without fused attention already
            cells.append(same if way is None else size(way["activations"]))
        table.add_row(row["name"], *cells, size(row["peak_bytes"]), _fits(row))
    return table


def _fits(row: Mapping[str, Any]) -> str:
    if row["fits"]:
        return "yes"
    return "with checkpointing" if row["fits_with_checkpointing"] else "no"


def _bars(rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> Table:
    """Draw the peak of each strategy; the mark is the memory limit."""
    scale = BAR / max([row["peak_bytes"] for row in rows] + [1])
    grid = Table(box=None, pad_edge=False, show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    for row in rows:
        grid.add_row(row["name"], _bar(row["at_peak"], scale, plan["limit_bytes"]))
    grid.add_row(
        "",
        Text(", ".join(f"{letter} {'activations, buffers' if name == 'other' else name}" for letter, _, name in PARTS)),
    )
    return grid


def _bar(held: Mapping[str, int], scale: float, limit: int) -> Text:
    text, drawn, total = Text(), 0, 0
    for letter, colour, name in PARTS:
        total += held[name]
        length = round(total * scale) - drawn
        text.append(letter * length, style=colour)
        drawn += length
    mark = round(limit * scale)
    return Text.assemble(text[:mark], ("|", "bold red"), text[mark + 1 :]) if 0 <= mark < drawn else text


def largest_worker(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the worker with the highest peak memory."""
    workers = [seat for seat in row["seats"] if seat["role"] == "worker"]
    return max(workers, key=lambda seat: int(seat["peak_bytes"]))


def _advice(plan: Mapping[str, Any]) -> str:
    best = plan["recommended"]
    if best is None:
        return "nothing fits: use more ranks, a smaller model or batch, or machines with more memory"
    flags = " --use-gradient-checkpointing" if best["checkpointing"] and not plan["checkpointing"] else ""
    workers = f" --workers {plan['ranks']}" if plan["ranks"] > 1 else ""
    return f"the first that fits: {best['name']}  (smolcluster train ...{workers} {best['flags']}{flags})"
