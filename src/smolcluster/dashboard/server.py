"""The dashboard's HTTP server: in this process (`serve`), or in a child process of a run (`start_in_background`).

Loopback by default. On other addresses a token is required; the printed URL has it after the #, which browsers do not send.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from smolcluster.dashboard.app import make_app, needed
from smolcluster.dashboard.hub import Hub
from smolcluster.dashboard.runs import RunFolder
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.launch.local.processes import NEW_GROUP, end_by_closing
from smolcluster.web import server as web
from smolcluster.web.connections import HttpLimits
from smolcluster.web.guard import choose_token
from smolcluster.web.server import url_of

PORT = 8265
PORTS_TRIED = 10  # from PORT on, if no port was given
REQUEST_S = 10.0  # idle connections are closed after this time
MAX_CONNECTIONS = 512
READY_S = 30.0
LEAVE_S = 5.0  # to send viewers the last changes
_NICE = 10  # training comes first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DashboardConfig:
    """The runs and the address of the dashboard. `port` None: the default, or one of the next few."""

    folder: Path  # of runs
    run: str | None = None  # shown first; None: the newest
    bind: str = "127.0.0.1"
    port: int | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    allow_hosts: tuple[str, ...] = ()

    def checked(self) -> DashboardConfig:
        return dataclasses.replace(self, token=choose_token(self.token, bind=self.bind))


def choose(run_dir: Path | None, runs: Path) -> tuple[Path, str | None]:
    """Return the folder of runs and the run for an argument that is a run, a folder of runs, or None (the newest in `runs`)."""
    if run_dir is None:
        return runs, None
    path = run_dir.resolve()
    if path.is_file():
        raise UserError(f"{run_dir} is a file; name a run directory such as runs/my-run")
    holds_runs = path.is_dir() and not any((path / n).exists() for n in ("config.yaml", "metrics.jsonl", "logs"))
    if holds_runs and RunFolder(path).newest() is not None:
        return path, None
    return path.parent, path.name


# Serving


def listen(bind: str, port: int | None) -> socket.socket:
    """Return a listening socket, on the given port or the first free default one."""
    return web.listen(bind, range(PORT, PORT + PORTS_TRIED) if port is None else [port])


def serve(config: DashboardConfig, *, ready: Callable[[str], None], until: threading.Event | None = None) -> None:
    """Serve until Ctrl-C, or until `until` is set. `ready` is called with the URL when the server accepts connections."""
    with needed():
        import uvicorn  # noqa: F401

    config = config.checked()
    with contextlib.closing(listen(config.bind, config.port)) as listener:
        hub = Hub(RunFolder(config.folder))
        names = (*config.allow_hosts, *web.names_here(config.bind))
        serving = web.serve(
            make_app(hub, token=config.token, allow_hosts=names, run=config.run),
            listener,
            ready=lambda: ready(url_of(listener, config.token)),
            closing=hub.close,  # viewers get the last changes
            until=until,
            limits=HttpLimits(request_s=REQUEST_S, max_connections=MAX_CONNECTIONS),
        )
        asyncio.run(serving)


def lower_priority() -> None:
    """Raise our niceness: training on the same machine comes first."""
    with contextlib.suppress(AttributeError, OSError):
        if os.nice(0) < _NICE:
            os.nice(_NICE - os.nice(0))


# In a child process of a run

_background: list[subprocess.Popen[bytes]] = []


def start_in_background(folder: Path, run_dir: Path, port: int | None = None) -> str:
    """Serve the runs of `folder` from a child process, with `run_dir` shown first. Returns its address.

    The child has a low priority and ends with this process, even if this process is killed.
    """
    with needed():
        import starlette  # noqa: F401 - missing packages are reported here, not by the child
        import uvicorn  # noqa: F401
    config = {"folder": str(folder.resolve()), "run": run_dir.name, "port": port}
    process = subprocess.Popen(
        [sys.executable, "-m", "smolcluster.dashboard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        **NEW_GROUP,  # Ctrl-C is for the run, which may take a while to save
    )
    if not _background:
        atexit.register(_end_background)
    _background.append(process)
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(config).encode() + b"\n")
        process.stdin.flush()
    timer = threading.Timer(READY_S, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    try:
        response = json.loads(line)
    except ValueError:
        raise SmolclusterError(
            f"the dashboard did not start: its process exited with status {process.wait()}"
        ) from None
    if "error" in response:
        raise UserError(response["error"])
    return str(response["url"])


def _end_background() -> None:
    """Close the standard input of each child, which then sends its viewers the last changes and exits."""
    end_by_closing(_background, timeout_s=LEAVE_S)
    _background.clear()
