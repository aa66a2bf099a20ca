"""The HTTP face of inference: what it answers to friends, to strangers and to who goes away. On a real port of loopback."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import itertools
import json
import re
import select
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.dashboard_client import get, raw
from tests.places import eventually
from tests.unit.scripted_engine import END, SAID, ByteText, ScriptedEngine, serving

from smolcluster.serve.engine.types import Busy, PromptTooLong, Unavailable
from smolcluster.serve.http import api
from smolcluster.serve.http.request_parsing import CHAT_FIELDS, COMPLETION_FIELDS, IGNORED, UNSUPPORTED
from smolcluster.serve.http.response_bodies import completion_logprobs
from smolcluster.serve.http.server import HttpSettings
from smolcluster.serve.http.service import TokenLogprob
from smolcluster.web import bodies
from smolcluster.web.connections import HttpLimits
from smolcluster.web.guard import HEADERS
from smolcluster.web.streams import event_stream

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

POSTS = ("/v1/chat/completions", "/v1/completions", "/chat", "/query")
GETS = ("/health", "/config", "/metrics", "/events", "/v1/models", "/v1/models/tiny")
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hi", "temperature": 0}
BODIES = dict(zip(POSTS, (CHAT, COMPLETION, {"message": "hi"}, {"prompt": "hi"}), strict=True))
QUICK = HttpLimits(request_s=0.3, linger_s=0.3, write_s=0.3, ending_s=1, max_connections=64)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedEngine, int]]:
    engine = ScriptedEngine()
    with serving(engine) as number:
        yield engine, number


@pytest.fixture
def engine(served: tuple[ScriptedEngine, int]) -> ScriptedEngine:
    """Behind `port`, as if it were new."""
    engine = served[0]
    engine.__init__()  # type: ignore[misc]
    return engine


@pytest.fixture
def port(served: tuple[ScriptedEngine, int], engine: ScriptedEngine) -> int:
    return served[1]


@pytest.fixture
def own() -> ScriptedEngine:
    """For a server of the test's own."""
    return ScriptedEngine()


LOOP = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("source", [LOOP, "{{ raise_exception('a secret of the model') }}"])
def test_a_template_stops_nobody_else_and_its_words_stay_here(
    own: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    """While one loops another request is answered; then the client hears that it was refused, and the log says why."""
    from smolcluster.serve.text import rendering

    renderer, rendered = rendering.Renderer(source), threading.Event()

    def chat(_: ByteText, messages: list[dict[str, str]]) -> list[int]:
        rendered.set()
        return list(renderer.render(messages, names={}).encode())

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


# OpenAI's interface


def test_other_ends_of_lines_in_a_text_do_not_end_an_event(port: int, engine: ScriptedEngine) -> None:
    text = "one\u2028two\u2029three\x85four\x0bfive\x1csix"
    engine.script = lambda _: [*text.encode(), END]
    status, _, body = post(port, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 99, "stream": True})
    assert status == 200
    assert "".join(event["choices"][0]["text"] for event in events(body)[:-1]) == text
    assert (
        asked(port, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 99})["choices"][0]["text"] == text
    )


def test_a_chat(port: int, engine: ScriptedEngine) -> None:
    found = asked(port, "/v1/chat/completions", CHAT | {"max_tokens": 9, "seed": 3})
    (choice,) = found.pop("choices")
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": SAID[:9], "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert found.pop("id").startswith("chatcmpl-")
    assert abs(found.pop("created") - time.time()) < 60
    assert found.pop("usage") == {"prompt_tokens": 10, "completion_tokens": 9, "total_tokens": 19}
    about = found.pop("smolcluster")
    assert (about["seed"], about["first_token_s"] >= 0) == (3, True)
    assert found == {"object": "chat.completion", "model": "tiny", "system_fingerprint": None}


def test_a_streamed_chat(port: int, engine: ScriptedEngine) -> None:
    status, headers, body = post(port, "/v1/chat/completions", CHAT | {"max_tokens": 3, "stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *chunks, done = events(body)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "", "refusal": None},
        *({"content": c} for c in SAID[:3]),
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]
    assert {choice["index"] for choice in choices} == {0}
    assert "seed" in chunks[-1]["smolcluster"]


@pytest.mark.parametrize("path", POSTS[:2])
def test_usage_of_a_stream_where_it_is_asked_for(port: int, path: str) -> None:
    wanted = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
    *chunks, last, done = events(post(port, path, BODIES[path] | wanted)[2])
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in chunks)


def test_the_chosen_token_of_a_completion_is_among_the_likeliest() -> None:
    unlikely = TokenLogprob(token=b"c", logprob=-3.0, top=((b"a", -0.5), (b"b", -1.5)), offset=0)
    likely = TokenLogprob(token=b"b", logprob=-1.5, top=((b"a", -0.5), (b"b", -1.5)), offset=1)
    alone = TokenLogprob(token=b"a", logprob=-0.5, top=(), offset=2)
    expected = [{"a": -0.5, "b": -1.5, "c": -3.0}, {"a": -0.5, "b": -1.5}, {"a": -0.5}]
    told = completion_logprobs([unlikely, likely, alone])["top_logprobs"]
    assert [list(one.items()) for one in told] == [list(one.items()) for one in expected]


def test_a_completion(port: int, engine: ScriptedEngine) -> None:
    found = asked(port, "/v1/completions", COMPLETION | {"prompt": ["a", "b"], "max_tokens": 5, "logprobs": 2})
    assert found["object"] == "text_completion"
    assert [(c["index"], c["text"], c["finish_reason"]) for c in found["choices"]] == [
        (i, SAID[:5], "length") for i in range(2)
    ]
    told = found["choices"][0]["logprobs"]
    assert told["tokens"] == list(SAID[:5])
    assert told["text_offset"] == [0, 1, 2, 3, 4]
    assert told["token_logprobs"] == [-0.5] * 5
    assert told["top_logprobs"][0] == {"T": -0.5, "U": -1.5}
    for prompt in ([104, 105], [[104, 105]]):
        assert asked(port, "/v1/completions", COMPLETION | {"prompt": prompt, "max_tokens": 2})["choices"]
        assert engine.asks[-1].tokens == (104, 105)


def test_a_streamed_completion(port: int) -> None:
    *chunks, done = events(post(port, "/v1/completions", COMPLETION | {"max_tokens": 3, "stream": True, "n": 2})[2])
    assert done == "[DONE]"
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == SAID[:3]
        assert [choice["finish_reason"] for choice in own] == [None, None, None, "length"]


def test_logprobs_of_a_chat(own: ScriptedEngine) -> None:
    own.script = lambda _: [*"ü".encode(), END]
    with serving(own) as port:
        found = asked(port, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1})
        first, second = found["choices"][0]["logprobs"]["content"]
        assert first == {
            "token": "bytes:\\xc3",
            "bytes": [0xC3],
            "logprob": -0.5,
            "top_logprobs": [{"token": "bytes:\\xc3", "bytes": [0xC3], "logprob": -0.5}],
        }
        assert second["bytes"] == [0xBC]
        wanted = CHAT | {"logprobs": True, "stream": True}
        *chunks, _ = events(post(port, "/v1/chat/completions", wanted)[2])
        told = [c["choices"][0]["logprobs"] for c in chunks]
        assert [len(entry["content"]) for entry in told if entry] == [2]


def test_messages_in_every_form(port: int, engine: ScriptedEngine) -> None:
    messages = [
        {"role": "developer", "content": "be short", "name": "me"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "d"},
    ]
    asked(port, "/v1/chat/completions", CHAT | {"messages": messages, "max_completion_tokens": 1})
    assert bytes(engine.asks[0].tokens[1:]) == b"system: be short\nuser: ab\nassistant: c\nuser: d\n"
    assert engine.asks[0].max_tokens == 1


def test_models(port: int) -> None:
    (model,) = json.loads(get(port, "/v1/models")[2])["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "smolcluster")
    assert json.loads(get(port, "/v1/models/tiny")[2]) == model
    for path in ("/v1/models/gpt-9", "/v1/models/a/b", "/v1/models/%00"):
        status, told = error(get(port, path))
        assert (status, told["code"], told["param"]) == (404, "model_not_found", "model")


def test_fields_that_openai_knows_and_that_change_nothing(port: int) -> None:
    extra = dict.fromkeys(IGNORED, "x") | {
        name: (values[0] if values else None) for name, values in UNSUPPORTED.items() if name not in COMPLETION_FIELDS
    }
    asked(port, "/v1/chat/completions", CHAT | {"max_tokens": 1} | extra)
    asked(
        port, "/v1/chat/completions", CHAT | {"max_tokens": 1} | dict.fromkeys(UNSUPPORTED) | {"stop": None, "n": None}
    )
    asked(port, "/v1/completions", COMPLETION | {"max_tokens": 1, "echo": False, "best_of": 1, "suffix": ""})


# The simple interface


def test_a_simple_chat(port: int, engine: ScriptedEngine) -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = asked(
        port, "/chat", {"message": "c", "history": history, "system": "s", "temperature": 0, "max_tokens": 4, "seed": 9}
    )
    assert bytes(engine.asks[0].tokens[1:]) == b"system: s\nuser: a\nassistant: b\nuser: c\n"
    assert (found["response"], found["finish_reason"], found["seed"], found["model"]) == (SAID[:4], "length", 9, "tiny")
    assert found["usage"]["completion_tokens"] == 4
    messages = [*history, {"role": "user", "content": "c"}]
    asked(port, "/chat", {"messages": messages, "system": "s"})
    assert engine.asks[1].tokens == engine.asks[0].tokens
    status, told = error(post(port, "/chat", {"messages": messages, "message": "and this?"}))
    assert (status, told["param"]) == (400, "message")


def test_a_simple_query(port: int, engine: ScriptedEngine) -> None:
    for name in ("prompt", "query", "text"):
        assert asked(port, "/query", {name: "once", "temperature": 0, "max_tokens": 4})["response"] == SAID[:4]
    assert {bytes(ask.tokens) for ask in engine.asks} == {b"once"}


@pytest.mark.parametrize("path", ["/chat", "/query"])
def test_a_simple_stream(port: int, path: str) -> None:
    wanted = {"text": "x", "stream": True, "temperature": 0, "max_tokens": 3}
    *pieces, last = events(post(port, path, wanted)[2])
    assert pieces == [{"text": c} for c in SAID[:3]]
    assert (last["done"], last["finish_reason"], last["usage"]["completion_tokens"]) == (True, "length", 3)


# About it


def test_health_and_config(port: int, engine: ScriptedEngine) -> None:
    assert (get(port, "/health")[0], json.loads(get(port, "/health")[2])["ready"]) == (200, True)
    engine.ready, engine.more = False, {"problems": ["pi5: 2 GB are too little"]}
    status, headers, body = get(port, "/health")
    assert (status, headers["retry-after"]) == (503, "5")
    assert json.loads(body)["problems"] == ["pi5: 2 GB are too little"]
    assert json.loads(body)["status"] == "waiting for machines"
    loading = {"layers": [0, 14], "machines": [{"name": "a", "state": "loading"}]}
    engine.more = {"stages": [loading, {"layers": [15, 29], "machines": [{"name": "b", "state": "ready"}]}]}
    assert json.loads(get(port, "/health")[2])["progress"] == "1 of 2 stages ready"
    engine.more = {"there": 1, "wanted": 2}
    assert json.loads(get(port, "/health")[2])["status"] == "waiting for machines: 1 of 2 connected"
    engine.more = {}
    config = json.loads(get(port, "/config")[2])
    assert (config["model"], config["context"], config["layers"], len(config["stages"])) == ("tiny", 512, 30, 2)
    assert config["sampling"]["temperature"] == 1.0
    assert config["limits"]["body_bytes"] == 1 << 20
    assert config["needs_key"] is False
    assert (config["chat"], config["openings"]) == (True, [])


def test_metrics(own: ScriptedEngine) -> None:
    with serving(own) as port:
        asked(port, "/v1/chat/completions", CHAT | {"max_tokens": 2})
        own.ready = False
        for path in ("/health", "/nowhere", "/else" + "x" * 100):
            get(port, path)
        _, headers, body = get(port, "/metrics")
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = body.decode().splitlines()
    assert 'smolcluster_serve_requests_total{route="/v1/chat/completions",status="200"} 1' in lines
    assert 'smolcluster_serve_requests_total{route="/health",status="503"} 1' in lines
    assert 'smolcluster_serve_requests_total{route="other",status="404"} 2' in lines
    for line in (
        *("prompt_tokens_total 10", "generated_tokens_total 2", "ready 0", "running 0"),
        *("first_token_seconds_count 1", 'first_token_seconds_bucket{le="+Inf"} 1', "token_seconds_count 1"),
    ):
        assert f"smolcluster_serve_{line}" in lines


def test_events_tell_what_changes_and_only_that(port: int, engine: ScriptedEngine) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("GET", "/events")
    answer = connection.getresponse()

    def state() -> dict[str, Any]:
        line = answer.readline()
        assert line.startswith(b"data: ")
        assert answer.readline() == b"\n"
        told: dict[str, Any] = json.loads(line[6:])
        return told

    def looked(enough: int) -> bool:
        return engine.looked >= enough

    assert state()["stages"][1]["layers"] == [15, 29]
    for number in range(3):
        enough = engine.looked + 3
        eventually(functools.partial(looked, enough))  # and nothing was told
        engine.more = {"waiting": number + 1}
        assert state()["waiting"] == number + 1
    connection.close()


def test_viewers_leave_when_the_server_ends(own: ScriptedEngine) -> None:
    with serving(own) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("GET", "/events")
        answer = connection.getresponse()
        answer.readline()
    assert answer.read() == b"\n"  # and no error: the stream was ended, not cut
    connection.close()


@pytest.mark.parametrize(("path", "held"), [("/v1/completions", None), ("/query", None), ("/v1/completions", 3)])
def test_a_stream_that_is_not_done_when_the_server_ends_says_so(
    own: ScriptedEngine, path: str, held: int | None
) -> None:
    """Also one that waits for a machine."""
    own.pace_s, own.hold_after = 0.05, held
    with serving(own, http_limits=HttpLimits(ending_s=20)) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        body = json.dumps({"prompt": "x", "max_tokens": 500, "stream": True})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
    told = [line for line in answer.read().splitlines() if line.startswith(b"data: ")]
    connection.close()
    assert json.loads(told[-1][6:])["error"]["message"] == "the server is stopping"
    assert own.freed.acquire(timeout=300)


def test_there_is_a_limit_to_viewers(own: ScriptedEngine) -> None:
    with serving(own, viewers=1) as port, connect(port) as viewer:
        viewer.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while b"data: " not in viewer.recv(65536):
            pass
        assert error(get(port, "/events"))[0] == 429
        viewer.close()
        eventually(lambda: head_of(port, "/events") == 200)


def head_of(port: int, path: str) -> int:
    with connect(port) as asking:
        asking.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return int(asking.recv(65536).split(b" ")[1])


def test_the_page(own: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.html").write_text("<p>hello</p>")
    (tmp_path / "chat.js").write_text("1")
    (tmp_path / "secret.key").write_text("no")
    monkeypatch.setattr(api, "STATIC", tmp_path)
    with serving(own, place={"key": "k" * 16}) as port:
        assert get(port, "/")[2] == b"<p>hello</p>"
        tag = get(port, "/static/chat.js")[1]["etag"]
        assert get(port, "/static/chat.js", if_none_match=tag)[0] == 304
        for path in ("/static/secret.key", "/static/../api.py", "/static/%2e%2e/api.py", "/static/", "/index.html"):
            assert get(port, path)[0] in (401, 404)


# Who may ask


def test_every_answer_is_hardened(port: int) -> None:
    found = [get(port, path) for path in (*GETS[:3], *GETS[4:], "/nowhere", "/")]
    found += [post(port, path, BODIES[path]) for path in POSTS]
    found += [post(port, POSTS[0], b"{"), post(port, POSTS[0], CHAT | {"stream": True}), post(port, "/x", {})]
    found += [get(port, "/health", host="evil.example"), get(port, "/health", origin="http://evil.example")]
    for _, headers, _ in found:
        assert {name: headers.get(name) for name in HEADERS} == HEADERS
        assert "server" not in headers
        assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize("verb", ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_only_post_where_there_is_something_to_do_and_get_where_there_is_something_to_see(port: int, verb: str) -> None:
    for allowed, paths in (("POST", (*POSTS, "/login")), ("GET, HEAD", (*GETS, "/", "/static/chat.js"))):
        for path in paths if verb not in allowed.split(", ") else ():
            status, headers, _ = get(port, path, method=verb)
            assert (status, headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("path", [*POSTS, "/login", *GETS, "/", "/static/chat.js", "/nowhere"])
def test_strangers_are_refused_everywhere(port: int, engine: ScriptedEngine, path: str) -> None:
    method = "POST" if path in (*POSTS, "/login") else "GET"
    more = {"content-type": "application/json"} if method == "POST" else {}
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io:5050", "2130706433", "0.0.0.0"):
        status, told = error(get(port, path, method, host=host, **more))
        assert (status, told["type"]) == (421, "invalid_request_error")
    for origin in ("http://evil.example", "null", "http://localhost:1", "https://127.0.0.1"):
        assert error(get(port, path, method, origin=origin, **more))[0] == 403
    if path not in ("/", "/static/chat.js"):
        for site in ("cross-site", "same-site"):
            assert error(get(port, path, method, sec_fetch_site=site, **more))[0] == 403
    for verb in ("OPTIONS", "PUT", method):
        assert get(port, path, verb, host="evil.example")[0] == 421
    assert not engine.asks


def test_the_page_of_this_server_may_ask(port: int) -> None:
    own = {"origin": f"http://127.0.0.1:{port}", "sec_fetch_site": "same-origin"}
    assert post(port, POSTS[0], CHAT, **own)[0] == 200


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "application/jsonp",
        "text/json", "text/plain; application/json",
    ],
)  # fmt: skip
def test_what_a_form_of_another_site_can_send_is_refused(port: int, engine: ScriptedEngine, kind: str) -> None:
    for path in (*POSTS, "/login"):
        assert error(post(port, path, BODIES.get(path, {}), content_type=kind))[0] == 415
    assert not engine.asks
    assert post(port, POSTS[0], CHAT, content_type="Application/JSON ; charset=utf-8")[0] == 200


def test_a_key(own: ScriptedEngine) -> None:
    key = "abcdefghijklmnop"
    with serving(own, place={"key": key}) as port:
        assert get(port, "/health")[0] == 200
        for path in (*GETS[1:], *POSTS, "/nowhere"):
            for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": key}, {"cookie": f"x={key}"}):
                status, told = error(post(port, path, {}, **given) if path in POSTS else get(port, path, **given))
                assert (status, told["code"], told["type"]) == (401, "invalid_api_key", "authentication_error")
        assert not own.asks
        right = {"authorization": f"Bearer {key}"}
        assert post(port, POSTS[0], CHAT, **right)[0] == 200
        config = get(port, "/config", **right)[2]
        assert json.loads(config)["needs_key"] is True
        assert key.encode() not in config + get(port, "/metrics", **right)[2]

        for wrong, status in ((b'{"key": "wrong"}', 401), (b'{"key": 7}', 400), (b"{}", 400), (b'{"kex": ""}', 400)):
            found = post(port, "/login", wrong)
            assert error(found)[0] == status
            assert "set-cookie" not in found[1]
        status, headers, _ = post(port, "/login", {"key": key})
        assert status == 200
        cookie, *flags = headers["set-cookie"].split("; ")
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(flags)
        assert key not in cookie
        assert post(port, POSTS[0], CHAT, cookie=cookie)[0] == 200
        assert get(port, "/config", cookie=cookie.replace(f"_{port}=", f"_{port + 1}="))[0] == 401


def test_beyond_loopback_there_is_always_a_key() -> None:
    assert HttpSettings().checked().key is None
    place = HttpSettings(bind="0.0.0.0").checked()
    assert place.key is not None
    assert len(place.key) >= 32
    assert place.key not in repr(place)


# What is wrong with a request


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"model": "\xc3"}', "not UTF-8"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"model": "a", "model": "b"}', "duplicate field 'model'"),
        (b'{"messages": [{"role": "user", "role": "system"}]}', "duplicate field 'role'"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "cannot|can be read|digits"),
        (b"[" * 5000, "nested deeper"),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000, "nested deeper"),
        (b'{"metadata": ' + b"[" * 65 + b"]" * 65 + b"}", "nested deeper"),
    ],
)
def test_bodies_that_cannot_be_read(port: int, body: bytes, words: str) -> None:
    for path in POSTS:
        status, told = error(post(port, path, body))
        assert status == 400
        assert re.search(words, told["message"]), told


def test_brackets_in_strings_are_no_depth() -> None:
    assert not bodies.too_deep(json.dumps({"a": "[[" * 100 + '\\"[{' * 100, "b": [[]] * 100}))
    assert not bodies.too_deep("[" * 32 + "]" * 32)
    assert bodies.too_deep("[" * 65 + "]" * 65)


@pytest.mark.parametrize(
    "bad", ["[" * 200_000 + '"' * 300_000, '"\\' * 500_000, '["' + '\\"' * 500_000, "{" * 1_000_000]
)
def test_depth_is_found_out_quickly(bad: str) -> None:
    began = time.perf_counter()
    bodies.too_deep(bad)
    assert time.perf_counter() - began < 20


WRONG: dict[str, list[Any]] = {
    "model": [7, [], {}, True, "\ud800"],
    **{
        name: ["1", [], {}, True, 1e999, -1e300, 10**400, *beyond]
        for name, *beyond in (
            ("temperature", -0.1, 2.1),
            ("top_p", -0.1, 1.1),
            ("repetition_penalty", 0.0, 10.1),
            ("presence_penalty", -2.1, 2.1),
            ("frequency_penalty", -2.1, 2.1),
        )
    },
    **{
        name: ["1", [], {}, True, 1.5, 1.0, -1, 0, most + 1, 10**400] for name, most in (("max_tokens", 512), ("n", 16))
    },
    "top_k": ["1", [], {}, True, 1.5, -2],
    "seed": ["1", [], {}, True, 1.5, 2**63, -(2**63) - 1],
    "stop": [7, True, {}, [7], [None], [""], "", ["x"] * 9, ["x" * 257], ["\udfff"]],
    "stream": [0, "true", [], {}],
    "stream_options": [7, [], "x", {"include_usage": 1}, {"other": True}],
}
CONTENTS: list[Any] = [None, 7, True, {}, [7], [{}], "\ud800"]
ROLES: list[Any] = [None, 7, "tool", "function", "User", "", [], "x" * 9999]
WRONG_CHAT = WRONG | {
    "max_completion_tokens": ["1", [], 1.5, -7, 0, 10**30],
    "logprobs": [0, 5, "true", []],
    "top_logprobs": ["1", True, 21, -1, 1.5],
    "messages": [
        *(7, "x", {}, True, [], [7], ["x"], [None], [{}], [{"role": "user"}], [{"content": "x"}]),
        *([{"role": "user", "content": content}] for content in CONTENTS),
        *([{"role": role, "content": "x"}] for role in ROLES),
        *([{"role": "user", "content": [part]}] for part in ({"type": "image_url"}, {"type": "text"}, {"text": "x"})),
        [{"role": "user", "content": "x", "other": 1}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        [{"role": "user", "content": "x" * 512}],
        [{"role": "user", "content": "a word that fits no template"}],
        [{"role": "user", "content": "x"}] * 2049,
    ],
}
WRONG_COMPLETION = WRONG | {
    "logprobs": ["1", True, 6, -1, 1.5],
    "prompt": [
        *(7, True, {}, [], "", [""], [[]], [True], [1, "x"], [[1, True]], [999], [[-1]], [1.5], [None], ["\ud800"]),
        *([[258]], ["x"] * 17, "x" * 512),
    ],
    "echo": [True, 1, "x"],
    "best_of": [2, True],
    "suffix": ["x"],
}


def test_wrong_values_name_their_field(port: int, engine: ScriptedEngine) -> None:
    for path, right, wrong, fields in (
        ("/v1/chat/completions", CHAT, WRONG_CHAT, CHAT_FIELDS),
        ("/v1/completions", COMPLETION, WRONG_COMPLETION, COMPLETION_FIELDS),
    ):
        assert set(wrong) == set(fields)
        for name, values in wrong.items():
            for value in values:
                extra = {"stream": True} if name == "stream_options" else {}
                extra |= {"logprobs": True} if name == "top_logprobs" else {}
                status, told = error(post(port, path, right | extra | {name: value}))
                assert status == 400, (path, name, value)
                assert told["param"] is not None
                assert told["param"].startswith(name), (value, told)
                assert len(told["message"]) < 400
    assert not engine.asks


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_what_is_missing_is_named(port: int, name: str) -> None:
    path, right = (POSTS[1], COMPLETION) if name == "prompt" else (POSTS[0], CHAT)
    for body in ({k: v for k, v in right.items() if k != name}, right | {name: None}):
        status, told = error(post(port, path, body))
        assert (status, told["param"]) == (400, name)
        assert "missing" in told["message"]


def test_unknown_fields_are_named_with_the_nearest(port: int) -> None:
    for path in POSTS:
        status, told = error(post(port, path, BODIES[path] | {"temperatur": 1}))
        assert (status, told["param"]) == (400, "temperatur")
        assert "did you mean 'temperature'?" in told["message"]
        for odd in ("", "é\n\x1b[31m", "x" * 5000):
            status, told = error(post(port, path, BODIES[path] | {odd: 1}))
            assert status == 400
            assert told["message"].isascii()
            assert len(told["message"]) < 600


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"50256": -100}),
        ("modalities", ["text", "audio"]),
        ("functions", [{}]),
        ("best_of", 1.0),
        ("echo", 0),
    ],
)
def test_what_would_change_the_answer_is_not_silently_left_out(port: int, name: str, value: Any) -> None:
    status, told = error(post(port, POSTS[0], CHAT | {name: value}))
    assert (status, told["param"]) == (400, name)
    assert "not supported here" in told["message"]


def test_an_unknown_model_is_not_found(port: int) -> None:
    for path in POSTS:
        status, told = error(post(port, path, BODIES[path] | {"model": "gpt-9"}))
        assert (status, told["code"], told["param"]) == (404, "model_not_found", "model")
        assert "tiny" in told["message"]


def test_what_is_not_there(port: int) -> None:
    for path in ("/v1/embeddings", "/v1", "/docs", "/openapi.json", "/v1/chat/completions/", "//evil.example"):
        assert error(get(port, path))[0] == 404
        assert error(post(port, path, {}))[0] == 404
    assert error(get(port, "/v1/models/"))[0] == 404


def test_too_large_a_body_is_refused_however_it_comes(own: ScriptedEngine) -> None:
    with serving(own, body_bytes=2000) as port:
        big = CHAT | {"user": "x" * 2000}
        for path in POSTS:
            assert error(post(port, path, big))[0] == 413
        assert error(post(port, POSTS[0], b"x" * (4 << 20)))[0] == 413  # read to its end, and dropped
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for length in (b"99999999999", b"9" * 19, b"2001"):
            answer = raw_until(port, head + b"Content-Length: " + length + b"\r\n\r\n{")
            assert answer.startswith(b"HTTP/1.1 413 "), length
        chunk = b"400\r\n" + b"x" * 0x400 + b"\r\n"
        assert raw_until(port, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 3).startswith(b"HTTP/1.1 413 ")
        assert not own.asks
        assert post(port, POSTS[0], CHAT)[0] == 200


def raw_until(port: int, request: bytes) -> bytes:
    """The answer, as far as it comes at once: the connection is left open."""
    with connect(port) as asking:
        asking.sendall(request)
        return asking.recv(65536)


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


def test_smuggled_and_broken_requests(port: int, engine: ScriptedEngine) -> None:
    body = json.dumps(CHAT).encode()
    line = b"POST /v1/chat/completions HTTP/1.1\r\n"
    kind = b"Content-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n" % len(body)
    for request in (
        line + kind + length + b"Connection: close\r\n\r\n" + body,  # no Host
        line + b"Host: localhost\r\nHost: evil.example\r\n" + kind + length + b"Connection: close\r\n\r\n" + body,
        line + b"Host: localhost\r\n" + kind + length + b"Content-Length: 3\r\nConnection: close\r\n\r\n" + body,
        line + b"Host: localhost\r\n" + kind + b"Content-Length: -1\r\nConnection: close\r\n\r\n" + body,
        b"POST http://evil.example/query HTTP/1.1\r\nHost: evil.example\r\n" + kind + b"Connection: close\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100 + b"\r\n\r\n",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        assert raw(port, request)[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.1 421 ")
    assert not engine.asks


# Fuzz

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["tiny", "user", "text", "system", 0, 1, 2, -1, 10**30]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    sorted({*CHAT_FIELDS, *COMPLETION_FIELDS, *UNSUPPORTED, *IGNORED, "message", "query", "history", "x"})
)


@pytest.fixture(scope="module")
def shared_port() -> Iterator[int]:
    with serving(ScriptedEngine(context=32)) as number:
        yield number


@given(st.sampled_from(POSTS), st.booleans(), st.dictionaries(NAMES, VALUES, max_size=5))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_sent_it_is_never_our_fault(
    shared_port: int, path: str, whole: bool, extra: dict[str, Any]
) -> None:
    status, headers, body = post(shared_port, path, (BODIES[path] if whole else {}) | extra)
    assert status in (200, 400, 404), body
    if status != 200:
        error((status, headers, body))
    elif headers["content-type"].startswith("text/event-stream"):
        assert not any("error" in event for event in events(body))


@given(st.sampled_from([*POSTS, "/login"]), st.binary(max_size=60))
def test_nor_whatever_bytes(shared_port: int, path: str, body: bytes) -> None:
    assert error(post(shared_port, path, body))[0] == 400


# Too many, too early, too late


def test_a_stream_that_is_not_taken_closes_what_it_is_made_of() -> None:
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


def test_a_full_house_is_429_and_nobody_there_is_503(port: int, engine: ScriptedEngine) -> None:
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


def test_so_many_bodies_at_once(own: ScriptedEngine) -> None:
    with serving(own, requests=1) as port, connect(port) as slow:
        slow.sendall(written(POSTS[0], CHAT)[:-5])
        eventually(lambda: post(port, POSTS[0], b"{")[0] == 429)
        slow.close()
        eventually(lambda: post(port, POSTS[0], CHAT)[0] == 200)


def test_who_sends_a_body_slowly_makes_room(own: ScriptedEngine) -> None:
    """After a while, and only where another waits; both for the bodies that are read and for connections."""
    http_limits = HttpLimits(request_s=20, ending_s=1, max_connections=3, crowded_s=0.2)
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
        assert b"is too slow while other requests wait" in one.recv(65536)


def test_what_is_no_http_is_400_as_all_errors_are_and_closed(own: ScriptedEngine) -> None:
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
def test_who_leaves_frees_his_place_at_once(
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


def test_who_leaves_in_the_middle_of_his_request(own: ScriptedEngine) -> None:
    with serving(own) as port:
        for how in ("close", "half", "reset"):
            with connect(port) as asking:
                asking.sendall(written(POSTS[0], CHAT)[:-5])
                leave(asking, how)
        eventually(lambda: b'route="/v1/chat/completions",status="499"} 3' in get(port, "/metrics")[2])
    assert not own.asks


def test_a_slow_body_is_not_waited_for(own: ScriptedEngine) -> None:
    with serving(own, body_s=0.2) as port, connect(port) as slow:
        slow.sendall(written(POSTS[0], CHAT)[:-5])
        assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
    assert not own.asks


def test_a_slow_head_is_not_waited_for(own: ScriptedEngine) -> None:
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


def test_requests_one_after_the_other_on_one_connection(port: int) -> None:
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
def test_who_takes_nothing_of_his_stream_is_let_go_and_holds_up_nobody() -> None:
    own = ScriptedEngine(context=1_000_000)
    told: list[int] = []
    own.script = lambda ask: Counted(ask.max_tokens, told)
    http_limits = HttpLimits(write_s=3.0, ending_s=1)
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
def test_who_takes_nothing_of_a_whole_answer_is_cut_off() -> None:
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


def test_thousands_of_connections(own: ScriptedEngine) -> None:
    """Those that ask nothing make room for others; where all have asked, a new one is told to come back."""
    http_limits = HttpLimits(request_s=20, ending_s=1, max_connections=50)
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


def test_one_that_rests_makes_room_after_those_that_never_asked(own: ScriptedEngine) -> None:
    http_limits = HttpLimits(request_s=20, ending_s=1, max_connections=2)
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


def test_many_at_once_all_get_their_own(own: ScriptedEngine) -> None:
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


def test_who_asks_while_the_server_ends_is_told_so(own: ScriptedEngine) -> None:
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


def split(line: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One answer, all of it."""
    answer = http.client.HTTPResponse(line)
    answer.begin()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
