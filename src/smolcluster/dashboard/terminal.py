"""Show a run in the terminal, from the snapshots that the page gets. `frame` renders one; `watch` updates it in place.

live | edp | training | 4 workers + server
step 290/3000 ━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 10%
loss 3.0911  val 3.1599 (best 3.1599)  1.10k tok/s  step 915 ms  16.5 MB/s  elapsed 2:49  eta 26:09

machine   state     host  device  step  loss    step time  compute  comm  waiting  staleness  traffic    memory  temp
worker 0  training  mini  mps      300  3.3078  1.24 s         62%    0%      38%          8  3.55 MB/s     26%  51 °C
worker 2  lost      pi5   cpu      134  3.4630  ...

5.5 ┤⠑⢄
...
05:18:54  lost        worker 2 is gone: the connection was closed
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from smolcluster.dashboard.run_reader import RunReader
from smolcluster.dashboard.snapshot_stream import SnapshotStream
from smolcluster.observe.live import bar
from smolcluster.observe.machine import describe_machine
from smolcluster.observe.plot import loss_plot
from smolcluster.observe.text import clock, dumb_terminal, duration, number, printable, short, size, supports

REFRESH_S = 1.0
LOCAL_FACTS_S = 5.0
_STYLES = {
    **dict.fromkeys(("training", "finished"), "green"),
    **dict.fromkeys(("silent", "waiting", "interrupted", "warning"), "yellow"),
    **dict.fromkeys(("lost", "evicted", "failed", "error", "evict"), "bold red"),
    **dict.fromkeys(("starting", "left", "stopped"), "dim"),
}
# Least important first: these are left out first on a narrow terminal.
_BY_IMPORTANCE = (
    *("temp", "memory", "waiting", "comm", "compute", "device", "staleness", "traffic", "host", "step time", "loss"),
    *("step", "state", "machine"),
)
_NUMBERS_BY_IMPORTANCE = ("step time", "best", "traffic", "accuracy", "elapsed", "speed", "skipped", "eta", "val", "")
_TEXT_COLUMNS = ("machine", "state", "host", "device", "step time", "traffic", "temp")


def frame(snapshot: dict[str, Any], *, width: int, height: int, unicode: bool = True) -> Group:
    """Render a snapshot in the given size. Curve and events get the lines that the machines do not need."""
    machines = _machine_table(snapshot["machines"], width=width, max_rows=max(1, height - 8))
    events = snapshot["events"]
    room = height - 6 - len(snapshot["machines"])
    num_events = max(0, min(len(events), 6, room // 3))
    plot_height = min(14, room - num_events - 5)
    parts: list[RenderableType] = [_header(snapshot, width), *_progress(snapshot["numbers"], width, unicode=unicode)]
    parts.append(_line(_numbers(snapshot, width)))
    if snapshot["error"]:
        parts.append(_line(snapshot["error"], "bold red"))
    parts += [Text(), machines]
    if plot_height >= 4 and (plot := _plot(snapshot["curves"], width=width, height=plot_height, unicode=unicode)):
        parts += [Text(), Text(plot)]
    if num_events:
        parts += [Text(), *(_event(event) for event in events[-num_events:])]
    return Group(*parts)


def _header(snapshot: dict[str, Any], width: int) -> Text:
    workers = sum(row["role"] != "server" for row in snapshot["machines"])
    server = " + server" if workers < len(snapshot["machines"]) else ""
    crew = f" | {workers} worker{'s' * (workers != 1)}{server}"
    status = printable(snapshot["status"]) + (" (still reading)" if snapshot["reading"] else "")
    strategy = snapshot["strategy"] or "?"
    name = snapshot["name"]
    if (room := width - len(f" | {strategy} | {status}{crew}")) < 12:
        room, crew = room + len(crew), ""
    if len(name) > room >= 6:  # names are recognized by their beginning
        name = f"{name[: room - 3]}..."
    text = _line(" | ".join([name, strategy, ""]), "bold")
    text.append(status, style=_STYLES.get(snapshot["status"], "bold"))
    return text.append(crew, style="bold")


def _progress(numbers: dict[str, Any], width: int, *, unicode: bool) -> list[RenderableType]:
    step, steps = numbers["step"], numbers["steps"]
    if step is None:
        return []
    label = f"step {step}" + (f"/{steps}" if steps else "")
    if not steps:
        return [_line(label)]
    percent = f"{step / steps:.0%}"
    return [bar(label, step, steps, percent, width) if unicode else _line(f"{label} {percent}")]


def _numbers(snapshot: dict[str, Any], width: int) -> str:
    """Return the numbers that fit the width, most important first; none is truncated."""
    numbers, moving = snapshot["numbers"], snapshot["status"] == "training"
    parts: dict[str, str] = {}
    if numbers["loss"] is not None:
        parts["loss"] = f"loss {number(numbers['loss'])}"
    if numbers["val_loss"] is not None:
        parts["val"] = f"val {number(numbers['val_loss'])}"
        parts["best"] = f"(best {number(numbers['best_val_loss'])})"
    if numbers["val_accuracy"] is not None:
        parts["accuracy"] = f"acc {numbers['val_accuracy']:.1%}"
    metrics = {f"metric {name}": f"{name} {number(v)}" for name, v in numbers["metrics"].items() if v is not None}
    parts |= metrics
    if numbers["skipped"]:
        parts["skipped"] = f"{numbers['skipped']} skipped"
    if numbers["tokens_per_s"]:
        parts["speed"] = f"{short(numbers['tokens_per_s'])} tok/s"
    elif numbers["samples_per_s"]:
        parts["speed"] = f"{short(numbers['samples_per_s'])} samples/s"
    if numbers["step_time_s"] is not None:
        parts["step time"] = f"step {duration(numbers['step_time_s'])}"
    parts["traffic"] = f"{size(numbers['bytes_per_s'])}/s" if moving else f"{size(numbers['bytes'])} sent"
    if numbers["elapsed_s"] is not None:
        parts["elapsed"] = f"elapsed {clock(numbers['elapsed_s'])}"
    if numbers["eta_s"] is not None:
        parts["eta"] = f"eta {clock(numbers['eta_s'])}"
    for name in (*reversed(metrics), *_NUMBERS_BY_IMPORTANCE):
        if len(text := "  ".join(parts.values()).replace("  (", " (")) <= width:
            break
        parts.pop(name, None)
    return text


def _cells(row: dict[str, Any]) -> dict[str, str]:
    facts, total = row["facts"], row["step_time_s"]

    def share(name: str) -> str:
        return f"{row[name] / total:.0%}" if total and row[name] is not None else "-"

    gpu = "device_" if "device_memory_total_bytes" in facts else ""
    used, memory = facts.get(f"{gpu}memory_used_bytes"), facts.get(f"{gpu}memory_total_bytes")
    heat = facts.get("device_temperature_c", facts.get("temperature_c"))
    traffic = row["sent_per_s"] + row["received_per_s"]
    server = row["role"] == "server"
    return {
        "machine": row["name"],
        "state": row["state"],
        "host": row["host"] or "-",
        "device": row["device"] or "-",
        "step": "-" if row["step"] is None else f"{row['step']}{' own' if row['own_steps'] else ''}",
        "loss": "-" if row["loss"] is None else number(row["loss"]),
        "step time": "-" if total is None or server else duration(total),
        **{title: "-" if server else share(name) for title, name in _SHARES.items()},
        "staleness": "-" if row["staleness"] is None or server else f"{row['staleness']:.3g}",
        "traffic": f"{size(traffic)}/s" if traffic else "-",
        "memory": f"{used / memory:.0%} of {'GPU' if gpu else 'host'}" if used and memory else "-",
        "temp": "-" if heat is None else f"{heat:.0f} °C",
    }


_SHARES = {"compute": "compute_s", "comm": "comm_s", "waiting": "wait_s"}


def _machine_table(machines: list[dict[str, Any]], *, width: int, max_rows: int) -> Table:
    rows = [_cells(row) for row in machines]
    columns = list(rows[0]) if rows else ["machine"]
    widths = {name: max([len(name), *(len(row[name]) for row in rows)]) + 2 for name in columns}
    for name in _BY_IMPORTANCE:  # empty columns go first, then those that do not fit
        if name in columns and rows and all(row[name] == "-" for row in rows):
            columns.remove(name)
    for name in _BY_IMPORTANCE:
        if sum(widths[column] for column in columns) > width + 2 and name in columns and len(columns) > 2:
            columns.remove(name)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in _TEXT_COLUMNS else "right", no_wrap=True)
    for row, machine in list(zip(rows, machines, strict=True))[:max_rows]:
        style = _STYLES.get(machine["state"], "")
        table.add_row(*(Text(printable(row[name]), style=style if name == "state" else "") for name in columns))
    if len(rows) > max_rows:
        table.add_row(Text(f"and {len(rows) - max_rows} more", style="dim"))
    return table


def _plot(curves: dict[str, Any], *, width: int, height: int, unicode: bool) -> str:
    joined, val = curves["joined"]["columns"], curves["val"]["columns"]
    if not joined["step"]:
        return ""
    points = sorted(zip(joined["step"], joined["loss"], strict=True), key=lambda point: point[0])  # a loss may be None
    marks = [(x, y) for x, y in zip(val["step"], val["val_loss"], strict=True) if y is not None]
    losses = [math.nan if y is None else y for _, y in points]
    return loss_plot([x for x, _ in points], losses, width=min(width, 120), height=height, val=marks, unicode=unicode)


def _event(event: dict[str, Any]) -> Text:
    when = datetime.datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{when}  ", style="dim").append(f"{event['kind']:<10}  ", style=_STYLES.get(event["kind"], ""))
    return text.append(printable(event["text"]))


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def print_once(reader: RunReader, console: Console) -> None:
    reader.local_facts = describe_machine(run_nvidia_smi=True)
    reader.poll_to_the_end()
    unicode = supports(console.file, "⣿●┤└─━╸") and not dumb_terminal()
    snapshot = SnapshotStream(reader).snapshot()
    height = 40 + len(snapshot["machines"])
    console.print(frame(snapshot, width=console.width, height=height, unicode=unicode))


def watch(find: Callable[[], RunReader | None], console: Console) -> None:
    """Show the run in place until Ctrl-C. `find` returns the reader, or None while there is no run yet."""
    reader, looked = None, -math.inf
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            reader = reader or find()
            if reader is None:
                live.update(Text("waiting for a run to begin ...", style="dim"), refresh=True)
            else:
                if time.monotonic() - looked > LOCAL_FACTS_S:
                    reader.local_facts, looked = describe_machine(run_nvidia_smi=True), time.monotonic()
                reader.poll()
                live.update(
                    frame(SnapshotStream(reader).snapshot(), width=console.width, height=console.height), refresh=True
                )
            if reader is None or not reader.has_more:
                time.sleep(REFRESH_S)
