"""What the dashboard answers: the real server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import webbrowser
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard_client import Viewer, get, get_json, raw
from tests.places import eventually
from tests.server_thread import served
from tests.unit.run_folder import configure, row, write_rows

from smolcluster.cli.dashboard import dashboard
from smolcluster.dashboard import app as dashboard_app
from smolcluster.dashboard import hub, server
from smolcluster.dashboard.runs import RunFolder
from smolcluster.errors import MissingExtra, UserError
from smolcluster.web.guard import HEADERS
from smolcluster.web.server import url_of


@contextlib.contextmanager
def serving(folder: Path, **options: Any) -> Iterator[int]:
    """A dashboard on a free port of loopback; ended with the block."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    place = server.DashboardConfig(folder=folder, port=0, **options)
    with served(lambda ready, until: server.serve(place, ready=ready, until=until)) as port:
        yield port


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    with serving(folder, run="new") as number:
        yield number


def test_the_page_and_the_api(port: int, folder: Path) -> None:
    status, headers, body = get(port, "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b'<script type="module" src="/static/app.js">' in body
    assert get(port, "/static/app.js", if_none_match=get(port, "/static/app.js")[1]["etag"])[0] == 304
    runs = get_json(port, "/api/runs")
    assert ([run["name"] for run in runs["runs"]], runs["chosen"]) == (["new", "old"], "new")
    assert get_json(port, "/api/run/new")["numbers"]["step"] == 5
    page = get_json(port, "/api/run/new/logs?search=WORLD&level=error&limit=9999")
    assert [line["message"] for line in page["lines"]] == ["hello <b>world</b>"]
    for odd in ("x", "%C2%B2", "-1", ""):
        assert get_json(port, f"/api/run/new/logs?before=nonsense&limit={odd}")["lines"]
    assert set(get_json(port, "/api/compare?run=new&run=old")["runs"]) == {"new", "old"}
    assert get_json(port, "/api/compare")["runs"] == {}
    assert set(get_json(port, "/api/compare?run=new&run=deleted")["runs"]) == {"new"}
    assert get(port, "/health")[2] == b"ok\n"


ODD_PATHS = [
    *("/api/run/..", "/api/run/%2e%2e", "/api/run/..%2f..%2foutside", "/api/run/link", "/api/run/.hidden", "/api/run/"),
    *("/api/run/new%00", "/api/run/nowhere/events", "/api/run/link/logs", "/api/run/%5c..%5coutside", "/api/run/new/x"),
    *("/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/", "/etc/passwd", "//evil.example"),
    *("/api/compare?run=link", "/api", "/docs", "/openapi.json"),
]  # fmt: skip


@pytest.mark.parametrize("path", ODD_PATHS)
def test_nothing_else_is_there(port: int, path: str) -> None:
    status, headers, body = get(port, path)
    assert status == 404
    assert headers["content-security-policy"] == HEADERS["content-security-policy"]
    assert b"outside" not in body


def test_every_answer_is_hardened(port: int) -> None:
    answers = [get(port, path) for path in ("/", "/static/app.js", "/api/runs", "/nowhere")]
    for _, headers, _ in (*answers, get(port, "/", origin="http://x")):
        assert {name: headers.get(name) for name in HEADERS} == HEADERS
        assert "server" not in headers
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize("verb", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_other_verbs_are_refused_everywhere(port: int, verb: str) -> None:
    paths = ("", "static/app.js", "api/runs", "api/run/new", "api/run/new/events", "api/login", "health", "nowhere")
    for path in paths:
        status, headers, _ = get(port, f"/{path}", method=verb)
        assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_head_has_no_body_and_holds_no_stream(port: int) -> None:
    for path in ("/", "/api/runs", "/api/run/new/events"):
        status, _, body = get(port, path, method="HEAD")
        assert (status, body) == (200, b"")


def test_an_upgrade_to_a_websocket_is_not_made(port: int) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n"
    answer = raw(port, asked + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_viewer_gets_the_picture_and_then_the_changes(port: int, folder: Path) -> None:
    viewer = Viewer(port)
    _, first, told = viewer.next("snapshot")
    assert told["numbers"]["step"] == 5
    write_rows(folder / "new", row(6, loss=0.25))
    _, second, news = viewer.next("changes")
    assert news["numbers"]["loss"] == 0.25
    assert news["curves"]["joined"]["from"] == 5
    assert news["curves"]["joined"]["columns"]["step"] == [6]
    assert first != second
    viewer.close()


def test_a_viewer_that_comes_back_gets_what_it_missed(port: int, folder: Path) -> None:
    watching, viewer = Viewer(port), Viewer(port)
    watching.next("snapshot")
    _, place, _ = viewer.next("snapshot")
    viewer.close()
    for step in (6, 7):
        write_rows(folder / "new", row(step))
        watching.next("changes")
    again = Viewer(port, last_event_id=place)
    kinds = [again.next("changes", "snapshot") for _ in range(2)]
    assert [kind for kind, _, _ in kinds] == ["changes", "changes"]
    assert kinds[1][2]["numbers"]["step"] == 7
    for unknown in ("00000000-1", place.partition("-")[0] + "-9999", "x", place + "x"):
        other = Viewer(port, last_event_id=unknown)
        assert other.next("changes", "snapshot")[0] == "snapshot"
        other.close()
    again.close()
    watching.close()


def test_who_fell_behind_the_ring_gets_a_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "RING", 2)
    monkeypatch.setattr(hub, "POLL_S", 0.05)
    with serving(folder) as port:
        watching = Viewer(port)
        _, place, _ = watching.next("snapshot")
        for step in range(6, 10):
            write_rows(folder / "new", row(step))
            watching.next("changes")
        late = Viewer(port, last_event_id=place)
        kind, _, told = late.next("changes", "snapshot")
        assert (kind, told["numbers"]["step"]) == ("snapshot", 9)
        late.close()
        watching.close()


def test_who_looks_at_a_run_that_cannot_be_followed_is_not_told_that_it_is_live(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "POLL_S", 0.01)
    monkeypatch.setattr(hub, "BEAT_S", 0.02)

    async def look() -> None:
        channel = await hub.Hub(RunFolder(folder)).channel("new")
        usual, broken = channel.reader.poll, threading.Event()

        def poll() -> bool:
            if broken.is_set():
                raise OverflowError("a defect of ours")
            return usual()

        monkeypatch.setattr(channel.reader, "poll", poll)
        async with asyncio.timeout(60):
            async for frame in channel.events(None):
                if b"event: beat" in frame:
                    broken.set()
            assert broken.is_set(), "it was alive, and then the stream ended"
            broken.clear()
            write_rows(folder / "new", row(6, loss=0.25))
            again = channel.events(None)
            async for frame in again:
                if b'"loss":0.25' in frame:
                    break
            await again.aclose()
        await channel.close()

    asyncio.run(look())


def test_what_a_script_asked_for_is_told_to_a_viewer_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/api/run/NAME` reads on as well: whoever comes after it has the news in his snapshot already."""
    monkeypatch.setattr(hub, "POLL_S", 0.01)
    monkeypatch.setattr(hub, "BEAT_S", 0.2)

    async def until_frame(frames: AsyncGenerator[bytes, None], part: bytes) -> bytes:
        seen = b""
        async for frame in frames:
            seen += frame
            if part in frame:
                break
        await frames.aclose()
        return seen

    async def look() -> None:
        channel = await hub.Hub(RunFolder(folder)).channel("new")
        async with asyncio.timeout(60):
            await until_frame(channel.events(None), b"event: snapshot")
            write_rows(folder / "new", row(6))
            await until_frame(channel.events(None), b"event: changes")  # the snapshot that is kept is an old one now
            write_rows(folder / "new", row(7, loss="nan"))
            assert (await channel.snapshot())["events"][-1]["text"] == "the loss of worker 0 is nan at step 7"
            seen = await until_frame(channel.events(None), b"event: beat")
            assert seen.count(b"the loss of worker 0 is nan") == 1
        await channel.close()

    asyncio.run(look())


def test_a_thread_of_a_viewer_who_left_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be called back, and two that read on at once would count rows twice."""

    async def look() -> None:
        channel = await hub.Hub(RunFolder(folder)).channel("new")
        usual, go, inside, most = channel.reader.poll, threading.Event(), 0, 0

        def poll() -> bool:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            go.wait(300)
            try:
                return usual()
            finally:
                inside -= 1

        monkeypatch.setattr(channel.reader, "poll", poll)
        leaves, stays = channel.events(None), channel.events(None)
        async with asyncio.timeout(60):
            await anext(leaves)
            reading = asyncio.ensure_future(anext(leaves))
            while not inside:
                await asyncio.sleep(0.01)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await anext(stays)
            reading = asyncio.ensure_future(anext(stays))
            await asyncio.sleep(0.2)
            go.set()
            assert b'"rows":5,' in await reading
            assert most == 1
            await stays.aclose()
        await channel.close()

    asyncio.run(look())


def admitted(port: int) -> bool:
    """Whether a new viewer gets the run."""
    with contextlib.closing(Viewer(port)) as viewer:
        return viewer.answer.status != 503 and bool(viewer.next("snapshot")[2]["name"] == "new")


def test_there_is_a_limit_to_viewers_and_who_leaves_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MAX_VIEWERS", 2)
    with serving(folder) as port:
        viewers = [Viewer(port) for _ in range(2)]
        for viewer in viewers:
            viewer.next("snapshot")
        refused = Viewer(port)
        assert (refused.answer.status, refused.answer.getheader("retry-after")) == (503, "5")
        refused.close()
        assert get(port, "/api/run/new")[0] == 200  # all else works
        viewers[0].close()
        eventually(lambda: admitted(port), what="a place")
        viewers[1].close()


def test_a_viewer_that_takes_nothing_is_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = server.listen

    def listen(bind: str, port: int | None) -> socket.socket:
        listener = usual(bind, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # else the kernel takes megabytes for it
        return listener

    monkeypatch.setattr(server, "listen", listen)
    monkeypatch.setattr(dashboard_app, "WRITE_S", 0.2)
    monkeypatch.setattr(hub, "MAX_VIEWERS", 1)
    configure(folder / "new", more="".join(f"k{i}: {'y' * 900}\n" for i in range(1000)))  # a snapshot of a megabyte
    with serving(folder) as port, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(b"GET /api/run/new/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert deaf.recv(8) == b"HTTP/1.1"  # it has the only place, and reads no more
        eventually(lambda: admitted(port), timeout_s=15.0, what="its place")  # the kernel alone would take 20 s


def test_a_connection_that_asks_nothing_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.1)
    with serving(folder) as port, socket.create_connection(("127.0.0.1", port), timeout=300) as silent:
        silent.sendall(b"GET / HT")
        with contextlib.suppress(ConnectionError):
            assert silent.recv(1) == b""


def test_a_token_is_asked_for_and_a_cookie_given(folder: Path) -> None:
    token = "abcdefghijklmnop"
    with serving(folder, token=token) as port:
        assert get(port, "/")[0] == 200
        for path in ("runs", "run/new", "run/new/events", "run/new/logs", "compare", "login"):
            assert get(port, f"/api/{path}")[0] == 401
            assert get(port, f"/api/{path}", authorization="Bearer wrong")[0] == 401
        status, headers, _ = get(port, "/api/login", authorization=f"Bearer {token}")
        assert status == 200
        cookie, *flags = headers["set-cookie"].split("; ")
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(flags)
        assert token not in cookie
        assert get(port, "/api/runs", cookie=cookie)[0] == 200


def test_viewers_are_told_when_the_dashboard_ends(folder: Path) -> None:
    with serving(folder) as port:
        viewer = Viewer(port)
        viewer.next("snapshot")
        write_rows(folder / "new", row(6))
    kind, _, news = viewer.next("changes", "bye")
    assert (kind, news["numbers"]["step"]) == ("changes", 6)  # the last change, however late
    assert viewer.next("bye")[0] == "bye"
    viewer.close()


def test_a_port_that_is_taken(folder: Path) -> None:
    with contextlib.closing(server.listen("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(UserError, match="--port"):
            server.listen("127.0.0.1", number)
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1"):
        server.listen("192.0.2.1", 0)


def test_the_usual_port_or_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(server.listen("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(server, "PORT", taken.getsockname()[1])
        with contextlib.closing(server.listen("127.0.0.1", None)) as found:
            assert server.PORT < found.getsockname()[1] < server.PORT + server.PORTS_TRIED


def test_the_address_has_the_token_where_browsers_keep_it() -> None:
    with contextlib.closing(server.listen("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        assert url_of(listener, None) == f"http://127.0.0.1:{number}/"
        assert url_of(listener, "secret") == f"http://127.0.0.1:{number}/#token=secret"


# Beside a run


@pytest.fixture
def starlette() -> None:
    pytest.importorskip("starlette")


def ended(process: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(300)
    return process.returncode is not None


@pytest.mark.usefixtures("starlette")
def test_in_the_background_it_ends_with_its_parent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LEAVE_S", 120.0)
    url = server.start_in_background(folder, folder / "new", 0)
    (process,) = server._background
    try:
        number = int(url.split(":")[2].rstrip("/"))
        assert get_json(number, "/api/runs")["chosen"] == "new"
        if sys.platform != "win32":
            assert os.getpgid(process.pid) == process.pid  # Ctrl-C does not reach it: that is for the run
    finally:
        server._end_background()
    assert process.returncode == 0


@pytest.mark.usefixtures("starlette")
def test_in_the_background_it_ends_also_when_nobody_hears_its_address(folder: Path) -> None:
    """Whoever started it was killed at once."""
    order = {"folder": str(folder), "run": "new", "port": 0, "bind": "127.0.0.1", "token": None}
    heard, said = os.pipe()
    os.close(heard)
    process = subprocess.Popen(
        [sys.executable, "-m", "smolcluster.dashboard"], stdin=subprocess.PIPE, stdout=said, stderr=subprocess.DEVNULL
    )
    os.close(said)
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.close()
        assert ended(process)
    finally:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("starlette")
def test_a_browser_that_is_waited_for_gets_its_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One in the terminal, such as w3m, ends when its user leaves it."""
    usual, left, found = server.serve, threading.Event(), []

    def browse(url: str) -> bool:
        with contextlib.suppress(TimeoutError):
            found.append(get(int(url.split(":")[2].strip("/")), "/health")[0])
        left.set()
        return True

    monkeypatch.setattr(server, "serve", lambda place, ready: usual(place, ready=ready, until=left))
    monkeypatch.setattr(server, "lower_priority", lambda: None)
    monkeypatch.setattr(webbrowser, "open", browse)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert dashboard(folder, port=0) == 0
    assert found == [200]
    assert capsys.readouterr().out.startswith("dashboard  http://127.0.0.1:")


@pytest.mark.usefixtures("starlette")
def test_in_the_background_mistakes_are_told(folder: Path) -> None:
    with contextlib.closing(server.listen("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="cannot listen"):
        server.start_in_background(folder, folder / "new", taken.getsockname()[1])
    server._end_background()


def test_without_the_extra_one_is_told_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("starlette", "uvicorn"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtra, match=r"smolcluster\[dashboard\]"):
        server.serve(server.DashboardConfig(folder=folder, port=0), ready=lambda _: None)
    with pytest.raises(MissingExtra, match=r"smolcluster\[dashboard\]"):
        server.start_in_background(folder, folder / "new")


def test_neither_torch_nor_a_web_server_is_imported_for_help() -> None:
    code = (
        "import sys, smolcluster.cli.dashboard, smolcluster.cli.top; "
        "loaded = {'torch', 'starlette', 'uvicorn', 'rich.live', 'yaml'} & set(sys.modules); assert not loaded, loaded; "
        "import smolcluster.dashboard.server, smolcluster.dashboard.terminal; "
        "loaded = {'torch', 'starlette', 'uvicorn'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_that_does_not_exist_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "serve", lambda place, *, ready: ready("http://127.0.0.1:1/"))
    monkeypatch.setattr(server, "lower_priority", lambda: None)
    dashboard(tmp_path / "typo", browser=False)
    assert f"{tmp_path / 'typo'} does not exist yet; the page waits for it" in capsys.readouterr().err
    dashboard(configure(tmp_path / "run"), browser=False)
    assert capsys.readouterr().err == ""
