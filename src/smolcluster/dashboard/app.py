"""The dashboard as an ASGI application: static files, and the runs of one folder as JSON and server-sent events.

    /, /static/*                     the page
    /api/runs                        the runs of the folder, the newest first
    /api/run/NAME                    a snapshot of one run, of bounded size
    /api/run/NAME/events             the snapshot, then every change
    /api/run/NAME/logs               its logs in pages: search, level, process, before, limit
    /api/compare?run=A&run=B         several runs
    /api/login                       sets a cookie for the token
    /health                          ok

All routes only read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smolcluster.dashboard.hub import Hub, TooManyViewers
from smolcluster.dashboard.logs import read_cursor, read_page
from smolcluster.dashboard.runs import MAX_COMPARED, MAX_RUNS, NoSuchRun, compare
from smolcluster.errors import needed as needed_for
from smolcluster.web.guard import App, Guard, GuardRules
from smolcluster.web.pages import static_files, static_response
from smolcluster.web.streams import WRITE_S, event_stream

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
SEARCHES = 2  # concurrent log searches
RULES = GuardRules(
    name="dashboard",
    program="smolcluster dashboard",
    is_ours=lambda path: path.startswith("/api"),
    needs_token=lambda path: path.startswith("/api"),
)
needed = functools.partial(needed_for, extra="dashboard", purpose="the dashboard")


def make_app(hub: Hub, *, token: str | None = None, allow_hosts: tuple[str, ...] = (), run: str | None = None) -> App:
    """Return the application: page and API, behind the guard. `run` is the run shown first."""
    with needed():
        from starlette.applications import Starlette
        from starlette.routing import Route

    api = _Api(hub, token=token, run=run)
    app = Starlette(
        routes=[
            Route("/", api.static),
            Route("/static/{path:path}", api.static),
            Route("/health", api.health),
            Route("/api/login", api.login),
            Route("/api/runs", api.runs),
            Route("/api/compare", api.compare),
            Route("/api/run/{name}", api.snapshot),
            Route("/api/run/{name}/events", api.events),
            Route("/api/run/{name}/logs", api.logs),
        ],
        exception_handlers={
            NoSuchRun: _error_handler(404, "there is no run of this name here"),
            TooManyViewers: _error_handler(503, "too many viewers", **{"retry-after": "5"}),
            404: _error_handler(404, "there is no such page"),
            500: _error_handler(500, "internal error of the dashboard"),
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, RULES, token=token, allow_hosts=allow_hosts)


class _Api:
    """The handlers of all routes."""

    def __init__(self, hub: Hub, *, token: str | None, run: str | None) -> None:
        self._hub, self._token, self._run = hub, token, run
        self._searching = asyncio.Semaphore(SEARCHES)
        self._files = static_files(STATIC)

    async def static(self, request: Request) -> Response:
        return static_response(self._files, request) or _json({"error": "there is no such page"}, 404)

    async def health(self, _: Request) -> Response:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse("ok\n", headers={"cache-control": "no-store"})

    async def login(self, request: Request) -> Response:
        response = _json({"ok": True})
        if self._token is not None:
            response.headers["set-cookie"] = RULES.login_cookie(self._token, request.scope)
        return response

    async def runs(self, _: Request) -> Response:
        folder = self._hub.runs
        found = await asyncio.to_thread(folder.list)
        more = len(found) == MAX_RUNS
        return _json({"runs": found, "more": more, "chosen": self._run, "folder": folder.folder.name})

    async def snapshot(self, request: Request) -> Response:
        channel = await self._hub.channel(request.path_params["name"])
        return _json(await channel.snapshot())

    async def events(self, request: Request) -> Response:
        self._hub.check_viewer_limit()
        channel = await self._hub.channel(request.path_params["name"])
        last = request.headers.get("last-event-id") or request.query_params.get("last")
        return event_stream(channel.events(last), write_s=WRITE_S)

    async def logs(self, request: Request) -> Response:
        path = await asyncio.to_thread(self._hub.runs.find, request.path_params["name"])
        query = request.query_params
        limit = query.get("limit", "")
        async with self._searching:
            page = await asyncio.to_thread(
                read_page,
                path,
                search=query.get("search", "")[:200],
                level=query.get("level", "").upper(),
                process=query.get("process", "")[:255],
                before=read_cursor(query.get("before", "")),
                limit=int(limit) if limit.isdecimal() and len(limit) < 5 else 200,
            )
        return _json(page)

    async def compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:MAX_COMPARED]
        found = {}
        for name in names:
            with contextlib.suppress(NoSuchRun):  # a deleted run does not hide the others
                found[name] = await (await self._hub.channel(name)).snapshot()
        if names and not found:
            raise NoSuchRun
        return _json(compare(found))


def _json(value: Any, status: int = 200, **headers: str) -> Response:
    from starlette.responses import Response

    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # in ASCII: names may have lone surrogates
    headers = {"cache-control": "no-store", "content-type": "application/json", **headers}
    return Response(text, status_code=status, headers=headers)


def _error_handler(status: int, message: str, **headers: str) -> Callable[[Request, Exception], Response]:
    return lambda _request, _error: _json({"error": message}, status, **headers)
