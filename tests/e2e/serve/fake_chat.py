"""A server with the face of `smolcluster serve` and a model that says what a test tells it to, when it tells it to.

fake.words      what it answers, one piece each; `pace_s` between them
fake.hold_at    so many pieces, then it waits for `fake.go`
fake.next       how the next requests go instead: refuse(429), break_off(3), err(3), ...
fake.bodies     what it was asked
fake.left       how often somebody went away before the answer was whole
fake.tell(...)  the engine's state, for /events
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from tests.server_thread import served

from smolcluster.serve.http.api import STATIC
from smolcluster.web import server

STORY = """Here is a **short** answer.

- one
- two

```python
print("hello")
```

That is all there is to say about it."""


@dataclass(frozen=True)
class Turn:
    """One request that does not go well: refused at once, or broken after some pieces."""

    status: int = 200
    message: str = ""
    retry_after: str | None = None
    cut_at: int | None = None
    error_at: int | None = None


def refuse(status: int, message: str = "", *, retry_after: str | None = None) -> Turn:
    return Turn(status=status, message=message, retry_after=retry_after)


def break_off(after: int) -> Turn:
    return Turn(cut_at=after)


def err(after: int, message: str) -> Turn:
    return Turn(error_at=after, message=message)


def machine(
    name: str, *, state: str = "ready", tokens: int = 0, busy: float = 0.3, device: str = "cpu"
) -> dict[str, Any]:
    return {"name": name, "device": device, "tokens": tokens, "busy": busy, "sequences": 1, "state": state}


def three_stages() -> dict[str, Any]:
    return {
        "ready": True,
        "model": "smollm2",
        "layers": 30,
        "stages": [
            {"layers": [0, 11], "machines": [machine("mini1", busy=0.62), machine("mini2", busy=0.35)]},
            {"layers": [12, 22], "machines": [machine("studio", device="mps", busy=0.48)]},
            {"layers": [23, 29], "machines": [machine("pi5", busy=0.71)]},
        ],
        "spares": [machine("laptop", busy=0.0)],
        "running": 1,
        "waiting": 0,
    }


@dataclass
class Fake:
    words: list[str] = field(default_factory=lambda: pieces(STORY))
    pace_s: float = 0.0
    hold_at: int | None = None
    go: threading.Event = field(default_factory=threading.Event)
    next: deque[Turn] = field(default_factory=deque)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0
    key: str | None = None
    models: list[str] = field(default_factory=lambda: ["smollm2"])
    state: dict[str, Any] = field(default_factory=three_stages)
    finish: str = "stop"
    chat: bool = True
    openings: list[str] = field(default_factory=list)
    url: str = ""
    _cookie: str = field(default_factory=lambda: secrets.token_hex(8))
    _ended: bool = False

    def reset(self) -> None:
        """As it was in the beginning, at the same address."""
        self.go.set()  # whoever is held back may go
        fresh = Fake()
        for name in {each.name for each in fields(self)} - {"url", "_cookie", "_ended"}:
            setattr(self, name, getattr(fresh, name))

    def tell(self, **changes: Any) -> None:
        self.state = copy.deepcopy(self.state) | changes

    # The answers

    def may(self, request: Any) -> bool:
        if self.key is None or request.cookies.get("smolcluster_fake") == self._cookie:
            return True
        return bool(request.headers.get("authorization") == f"Bearer {self.key}")

    async def stream(self, turn: Turn, shape: str) -> AsyncGenerator[bytes, None]:
        def event(choice: dict[str, Any] | None, **more: Any) -> bytes:
            choices = [] if choice is None else [{"index": 0, "finish_reason": None, **choice}]
            return b"data: " + json.dumps({"object": shape, "choices": choices, **more}).encode() + b"\n\n"

        def piece(text: str) -> dict[str, Any]:
            return {"text": text} if shape == "text_completion" else {"delta": {"content": text}}

        whole = False
        try:
            if shape != "text_completion":
                yield event({"delta": {"role": "assistant", "content": ""}})
            for count, word in enumerate(self.words):
                go = self.go
                while count == self.hold_at and not go.is_set():
                    await asyncio.sleep(0.005)
                if count == turn.cut_at:
                    whole = True
                    return
                if count == turn.error_at:
                    whole = True
                    yield (
                        b"data: "
                        + json.dumps({"error": {"message": turn.message, "type": "server_error"}}).encode()
                        + b"\n\n"
                    )
                    return
                yield event(piece(word))
                await asyncio.sleep(self.pace_s)
            yield event(piece("") | {"finish_reason": self.finish})
            usage = {"prompt_tokens": 5, "completion_tokens": len(self.words), "total_tokens": 5 + len(self.words)}
            yield event(None, usage=usage)
            whole = True
            yield b"data: [DONE]\n\n"
        finally:
            self.left += not whole

    async def events(self) -> AsyncGenerator[bytes, None]:
        told: dict[str, Any] | None = None
        while not self._ended:
            state = self.state
            if state is not told:
                told = state
                yield b"data: " + json.dumps(state).encode() + b"\n\n"
            await asyncio.sleep(0.02)

    def app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        from smolcluster.web.guard import hardened
        from smolcluster.web.pages import static_files, static_response
        from smolcluster.web.streams import event_stream

        files = static_files(STATIC)

        def refusal(status: int, message: str, retry_after: str | None = None) -> Response:
            headers = {} if retry_after is None else {"retry-after": retry_after}
            return JSONResponse(
                {"error": {"message": message, "type": "error", "param": None, "code": None}}, status, headers
            )

        async def page(request: Request) -> Response:
            return static_response(files, request) or Response(status_code=404)

        async def models(request: Request) -> Response:
            if not self.may(request):
                return refusal(401, "a key is needed")
            return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

        async def config(_: Request) -> Response:
            defaults = {"temperature": 0.8, "top_p": 0.95}
            offer = {"chat": self.chat, "openings": self.openings}
            return JSONResponse({"model": self.models[0], "context": 2048, "layers": 30, "sampling": defaults, **offer})

        async def health(_: Request) -> Response:
            ready = self.state["ready"]
            state = {"ready": ready, "progress": "1 of 2 stages ready", "problems": self.state.get("problems", [])}
            return JSONResponse(state, 200 if ready else 503)

        async def complete(request: Request) -> Response:
            if not self.may(request):
                return refusal(401, "a key is needed")
            body = await request.json()
            self.bodies.append(body)
            turn = self.next.popleft() if self.next else Turn()
            if turn.status != 200:
                return refusal(turn.status, turn.message, turn.retry_after)
            shape = "chat.completion.chunk" if "messages" in body else "text_completion"
            if body.get("stream"):
                return event_stream(self.stream(turn, shape))
            text = "".join(self.words)
            choice = (
                {"text": text} if shape == "text_completion" else {"message": {"role": "assistant", "content": text}}
            )
            usage = {"prompt_tokens": 5, "completion_tokens": len(self.words)}
            return JSONResponse({"choices": [{"index": 0, "finish_reason": self.finish, **choice}], "usage": usage})

        async def login(request: Request) -> Response:
            if (await request.json()).get("key") != self.key:
                return refusal(401, "that is not the key")
            answer = JSONResponse({"ok": True})
            answer.set_cookie("smolcluster_fake", self._cookie, httponly=True, samesite="strict")
            return answer

        async def events(request: Request) -> Response:
            return event_stream(self.events()) if self.may(request) else refusal(401, "a key is needed")

        routes = [
            Route("/", page),
            Route("/static/{path:path}", page),
            Route("/v1/models", models),
            Route("/config", config),
            Route("/health", health),
        ]
        routes += [Route(path, complete, methods=["POST"]) for path in ("/v1/chat/completions", "/v1/completions")]
        inside = Starlette(routes=[*routes, Route("/login", login, methods=["POST"]), Route("/events", events)])

        async def outside(scope: Any, receive: Any, send: Any) -> None:
            await inside(scope, receive, hardened(send))

        return outside


def pieces(text: str) -> list[str]:
    """As a model would say it: a word at a time, with the space before it."""
    found, word = [], ""
    for char in text:
        if char in " \n" and word and word[-1] not in " \n":
            found.append(word)
            word = ""
        word += char
    return [*found, word]


@contextlib.contextmanager
def serving(fake: Fake, *, port: int = 0) -> Iterator[Fake]:
    """Serve on a loopback port, in a thread of this process."""

    async def closing() -> None:
        fake._ended = True
        fake.go.set()

    def serve(ready: Callable[[str], None], until: threading.Event) -> None:
        with contextlib.closing(server.listen("127.0.0.1", [port])) as listener:
            url = server.url_of(listener, None)
            asyncio.run(server.serve(fake.app(), listener, ready=lambda: ready(url), closing=closing, until=until))

    with served(serve) as number:
        fake.url = f"http://127.0.0.1:{number}"
        yield fake
    fake._ended = False
