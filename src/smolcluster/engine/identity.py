"""The identity of a process: a new instance at every start, and the versions it runs."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import secrets
import socket
import uuid
from pathlib import Path

import torch

from smolcluster.comm.elastic.transport.messages import Peer
from smolcluster.durable_files import durable_write_text
from smolcluster.version import __version__

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def new_peer(*, role: str, rank: int, host: str, run: str = "") -> Peer:
    return Peer(role=role, rank=rank, host=host, instance=secrets.token_hex(8), run=run, versions=versions())


def new_secret() -> str:
    """Return a secret for `instance_of`, which only the server of this process receives."""
    return secrets.token_hex(16)


def instance_of(secret: str) -> str:
    """Return the hash of a secret as the instance of a worker: peers know the instance and cannot join as it."""
    return hashlib.sha256(b"smolcluster instance " + secret.encode("utf-8", "replace")).hexdigest()[:16]


def this_machine() -> str:
    """Return an id of this machine: host names need not be unique."""
    try:
        mark = BOOT_ID.read_text(encoding="ascii")
    except OSError:
        mark = f"{uuid.getnode():x}"
    return f"{socket.gethostname().partition('.')[0]}-{hashlib.sha256(mark.encode()).hexdigest()[:8]}"


def run_id_in(file: Path) -> str:
    """Return the run's id, new in a new run. Workers that reconnect ask for it, also after a power cut."""
    with contextlib.suppress(FileNotFoundError):
        if known := file.read_text().strip():
            return known
    run_id = secrets.token_hex(8)
    durable_write_text(file, run_id + "\n")
    return run_id


def versions() -> dict[str, str]:
    return {
        "smolcluster": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def must_agree() -> dict[str, str]:
    """Return the versions that all ranks of a mesh must share, without torch's build tags."""
    return {name: versions()[name].partition("+")[0] for name in ("smolcluster", "torch")}
