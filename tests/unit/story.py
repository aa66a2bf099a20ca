"""A run in a folder whose processes follow a script (scripted_process.py), and what it told."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.places import eventually

from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.spec import WorkerSpec
from smolcluster.launch.local.processes import Child, spawn
from smolcluster.observe.events import Event, Notice

Script = dict[str, list[list[str]]]  # `{rank}` in an action is the number in its name
ROOT = Path(__file__).parents[2]


def use_scripted_processes(folder: Path, launcher: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a launcher start processes that follow a script."""
    monkeypatch.setattr(launcher, "_PROCESS", "tests.unit.scripted_process")
    monkeypatch.setenv("SCRIPT_FOLDER", str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")


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
        told = {
            name: [[action.format(rank=name.rpartition("-")[2]) for action in life] for life in lives]
            for name, lives in script.items()
        }
        (self.run_dir.path / "script.json").write_text(json.dumps(told))

    def interrupt_at(self, *moments: str) -> None:
        """Ctrl-C for this process at each moment: when all these files are there."""

        def wait_and_send() -> None:
            for names in moments:
                files = [self.run_dir.path / name for name in names.split()]
                eventually(lambda files=files: all(file.exists() for file in files))
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=wait_and_send, daemon=True).start()

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
