"""Attacks on an HTTP port, by clients without the key and by pages of other sites in a user's browser."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import random
import select
import statistics
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.abuse.doors import HANG_S, TO_NOTICE_S, Door, peak_bytes, until_the_end
from tools.abuse.elastic import NUM_IDLE, NUM_LORIS, REFUSED_BYTES, REFUSED_S, THREADS, in_threads, outstay
from tools.abuse.report import Attacks, Result
from tools.fuzz import mutated

VERBS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "X")
ELSEWHERE = "evil.example"
LINGER_S = 5.0  # for a client that continues to send after its response: smolcluster.web.server.Patience
ANSWER_S = 0.02  # for a request that may not be complete
REQUESTS_PER_FRAME = 0.1  # an HTTP request takes longer than a frame
TEXTS = (
    *(b"\r\n", b"\r\n\r\n", b"\n", b"\0", b": ", b"chunked", b"HTTP/1.1", b"HTTP/9.9", b"%00%2e%2e/", b"NaN", b"1e999"),
    *(b"Content-Length: 18446744073709551616\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n"),
    *(b"Upgrade: websocket\r\nConnection: upgrade\r\n", b"ffffffffffffffff\r\n", b"[" * 8, b'{"a":' * 40, b'"\\ud800"'),
)


@dataclass(frozen=True, kw_only=True)
class Site:
    """The paths of a server and their verbs. `pages`: those that another site may link to."""

    gets: tuple[str, ...]
    posts: tuple[str, ...]
    pages: tuple[str, ...]
    body: dict[str, object]  # of a valid POST
    open: tuple[str, ...] = ()  # no key is needed there

    def verbs(self, path: str) -> tuple[str, ...]:
        return ("POST",) if path in self.posts else ("GET", "HEAD")

    @property
    def paths(self) -> tuple[str, ...]:
        return (*self.gets, *self.posts)


class Web(Attacks):
    """All attacks on an HTTP port."""

    names = ("requests", "bodies", "bombs", "idle", "loris", "origins", "impostors")

    def __init__(self, canary: Path, site: Site) -> None:
        super().__init__(canary)
        self._site = site

    # Bytes

    def requests(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        """Send damaged requests, one a connection. None may lead to a status of 500 or more."""
        count = max(THREADS, int(REQUESTS_PER_FRAME * count))
        honest = [
            written(door, verb, path, self._site.body) for path in self._site.paths for verb in self._site.verbs(path)
        ]
        in_threads(rng, count, lambda own_rng, share: self._requests(door, result, own_rng, honest, share))
        result.count = count

    def _requests(self, door: Door, result: Result, rng: random.Random, honest: list[bytes], count: int) -> None:
        for _ in range(count):
            if result.wrong or time.monotonic() > self.deadline:
                return
            data = bytearray(mutated(rng, rng.choice(honest), honest))
            for _ in range(rng.randrange(3)):
                at = rng.randrange(len(data) + 1)
                data[at:at] = rng.choice(TEXTS)
            try:
                heard = answer_of(door, bytes(data), answer_s=ANSWER_S)
            except TimeoutError:
                result.wrong.append(f"no end within {HANG_S:g} s of {bytes(data[:200])!r}")
            except ConnectionRefusedError:
                result.wrong.append("the socket refuses connections")
            except ConnectionError:
                pass  # closed before all was sent
            else:
                if status_of(heard) >= 500:
                    result.wrong.append(f"{heard[:200]!r} to {bytes(data[:400])!r}")

    def bodies(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        """Send bodies over the limit: announced, and without an end."""
        posts = self._site.posts
        for path in posts:  # the cost of a valid request does not count
            answer_of(door, written(door, "POST", path, {"unknown": 1}))
        took, before = [], peak_bytes(door.pid, anew=True)
        for path, length in itertools.product(posts, (2**31, 2**63, 2**64, 10**30, (1 << 20) + 1)):
            began = time.perf_counter()
            heard = answer_of(door, head(door, "POST", path, f"Content-Length: {length}", JSON))
            took.append(time.perf_counter() - began)
            if status_of(heard) not in (400, 413):
                result.wrong.append(f"{length} bytes announced to {path}: {heard[:100]!r}")
        grown = peak_bytes(door.pid) - before
        longest = max(self._endless(door, result, path) for path in posts)
        result.count = len(took) + len(posts)
        median = statistics.median(took)
        result.figures = {
            "median_ms": 1e3 * median,
            "max_ms": 1e3 * max(took),
            "peak_mb": grown / 2**20,
            "endless_s": longest,
        }
        if median > REFUSED_S:
            result.wrong.append(f"refused after {1e3 * median:.1f} ms (median)")
        if grown > REFUSED_BYTES:
            result.wrong.append(f"its memory rose by {grown} bytes meanwhile")

    def _endless(self, door: Door, result: Result, path: str) -> float:
        """Send chunk after chunk until the connection is closed. Return the seconds."""
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with contextlib.closing(door.connect()) as sock:
            began, sent = time.monotonic(), 0
            sock.sendall(head(door, "POST", path, "Transfer-Encoding: chunked", JSON))
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - began < HANG_S:
                    sock.sendall(chunk)
                    sent += len(chunk)
            took = time.monotonic() - began
        if took > LINGER_S + TO_NOTICE_S:
            result.wrong.append(f"a body without end was taken by {path} for {took:.1f} s, {sent} bytes of it")
        return took

    def bombs(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        """Send bodies that would be large if they were decompressed, and JSON that is deep or huge."""
        zeros = bytes(8 << 20)
        packed = [
            ("gzip", gzip.compress(zeros)),
            ("deflate", zlib.compress(zeros, 9)),
            ("gzip, gzip", gzip.compress(gzip.compress(zeros))),
        ]
        texts = [
            b"[" * 500_000,
            b'{"a":' * 150_000,
            b'{"prompt":' + b"9" * 900_000 + b"}",
            b'{"prompt":"' + b"\\" * 900_000 + b'"}',
        ]
        texts += [b'{"' + b"x" * 900_000 + b'":1}', b"{" + b",".join(b'"%d":1e308' % n for n in range(60_000)) + b"}"]
        for path in self._site.posts:
            for coding, data in [*packed, *(("identity", text) for text in texts)]:
                result.count += 1
                said = (
                    head(door, "POST", path, f"Content-Encoding: {coding}", f"Content-Length: {len(data)}", JSON) + data
                )
                heard = answer_of(door, said)
                if not 400 <= status_of(heard) < 500:
                    result.wrong.append(f"{coding} to {path}: {heard[:100]!r}")

    # Connections

    def idle(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        outstay(door, result, [door.connect for _ in range(NUM_IDLE)], say=b"")

    def loris(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        said = b"GET /health HTTP/1.1\r\nX: " + b"x" * 1000
        outstay(door, result, [door.connect for _ in range(NUM_LORIS)], say=said)

    # Authorization

    def origins(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        """Send every verb to every path, from other origins and under other host names; and wrong verbs. At most `count`."""
        cases = [
            case
            for path, verb in itertools.product((*self._site.paths, "/nowhere", "*", "//evil.example/"), VERBS)
            for case in self._unwanted(door, verb, path)
        ]
        for name, request in cases if count >= len(cases) else rng.sample(cases, count):
            result.count += 1
            self._refused(result, name, answer_of(door, request))
        for path in self._site.gets:  # a server that refuses everything would pass the above
            request = head(door, "GET", path, f"Origin: http://127.0.0.1:{door.port}", "Sec-Fetch-Site: same-origin")
            if status_of(answer_of(door, request)) != 200:
                result.wrong.append(f"{path} is refused to its own page")

    def _unwanted(self, door: Door, verb: str, path: str) -> Iterator[tuple[str, bytes]]:
        for name, request in self._from_elsewhere(door, verb, path):
            yield f"{verb} {path} {name}", request
        if path not in self._site.paths or verb not in self._site.verbs(path):
            yield f"{verb} {path}", head(door, verb, path, JSON, "Content-Length: 0")

    def _from_elsewhere(self, door: Door, verb: str, path: str) -> Iterator[tuple[str, bytes]]:
        here, there = f"127.0.0.1:{door.port}", f"{ELSEWHERE}:{door.port}"
        body = json.dumps(self._site.body).encode() if verb in ("POST", "PUT", "PATCH") else b""
        size = f"Content-Length: {len(body)}"
        for host in (there, ELSEWHERE, f"{here}.{ELSEWHERE}", f"{ELSEWHERE}@{here}", f"127.0.0.1.{ELSEWHERE}", ""):
            yield f"for the host {host!r}", head(door, verb, path, size, JSON, host=host) + body
        yield "rebound", head(door, verb, path, f"Origin: http://{there}", size, JSON, host=there) + body
        yield "of two hosts", head(door, verb, path, f"Host: {there}", size, JSON) + body
        yield "of no host", f"{verb} {path} HTTP/1.0\r\n{size}\r\n{JSON}\r\n\r\n".encode() + body
        for origin in (
            f"http://{ELSEWHERE}",
            f"https://{ELSEWHERE}",
            "null",
            "http://127.0.0.1:1",
            f"http://{here}.{ELSEWHERE}",
        ):
            yield f"from {origin}", head(door, verb, path, f"Origin: {origin}", size, JSON) + body
        own = f"Origin: http://{here}"
        yield "from two origins", head(door, verb, path, own, f"Origin: http://{ELSEWHERE}", size, JSON) + body
        if path not in self._site.pages:
            yield "cross-site", head(door, verb, path, "Sec-Fetch-Site: cross-site", size, JSON) + body
        if verb != "GET" and verb != "HEAD":
            yield "as a form", head(door, verb, path, size, "Content-Type: text/plain") + body

    def _refused(self, result: Result, name: str, heard: bytes) -> None:
        if b"access-control-allow" in heard.lower():
            result.wrong.append(f"{name}: another site is allowed: {heard[:200]!r}")
        if not 400 <= status_of(heard) < 500 and not (heard == b"" and name.startswith("CONNECT")):
            result.wrong.append(f"{name}: {heard[:60]!r}")

    def impostors(self, door: Door, result: Result, rng: random.Random, count: int) -> None:
        """If there is a key: send none, wrong ones, and the key in the wrong place."""
        if door.key is None:
            return
        key, wrong = door.key, ["", "Bearer", "Bearer ", "Bearer " + "x" * len(door.key), f"Basic {door.key}"]
        wrong += [f"Bearer {key[:-1]}", f"Bearer {key}x", f"Bearer {key.swapcase()}", "Bearer " + "x" * 10_000]
        fields = [f"Authorization: {value}" for value in wrong]
        fields += [f"Cookie: smolcluster_serve_{door.port}={key}", f"X-Api-Key: {key}", f"Cookie: key={key}", "X: y"]
        for path, line in itertools.product(self._site.paths, fields):
            if path in (*self._site.pages, *self._site.open):
                continue
            verb = self._site.verbs(path)[0]
            body = json.dumps(self._site.body).encode()
            heard = answer_of(
                door, head(door, verb, path, line, f"Content-Length: {len(body)}", JSON, key=False) + body
            )
            result.count += 1
            if status_of(heard) != 401:
                result.wrong.append(f"{verb} {path} with {line[:60]!r}: {heard[:60]!r}")


JSON = "Content-Type: application/json"


def head(door: Door, verb: str, path: str, *fields: str, host: str | None = None, key: bool = True) -> bytes:
    """Return the head of a request. `key`: with the key, if there is one."""
    lines = [f"{verb} {path} HTTP/1.1", f"Host: {f'127.0.0.1:{door.port}' if host is None else host}", *fields]
    if key and door.key is not None:
        lines.append(f"Authorization: Bearer {door.key}")
    return "\r\n".join([*lines, "", ""]).encode()


def written(door: Door, verb: str, path: str, body: dict[str, object]) -> bytes:
    """Return a valid request."""
    if verb != "POST":
        return head(door, verb, path)
    data = json.dumps(body).encode()
    return head(door, verb, path, f"Content-Length: {len(data)}", JSON) + data


def answer_of(door: Door, data: bytes, *, answer_s: float = HANG_S) -> bytes:
    """Return the first bytes of the response, after the server has closed the connection. `answer_s`: to wait for them."""
    sock, heard = door.connect(), b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        sock.sendall(data)
        if select.select([sock], [], [], answer_s)[0]:
            heard = sock.recv(1 << 16)
    until_the_end(sock)
    return heard


def status_of(heard: bytes) -> int:
    """Return the status of a response; 0 where there is none."""
    words = heard[:20].split(b" ")
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit() else 0
