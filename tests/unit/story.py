"""A run in a folder whose processes follow a script (scripted_process.py), and what it told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.spec import WorkerSpec
from smolcluster.launch.local.processes import Child, spawn
from smolcluster.observe.events import Event, Notice

Script = dict[str, list[list[str]]]


class Story:
    """A sink for its events. Scripts may await `notice-N`, the N-th that was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = RunDir(folder / "run")
        self.events: list[Event] = []

    def handle(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Notice):
            (self.run_dir.path / f"notice-{len(self.notices())}").touch()

    def close(self) -> None:
        """Nothing is open."""

    def write(self, script: Script) -> None:
        self.run_dir.path.mkdir(parents=True, exist_ok=True)
        (self.run_dir.path / "script.json").write_text(json.dumps(script))

    def all_gone(self) -> bool:
        """Whether every process has ended that was started. Numbers are given again: it must be one of this story."""
        born = (self.folder / "born.txt").read_text().split()
        return not any(str(self.folder).encode() in _command_line(pid) for pid in born)

    def notices(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Notice)]

    def summary(self) -> dict[str, Any]:
        return dict(json.loads(self.run_dir.summary.read_text()))


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def recorded(started: list[tuple[str, int, bool]]) -> Any:
    """`spawn` that notes role, rank and whether it stands by."""

    def spawned(spec: WorkerSpec, *arguments: Any, standby: bool, **options: Any) -> Child:
        started.append((spec.role, spec.rank, standby))
        return spawn(spec, *arguments, standby=standby, **options)

    return spawned
