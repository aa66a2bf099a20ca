"""Answers that take their time, for as long as the client is connected.

event_stream    server-sent events: ends when the viewer leaves, takes nothing for `write_s`, or there is no more to tell
while_there     one result: given up when the viewer leaves before it is there
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from smolcluster.web.bodies import ClientGone
from smolcluster.web.guard import Receive, Scope, Send

if TYPE_CHECKING:
    from starlette.responses import Response

WRITE_S = 20.0  # a viewer that takes nothing for so long is let go
T = TypeVar("T")


def event_stream(
    frames: AsyncGenerator[bytes, None], *, source: AsyncGenerator[Any, None] | None = None, write_s: float = WRITE_S
) -> Response:
    """The frames as an answer. Whatever becomes of it, they are closed, and after them what they are made of.

    (A generator that was never started is closed without having run: it could not close its source itself.)
    """
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
                    await while_there(receive, self._send_all(send))

        async def _send_all(self, send: Send) -> None:
            async for frame in frames:
                async with asyncio.timeout(write_s):
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body"})

    return EventStream()


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Raises Gone, with the work cancelled and ended, as soon as the client has left."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(until_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("before the answer was there")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def until_gone(receive: Receive) -> None:
    """Returns when the connection is lost or half of it closed. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
