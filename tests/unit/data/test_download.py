"""Downloads from a real server on loopback."""

import gzip
import hashlib
import io
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from smolcluster.config.schema import DataConfig
from smolcluster.data import mnist
from smolcluster.data.download import Archive, fetch, fetch_members
from smolcluster.errors import UserError

BODY = b"some bytes that are worth having\n" * 20_000
SHA256 = hashlib.sha256(BODY).hexdigest()


class Server:
    """Serves what is in `pages`; `cut` pages promise more than they send. Counts requests by path."""

    def __init__(self):
        self.pages: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.requests: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.requests.append(self.path)
                body = outer.pages.get(self.path)
                if body is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if self.path in outer.cut else body)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    server.pages["/good"] = BODY
    yield server
    server.close()


def closed_port() -> str:
    http = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    http.server_close()
    return f"http://127.0.0.1:{http.server_port}/file"


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_good_mirror(server, tmp_path):
    seen = []
    target = tmp_path / "deep" / "file.bin"
    assert fetch([f"{server.url}/good"], target, sha256=SHA256, progress=lambda *a: seen.append(a)) == target
    assert target.read_bytes() == BODY
    assert names(target.parent) == ["file.bin"]
    assert {name for name, _, _ in seen} == {"file.bin"}
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert [a for a in seen if a[1] == a[2]] == [("file.bin", len(BODY), len(BODY))] == seen[-1:]


def test_a_file_that_is_there_is_not_fetched_again(server, tmp_path):
    target = tmp_path / "file.bin"
    for _ in range(2):
        fetch([f"{server.url}/good"], target, sha256=SHA256)
    assert server.requests == ["/good"]
    target.write_bytes(BODY[:-1])
    fetch([f"{server.url}/good"], target, sha256=SHA256)
    assert target.read_bytes() == BODY


def test_the_next_mirror_is_tried(server, tmp_path):
    server.pages["/wrong"] = BODY[::-1]
    server.pages["/cut"] = BODY
    server.cut.add("/cut")
    urls = [closed_port(), *(f"{server.url}/{page}" for page in ("missing", "wrong", "cut", "good"))]
    fetch(urls, tmp_path / "file.bin", sha256=SHA256)
    assert server.requests == ["/missing", "/wrong", "/cut", "/good"]
    assert (tmp_path / "file.bin").read_bytes() == BODY
    assert names(tmp_path) == ["file.bin"]


def test_when_no_mirror_helps_each_reason_is_given(server, tmp_path):
    server.pages["/wrong"] = BODY[::-1]
    server.pages["/cut"] = BODY
    server.cut.add("/cut")
    dead = closed_port()
    target = tmp_path / "file.bin"
    with pytest.raises(UserError) as caught:
        fetch([dead, *(f"{server.url}/{page}" for page in ("missing", "wrong", "cut"))], target, sha256=SHA256)
    message = str(caught.value)
    lines = message.splitlines()
    assert len(lines) == 6
    assert lines[1].startswith(f"  {dead}: ")
    assert "404" in lines[2]
    assert f"not {SHA256}" in lines[3]
    assert f"of {len(BODY)} bytes" in lines[4]
    assert str(target) in lines[5]
    assert names(tmp_path) == []


def test_a_mirror_may_not_fill_the_disk(server, tmp_path):
    with pytest.raises(UserError, match="more than 1000 bytes"):
        fetch([f"{server.url}/good"], tmp_path / "file.bin", sha256=SHA256, max_bytes=1000)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written(server, tmp_path):
    (tmp_path / "in the way").write_text("a file", encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot write.*data\.cache_dir"):
        fetch([f"{server.url}/good"], tmp_path / "in the way" / "file.bin", sha256=SHA256)


def test_several_at_once_fetch_once(server, tmp_path):
    gate = threading.Barrier(4)

    def ask():
        gate.wait()
        fetch([f"{server.url}/good"], tmp_path / "file.bin", sha256=SHA256)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.requests == ["/good"]
    assert names(tmp_path) == ["file.bin"]


def make_zip(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as opened:
        for name, content in members.items():
            opened.writestr(f"inner/{name}", content)
    return out.getvalue()


def test_members_of_an_archive(server, tmp_path):
    packed = make_zip(a=b"aaa", b=b"bbb", other=b"x")
    server.pages["/data.zip"] = packed
    archive = Archive((f"{server.url}/data.zip",), hashlib.sha256(packed).hexdigest(), ("inner/a", "inner/b"))
    for _ in range(2):
        files = fetch_members(archive, tmp_path)
    assert [f.read_bytes() for f in files] == [b"aaa", b"bbb"]
    assert server.requests == ["/data.zip"]
    assert names(tmp_path) == ["a", "b"]


def test_an_archive_put_there_by_hand_is_used_and_kept(server, tmp_path):
    packed = make_zip(a=b"aaa")
    (tmp_path / "data.zip").write_bytes(packed)
    archive = Archive((f"{server.url}/data.zip",), hashlib.sha256(packed).hexdigest(), ("inner/a",))
    fetch_members(archive, tmp_path)
    assert server.requests == []
    assert names(tmp_path) == ["a", "data.zip"]


def test_mnist_is_fetched_into_the_cache(server, tmp_path, monkeypatch):
    for stems, count in ((mnist.SPLITS["train"], 5), (mnist.SPLITS["validation"], 3)):
        images = bytes((0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 2, 0, 0, 0, 2)) + bytes(4 * count)
        labels = bytes((0, 0, 8, 1, 0, 0, 0, count)) + bytes(range(count))
        for stem, content in zip(stems, (images, labels), strict=True):
            packed = gzip.compress(content)
            server.pages[f"/{stem}.gz"] = packed
            monkeypatch.setitem(mnist.SHA256, stem, hashlib.sha256(packed).hexdigest())
    monkeypatch.setattr(mnist, "MIRRORS", (f"{server.url}/nothing", server.url))
    for _ in range(2):
        train, validation = mnist.open_mnist(DataConfig(name="mnist", cache_dir=str(tmp_path)))
    assert (len(train), len(validation)) == (5, 3)
    assert len([r for r in server.requests if not r.startswith("/nothing")]) == 4
