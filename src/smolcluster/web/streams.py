"""Responses that end when the client disconnects.

event_stream       server-sent events; also ends when the client takes nothing for `write_s`
while_connected    one result; cancelled when the client disconnects
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from smolcluster.web.bodies import ClientGone
from smolcluster.web.guard import Receive, Scope, Send

if TYPE_CHECKING:
    from starlette.responses import Response

WRITE_S = 20.0  # without progress
T = TypeVar("T")


def event_stream(
    frames: AsyncGenerator[bytes, None], *, source: AsyncGenerator[Any, None] | None = None, write_s: float = WRITE_S
) -> Response:
    """Return a response of these frames. Closes them, and then `source`: a generator that never started cannot close it."""
    from starlette.responses import Response

    class EventStream(Response):
        media_type = "text/event-stream"

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            async with contextlib.AsyncExitStack() as closing:
                for generator in (source, frames):
                    if generator is not None:
                        closing.push_async_callback(generator.aclose)
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                if scope["method"] == "HEAD":
                    await send({"type": "http.response.body"})
                    return
                with contextlib.suppress(ClientGone, TimeoutError):
                    await while_connected(receive, self._send_all(send))

        async def _send_all(self, send: Send) -> None:
            async for frame in frames:
                async with asyncio.timeout(write_s):
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body"})

    return EventStream()


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. Raises ClientGone, with the work cancelled, when the client disconnects."""
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(until_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("before its response was complete")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def until_disconnected(receive: Receive) -> None:
    """Return when the connection is lost or half closed. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
