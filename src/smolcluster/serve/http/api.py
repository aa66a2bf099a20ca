"""The service as an ASGI application: OpenAI's API, a simpler one, the page, and monitoring.

    POST /v1/chat/completions, /v1/completions     OpenAI's, as JSON or as server-sent events
    GET  /v1/models, /v1/models/NAME               the one model that is served
    POST /chat, /query                             a message or a prompt; see `request_parsing.py`
    GET  /health                                   200 when ready, else 503; no key required
    GET  /config, /metrics, /events                settings; Prometheus; the layout, live
    POST /login                                    sets a cookie for the key
    GET  /, /static/*                              the page; no key required

Errors have OpenAI's format. An error within a stream is its last event. When a client disconnects, or does not read its stream,
its sequences are freed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import smolcluster
from smolcluster.errors import SmolclusterError, needed
from smolcluster.serve.engine.types import Busy, PromptTooLong, RetriesExhausted, Unavailable
from smolcluster.serve.http import request_parsing, response_bodies
from smolcluster.serve.http.request_parsing import Json, ParsedRequest
from smolcluster.serve.http.response_bodies import ResponseFormat
from smolcluster.serve.http.service import BadRequest, CompletionJob, Service, TextChunk, UnknownModel
from smolcluster.web.bodies import BadBody, BodyReaders, ClientGone, read_object
from smolcluster.web.guard import (
    READ_ONLY,
    App,
    Guard,
    GuardRules,
    Message,
    Receive,
    Scope,
    Send,
    equal,
    hardened,
    send_response,
)
from smolcluster.web.pages import static_files, static_response
from smolcluster.web.streams import WRITE_S, event_stream, while_connected

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

STATIC = Path(__file__).parents[1] / "static"
DRAIN_S = 1.0  # for running responses, when the server stops; less than HttpLimits.shutdown_s
POLL_S = 0.1  # polling interval of /events
KEEP_ALIVE_S = 15.0  # keep-alive interval of /events: only writing detects a vanished viewer
CLIENT_CLOSED = 499  # nginx's status for a client that disconnected before the response

_POSTS = ("/v1/chat/completions", "/v1/completions", "/chat", "/query", "/login")
_GETS = ("/", "/health", "/config", "/metrics", "/events", "/v1/models")
_CODES = {401: "invalid_api_key"}
_LINE_ENDS = re.compile("[\\x85\\u2028\\u2029]")  # line terminators of str.splitlines and JavaScript
_log = logging.getLogger(__name__)
T = TypeVar("T")


def route_of(path: str) -> str:
    """Return the route label for metrics (bounded cardinality)."""
    if path in _POSTS or path in _GETS:
        return path
    return next((start for start in ("/v1/models/", "/static/") if path.startswith(start)), "other")


def error_json(status: int, text: str) -> tuple[str, bytes]:
    """Return content type and body of an error of the guard or the server."""
    return "application/json", _json(response_bodies.error_body(text, status=status, code=_CODES.get(status)))


def _methods(path: str) -> tuple[str, ...]:
    if path in _POSTS:
        return ("POST",)
    if route_of(path) == "other":  # the router responds with 404, not 405
        return (*READ_ONLY, "POST")
    return READ_ONLY


def _is_page(path: str) -> bool:
    return path == "/" or path.startswith("/static/")


RULES = GuardRules(
    name="serve",
    program="smolcluster serve",
    token="key",
    is_ours=lambda path: not _is_page(path),
    needs_token=lambda path: not _is_page(path) and path not in ("/health", "/login"),
    methods=_methods,
    error_body=error_json,
)


class Api:
    """The ASGI application, on one event loop."""

    def __init__(
        self,
        service: Service,
        *,
        key: str | None = None,
        allow_hosts: Iterable[str] = (),
        write_s: float = WRITE_S,
    ) -> None:
        self.service, self._key, self._write_s = service, key, write_s
        self._files = static_files(STATIC)
        self._created = int(time.time())
        self._closing = asyncio.Event()
        self._viewers = self._preparing = 0
        self._readers = BodyReaders(min_s=service.limits.crowded_body_s)
        self._state, self._state_at = b"", -math.inf
        self._app = Guard(self._routes(), RULES, token=key, allow_hosts=allow_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, streamed = CLIENT_CLOSED, False

        async def tracked_send(message: Message) -> None:
            nonlocal status, streamed
            if message["type"] == "http.response.start":
                status = message["status"]
                streamed = any(value.startswith(b"text/event-stream") for _, value in message.get("headers", ()))
            await send(message)

        try:
            await self._app(scope, receive, tracked_send)
        except asyncio.CancelledError:
            if not self._closing.is_set() or (status != CLIENT_CLOSED and not streamed):
                raise
            kind, body = error_json(503, "the server is stopping")
            if streamed:  # while it waited for a token
                await tracked_send({"type": "http.response.body", "body": _events_of([body])})
            else:
                headers = {"retry-after": "5", "connection": "close"}
                await send_response(503, kind, body, headers=headers, send=hardened(tracked_send))
        finally:
            self.service.metrics.requests[route_of(scope["path"]), status] += 1

    async def close(self) -> None:
        """End /events. Running responses get DRAIN_S, then end with an error."""
        self._closing.set()
        asyncio.get_running_loop().call_later(DRAIN_S, self.service.end)

    def _routes(self) -> App:
        with needed(extra="serve", purpose="serving a model"):
            from starlette.applications import Starlette
            from starlette.routing import Route

        def post(path: str, endpoint: Callable[[Request], Any]) -> Route:
            return Route(path, endpoint, methods=["POST"])

        app = Starlette(
            routes=[
                post("/v1/chat/completions", self._openai(request_parsing.read_chat, response_bodies.CHAT)),
                post("/v1/completions", self._openai(request_parsing.read_completion, response_bodies.COMPLETION)),
                post("/chat", self._simple(request_parsing.read_simple_chat)),
                post("/query", self._simple(request_parsing.read_simple_query)),
                post("/login", self._login),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/config", self._config),
                Route("/metrics", self._metrics),
                Route("/events", self._events),
                Route("/", self._static),
                Route("/static/{path:path}", self._static),
            ],
            exception_handlers={SmolclusterError: _error_handler, 404: _not_found, 500: _error_handler},
        )
        app.router.redirect_slashes = False
        return app

    # Completions

    def _openai(self, read: Callable[[Json], ParsedRequest], shape: ResponseFormat) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            parsed, job = await self._read_and_prepare(request, read)
            head = {
                "id": f"{shape.prefix}-{secrets.token_hex(12)}",
                "created": int(time.time()),
                "model": self.service.model_name,
                "system_fingerprint": None,
            }
            logprobs = parsed.request.logprobs is not None
            if parsed.stream:
                encode = _openai_encoder(shape, head, job, logprobs=logprobs, include_usage=parsed.include_usage)
                return await self._stream_response(request, job, encode)
            choices = await while_connected(request.receive, self.service.complete(job))
            body = response_bodies.completion_body(
                shape, head, choices, usage=job.usage, seed=job.seed, logprobs=logprobs
            )
            return _json_response(body)

        return endpoint

    def _simple(self, read: Callable[[Json], ParsedRequest]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            parsed, job = await self._read_and_prepare(request, read)
            if parsed.stream:
                return await self._stream_response(request, job, _simple_encoder(self.service.model_name, job))
            (choice,) = await while_connected(request.receive, self.service.complete(job))
            ending = response_bodies.simple_ending(self.service.model_name, choice, job.usage, job.seed)
            return _json_response({"response": choice.text, **ending})

        return endpoint

    async def _read_and_prepare(
        self, request: Request, read: Callable[[Json], ParsedRequest]
    ) -> tuple[ParsedRequest, CompletionJob]:
        limits = self.service.limits
        if self._preparing >= limits.requests and not self._readers.hurry():
            raise Busy(f"{self._preparing} requests are being read already; try again later")
        self._preparing += 1
        try:
            body = await read_object(
                request.scope,
                request.receive,
                max_bytes=limits.body_bytes,
                body_s=limits.body_s,
                readers=self._readers,
            )
            parsed = read(body)
            return parsed, await self.service.prepare(parsed.request)
        finally:
            self._preparing -= 1

    async def _stream_response(self, request: Request, job: CompletionJob, encode: StreamEncoder) -> Response:
        """Wait for the first chunk, so that an error before it is sent with its HTTP status."""
        chunks = self.service.stream(job)
        try:
            first = await while_connected(request.receive, anext(chunks))
        except BaseException:
            await chunks.aclose()
            raise
        return event_stream(_event_stream(_chain(first, chunks), encode), source=chunks, write_s=self._write_s)

    # Monitoring

    async def _models(self, _: Request) -> Response:
        return _json_response({"object": "list", "data": [self._model_body()]})

    async def _model(self, request: Request) -> Response:
        self.service.check_model(request.path_params["name"])
        return _json_response(self._model_body())

    def _model_body(self) -> Json:
        name = self.service.model_name
        return {"id": name, "object": "model", "created": self._created, "owned_by": "smolcluster"}

    async def _health(self, _: Request) -> Response:
        state = self.service.engine.state()
        if state.get("ready"):
            return _json_response({"status": "ok", "ready": True})
        connected, wanted = state.get("there", 0), state.get("wanted", 0)
        few = f": {connected} of {wanted} connected" if connected < wanted else ""
        waiting = {"status": f"waiting for machines{few}", "ready": False, "progress": _progress(state)}
        if self._key is None:  # they contain paths; with a key, see /events
            waiting["problems"] = state.get("problems", [])
        return _json_response(waiting, 503, retry_s=Unavailable.retry_after_s)

    async def _config(self, _: Request) -> Response:
        service = self.service
        state = service.engine.state()
        stages = state.get("stages", [])
        return _json_response(
            {
                "model": service.model_name,
                "context": service.engine.context,
                "vocab_size": service.text.vocab_size,
                "layers": state.get("layers", 0),
                "stages": stages,
                "spares": state.get("spares", []),
                "sampling": {k: v for k, v in asdict(service.defaults).items() if k not in ("seed", "logprobs")},
                "limits": asdict(service.limits),
                "needs_key": self._key is not None,
                "version": smolcluster.__version__,
                "chat": service.text.has_template,
                "openings": list(service.example_prompts),
            }
        )

    async def _metrics(self, _: Request) -> Response:
        from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
        from starlette.responses import Response

        headers = {"content-type": CONTENT_TYPE_PLAIN_0_0_4, "cache-control": "no-store"}
        return Response(generate_latest(self.service.metrics), headers=headers)

    async def _events(self, _: Request) -> Response:
        if self._viewers >= self.service.limits.viewers:
            raise Busy(f"{self._viewers} viewers already; try again later")
        states = self._states()
        first = await anext(states, None)  # do not await before this line: the viewer is counted from here on
        if first is None:
            raise Unavailable("the server is stopping")
        return event_stream(_chain(first, states), source=states, write_s=self._write_s)

    async def _states(self) -> AsyncGenerator[bytes, None]:
        shown, shown_at = b"", time.monotonic()
        self._viewers += 1
        try:
            while not self._closing.is_set():
                state, now = self._current_state(), time.monotonic()
                if state != shown:
                    shown, shown_at = state, now
                    yield b"data: " + state + b"\n\n"
                elif now - shown_at > KEEP_ALIVE_S:
                    shown_at = now
                    yield b":\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), POLL_S)
        finally:
            self._viewers -= 1

    def _current_state(self) -> bytes:
        """Return the engine's state, cached for all viewers."""
        now = time.monotonic()
        if now - self._state_at >= POLL_S / 2:
            self._state, self._state_at = _json(self.service.engine.state()), now
        return self._state

    # The page

    async def _login(self, request: Request) -> Response:
        given = request_parsing.read_key(await read_object(request.scope, request.receive, max_bytes=4096))
        if self._key is None:
            return _json_response({"ok": True})
        if not equal(given, self._key):
            return _json_response(
                response_bodies.error_body("wrong key", status=401, field="key", code=_CODES[401]), 401
            )
        response = _json_response({"ok": True})
        response.headers["set-cookie"] = RULES.login_cookie(self._key, request.scope)
        return response

    async def _static(self, request: Request) -> Response:
        return static_response(self._files, request) or _not_found(request, None)


# Streams


async def _chain(first: T, others: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    yield first
    async for other in others:
        yield other


StreamEncoder = Callable[[AsyncIterator[TextChunk]], AsyncIterator[list[bytes]]]


def _openai_encoder(
    shape: ResponseFormat, head: Json, job: CompletionJob, *, logprobs: bool, include_usage: bool
) -> StreamEncoder:
    """Convert chunks to OpenAI's stream."""
    head = head | {"usage": None} if include_usage else head

    async def encode(chunks: AsyncIterator[TextChunk]) -> AsyncIterator[list[bytes]]:
        begun: set[int] = set()
        async for chunk in chunks:
            begins = chunk.index not in begun
            begun.add(chunk.index)
            bodies = response_bodies.chunk_bodies(shape, head, chunk, begins=begins, logprobs=logprobs, seed=job.seed)
            yield [_json(body) for body in bodies]
        last = head | {"object": shape.chunk, "choices": [], "usage": response_bodies.usage_body(job.usage)}
        yield [*([_json(last)] if include_usage else []), b"[DONE]"]

    return encode


def _simple_encoder(model: str, job: CompletionJob) -> StreamEncoder:
    """Convert chunks to `{"text": "..."}`, and a last event with the other fields of the response."""

    async def encode(chunks: AsyncIterator[TextChunk]) -> AsyncIterator[list[bytes]]:
        async for chunk in chunks:
            events = [_json({"text": chunk.text})] if chunk.text else []
            if chunk.finish is not None:
                events.append(_json({"done": True, **response_bodies.simple_ending(model, chunk, job.usage, job.seed)}))
            yield events

    return encode


async def _event_stream(chunks: AsyncIterator[TextChunk], encode: StreamEncoder) -> AsyncGenerator[bytes, None]:
    try:
        async for events in encode(chunks):
            if events:
                yield _events_of(events)
    except Exception as error:  # noqa: BLE001 - sent as an event: the status line was already sent
        yield _events_of([_json(_error_response(error)[1])])


def _events_of(datas: list[bytes]) -> bytes:
    return b"".join(b"data: " + data + b"\n\n" for data in datas)


# Errors


# Default status, OpenAI's code and default message of each error; the first match applies.
_ERRORS: tuple[tuple[type[SmolclusterError], int, str | None, str], ...] = (
    (UnknownModel, 404, None, ""),
    (BadRequest, 400, None, ""),
    (BadBody, 400, None, ""),
    (PromptTooLong, 400, "context_length_exceeded", ""),
    (Busy, 429, "rate_limit_exceeded", "too many requests"),
    (RetriesExhausted, 503, "given_up", ""),
    (Unavailable, 503, "not_ready", "some layers are not loaded on any stage"),
    (ClientGone, CLIENT_CLOSED, None, "client closed request"),
)


def _error_response(error: Exception) -> tuple[int, Json, float | None]:
    """Return status, body and Retry-After."""
    for kind, default_status, default_code, default_text in _ERRORS:
        if isinstance(error, kind):
            status, code = getattr(error, "status", default_status), getattr(error, "code", default_code)
            body = response_bodies.error_body(
                str(error) or default_text, status=status, field=getattr(error, "field", None), code=code
            )
            return status, body, getattr(error, "retry_after_s", None)
    _log.error("a request failed", exc_info=error)
    return 500, response_bodies.error_body("internal server error", status=500), None


def _error_handler(_request: Request, error: Exception) -> Response:
    status, body, retry_s = _error_response(error)
    return _json_response(body, status, retry_s=retry_s)


def _progress(state: Json) -> str:
    """Return the progress of the start: "1 of 2 stages ready"."""
    stages = state.get("stages", [])
    ready = sum(any(one.get("state") == "ready" for one in stage.get("machines", [])) for stage in stages)
    wanted = max(len(stages), state.get("wanted", 0))
    return f"{ready} of {wanted} stages ready" if wanted else "no machine is connected yet"


def _not_found(request: Request, _error: Exception | None) -> Response:
    path = re.sub(r"[^\x21-\x7e]", "?", request.url.path[:80])
    return _json_response(response_bodies.error_body(f"no such path: {path}", status=404), 404)


def _json_response(value: Json, status: int = 200, *, retry_s: float | None = None) -> Response:
    from starlette.responses import Response

    headers = {"content-type": "application/json", "cache-control": "no-store"}
    if retry_s is not None:
        headers["retry-after"] = str(math.ceil(retry_s))
    return Response(_json(value), status_code=status, headers=headers)


def _json(value: Any) -> bytes:
    """Encode as JSON, with lone surrogates and Unicode line terminators escaped: the latter would split an event."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _LINE_ENDS.sub(lambda end: f"\\u{ord(end[0]):04x}", text).encode(errors="backslashreplace")
