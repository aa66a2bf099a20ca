"""Asking a dashboard without a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    with contextlib.closing(connection):
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()


def get_json(port: int, path: str) -> Any:
    status, _, body = get(port, path)
    assert status == 200, body
    return json.loads(body)


class Viewer:
    """Server-sent events, one by one."""

    def __init__(self, port: int, name: str = "new", **headers: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        self.connection.request(
            "GET", f"/api/run/{name}/events", headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        self.answer = self.connection.getresponse()

    def next(self, *kinds: str) -> tuple[str, str, Any]:
        """Kind, id and data of the next event of these kinds."""
        fields: dict[str, str] = {}
        while True:
            line = self.answer.readline().decode()
            assert line, "the stream has ended"
            if line == "\n":
                if fields.get("event") in kinds:
                    return fields["event"], fields.get("id", ""), json.loads(fields["data"])
                fields = {}
            else:
                name, _, value = line.partition(": ")
                fields[name] = value.rstrip("\n")

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        connection.sendall(request)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
        return answer
