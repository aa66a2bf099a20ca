"""Run directories made by hand, line by line."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from smolcluster.dashboard.run_reader import RunReader
from smolcluster.dashboard.snapshot_stream import SnapshotStream
from smolcluster.dashboard.terminal import frame

T0 = 1_700_000_000.0


def row(step: int, rank: int = 0, **fields: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "role": "worker", "host": "mini", "time": T0 + step, "loss": 5.0 / step, "lr": 1e-3, "grad_norm": 1.0,
        "samples": 4 * step, "tokens": 64 * step, "tokens_per_s": 100.0, "samples_per_s": 5.0, "step_time_s": 1.0,
        "compute_s": 0.6, "comm_s": 0.3, "bytes_sent": 1000 * step, "bytes_received": 100 * step, "staleness": 0.0,
    }  # fmt: skip
    return {"step": step, "rank": rank, **(known | fields)}


def append(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(fields) + "\n" for fields in rows)


def configure(
    run: Path, *some: dict[str, Any], strategy: str = "allreduce", workers: int = 2, steps: int = 100, more: str = ""
) -> Path:
    """Make a run directory with its configuration, and these rows."""
    run.mkdir(parents=True, exist_ok=True)
    text = f"strategy:\n  name: {strategy}\ncluster:\n  num_workers: {workers}\ntraining:\n  steps: {steps}\n{more}"
    (run / "config.yaml").write_text(text, encoding="utf-8")
    if some:
        write_rows(run, *some)
    return run


def write_rows(run: Path, *some: dict[str, Any]) -> None:
    append(run / "metrics.jsonl", *some)


def summarize(run: Path, **fields: Any) -> None:
    (run / "summary.json").write_text(json.dumps(fields), encoding="utf-8")


def aged(path: Path, when: float) -> None:
    """Set the time of a file, or of all files below a folder."""
    for file in (path, *path.rglob("*")):
        os.utime(file, (when, when))


def member(event: str, rank: int, when: float, reason: str = "") -> dict[str, Any]:
    return {
        "epoch": 1, "time": T0 + when, "kind": "member", "event": event, "rank": rank, "instance": "i", "reason": reason
    }  # fmt: skip


def begin(when: float, next_step: int = 1) -> dict[str, Any]:
    return {"epoch": 1, "time": T0 + when, "kind": "begin", "server": "s", "next_step": next_step}


def log(message: str, level: str = "INFO", when: float = 0, **fields: Any) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(T0 + when)) + ".000Z"
    return {
        "time": stamp,
        "level": level,
        "logger": "smolcluster",
        "message": message,
        "role": "worker",
        "rank": 1,
    } | fields


def folder_of_runs(tmp_path: Path) -> Path:
    """`old`, finished; `new`, running; and what must not be found: a link, a hidden folder, an empty one."""
    runs = tmp_path / "runs"
    for name, when in (("old", 1), ("new", 2)):
        run = configure(runs / name, workers=1)
        write_rows(run, *(row(step) for step in range(1, 6)))
        aged(run, T0 + when)
        append(run / "logs" / "worker-rank0-a.log", log("hello <b>world</b>", "ERROR"))
    summarize(runs / "old", status="finished", strategy="edp", train_loss=1.5)
    aged(runs / "old" / "summary.json", T0 + 1)
    configure(tmp_path / "outside")
    if sys.platform != "win32":
        (runs / "link").symlink_to(tmp_path / "outside")
    configure(runs / ".hidden")
    (runs / "empty").mkdir()
    return runs


def reader_of(run: Path, *, now: float = T0 + 10) -> RunReader:
    reader = RunReader(run, now=lambda: now)
    reader.poll_to_the_end()
    return reader


def snapshot_of(run: Path, **options: Any) -> dict[str, Any]:
    return SnapshotStream(reader_of(run, **options)).snapshot()


def states(told: dict[str, Any]) -> dict[str, str]:
    return {machine["name"]: machine["state"] for machine in told["machines"]}


def drawn(told: dict[str, Any], *, width: int = 120, height: int = 40, unicode: bool = True) -> str:
    console = Console(width=width, height=height, highlight=False)
    with console.capture() as capture:
        console.print(frame(told, width=width, height=height, unicode=unicode))
    return capture.get()
