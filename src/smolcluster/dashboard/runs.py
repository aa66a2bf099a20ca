"""List, find and compare the runs in one folder."""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from smolcluster.dashboard.downsample import finite
from smolcluster.dashboard.follow import lstat, read_file
from smolcluster.dashboard.logs import ReadBudget, file_size, lines_before
from smolcluster.dashboard.run_files import flat_config, parse_count
from smolcluster.dashboard.run_reader import QUIET_S, RunReader
from smolcluster.dashboard.snapshot_stream import SnapshotStream
from smolcluster.observe.jsonl import json_object

MAX_RUNS = 200
MAX_COMPARED = 8
MAX_LIVE = 16  # newest runs without a summary that are read for the list
LAST_BYTES = 512 << 10
OPEN_BUDGET_S = 0.25  # no further run is opened after this time: a viewer waits for the list
_MARKS = ("config.yaml", "metrics.jsonl", "summary.json")
_TAIL_BYTES = 16 << 10


class NoSuchRun(Exception):
    """There is no run of this name here."""


class RunFolder:
    """Lists and finds runs. Descriptions of ended runs are cached until one of their files changes. A live run is read from
    its end by a `RunReader`, so that list and page agree."""

    def __init__(self, folder: Path, *, now: Callable[[], float] = time.time) -> None:
        self.folder, self._now = folder.resolve(), now
        self._lines: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._streams: dict[str, SnapshotStream] = {}
        self._lock = threading.Lock()  # a reader is used by one thread at a time

    def find(self, name: str) -> Path:
        """Return the directory of a run. Names cannot lead out of the folder: no separators, no leading dots, no links."""
        if not is_name(name):
            raise NoSuchRun
        path = self.folder / name
        found = lstat(path)
        is_folder = found is not None and stat.S_ISDIR(found.st_mode)
        if not (is_folder and path.resolve().parent == self.folder and holds_a_run(path)):
            raise NoSuchRun
        return path

    def list(self) -> list[dict[str, Any]]:
        """Describe each run, the newest first."""
        found = []
        try:
            entries = [e for e in os.scandir(self.folder) if is_name(e.name) and e.is_dir(follow_symlinks=False)]
        except OSError:
            return []
        for entry in entries:
            stamps = tuple(_stamp(Path(entry.path) / name) for name in _MARKS)
            if any(stamps):
                found.append((max(filter(None, stamps)), entry.name, stamps))
        newest = sorted(found, reverse=True)[:MAX_RUNS]
        with self._lock:
            self._lines = {name: line for name, line in self._lines.items() if name in {n for _, n, _ in newest}}
            described = [self._line(name, stamps) for _, name, stamps in newest]
            live = self._read_live([line for line in described if not line["ended"]])
        return [line | live.get(line["name"], {}) for line in described]

    def _read_live(self, live: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Describe the runs that have not ended, by name. Those not read in time get a status from their files."""
        began, known, self._streams = time.monotonic(), self._streams, {}
        lines = {}
        for line in live:
            name, quiet_s = line["name"], self._now() - line["changed"]
            stream = known.get(name)
            if stream is None and len(self._streams) < MAX_LIVE and time.monotonic() - began < OPEN_BUDGET_S:
                stream = SnapshotStream(RunReader(self.folder / name, now=self._now, last_bytes=LAST_BYTES))
            if stream is not None:
                self._streams[name] = stream
                lines[name] = describe_live(stream)
            else:
                lines[name] = {"status": "silent" if quiet_s > QUIET_S else "training"}
        return lines

    def newest(self) -> str | None:
        return next((line["name"] for line in self.list()), None)

    def _line(self, name: str, stamps: tuple[float | None, ...]) -> dict[str, Any]:
        known = self._lines.get(name)
        if known is None or known[0] != stamps:
            known = self._lines[name] = (stamps, describe(self.folder / name, stamps))
        return known[1]


def is_name(name: str) -> bool:
    """Return whether a name is one visible path component that can be encoded in a URL."""
    separators = r"[/\\:\0]" if os.name == "nt" else r"[/\0]"
    known = bool(name) and len(name) < 256 and not name.startswith(".") and not re.search(separators, name)
    return known and name == name.encode(errors="replace").decode()


def holds_a_run(path: Path) -> bool:
    return any(_stamp(path / name) is not None for name in _MARKS)


def describe(path: Path, stamps: Sequence[float | None]) -> dict[str, Any]:
    """Describe a run from its summary; without one, from its configuration and its last row."""
    raw = read_file(path / "summary.json", max_bytes=1 << 20)
    summary = json_object(raw or b"")
    resumed = bool(stamps[0] and stamps[2] and max(stamps[0], stamps[1] or 0.0) > stamps[2] + 2.0)
    ended = bool(summary and not resumed)
    if summary and ended:
        names = ("steps", "train_loss", "val_loss", "tokens_per_s", "samples_per_s", "wall_s", "workers")
        known: dict[str, Any] = {name: finite(summary.get(name)) for name in names}
        known |= {"status": str(summary.get("status", ""))[:40], "strategy": str(summary.get("strategy", ""))[:40]}
    else:
        config = flat_config(read_file(path / "config.yaml", max_bytes=1 << 20) or b"")
        row = last_row(path / "metrics.jsonl")
        known = {
            "strategy": config.get("strategy.name", ""),
            "steps": finite(row.get("step")),
            "train_loss": finite(row.get("loss")),
            "workers": parse_count(config.get("cluster.num_workers", "")),
        }
    return known | {"name": path.name, "ended": ended, "changed": max(filter(None, stamps), default=0.0)}


def describe_live(stream: SnapshotStream) -> dict[str, Any]:
    """Return the fields of `describe` for a run that is live or was killed, with the numbers of its page."""
    run = stream.run
    run.poll_to_the_end()
    machines = stream.machines()
    numbers = stream.numbers(machines)
    return {
        "status": run.status(),
        "strategy": run.strategy[:40],
        "workers": sum(row["role"] != "server" for row in machines),
        "steps": numbers["step"],
        "train_loss": numbers["loss"],
        **{name: numbers[name] for name in ("val_loss", "tokens_per_s", "samples_per_s")},
        "wall_s": numbers["elapsed_s"],
    }


def last_row(path: Path) -> dict[str, Any]:
    """Return the last complete row of a metrics file, without reading the others."""
    lines = lines_before(path, file_size(path), ReadBudget(_TAIL_BYTES))
    return next((row for line in lines if (row := json_object(line.text))), {})


def compare(snapshots: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the curves and numbers of several runs, and the configuration keys in which they differ."""
    runs = {
        name: {
            "status": snapshot["status"],
            "strategy": snapshot["strategy"],
            "num_workers": sum(row["role"] != "server" for row in snapshot["machines"]),
            "numbers": snapshot["numbers"],
            "curves": {key: snapshot["curves"][key] for key in ("joined", "val")},
        }
        for name, snapshot in snapshots.items()
    }
    return {"runs": runs, "differences": differences({name: one["config"] for name, one in snapshots.items()})}


def differences(configs: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return `[{"key": "strategy.name", "values": {"a": "edp", "b": "allreduce"}}, ...]` for keys with different values."""
    keys = sorted({key for config in configs.values() for key in config})
    rows = ({"key": key, "values": {name: config.get(key, "") for name, config in configs.items()}} for key in keys)
    return [row for row in rows if len(set(row["values"].values())) > 1]  # type: ignore[attr-defined]


def _stamp(path: Path) -> float | None:
    found = lstat(path)
    return found.st_mtime if found is not None and stat.S_ISREG(found.st_mode) else None
