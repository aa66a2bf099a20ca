"""The dashboard's HTTP server: one port, here (`serve`) or in a process of its own beside a run (`start_in_background`).

Loopback by default. Beyond it there is always a token: the address that is printed carries it behind the #, where browsers
keep it to themselves.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smolcluster.comm.addresses import is_loopback
from smolcluster.dashboard.app import WRITE_S, make_app, needed
from smolcluster.dashboard.guard import check_token
from smolcluster.dashboard.hub import Hub
from smolcluster.dashboard.runs import Runs
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.launch.processes import APART

PORT = 8265
PORTS_TRIED = 10  # from PORT on, when nobody asked for a certain one
REQUEST_S = 10.0  # a connection that does not ask anything for so long is closed
MOST_CONNECTIONS = 512
READY_S = 30.0
_NICE = 10  # training comes first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the dashboard listens, and for whom. `port` None: the usual one, or one of the next few."""

    folder: Path  # of runs
    run: str | None = None  # the one that is shown first; None: the newest
    bind: str = "127.0.0.1"
    port: int | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    allow_hosts: tuple[str, ...] = ()

    def checked(self) -> Place:
        """Beyond loopback there is always a token: the one that was given, or a new one."""
        token = self.token
        if token is not None:
            check_token(token)
        elif not is_loopback(self.bind):
            token = secrets.token_urlsafe(24)
        return dataclasses.replace(self, token=token)


def choose(run_dir: Path | None, runs: Path) -> tuple[Path, str | None]:
    """The folder of runs and the run that are meant: a run, a folder of runs, or the newest in `runs`."""
    if run_dir is None:
        return runs, None
    whole = run_dir.resolve()
    if whole.is_file():
        raise UserError(f"{run_dir} is a file; name a run directory such as runs/my-run")
    holds_runs = whole.is_dir() and not any((whole / n).exists() for n in ("config.yaml", "metrics.jsonl", "logs"))
    if holds_runs and Runs(whole).newest() is not None:
        return whole, None
    return whole.parent, whole.name


# Serving


def listen(bind: str, port: int | None) -> socket.socket:
    """A listening socket; where no port was asked for, on the first of the usual ones that is free."""
    tried = range(PORT, PORT + PORTS_TRIED) if port is None else [port]
    for number in tried:
        try:
            family = socket.AF_INET6 if ":" in bind else socket.AF_INET
            listener = socket.create_server((bind, number), family=family, backlog=128)
        except OSError as error:
            reason = error
            continue
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # who is gone without a word does not keep its connection
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(WRITE_S * 1000))
        return listener
    remedy = (
        "--bind must be an address of this machine" if port == 0 else "choose another with --port (0: any free one)"
    )
    raise UserError(f"cannot listen on {bind}:{tried[0]}: {reason.strerror or reason}; {remedy}")


def url_of(listener: socket.socket, token: str | None) -> str:
    """What a person opens. The token is behind the #: browsers do not send that part, so it is in no log."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    address = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    return address + (f"#token={token}" if token else "")


def serve(place: Place, *, ready: Callable[[str], None], until: threading.Event | None = None) -> None:
    """Serve until Ctrl-C, or until `until` is set. `ready` is told the address when it can be opened."""
    with needed():
        import uvicorn

    place = place.checked()
    listener = listen(place.bind, place.port)
    names = place.allow_hosts
    if place.bind in ("0.0.0.0", "::"):
        names = (*names, socket.gethostname())
    with contextlib.closing(listener):
        hub = Hub(Runs(place.folder))
        app = make_app(hub, token=place.token, allow_hosts=names, run=place.run)
        config = uvicorn.Config(
            app,
            http=_impatient_protocol(),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=16 << 10,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
        )
        asyncio.run(_serve(uvicorn.Server(config), hub, listener, until, lambda: ready(url_of(listener, place.token))))


async def _serve(
    server: Any, hub: Hub, listener: socket.socket, until: threading.Event | None, ready: Callable[[], None]
) -> None:
    async def watch() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        ready()
        while not (server.should_exit or (until is not None and until.is_set())):
            await asyncio.sleep(0.1)
        await hub.close()  # viewers get the last changes, and leave
        server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[listener])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _impatient_protocol() -> Any:
    """uvicorn's, but a connection that never asks anything is closed."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(REQUEST_S, self._close_if_silent, transport)

        def _close_if_silent(self, transport: Any) -> None:
            if getattr(self, "cycle", None) is None and not transport.is_closing():
                transport.abort()

    return Impatient


def give_way() -> None:
    """Training on the same machine comes first."""
    with contextlib.suppress(AttributeError, OSError):
        if os.nice(0) < _NICE:
            os.nice(_NICE - os.nice(0))


# Beside a run

_background: list[subprocess.Popen[bytes]] = []


def start_in_background(
    folder: Path, run_dir: Path, port: int | None = None, *, bind: str = "127.0.0.1", token: str | None = None
) -> str:
    """Serve the runs of `folder` from a process of its own, with `run_dir` shown first. Returns its address.

    The process has a low priority and ends with the one that started it, whatever becomes of that.
    """
    with needed():
        import starlette  # noqa: F401 - better told here than in a log nobody reads
        import uvicorn  # noqa: F401
    order = {"folder": str(folder.resolve()), "run": run_dir.name, "port": port, "bind": bind, "token": token}
    process = subprocess.Popen(
        [sys.executable, "-m", "smolcluster.dashboard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        **APART,  # Ctrl-C is for the run, which may need a while to save
    )
    if not _background:
        atexit.register(_end_background)
    _background.append(process)
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
    timer = threading.Timer(READY_S, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    try:
        said = json.loads(line)
    except ValueError:
        raise SmolclusterError(f"the dashboard did not start: its process ended with {process.wait()}") from None
    if "error" in said:
        raise UserError(said["error"])
    return str(said["url"])


def _end_background() -> None:
    """Its standard input ends: it tells its viewers the last changes and leaves."""
    for process in _background:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _background.clear()
