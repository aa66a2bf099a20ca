"""A client of the API, for the terminal. Standard library only.

    client = Client("http://127.0.0.1:5050")
    for piece in client.chat([{"role": "user", "content": "Why is the sky blue?"}], options={"temperature": 0.7}):
        print(piece.text, end="")

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
CONNECT_S = 10.0
READY_S, POLL_S = 900.0, 0.5  # for a server to start, and the polling interval
SILENCE_S = 600.0  # a long prompt on a slow machine
MAX_LINE = 1 << 20  # bytes of one event
MAX_BODY = 64 << 20  # bytes

Json = dict[str, Any]
RequestOptions = Mapping[str, Any]


class ServerFailed(SmolclusterError):
    """The server failed to answer."""

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


class RequestRejected(UserError):
    """The request is invalid: do not retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerChunk:
    """Some of an answer. The last chunk has the finish reason and the number of tokens."""

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
        url, _, behind = url.partition("#")  # `smolcluster serve` prints a URL with the key there
        key = key or (behind.removeprefix("key=") if behind.startswith("key=") else None)
        self._secure, self._host, self._port, self._path = _parts(url)
        self.url = url.rstrip("/")
        if key is not None and not re.fullmatch(r"[\x21-\x7e]+", key):
            raise UserError("--key has characters that are not printable ASCII")
        self._key = key

    def models(self) -> list[str]:
        with self._ask("GET", "/v1/models") as answer:
            data = _whole(answer).get("data")
        names = [model.get("id") for model in data if isinstance(model, dict)] if isinstance(data, list) else []
        found = [name for name in names if isinstance(name, str)]
        if not found:
            raise ServerFailed(f"{self.url} serves no model")
        return found

    def describe(self) -> Json:
        """Return /config; empty for other servers than ours."""
        with contextlib.suppress(SmolclusterError), self._ask("GET", "/config") as answer:
            return _whole(answer)
        return {}

    def wait_ready(self, report: Callable[[str], None], *, timeout_s: float = READY_S) -> None:
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
            with self._ask("GET", "/health", fine=(200, 503)) as answer:
                ready, state = answer.status == 200, _whole(answer)
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
        """Stream the answer to a conversation. `options`: model, temperature, ..., as in the API."""
        yield from self._generate("/v1/chat/completions", {**options, "messages": list(messages)}, stream=True)

    def complete(
        self, prompt: str, *, options: RequestOptions, stream: bool = True
    ) -> Generator[AnswerChunk, None, None]:
        """Continue a text."""
        yield from self._generate("/v1/completions", {**options, "prompt": prompt}, stream=stream)

    def _generate(self, path: str, body: Json, *, stream: bool) -> Generator[AnswerChunk, None, None]:
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._ask("POST", path, body) as answer:
            if stream:
                yield from _streamed(answer)
                return
            whole = _whole(answer)
        yield AnswerChunk(text=_text(_choice(whole)), finish=_choice(whole).get("finish_reason"), tokens=_tokens(whole))

    @contextlib.contextmanager
    def _ask(
        self, verb: str, path: str, body: Json | None = None, *, fine: Sequence[int] = (200,)
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_S)
        headers = {"accept": "application/json, text/event-stream"}
        if body is not None:
            headers["content-type"] = "application/json"
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        with contextlib.closing(connection):
            try:
                connection.connect()
                connection.sock.settimeout(SILENCE_S)
                sent = None if body is None else json.dumps(body).encode()
                connection.request(verb, self._path + path, body=sent, headers=headers)
                answer = connection.getresponse()
                if answer.status not in fine:
                    raise self._refused(answer)
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                raise self._unreachable(error) from error
            try:
                yield answer
            except TimeoutError as error:
                raise ServerFailed(f"{self.url} has sent nothing for {SILENCE_S:g} seconds") from error
            except (OSError, http.client.HTTPException) as error:
                raise ServerFailed(f"lost the connection to {self.url} before the end of the answer") from error

    def _unreachable(self, error: Exception) -> SmolclusterError:
        if isinstance(error, ConnectionRefusedError):
            return UserError(f"no server at {self.url}; start one with: smolcluster serve smollm2")
        if isinstance(error, socket.gaierror):
            return UserError(f"{self.url}: unknown host {self._host}; check the address")
        if isinstance(error, TimeoutError):
            return UserError(f"{self.url} does not answer; is the server running, and can this machine reach it?")
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return UserError(f"cannot connect to {self.url}: {why}; an address is like {URL}")

    def _refused(self, answer: http.client.HTTPResponse) -> SmolclusterError:
        reported = ""
        with contextlib.suppress(ValueError, ServerFailed, AttributeError):
            error = _whole(answer).get("error")
            reported = str(error.get("message") if isinstance(error, dict) else error or "")
        if answer.status == 401:
            how = "that is not its key" if self._key else "give it with --key or in SMOLCLUSTER_API_KEY"
            return UserError(f"{self.url} needs a key: {how}")
        after = answer.headers.get("retry-after", "")
        retry_after_s = float(after) if re.fullmatch(r"[0-9]{1,5}", after) else None
        if answer.status in (429, 503):
            otherwise = "the server is overloaded" if answer.status == 429 else "the model is not ready"
            later = f"; try again in {retry_after_s:g} s" if retry_after_s is not None else "; try again later"
            return ServerFailed(f"{reported or otherwise}{later}", status=answer.status, retry_after_s=retry_after_s)
        if answer.status in (400, 413, 422) or (answer.status == 404 and reported):
            return RequestRejected(reported or f"{self.url} refuses this request ({answer.status})")
        if answer.status == 404:
            return UserError(f"{self.url} is not a model server; an address is like {URL}")
        return ServerFailed(
            f"{self.url} failed ({answer.status})" + (f": {reported}" if reported else ""), status=answer.status
        )


def _parts(url: str) -> tuple[bool, str, int | None, str]:
    """`127.0.0.1:5050`, `http://mini1:5050`, `https://[::1]/below` -> https?, host, port, path."""
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


def _streamed(answer: http.client.HTTPResponse) -> Iterator[AnswerChunk]:
    """Parse server-sent events. Raises ServerFailed if the end of the answer is missing."""
    finished = False
    while line := answer.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise ServerFailed("the server sent too long a line")
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
        raise ServerFailed("lost the connection to the server before the end of the answer")


def _whole(answer: http.client.HTTPResponse) -> Json:
    body = answer.read(MAX_BODY + 1)
    if len(body) > MAX_BODY:
        raise ServerFailed("the server sent too large an answer")
    return _object(body)


def _object(data: bytes) -> Json:
    found = json_object(data)
    if found is None:
        raise ServerFailed("the server sent an invalid answer; is it a model server?")
    return found


def _choice(chunk: Json) -> Json:
    choices = chunk.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def _text(choice: Json) -> str:
    """Return the text of a chat choice, streamed or whole, or of a completion."""
    holder = choice.get("delta") or choice.get("message") or choice
    text = holder.get("content", holder.get("text")) if isinstance(holder, dict) else None
    return text if isinstance(text, str) else ""


def _tokens(chunk: Json) -> int | None:
    usage = chunk.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else None
