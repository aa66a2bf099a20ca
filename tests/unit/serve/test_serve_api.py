"""The answers of the HTTP service, on a real port of loopback: OpenAI's API, the simple one, monitoring, the page."""

from __future__ import annotations

import functools
import http.client
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard_client import get
from tests.places import eventually
from tests.unit.scripted_engine import END, SAID, ScriptedEngine, serving
from tests.unit.serve.http_requests import BODIES, CHAT, COMPLETION, POSTS, asked, connect, error, events, post

from smolcluster.serve.http import api
from smolcluster.serve.http.request_parsing import COMPLETION_FIELDS, IGNORED, UNSUPPORTED
from smolcluster.serve.http.response_bodies import completion_logprobs
from smolcluster.serve.http.service import TokenLogprob
from smolcluster.web.connections import HttpLimits

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def test_unicode_line_ends_do_not_end_an_event(port: int, engine: ScriptedEngine) -> None:
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
def test_usage_of_a_stream_on_request(port: int, path: str) -> None:
    wanted = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
    *chunks, last, done = events(post(port, path, BODIES[path] | wanted)[2])
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in chunks)


def test_top_logprobs_include_the_sampled_token() -> None:
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


def test_fields_without_effect_are_accepted(port: int) -> None:
    extra = dict.fromkeys(IGNORED, "x") | {
        name: (values[0] if values else None) for name, values in UNSUPPORTED.items() if name not in COMPLETION_FIELDS
    }
    asked(port, "/v1/chat/completions", CHAT | {"max_tokens": 1} | extra)
    asked(
        port, "/v1/chat/completions", CHAT | {"max_tokens": 1} | dict.fromkeys(UNSUPPORTED) | {"stop": None, "n": None}
    )
    asked(port, "/v1/completions", COMPLETION | {"max_tokens": 1, "echo": False, "best_of": 1, "suffix": ""})


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
    assert 'smolcluster_serve_requests_total{route="/v1/chat/completions",status="200"} 1.0' in lines
    assert 'smolcluster_serve_requests_total{route="/health",status="503"} 1.0' in lines
    assert 'smolcluster_serve_requests_total{route="other",status="404"} 2.0' in lines
    for line in (
        *("prompt_tokens_total 10.0", "generated_tokens_total 2.0", "ready 0.0", "running 0.0"),
        *("first_token_seconds_count 1.0", 'first_token_seconds_bucket{le="+Inf"} 1.0', "token_seconds_count 1.0"),
    ):
        assert f"smolcluster_serve_{line}" in lines


def test_events_are_sent_on_change_only(port: int, engine: ScriptedEngine) -> None:
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


def test_shutdown_ends_event_streams_cleanly(own: ScriptedEngine) -> None:
    with serving(own) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("GET", "/events")
        answer = connection.getresponse()
        answer.readline()
    assert answer.read() == b"\n"  # and no error: the stream was ended, not cut
    connection.close()


@pytest.mark.parametrize(("path", "held"), [("/v1/completions", None), ("/query", None), ("/v1/completions", 3)])
def test_shutdown_ends_a_running_stream_with_an_error(own: ScriptedEngine, path: str, held: int | None) -> None:
    """Also one that waits for a machine."""
    own.pace_s, own.hold_after = 0.05, held
    with serving(own, http_limits=HttpLimits(shutdown_s=20)) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        body = json.dumps({"prompt": "x", "max_tokens": 500, "stream": True})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
    told = [line for line in answer.read().splitlines() if line.startswith(b"data: ")]
    connection.close()
    assert json.loads(told[-1][6:])["error"]["message"] == "the server is stopping"
    assert own.freed.acquire(timeout=300)


def test_the_number_of_viewers_is_limited(own: ScriptedEngine) -> None:
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
