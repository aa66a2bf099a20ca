"""A Loki that forgives nothing: its documented push API, with every deviation noted, and outages on demand.

    POST /loki/api/v1/push    Content-Type application/json, perhaps gzipped; {"streams": [{"stream": {label: value},
                              "values": [["<nanoseconds>", "<line>"], ...]}]}; 204 when stored
    an entry it knows         the same stream, time and text: dropped as a duplicate, and counted
    a bad entry               too old, too new or too long: 400, and the good ones of the same push are stored, as Loki does
    anything else             400 and a note in `violations`; so are entries out of order, which Loki itself would let pass

The answers to coming pushes can be scripted: `plan.append(status)`, `(429, seconds)`, or

    "lose the answer"         stored, then the connection is closed without a word
    "hang up"                 the connection is closed in the middle of the request, nothing is stored
    "say nothing"             neither an answer nor an end, until the test is over
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Labels = tuple[tuple[str, str], ...]
Scripted = int | str | tuple[int, float] | tuple[int, str]
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class StrictLoki:
    """Use it in a `with` block; `url` is where it listens."""

    def __init__(
        self,
        *,
        longest: int = 256 * 1024,
        oldest_ns: int = 0,
        auth: str = "",
    ) -> None:
        self.longest, self.oldest_ns, self.auth = longest, oldest_ns, auth
        self.newest_ns: int | None = None
        self.streams: dict[Labels, list[tuple[int, str]]] = {}
        self.duplicates = 0
        self.violations: list[str] = []
        self.statuses: list[int] = []  # of all answers
        self.times: list[float] = []  # when each request came
        self.tenants: set[str | None] = set()
        self.plan: deque[Scripted] = deque()
        self.always: Scripted | None = None  # once the plan is over
        self._news = threading.Condition()
        self._over = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> StrictLoki:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.stop()

    def start(self) -> None:
        """Also again, on the port it had."""
        handler = type("Handler", (_Handler,), {"loki": self})
        self._server = _Server(("127.0.0.1", self.port), handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """From now on connections are refused, and those that are open are cut."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            for open_socket in list(self._sockets):
                with contextlib.suppress(OSError):
                    open_socket.shutdown(socket.SHUT_RDWR)

    # What arrived

    def lines(self, **labels: str) -> list[str]:
        """Of the streams with these labels, by time."""
        with self._news:
            found = [
                entry
                for have, entries in self.streams.items()
                if labels.items() <= dict(have).items()
                for entry in entries
            ]
        return [text for _, text in sorted(found)]

    def wait(self, question: Callable[[], bool], *, what: str, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        with self._news:
            while not question():
                left = deadline - time.monotonic()
                assert left > 0, f"{what}: not within {timeout_s:g} s; {self.statuses[-20:]}, {self.violations[:3]}"
                self._news.wait(min(left, 0.05))

    def wait_for(self, lines: int, *, timeout_s: float = 90.0) -> None:
        self.wait(
            lambda: len(self.lines()) >= lines, what=f"{lines} lines, {len(self.lines())} came", timeout_s=timeout_s
        )

    def wait_for_requests(self, count: int, *, timeout_s: float = 90.0) -> None:
        self.wait(lambda: len(self.times) >= count, what=f"{count} requests", timeout_s=timeout_s)

    # Taking a push

    def answer(self, request: _Handler, body: bytes) -> Scripted:
        with self._news:
            self.times.append(time.monotonic())
            self.tenants.add(request.headers.get("X-Scope-OrgID"))
            scripted = self.plan.popleft() if self.plan else self.always
            if scripted is not None and scripted != "lose the answer":
                return scripted
            if self.auth and request.headers.get("Authorization") != self.auth:
                return 401
            status, text = self._store(request, body)
            self._news.notify_all()
            return "lose the answer" if scripted else (status, text)

    def answered(self, status: int) -> None:
        with self._news:
            self.statuses.append(status)
            self._news.notify_all()

    def _store(self, request: _Handler, body: bytes) -> tuple[int, str]:
        try:
            streams = _read(request, body)
        except ValueError as error:
            self.violations.append(str(error))
            return 400, str(error)
        bad = []
        for labels, entries in streams:
            kept = self.streams.setdefault(labels, [])
            known, last = set(kept), kept[-1][0] if kept else 0
            for time_ns, text in entries:
                if time_ns < self.oldest_ns:
                    bad.append(f"entry with timestamp {time_ns} ignored, reason: 'timestamp too old'")
                elif len(text.encode()) > self.longest:
                    bad.append(f"Max entry size '{self.longest}' bytes exceeded for stream {dict(labels)}")
                elif self.newest_ns is not None and time_ns > self.newest_ns:
                    bad.append(f"entry for stream '{dict(labels)}' has timestamp too new: {time_ns}")
                elif (time_ns, text) in known:
                    self.duplicates += 1
                elif time_ns <= last:
                    self.violations.append(
                        f"out of order: {time_ns} is not after {last} in {dict(labels)}: {text[:80]}"
                    )
                    bad.append("entry out of order")
                else:
                    kept.append((time_ns, text))
                    known.add((time_ns, text))
                    last = time_ns
        return (400, "\n".join(bad)) if bad else (204, "")


def _read(request: _Handler, body: bytes) -> list[tuple[Labels, list[tuple[int, str]]]]:
    """The streams of a push, or ValueError for whatever is not as documented."""
    if request.path != "/loki/api/v1/push":
        raise ValueError(f"no such path: {request.path}")
    if request.headers.get("Content-Type") != "application/json":
        raise ValueError(f"Content-Type is {request.headers.get('Content-Type')!r}")
    encoding = request.headers.get("Content-Encoding")
    if encoding not in (None, "gzip"):
        raise ValueError(f"Content-Encoding is {encoding!r}")
    try:
        push = json.loads(gzip.decompress(body) if encoding == "gzip" else body)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"not {encoding or 'plain'} JSON: {error}") from error
    if not isinstance(push, dict) or set(push) != {"streams"} or not push["streams"]:
        raise ValueError(f"a push is {{'streams': [...]}}, not {str(push)[:80]}")
    return [_stream(stream) for stream in push["streams"]]


def _stream(stream: Any) -> tuple[Labels, list[tuple[int, str]]]:
    if not isinstance(stream, dict) or set(stream) != {"stream", "values"}:
        raise ValueError(f"a stream has 'stream' and 'values': {str(stream)[:80]}")
    labels, values = stream["stream"], stream["values"]
    if not labels or not all(isinstance(v, str) and v and _NAME.fullmatch(k) for k, v in labels.items()):
        raise ValueError(f"labels are names with texts: {labels}")
    if not values:
        raise ValueError("a stream without values")
    entries = []
    for value in values:
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)):
            raise ValueError(f"a value is two texts: {str(value)[:80]}")
        if not re.fullmatch(r"[0-9]{19}", value[0]):
            raise ValueError(f"a time is a text of nanoseconds: {value[0]!r}")
        entries.append((int(value[0]), value[1]))
    if [time_ns for time_ns, _ in entries] != sorted({time_ns for time_ns, _ in entries}):
        raise ValueError("the entries of a stream are not in order, each with a time of its own")
    return tuple(sorted(labels.items())), entries


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """A client that is killed in the middle is what tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    loki: StrictLoki

    def setup(self) -> None:
        super().setup()
        self.loki._sockets.add(self.connection)

    def finish(self) -> None:
        self.loki._sockets.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        if length is None:
            self.loki.violations.append("no Content-Length")
            return self._say(411, "")
        body = self.rfile.read(int(length))
        if len(body) != int(length):
            return None  # the client died
        match self.loki.answer(self, body):
            case "hang up" | "lose the answer":
                self.loki.answered(0)
                self.close_connection = True
                return None
            case "say nothing":
                self.loki._over.wait()
                self.close_connection = True
                return None
            case 429, float(after_s):
                return self._say(429, "slow down", {"Retry-After": f"{after_s:g}"})
            case int(status), str(text):
                return self._say(status, text)
            case int(status):
                return self._say(status, f"scripted {status}")
        raise AssertionError("no such script")

    def do_GET(self) -> None:
        self.loki.violations.append(f"GET {self.path}")
        self._say(405, "")

    def _say(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.loki.answered(status)  # before the client knows: a test looks when that is done
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def every_line_once(loki: StrictLoki, log: str, host: str) -> None:
    """Every line of a log has arrived exactly once, in order, and nothing else has for that host."""
    written = [line.rstrip("\r") for line in log.split("\n") if line.strip()]
    arrived = loki.lines(host=host)
    if arrived != written:
        missing, added = Counter(written) - Counter(arrived), Counter(arrived) - Counter(written)
        where = "nothing but their order differs" if not (missing or added) else ""
        raise AssertionError(f"{host}: missing {dict(missing)}, too many {dict(added)} {where}")


_MOMENT = "2026-03-01T12:00:{:06.3f}Z"


def record(seconds: float, message: str = "", level: str = "INFO") -> bytes:
    """A line of a log."""
    fields = {"time": _MOMENT.format(seconds), "level": level, "logger": "x", "message": message}
    return json.dumps(fields).encode() + b"\n"
