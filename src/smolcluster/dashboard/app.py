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
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smolcluster.dashboard.hub import Hub, TooManyViewers
from smolcluster.dashboard.logs import read_cursor, read_page
from smolcluster.dashboard.runs import MOST_COMPARED, MOST_RUNS, NoSuchRun, compare
from smolcluster.errors import needed as needed_for
from smolcluster.web.guard import App, Guard, GuardRules
from smolcluster.web.pages import static_answer, static_files
from smolcluster.web.streams import WRITE_S, event_stream

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
SEARCHES = 2  # of logs, at once
RULES = GuardRules(
    name="dashboard",
    program="smolcluster dashboard",
    is_ours=lambda path: path.startswith("/api"),
    needs_token=lambda path: path.startswith("/api"),
)
needed = functools.partial(needed_for, extra="dashboard", purpose="the dashboard")


def make_app(hub: Hub, *, token: str | None = None, allow_hosts: tuple[str, ...] = (), run: str | None = None) -> App:
    """The page, the API and the guard before both."""
    with needed():
        from starlette.applications import Starlette
        from starlette.responses import PlainTextResponse, Response
        from starlette.routing import Route

    searching = asyncio.Semaphore(SEARCHES)

    def answer(value: Any, status: int = 200, **more: str) -> Response:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # in ASCII: names may have half a character
        headers = {"cache-control": "no-store", "content-type": "application/json", **more}
        return Response(text, status_code=status, headers=headers)

    async def runs(_: Request) -> Response:
        found = await asyncio.to_thread(hub.runs.list)
        return answer({"runs": found, "more": len(found) == MOST_RUNS, "chosen": run, "folder": hub.runs.folder.name})

    async def snapshot(request: Request) -> Response:
        channel = await hub.channel(request.path_params["name"])
        return answer(await channel.snapshot())

    async def events(request: Request) -> Response:
        hub.check_room()
        channel = await hub.channel(request.path_params["name"])
        last = request.headers.get("last-event-id") or request.query_params.get("last")
        return event_stream(channel.frames(last), write_s=WRITE_S)

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
                limit=int(limit) if limit.isdecimal() and len(limit) < 5 else 200,
            )
        return answer(page)

    async def compared(request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_COMPARED]
        found = {}
        for name in names:
            with contextlib.suppress(NoSuchRun):  # one that was deleted does not keep the others from being seen
                found[name] = await (await hub.channel(name)).snapshot()
        if names and not found:
            raise NoSuchRun
        return answer(compare(found))

    async def login(request: Request) -> Response:
        response = answer({"ok": True})
        if token is not None:
            response.headers["set-cookie"] = RULES.login_cookie(token, request.scope)
        return response

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n", headers={"cache-control": "no-store"})

    files = static_files(STATIC)

    async def static(request: Request) -> Response:
        return static_answer(files, request) or answer({"error": "there is no such page"}, 404)

    def refusal(status: int, message: str, **headers: str) -> Callable[[Request, Exception], Response]:
        return lambda _request, _error: answer({"error": message}, status, **headers)

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
        exception_handlers={
            NoSuchRun: refusal(404, "there is no run of this name here"),
            TooManyViewers: refusal(503, "too many viewers", **{"retry-after": "5"}),
            404: refusal(404, "there is no such page"),
            500: refusal(500, "the dashboard failed to answer this"),
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, RULES, token=token, allow_hosts=allow_hosts)
