"""Records of the clusters that this machine has started, so that `status`, `logs` and `down` need no cluster file.

One JSON file each, in the user's state folder: machines and process names, no secrets. The machines hold the actual state; if a
record is lost, give the cluster file on the command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smolcluster.durable_files import durable_write_text
from smolcluster.errors import UserError, unknown_name
from smolcluster.folders import user_folder


def state_folder() -> Path:
    return user_folder("state") / "clusters"


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Make a folder. Turn an OSError inside into a UserError that names the environment variable to set."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield
    except OSError as error:
        variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_STATE_HOME"
        raise UserError(
            f"cannot write {folder}: {error.strerror or error}; set {variable} to a writable folder"
        ) from error


def _path(name: str) -> Path:
    return state_folder() / f"{name}.json"


def save_record(record: Mapping[str, Any]) -> None:
    path = _path(record["name"])
    with contextlib.suppress(OSError, ValueError):  # keep the next rank for `cluster accept`
        before = json.loads(path.read_text(encoding="utf-8"))
        if before.get("run") == record.get("run") and "next_rank" in before:
            record = {"next_rank": before["next_rank"], **record}
    with writable(path.parent):
        durable_write_text(path, json.dumps(dict(record), indent=1))


def read_raw(name: str) -> tuple[bytes, float] | None:
    """Return a record's bytes and time, for `restore_record`."""
    with contextlib.suppress(OSError):
        return _path(name).read_bytes(), _path(name).stat().st_mtime
    return None


def restore_record(name: str, former: tuple[bytes, float] | None) -> None:
    """Restore a record and its time, by which the last cluster is found."""
    path = _path(name)
    if former is None:
        path.unlink(missing_ok=True)
    elif not path.exists() or path.read_bytes() != former[0]:
        path.write_bytes(former[0])
        os.utime(path, (former[1], former[1]))


def load_record(name: str | None) -> dict[str, Any]:
    """Return the record of this cluster, or of the one started last."""
    found = sorted(state_folder().glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError("no cluster was started from this machine; start one: smolcluster up cluster.yaml")
    known = {path.stem: path for path in found}
    if name is not None and name not in known:
        raise unknown_name("cluster", name, known)
    path = known[name] if name is not None else found[-1]
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("not a record")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; delete it and give the cluster file instead") from error
    return record
