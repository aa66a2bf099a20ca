"""Requests and answers of the HTTP service, for its tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any

POSTS = ("/v1/chat/completions", "/v1/completions", "/chat", "/query")

GETS = ("/health", "/config", "/metrics", "/events", "/v1/models", "/v1/models/tiny")

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hi", "temperature": 0}

BODIES = dict(zip(POSTS, (CHAT, COMPLETION, {"message": "hi"}, {"prompt": "hi"}), strict=True))


def post(port: int, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """`body`: bytes as they are, all else as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    data = body if isinstance(body, bytes) else json.dumps(body).replace("Infinity", "1e999").encode()
    named = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    with contextlib.closing(connection):
        connection.request("POST", path, body=data, headers=named)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()


def asked(port: int, path: str, body: Any) -> Any:
    status, _, found = post(port, path, body)
    assert status == 200, found
    return json.loads(found)


def error(found: tuple[int, dict[str, str], bytes]) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer that is one, in OpenAI's shape."""
    status, headers, body = found
    assert headers["content-type"] == "application/json"
    told = json.loads(body)
    assert set(told) == {"error"}
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert told["error"]["message"]
    return status, told["error"]


def events(body: bytes) -> list[Any]:
    """The data of server-sent events, and nothing else but them."""
    frames = body.decode().split("\n\n")
    assert frames.pop() == ""
    assert len(body.decode().splitlines()) == 2 * len(frames), "lines end with line feeds alone"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


def written(path: str, body: Any, *more: str) -> bytes:
    """A request as bytes."""
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
    return "\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=300)


def split(line: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One answer, all of it."""
    answer = http.client.HTTPResponse(line)
    answer.begin()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
