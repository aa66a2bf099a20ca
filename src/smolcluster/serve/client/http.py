"""A client of the HTTP API, for the terminal. Standard library only.

    client = ServerClient("http://127.0.0.1:5050")
    for chunk in client.chat([{"role": "user", "content": "Why is the sky blue?"}], options={"temperature": 0.7}):
        print(chunk.text, end="")

Closing the generator closes the connection, and the server frees the sequence.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from smolcluster.errors import SmolclusterError, UserError
from smolcluster.observe.jsonl import json_object
from smolcluster.observe.text import printable

URL = "http://127.0.0.1:5050"
CONNECT_TIMEOUT_S = 10.0
READY_TIMEOUT_S, POLL_S = 900.0, 0.5
READ_TIMEOUT_S = 600.0  # a long prompt on a slow machine
MAX_LINE = 1 << 20  # bytes of one line of an event stream
MAX_BODY = 64 << 20  # bytes

Json = dict[str, Any]
RequestOptions = Mapping[str, Any]


class ServerFailed(SmolclusterError):
    """The server sent an error, an invalid response, or no response."""

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


class RequestRejected(UserError):
    """The request is invalid: do not retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerChunk:
    """Part of a response. The last chunk has the finish reason and the number of tokens."""

    text: str = ""
    finish: str | None = None
    tokens: int | None = None


class CompletionClient(Protocol):
    """A server, or a model in this process."""

    def complete(
        self, prompt: str, *, options: RequestOptions, stream: bool = True
    ) -> Generator[AnswerChunk, None, None]: ...


class ServerClient:
    """One server. Every request has its own connection."""

    def __init__(self, url: str = URL, *, key: str | None = None) -> None:
        url, _, fragment = url.partition("#")  # `smolcluster serve` prints a URL with the key there
        key = key or (fragment.removeprefix("key=") if fragment.startswith("key=") else None)
        self._secure, self._host, self._port, self._path = _parts(url)
        self.url = url.rstrip("/")
        if key is not None and not re.fullmatch(r"[\x21-\x7e]+", key):
            raise UserError("--key has characters that are not printable ASCII")
        self._key = key

    def models(self) -> list[str]:
        with self._request("GET", "/v1/models") as response:
            data = _read_json(response).get("data")
        names = [model.get("id") for model in data if isinstance(model, dict)] if isinstance(data, list) else []
        found = [name for name in names if isinstance(name, str)]
        if not found:
            raise ServerFailed(f"{self.url} serves no model")
        return found

    def describe(self) -> Json:
        """Return /config; empty if the server is not smolcluster's."""
        with contextlib.suppress(SmolclusterError), self._request("GET", "/config") as response:
            return _read_json(response)
        return {}

    def wait_ready(self, report: Callable[[str], None], *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the server is ready, reporting progress. Raises ServerFailed after `timeout_s`."""
        reported, until = "", time.monotonic() + timeout_s
        while (waiting := self._not_ready()) is not None:
            if time.monotonic() > until:
                raise ServerFailed(f"{self.url} is still not ready after {timeout_s:g} s: {waiting}")
            if waiting != reported:
                report(waiting)
                reported = waiting
            time.sleep(POLL_S)

    def _not_ready(self) -> str | None:
        try:
            with self._request("GET", "/health", ok_statuses=(200, 503)) as response:
                ready, state = response.status == 200, _read_json(response)
        except SmolclusterError:  # another server, or none: the next request reports it
            return None
        if ready:
            return None
        problems = state.get("problems")
        reasons = [state.get("progress") or "the model is not ready", *(problems if isinstance(problems, list) else [])]
        return printable("; ".join(map(str, reasons)))

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, options: RequestOptions
    ) -> Generator[AnswerChunk, None, None]:
        """Stream the response to a conversation. `options`: model, temperature, ..., as in the API."""
        yield from self._generate("/v1/chat/completions", {**options, "messages": list(messages)}, stream=True)

    def complete(
        self, prompt: str, *, options: RequestOptions, stream: bool = True
    ) -> Generator[AnswerChunk, None, None]:
        """Continue a text."""
        yield from self._generate("/v1/completions", {**options, "prompt": prompt}, stream=stream)

    def _generate(self, path: str, body: Json, *, stream: bool) -> Generator[AnswerChunk, None, None]:
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._request("POST", path, body) as response:
            if stream:
                yield from _read_stream(response)
                return
            completion = _read_json(response)
        choice = _choice(completion)
        yield AnswerChunk(text=_text(choice), finish=choice.get("finish_reason"), tokens=_tokens(completion))

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: Json | None = None, *, ok_statuses: Sequence[int] = (200,)
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        headers = {"accept": "application/json, text/event-stream"}
        if body is not None:
            headers["content-type"] = "application/json"
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        with contextlib.closing(connection):
            try:
                connection.connect()
                connection.sock.settimeout(READ_TIMEOUT_S)
                sent = None if body is None else json.dumps(body).encode()
                connection.request(method, self._path + path, body=sent, headers=headers)
                response = connection.getresponse()
                if response.status not in ok_statuses:
                    raise self._error_of(response)
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                raise self._unreachable(error) from error
            try:
                yield response
            except TimeoutError as error:
                raise ServerFailed(f"{self.url} has sent nothing for {READ_TIMEOUT_S:g} seconds") from error
            except (OSError, http.client.HTTPException) as error:
                raise ServerFailed(f"lost the connection to {self.url} before the end of the response") from error

    def _unreachable(self, error: Exception) -> SmolclusterError:
        if isinstance(error, ConnectionRefusedError):
            return UserError(f"no server at {self.url}; start one with: smolcluster serve smollm2")
        if isinstance(error, socket.gaierror):
            return UserError(f"{self.url}: unknown host {self._host}; check the address")
        if isinstance(error, TimeoutError):
            return UserError(f"{self.url} does not respond; is the server running, and can this machine reach it?")
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return UserError(f"cannot connect to {self.url}: {why}; an address is like {URL}")

    def _error_of(self, response: http.client.HTTPResponse) -> SmolclusterError:
        """Return the exception for an error response."""
        status, reported = response.status, ""
        with contextlib.suppress(ValueError, ServerFailed, AttributeError):
            error = _read_json(response).get("error")
            reported = str(error.get("message") if isinstance(error, dict) else error or "")
        if status == 401 and self._key:
            return UserError(f"{self.url}: invalid API key; check --key or SMOLCLUSTER_API_KEY")
        if status == 401:
            return UserError(f"{self.url} needs an API key: give it with --key or in SMOLCLUSTER_API_KEY")
        after = response.headers.get("retry-after", "")
        retry_after_s = float(after) if re.fullmatch(r"[0-9]{1,5}", after) else None
        if status in (429, 503):
            otherwise = "the server is overloaded" if status == 429 else "the model is not ready"
            later = f"; try again in {retry_after_s:g} s" if retry_after_s is not None else "; try again later"
            return ServerFailed(f"{reported or otherwise}{later}", status=status, retry_after_s=retry_after_s)
        if status in (400, 413, 422) or (status == 404 and reported):
            return RequestRejected(reported or f"{self.url} refuses this request ({status})")
        if status == 404:
            return UserError(f"{self.url} is not a model server; an address is like {URL}")
        return ServerFailed(f"{self.url} failed ({status})" + (f": {reported}" if reported else ""), status=status)


def _parts(url: str) -> tuple[bool, str, int | None, str]:
    """Split `127.0.0.1:5050`, `http://mini1:5050`, `https://[::1]/below` into: is https, host, port, path."""
    given = url if "://" in url else f"http://{url}"
    wrong = UserError(f"{url!r} is not the address of a server; write it like {URL}")
    try:
        parts = urlsplit(given)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not host or re.search(r"[\x00-\x20\x7f]", given):
        raise wrong
    if parts.username is not None or parts.password is not None:
        raise UserError("the address of a server has no user or password in it; give its key with --key")
    return parts.scheme == "https", host, port, parts.path.rstrip("/").removesuffix("/v1")


def _read_stream(response: http.client.HTTPResponse) -> Iterator[AnswerChunk]:
    """Parse server-sent events. Raises ServerFailed if the end of the response is missing."""
    finished = False
    while line := response.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise ServerFailed(f"the server sent a line longer than {MAX_LINE >> 20} MiB")
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        chunk = _object(data)
        if chunk.get("error"):
            error = chunk["error"]
            raise ServerFailed(str(error.get("message") if isinstance(error, dict) else error))
        choice, tokens = _choice(chunk), _tokens(chunk)
        finish = choice.get("finish_reason")
        finished = finished or finish is not None
        if (text := _text(choice)) or finish is not None or tokens is not None:
            yield AnswerChunk(text=text, finish=finish, tokens=tokens)
    if not finished:
        raise ServerFailed("lost the connection to the server before the end of the response")


def _read_json(response: http.client.HTTPResponse) -> Json:
    body = response.read(MAX_BODY + 1)
    if len(body) > MAX_BODY:
        raise ServerFailed(f"the server sent a response larger than {MAX_BODY >> 20} MiB")
    return _object(body)


def _object(data: bytes) -> Json:
    found = json_object(data)
    if found is None:
        raise ServerFailed("the server sent an invalid response; is it a model server?")
    return found


def _choice(chunk: Json) -> Json:
    choices = chunk.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def _text(choice: Json) -> str:
    """Return the text of a chat message, a chunk of one, or a completion."""
    holder = choice.get("delta") or choice.get("message") or choice
    text = holder.get("content", holder.get("text")) if isinstance(holder, dict) else None
    return text if isinstance(text, str) else ""


def _tokens(chunk: Json) -> int | None:
    usage = chunk.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else None
