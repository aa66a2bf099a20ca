"""Requests that the HTTP service refuses: by sender, by contents, by anything at all."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.dashboard_client import get, raw
from tests.unit.scripted_engine import ScriptedEngine, serving
from tests.unit.serve.http_requests import BODIES, CHAT, COMPLETION, GETS, POSTS, connect, error, events, post

from smolcluster.serve.http.request_parsing import CHAT_FIELDS, COMPLETION_FIELDS, IGNORED, UNSUPPORTED
from smolcluster.serve.http.server import HttpSettings
from smolcluster.web import bodies
from smolcluster.web.guard import HEADERS

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def test_every_response_has_the_security_headers(port: int) -> None:
    found = [get(port, path) for path in (*GETS[:3], *GETS[4:], "/nowhere", "/")]
    found += [post(port, path, BODIES[path]) for path in POSTS]
    found += [post(port, POSTS[0], b"{"), post(port, POSTS[0], CHAT | {"stream": True}), post(port, "/x", {})]
    found += [get(port, "/health", host="evil.example"), get(port, "/health", origin="http://evil.example")]
    for _, headers, _ in found:
        assert {name: headers.get(name) for name in HEADERS} == HEADERS
        assert "server" not in headers
        assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize("verb", ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_other_methods_are_405(port: int, verb: str) -> None:
    for allowed, paths in (("POST", (*POSTS, "/login")), ("GET, HEAD", (*GETS, "/", "/static/chat.js"))):
        for path in paths if verb not in allowed.split(", ") else ():
            status, headers, _ = get(port, path, method=verb)
            assert (status, headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("path", [*POSTS, "/login", *GETS, "/", "/static/chat.js", "/nowhere"])
def test_foreign_hosts_and_origins_are_refused_everywhere(port: int, engine: ScriptedEngine, path: str) -> None:
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


def test_requests_of_our_own_page_are_accepted(port: int) -> None:
    own = {"origin": f"http://127.0.0.1:{port}", "sec_fetch_site": "same-origin"}
    assert post(port, POSTS[0], CHAT, **own)[0] == 200


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "application/jsonp",
        "text/json", "text/plain; application/json",
    ],
)  # fmt: skip
def test_content_types_of_html_forms_are_refused(port: int, engine: ScriptedEngine, kind: str) -> None:
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
def test_invalid_bodies(port: int, body: bytes, words: str) -> None:
    for path in POSTS:
        status, told = error(post(port, path, body))
        assert status == 400
        assert re.search(words, told["message"]), told


def test_brackets_in_strings_are_not_nesting() -> None:
    assert not bodies.too_deep(json.dumps({"a": "[[" * 100 + '\\"[{' * 100, "b": [[]] * 100}))
    assert not bodies.too_deep("[" * 32 + "]" * 32)
    assert bodies.too_deep("[" * 65 + "]" * 65)


@pytest.mark.parametrize(
    "bad", ["[" * 200_000 + '"' * 300_000, '"\\' * 500_000, '["' + '\\"' * 500_000, "{" * 1_000_000]
)
def test_the_depth_check_takes_linear_time(bad: str) -> None:
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
def test_missing_fields_are_named(port: int, name: str) -> None:
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
def test_unsupported_fields_are_refused(port: int, name: str, value: Any) -> None:
    status, told = error(post(port, POSTS[0], CHAT | {name: value}))
    assert (status, told["param"]) == (400, name)
    assert "not supported here" in told["message"]


def test_an_unknown_model_is_not_found(port: int) -> None:
    for path in POSTS:
        status, told = error(post(port, path, BODIES[path] | {"model": "gpt-9"}))
        assert (status, told["code"], told["param"]) == (404, "model_not_found", "model")
        assert "tiny" in told["message"]


def test_unknown_paths_are_404(port: int) -> None:
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
def test_no_json_is_answered_with_500(shared_port: int, path: str, whole: bool, extra: dict[str, Any]) -> None:
    status, headers, body = post(shared_port, path, (BODIES[path] if whole else {}) | extra)
    assert status in (200, 400, 404), body
    if status != 200:
        error((status, headers, body))
    elif headers["content-type"].startswith("text/event-stream"):
        assert not any("error" in event for event in events(body))


@given(st.sampled_from([*POSTS, "/login"]), st.binary(max_size=60))
def test_no_bytes_are_answered_with_500(shared_port: int, path: str, body: bytes) -> None:
    assert error(post(shared_port, path, body))[0] == 400
