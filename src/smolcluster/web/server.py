"""Serve an ASGI application on one port; see connections.py for its timeouts and limits."""

from __future__ import annotations

import asyncio
import atexit
import errno
import html
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

from smolcluster.comm.addresses import is_loopback
from smolcluster.errors import UserError
from smolcluster.web.connections import ConnectionGate, HttpLimits
from smolcluster.web.guard import App, plain_text
from smolcluster.web.streams import WRITE_S

_OPEN_S = 60.0  # for a browser to start


def listen(bind: str, ports: Sequence[int], *, write_s: float = WRITE_S) -> socket.socket:
    """Return a socket that listens on the first free port of these."""
    for number in ports:
        try:
            family = socket.AF_INET6 if ":" in bind else socket.AF_INET
            listener = socket.create_server((bind, number), family=family, backlog=128)
        except (OSError, OverflowError) as error:
            reason = error
            continue
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # drops clients that vanished
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_s * 1000))
        return listener
    code = getattr(reason, "errno", None)
    unknown = isinstance(reason, socket.gaierror)
    nowhere = unknown or code == errno.EADDRNOTAVAIL or list(ports) == [0]
    remedy = "--bind must be an address of this machine" if nowhere else "choose another with --port (0: any free one)"
    why = reason if unknown or code is None else os.strerror(code)  # without what asyncio and socket add
    raise UserError(f"cannot listen on {bind}:{ports[0]}: {why}; {remedy}")


def url_of(listener: socket.socket, token: str | None, *, name: str = "token") -> str:
    """Return the URL to open. The token is in the fragment: browsers do not send that, so it is in no log."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    address = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    return address + (f"#{name}={token}" if token else "")


def open_browser(url: str) -> None:
    """Open a page, on a separate thread: starting a browser may block.

    Every user of this machine can see a browser's arguments. For a URL with a key they name a file that redirects there and
    that only this user can read; it is removed after a minute or at exit.
    """
    import webbrowser

    if "#" in url:
        page = _redirect_page(url)
        url = page.as_uri()
        atexit.register(_remove, page)
        timer = threading.Timer(_OPEN_S, _remove, args=(page,))
        timer.daemon = True
        timer.start()
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True, name="browser").start()


def _remove(page: Path) -> None:
    shutil.rmtree(page.parent, ignore_errors=True)


def _redirect_page(url: str) -> Path:
    """Write a page that redirects to `url`, in a folder of its own.

    The folder is in the user's home and not hidden: a browser installed as a snap can read nothing else.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="smolcluster-open-", dir=Path.home()))  # mode 0700
    except (OSError, RuntimeError):  # no home, or not writable
        folder = Path(tempfile.mkdtemp(prefix="smolcluster-open-"))
    page = folder / "open.html"
    quoted = html.escape(url, quote=True)
    text = f'<!DOCTYPE html><meta http-equiv="refresh" content="0;url={quoted}"><a href="{quoted}">open</a>\n'
    handle = os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    return page


def names_here(bind: str) -> tuple[str, ...]:
    """Return the host names of a server that listens there, none on loopback."""
    if is_loopback(bind):
        return ()
    name = socket.gethostname()
    short = name.partition(".")[0]
    return tuple(dict.fromkeys((name, short, f"{short}.local")))  # the last: mDNS


async def serve(
    app: App,
    listener: socket.socket,
    *,
    ready: Callable[[], None],
    closing: Callable[[], Awaitable[None]],
    until: threading.Event | asyncio.Event | None = None,
    limits: HttpLimits | None = None,
    error_body: Callable[[int, str], tuple[str, bytes]] = plain_text,
) -> None:
    """Serve until Ctrl-C, or until `until` is set. `closing` is awaited before connections are closed."""
    import uvicorn

    limits = limits or HttpLimits()
    gate = ConnectionGate(app, limits, error_body)
    config = uvicorn.Config(
        gate,
        http=cast(Any, gate.protocol),
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
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=limits.shutdown_s,
    )
    server = uvicorn.Server(config)

    async def watch() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        ready()
        while not (server.should_exit or (until is not None and until.is_set())):
            await asyncio.sleep(0.1)
        await closing()
        server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[listener])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
