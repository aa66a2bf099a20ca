"""Connections of the HTTP service: slow, idle, crowded, closed by either side."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import select
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.dashboard_client import get, raw
from tests.places import eventually
from tests.unit.scripted_engine import ByteText, ScriptedEngine, serving
from tests.unit.serve.http_requests import (
    BODIES,
    CHAT,
    COMPLETION,
    POSTS,
    asked,
    connect,
    error,
    events,
    post,
    split,
    written,
)

from smolcluster.serve.engine.types import Busy, PromptTooLong, Unavailable
from smolcluster.web.connections import HttpLimits
from smolcluster.web.streams import event_stream

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


QUICK = HttpLimits(request_s=0.3, linger_s=0.3, write_s=0.3, shutdown_s=1, max_connections=64)

LOOP = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("source", [LOOP, "{{ raise_exception('a secret of the model') }}"])
def test_a_failing_template_blocks_no_other_request_and_is_only_logged(
    own: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    """While one loops another request is answered; then the client hears that it was refused, and the log says why."""
    from smolcluster.serve.text import rendering

    rendered = threading.Event()

    def chat(_: ByteText, messages: list[dict[str, str]]) -> list[int]:
        rendered.set()
        return list(rendering.render_in_child(source, messages, names={}).encode())

    started: list[rendering._Process] = []

    class Recorded(rendering._Process):
        def __init__(self) -> None:
            super().__init__()
            started.append(self)

    monkeypatch.setattr(ByteText, "chat", chat)
    monkeypatch.setattr(rendering, "_Process", Recorded)
    monkeypatch.setattr(rendering, "RENDER_S", 600.0)
    rendering._POOL.close()  # the next one is recorded
    with serving(own) as port, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, port, "/v1/chat/completions", CHAT)
        assert rendered.wait(300)
        assert post(port, "/v1/completions", COMPLETION | {"max_tokens": 1})[0] == 200
        if source == LOOP:
            eventually(lambda: started)
            assert not asked.done()
            started[0]._process.kill()  # sooner than its deadline
        status, _, body = asked.result(90)
    assert status == 400
    assert json.loads(body)["error"]["message"] == "messages: the model's chat template refuses this conversation"
    assert ("takes longer than 600 s" if source == LOOP else "a secret of the model") in caplog.text


def test_a_stalled_stream_closes_its_source() -> None:
    """Where the frames stand between two of them, and so does what they are made of."""

    async def story() -> None:
        closed, stuck = asyncio.Event(), asyncio.Event()

        async def source() -> AsyncGenerator[int, None]:
            try:
                for number in itertools.count():
                    yield number
            finally:
                closed.set()

        async def frames() -> AsyncGenerator[bytes, None]:
            async for number in made_of:
                yield b"%d" % number

        async def receive() -> dict[str, Any]:
            await stuck.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                stuck.set()
                await asyncio.Event().wait()

        made_of = source()
        assert await anext(made_of) == 0
        await event_stream(frames(), source=made_of)({"type": "http", "method": "GET"}, receive, send)
        assert closed.is_set()

    asyncio.run(story())


def test_errors_of_the_engine_have_their_status(port: int, engine: ScriptedEngine) -> None:
    for refusal, status, after, kind in (
        (Busy("12 wait already"), 429, "1", "rate_limit_error"),
        (Unavailable("layers 15 to 30 are on no machine"), 503, "5", "server_error"),
        (PromptTooLong("30 tokens; memory for 20"), 400, None, "invalid_request_error"),
    ):
        engine.refuse = refusal
        for path in POSTS:
            for stream in (False, True):
                found = post(port, path, BODIES[path] | {"stream": stream})
                assert found[1].get("retry-after") == after
                assert error(found)[0] == status
                assert error(found)[1]["type"] == kind
                assert str(refusal) in error(found)[1]["message"]
    engine.refuse = None
    assert post(port, POSTS[0], CHAT)[0] == 200


def test_the_number_of_bodies_being_read_is_limited(own: ScriptedEngine) -> None:
    with serving(own, requests=1) as port, connect(port) as slow:
        slow.sendall(written(POSTS[0], CHAT)[:-5])
        eventually(lambda: post(port, POSTS[0], b"{")[0] == 429)
        slow.close()
        eventually(lambda: post(port, POSTS[0], CHAT)[0] == 200)


def test_slow_bodies_make_room(own: ScriptedEngine) -> None:
    """After a while, and only where another waits; both for the bodies that are read and for connections."""
    http_limits = HttpLimits(request_s=20, shutdown_s=1, max_connections=3, slow_body_s=0.2)
    limits = {"requests": 3, "crowded_body_s": 0.2, "body_s": 60.0}
    with serving(own, http_limits=http_limits, **limits) as port, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(port)) for _ in range(2)]
        for one in slow:
            one.sendall(written(POSTS[0], CHAT)[:-5])
        assert post(port, POSTS[0], CHAT)[0] == 200  # there is room
        slow.append(stack.enter_context(connect(port)))
        slow[-1].sendall(written(POSTS[0], CHAT)[:-5])
        eventually(lambda: status_of(port) == 200)
        (gone,), _, _ = select.select(slow, [], [], 20)
        with contextlib.suppress(ConnectionError):
            assert gone.recv(1) == b""
        slow.remove(gone)
        for one in slow:
            one.sendall(written(POSTS[0], CHAT)[-5:])
            assert one.recv(13) == b"HTTP/1.1 200 "
    with serving(own, requests=1, crowded_body_s=0.2) as port, connect(port) as one:
        one.sendall(written(POSTS[0], CHAT)[:-5])
        eventually(lambda: post(port, POSTS[0], CHAT)[0] == 200)
        assert one.recv(13) == b"HTTP/1.1 408 "
        with one.makefile("rb") as rest:
            assert b"is too slow while other requests wait" in rest.read()


def test_bytes_that_are_not_http_are_400(own: ScriptedEngine) -> None:
    with serving(own) as port:
        head, _, body = raw(port, b"nonsense\r\n\r\n").partition(b"\r\n\r\n")  # and closed
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"x-content-type-options: nosniff" in head.lower()
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        begun = raw(port, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\nnonsense\r\n\r\n")
        assert begun.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("kind", [Unavailable("mini1 is lost"), RuntimeError("a secret inside")])
def test_an_error_in_the_middle_of_a_stream_is_an_event(
    port: int, engine: ScriptedEngine, kind: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    engine.fail = (2, kind)
    for path in POSTS:
        status, _, body = post(port, path, BODIES[path] | {"stream": True, "temperature": 0})
        *_, last = events(body)
        assert status == 200
        assert set(last) == {"error"}
        assert last["error"]["type"] == "server_error"
        assert ("mini1 is lost" in last["error"]["message"]) == isinstance(kind, Unavailable)
        assert b"secret" not in body
        assert b"[DONE]" not in body
    status, told = error(post(port, POSTS[0], CHAT))
    assert status == (503 if isinstance(kind, Unavailable) else 500)
    assert "secret" not in told["message"]
    assert ("a request failed" in caplog.text) == isinstance(kind, RuntimeError)
    assert engine.open == 0


def leave(asking: socket.socket, how: str) -> None:
    if how == "close":
        asking.close()
    elif how == "half":
        asking.shutdown(socket.SHUT_WR)
    else:  # without a word
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asking.close()


@pytest.mark.parametrize("how", ["close", "half", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("held", [0, 3])
def test_a_disconnect_frees_the_sequence_at_once(
    port: int, engine: ScriptedEngine, how: str, stream: bool, held: int
) -> None:
    engine.hold_after = held  # before the first token, and in the middle
    for path in POSTS:
        for ahead in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):  # and with a request that waits
            with connect(port) as asking:
                asking.sendall(written(path, BODIES[path] | {"stream": stream}) + ahead)
                assert engine.begun.acquire(timeout=300)
                assert engine.open == 1
                if stream and held:
                    assert asking.recv(10)
                asking.sendall(ahead)
                leave(asking, how)
                assert engine.freed.acquire(timeout=300), "its place is still taken"
    eventually(lambda: engine.open == 0)


def test_a_disconnect_while_the_request_is_sent(own: ScriptedEngine) -> None:
    with serving(own) as port:
        for how in ("close", "half", "reset"):
            with connect(port) as asking:
                asking.sendall(written(POSTS[0], CHAT)[:-5])
                leave(asking, how)
        eventually(lambda: b'route="/v1/chat/completions",status="499"} 3' in get(port, "/metrics")[2])
    assert not own.asks


def test_a_slow_body_times_out(own: ScriptedEngine) -> None:
    with serving(own, body_s=0.2) as port, connect(port) as slow:
        slow.sendall(written(POSTS[0], CHAT)[:-5])
        assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
    assert not own.asks


def test_a_slow_head_times_out(own: ScriptedEngine) -> None:
    with serving(own, http_limits=QUICK) as port:
        for in_order in (0, 1):  # also after a request that was in order
            with connect(port) as slow:
                answer = b""
                slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * in_order)
                while in_order and not answer.endswith(b"}"):
                    answer += slow.recv(65536)
                slow.sendall(b"GET / HT")
                with contextlib.suppress(ConnectionError):
                    assert slow.recv(1) == b""


def test_chunked_bombs(own: ScriptedEngine) -> None:
    head = b"POST /query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(own, http_limits=QUICK, body_bytes=100_000, body_s=0.3) as port:
        for bomb in (b"FFFFFFFFFFFFFFFFFF\r\n", b"-1\r\n", b"zz\r\n", b"0" * 30_000, b"1;" + b"x" * 30_000):
            answer = raw(port, head + bomb)
            assert answer[:13] in (b"", *(b"HTTP/1.1 %d " % status for status in (400, 408, 413)))
        with connect(port) as endless, contextlib.suppress(ConnectionError):
            endless.sendall(head)
            while True:  # until it is cut off: who goes on after the answer is let go
                endless.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
        assert post(port, POSTS[0], CHAT)[0] == 200


def test_pipelined_requests(port: int) -> None:
    """Also when they are sent before they are asked for."""
    with connect(port) as asking:
        asking.sendall(written(POSTS[0], CHAT | {"max_tokens": 3}) * 3 + written(POSTS[0], CHAT, "Connection: close"))
        answer = b""
        while part := asking.recv(65536):
            answer += part
    assert answer.count(b"HTTP/1.1 200 ") == 4


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the kernel takes megabytes for who reads nothing, and ends his connection itself."""
    from smolcluster.web import server

    usual = server.listen

    def listen(*args: Any, **kwargs: Any) -> socket.socket:
        listener = usual(*args, **kwargs)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        return listener

    monkeypatch.setattr(server, "listen", listen)


def deaf(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(300)
    connection.connect(("127.0.0.1", port))
    return connection


@pytest.mark.usefixtures("small_buffers")
def test_a_client_that_does_not_read_its_stream_is_disconnected() -> None:
    own = ScriptedEngine(context=1_000_000)
    told: list[int] = []
    own.script = lambda ask: Counted(ask.max_tokens, told)
    http_limits = HttpLimits(write_s=3.0, shutdown_s=1)
    with serving(own, http_limits=http_limits, max_tokens=900_000) as port, deaf(port) as reader:
        reader.sendall(written(POSTS[0], CHAT | {"stream": True}))
        assert own.begun.acquire(timeout=300)
        began = time.monotonic()
        assert post(port, POSTS[0], CHAT | {"max_tokens": 5})[0] == 200
        assert time.monotonic() - began < http_limits.write_s
        assert own.begun.acquire(timeout=300)
        for _ in range(2):
            assert own.freed.acquire(timeout=300), "it still has its place"
        assert len(told) < 20_000  # of 900,000: what was not taken was not made
        eventually(lambda: cut_off(reader))


class Counted(list[int]):
    """So many tokens, made when they are asked for."""

    def __init__(self, number: int, told: list[int]) -> None:
        super().__init__()
        self._number, self._told = number, told

    def __iter__(self) -> Iterator[int]:
        for _ in range(self._number):
            self._told.append(1)
            yield 97


@pytest.mark.usefixtures("small_buffers")
def test_a_client_that_does_not_read_its_answer_is_disconnected() -> None:
    own = ScriptedEngine(context=10_000)
    with serving(own, http_limits=QUICK, max_tokens=5000) as port, deaf(port) as reader:
        reader.sendall(written(POSTS[1], COMPLETION | {"logprobs": 5}))  # half a megabyte
        assert own.freed.acquire(timeout=300)
        eventually(lambda: cut_off(reader))


def cut_off(reader: socket.socket) -> bool:
    """Whether the other side has closed the connection, without reading what is there."""
    try:
        reader.sendall(b"G")
    except ConnectionError:
        return True
    return False


def test_connections_beyond_the_limit(own: ScriptedEngine) -> None:
    """Those that ask nothing make room for others; where all have asked, a new one is told to come back."""
    http_limits = HttpLimits(request_s=20, shutdown_s=1, max_connections=50)
    with serving(own, http_limits=http_limits) as port, contextlib.ExitStack() as stack:
        crowd = []
        for _ in range(1000):
            one = stack.enter_context(socket.socket())
            one.settimeout(300)
            with contextlib.suppress(ConnectionError):
                one.connect(("127.0.0.1", port))
                crowd.append(one)
        assert get(port, "/health")[0] == 200  # at once
        answers = [asked_of(one) for one in crowd]
        assert 40 <= answers.count(b"200") <= 50
        assert answers.count(b"") == len(crowd) - answers.count(b"200")
        for one in crowd:
            one.close()

        busy = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300)) for _ in range(50)]
        for one in busy:
            one.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert one.recv(9) == b"HTTP/1.1 "
        for _ in range(20):
            assert asked_of(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300))) == b"503"
        for one in busy:
            one.close()
        eventually(lambda: status_of(port) == 200)


def test_the_connection_idle_longest_is_evicted(own: ScriptedEngine) -> None:
    http_limits = HttpLimits(request_s=20, shutdown_s=1, max_connections=2)
    with serving(own, http_limits=http_limits) as port, contextlib.ExitStack() as stack:
        friend, other = (
            stack.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)))
            for _ in range(2)
        )
        assert health_of(friend) == 200
        silent = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300))
        eventually(lambda: health_of(other) == 200)
        with contextlib.suppress(ConnectionError):
            assert silent.recv(1) == b""
        kept = friend.sock
        assert health_of(friend) == 200
        assert friend.sock is kept  # the same connection
        assert get(port, "/health")[0] == 200
        with contextlib.suppress(ConnectionError):
            assert other.sock.recv(1) == b""  # it had rested for longer than the friend


def health_of(line: http.client.HTTPConnection) -> int:
    line.request("GET", "/health")
    answer = line.getresponse()
    answer.read()
    return answer.status


def asked_of(one: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionError):
        one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            status, headers, body = split(one)  # all of it: the next answer comes behind
        except http.client.RemoteDisconnected:
            return b""
        if status == 503:
            assert headers["retry-after"] == "5"
            assert headers["x-content-type-options"] == "nosniff"
            assert json.loads(body)["error"]["type"] == "server_error"
        return str(status).encode()
    return b""


def status_of(port: int) -> int | None:
    with contextlib.suppress(ConnectionError, http.client.HTTPException):
        return get(port, "/health")[0]
    return None


def test_concurrent_requests_get_their_own_answers(own: ScriptedEngine) -> None:
    with serving(own, sequences=64) as port:
        found: dict[int, str] = {}

        def one(seed: int) -> None:
            body = {"model": "tiny", "prompt": "x", "seed": seed, "max_tokens": 30, "stream": bool(seed % 2)}
            _, _, answer = post(port, "/v1/completions", body)
            if seed % 2:
                found[seed] = "".join(chunk["choices"][0]["text"] for chunk in events(answer)[:-1])
            else:
                found[seed] = json.loads(answer)["choices"][0]["text"]

        threads = [threading.Thread(target=one, args=(seed,)) for seed in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found.values())) == 24
        for seed in (3, 4):
            alone = asked(port, "/v1/completions", {"model": "tiny", "prompt": "x", "seed": seed, "max_tokens": 30})
            assert found[seed] == alone["choices"][0]["text"]


def test_a_request_during_shutdown_is_503(own: ScriptedEngine) -> None:
    own.hold_after = 0
    with serving(own) as port:
        asking = connect(port)
        asking.sendall(written("/v1/completions", {"prompt": "x"}))
        assert own.begun.acquire(timeout=300)
    assert own.freed.acquire(timeout=300)
    with asking:
        status, headers, body = split(asking)
    assert (status, headers["retry-after"]) == (503, "5")
    assert json.loads(body)["error"]["message"] == "the server is stopping"
