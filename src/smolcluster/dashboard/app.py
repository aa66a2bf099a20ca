"""The dashboard as an ASGI application: a page of plain files, and the runs of one folder as JSON and server-sent events.

    /, /static/*                     the page
    /api/runs                        the runs of the folder, the newest first
    /api/run/NAME                    everything about one of them, of bounded size
    /api/run/NAME/events             the same, and then every change as it comes
    /api/run/NAME/logs               its logs, page by page: search, level, process, before, limit
    /api/compare?run=A&run=B         several beside each other
    /api/login                       a cookie for the token
    /health                          ok

It reads files and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smolcluster.dashboard.guard import App, Guard, Receive, Scope, Send, login_cookie
from smolcluster.dashboard.hub import Hub, TooManyViewers
from smolcluster.dashboard.logs import read_cursor, read_page
from smolcluster.dashboard.runs import MOST_COMPARED, NoSuchRun, compare
from smolcluster.errors import MissingExtra

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
WRITE_S = 20.0  # a viewer that takes nothing for so long is let go
SEARCHES = 2  # of logs, at once
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """The packages of the extra, or what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), extra="dashboard", purpose="the dashboard") from error


def make_app(hub: Hub, *, token: str | None = None, allow_hosts: tuple[str, ...] = (), run: str | None = None) -> App:
    """The page, the API and the guard before both."""
    with needed():
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse, PlainTextResponse, Response
        from starlette.routing import Route

    searching = asyncio.Semaphore(SEARCHES)

    def answer(value: Any, status: int = 200) -> Response:
        return JSONResponse(value, status_code=status, headers={"cache-control": "no-store"})

    async def runs(_: Request) -> Response:
        found = await asyncio.to_thread(hub.runs.list)
        return answer({"runs": found, "chosen": run, "folder": hub.runs.folder.name})

    async def snapshot(request: Request) -> Response:
        channel = await hub.channel(request.path_params["name"])
        return answer(await channel.snapshot())

    async def events(request: Request) -> Response:
        hub.check_room()
        channel = await hub.channel(request.path_params["name"])
        last = request.headers.get("last-event-id") or request.query_params.get("last")
        return _event_stream(channel.frames(last))

    async def logs(request: Request) -> Response:
        path = await asyncio.to_thread(hub.runs.find, request.path_params["name"])
        asked = request.query_params
        limit = asked.get("limit", "")
        async with searching:
            page = await asyncio.to_thread(
                read_page,
                path,
                search=asked.get("search", "")[:200],
                level=asked.get("level", "").upper(),
                process=asked.get("process", "")[:255],
                before=read_cursor(asked.get("before", "")),
                limit=int(limit) if limit.isdigit() and len(limit) < 5 else 200,
            )
        return answer(page)

    async def compared(request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_COMPARED]
        return answer(compare({name: await (await hub.channel(name)).snapshot() for name in names}))

    async def login(request: Request) -> Response:
        response = answer({"ok": True})
        if token is not None:
            response.headers["set-cookie"] = login_cookie(token, request.scope)
        return response

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n", headers={"cache-control": "no-store"})

    files = static_files()

    async def static(request: Request) -> Response:
        found = files.get(request.path_params.get("path", "index.html"))
        if found is None:
            return answer({"error": "there is no such page"}, 404)
        kind, tag, body = found
        headers = {"etag": tag, "cache-control": "no-cache", "content-type": kind}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers)

    def no_such_run(_request: Request, _error: Exception) -> Response:
        return answer({"error": "there is no run of this name here"}, 404)

    def too_many(_request: Request, _error: Exception) -> Response:
        response = answer({"error": "too many viewers"}, 503)
        response.headers["retry-after"] = "5"
        return response

    def unknown(_request: Request, _error: Exception) -> Response:
        return answer({"error": "there is no such page"}, 404)

    def failed(_request: Request, _error: Exception) -> Response:
        return answer({"error": "the dashboard failed to answer this"}, 500)

    app = Starlette(
        routes=[
            Route("/", static),
            Route("/static/{path:path}", static),
            Route("/health", health),
            Route("/api/login", login),
            Route("/api/runs", runs),
            Route("/api/compare", compared),
            Route("/api/run/{name}", snapshot),
            Route("/api/run/{name}/events", events),
            Route("/api/run/{name}/logs", logs),
        ],
        exception_handlers={NoSuchRun: no_such_run, TooManyViewers: too_many, 404: unknown, 500: failed},
    )
    app.router.redirect_slashes = False
    return Guard(app, token=token, allow_hosts=allow_hosts)


def static_files() -> dict[str, tuple[str, str, bytes]]:
    """Everything the page is made of, by its path below static/: kind, tag, bytes. What is not here cannot be asked for."""
    found = {}
    for path in sorted(STATIC.rglob("*")):
        if path.is_file() and path.suffix in _KINDS:
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found[path.relative_to(STATIC).as_posix()] = (_KINDS[path.suffix], tag, body)
    return found


def _event_stream(frames: AsyncGenerator[bytes, None]) -> Response:
    """An answer that goes on until the viewer leaves, takes nothing for WRITE_S, or there is no more to tell."""
    from starlette.responses import Response

    class EventStream(Response):
        media_type = "text/event-stream"

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body"})
                return
            sending = asyncio.create_task(self._send_all(send))
            leaving = asyncio.create_task(_until_gone(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.gather(sending, leaving, return_exceptions=True)

        async def _send_all(self, send: Send) -> None:
            async with contextlib.aclosing(frames):
                with contextlib.suppress(TimeoutError):
                    async for frame in frames:
                        async with asyncio.timeout(WRITE_S):
                            await send({"type": "http.response.body", "body": frame, "more_body": True})
                    await send({"type": "http.response.body"})

    return EventStream()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
