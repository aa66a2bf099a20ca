"""Unpack files on a machine, and read small ones."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import tarfile
import time
from pathlib import Path
from typing import Any

from smolcluster.launch.cluster.agent.base import disk_error, private_home, read_object, root_of, write_private
from smolcluster.launch.cluster.agent.processes import is_alive

LEFT_S = 86400.0  # age after which a partial upload is deleted
COPIES = 3  # of the package that are kept, for users who go back to older code
READ_BYTES = 1 << 20  # limit of `read`
PAST_BYTES = 64 << 10  # of a log that `tail` and the start of `follow` read


def unpack(folder: str, place: str, data: bytes, fresh: bool = False, **_: Any) -> None:
    """Unpack an archive into a folder below ours. `fresh`: replace the folder atomically."""
    target = root_of(folder) / place
    target.parent.mkdir(parents=True, exist_ok=True)
    into = _own_name(target, "new") if fresh else target
    try:
        into.mkdir(parents=True, exist_ok=True)
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 on
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            archive.extractall(into, **safely)
        if fresh:
            _put(into, target)
            _clear_out(target)
    except OSError as error:
        raise disk_error(error, target) from error
    finally:
        if fresh:
            shutil.rmtree(into, ignore_errors=True)


def _own_name(target: Path, what: str) -> Path:
    """Return a unique name in the same folder: two clients may send the same files at once, also to a shared home directory."""
    return target.with_name(f"{target.name}.{socket.gethostname()}-{os.getpid()}.{what}")


def _put(unpacked: Path, target: Path) -> None:
    """Rename it into place. Keep equal contents that another client has put there: processes may use them."""
    with contextlib.suppress(OSError):
        unpacked.rename(target)
        return
    sizes = {path.relative_to(unpacked): path.stat().st_size for path in unpacked.rglob("*") if path.is_file()}
    with contextlib.suppress(OSError):
        if all((target / path).stat().st_size == size for path, size in sizes.items()):
            return
    old = _own_name(target, "old")
    target.rename(old)
    unpacked.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _clear_out(newest: Path) -> None:
    """Remove all but COPIES copies of the package, except those that processes use."""
    used = {newest.name}
    for order in newest.parents[1].glob("clusters/*/processes/*/order.json"):
        if is_alive(order.parent):
            used.add(str(read_object(order).get("code")))
    ages: dict[Path, float] = {}
    for path in newest.parent.iterdir():
        with contextlib.suppress(OSError):  # another client may remove it first
            ages[path] = time.time() - path.stat().st_mtime
    partial = [path for path in ages if path.suffix in (".new", ".old")]  # another client may be sending them now
    copies = sorted(
        (path for path in ages if path not in partial and path.name not in used), key=lambda path: ages[path]
    )
    for path in [*copies[COPIES - 1 :], *(path for path in partial if ages[path] > LEFT_S)]:
        shutil.rmtree(path, ignore_errors=True)


def has(folder: str, places: list[str], **_: Any) -> list[bool]:
    """Return which of these exist."""
    return [(root_of(folder) / place).exists() for place in places]


def keep_secret(folder: str, name: str, data: bytes, **_: Any) -> None:
    write_private(private_home(folder, name) / "token", data)


def read(folder: str, place: str, **_: Any) -> str | None:
    """Return the start of a text file; None if it cannot be read."""
    with contextlib.suppress(OSError), (root_of(folder) / place).open("rb") as file:
        return file.read(READ_BYTES).decode("utf-8", "replace")
    return None


def tail(folder: str, place: str, **_: Any) -> list[str]:
    """Return the last complete lines of a text file."""
    with contextlib.suppress(OSError), (root_of(folder) / place).open("rb") as file:
        begin = max(0, os.fstat(file.fileno()).st_size - PAST_BYTES)
        file.seek(begin)
        lines = file.read(PAST_BYTES).decode("utf-8", "replace").split("\n")[:-1]
        return lines[1:] if begin else lines
    return []
