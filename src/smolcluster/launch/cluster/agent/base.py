"""Shared by all parts of the agent: replies, user errors, paths."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FREE_SPACE = "free some space, or set folder in the cluster file to another disk"


class AgentError(Exception):
    """An error with a remedy for the user."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def root_of(folder: str) -> Path:
    return Path(folder).expanduser()


def home_of(folder: str, name: str) -> Path:
    return root_of(folder) / "clusters" / name


def private_home(folder: str, name: str) -> Path:
    """Make the folder of a cluster, private: it holds a token, environment variables and logs."""
    root, home = root_of(folder), home_of(folder, name)
    home.mkdir(parents=True, exist_ok=True)
    ours = [root] if root.name == ".smolcluster" else []  # a folder that the user chose may contain other files
    for path in (*ours, home.parent, home):
        with contextlib.suppress(OSError):  # it may belong to another user
            path.chmod(0o700)
    return home


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from its creation on."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if it is missing or not an object."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def run_briefly(*command: str, timeout_s: float) -> subprocess.CompletedProcess[str] | None:
    """Run a command and return its result; None if it cannot be run or times out."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    return None


def disk_error(error: OSError, path: Path) -> AgentError:
    if error.errno == 28:
        return AgentError(f"the disk is full ({path})", FREE_SPACE)
    remedy = "set folder in the cluster file to a writable one"
    return AgentError(f"cannot write {path}: {error.strerror or error}", remedy)
