"""OpenAI's own Python client against our server: what works there works here, and errors are the ones it knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.scripted_engine import END, SAID, ScriptedEngine, serving

from smolcluster.serve.engine.types import Busy, Unavailable

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

KEY = "a-key-of-16-letters"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedEngine, int, Any]]:
    engine = ScriptedEngine()
    with serving(engine, place={"key": KEY}, body_bytes=100_000) as port:
        address = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=300) as client:
            yield engine, port, client


@pytest.fixture
def engine(served: tuple[ScriptedEngine, int, Any]) -> ScriptedEngine:
    """Behind the client, as if it were new."""
    engine = served[0]
    engine.__init__()  # type: ignore[misc]
    return engine


@pytest.fixture
def client(served: tuple[ScriptedEngine, int, Any], engine: ScriptedEngine) -> Any:
    return served[2]


def test_a_conversation_goes_on_with_what_came_back(client: Any, engine: ScriptedEngine) -> None:
    first = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_tokens=3)
    assert (first.model, first.choices[0].message.role, first.choices[0].finish_reason) == (
        "tiny",
        "assistant",
        "length",
    )
    assert (first.usage.completion_tokens, first.usage.total_tokens) == (3, first.usage.prompt_tokens + 3)
    messages = [*HELLO, first.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "and?"}]}]
    client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=3)
    assert bytes(engine.asks[1].tokens[1:]) == b"user: hello\nassistant: The\nuser: and?\n"


def test_a_stream(client: Any) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        temperature=0,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID[:9]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert (last.choices, last.usage.completion_tokens) == ([], 9)


def test_the_clients_own_way_to_stream(client: Any) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, temperature=0, stop=" brown", logprobs=True
    ) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= kinds
    assert found.choices[0].message.content == SAID[:9]
    assert len(found.choices[0].logprobs.content) == 9


def test_a_stream_that_is_left_frees_its_place(client: Any, engine: ScriptedEngine) -> None:
    engine.hold_after = 3
    stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    next(stream)
    assert engine.open == 1
    stream.close()
    assert engine.freed.acquire(timeout=300)


def test_stop(client: Any, engine: ScriptedEngine) -> None:
    for stop, said in (("fox", "The quick brown "), (["lazy", "quick"], "The ")):
        found = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, stop=stop)
        assert (found.choices[0].message.content, found.choices[0].finish_reason) == (said, "stop")
    engine.script = lambda _: [*b"done", END]
    found = client.chat.completions.create(model="tiny", messages=HELLO)
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("done", "stop")


def test_logprobs(client: Any) -> None:
    found = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=2, logprobs=True, top_logprobs=3
    )
    first, second = found.choices[0].logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("T", [84], -0.5)
    assert [top.token for top in second.top_logprobs] == ["h", "i", "j"]
    old = client.completions.create(model="tiny", prompt="x", temperature=0, max_tokens=2, logprobs=1)
    assert (old.choices[0].logprobs.tokens, old.choices[0].logprobs.text_offset) == (["T", "h"], [0, 1])


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("temperature", {"temperature": 3}),
        ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("minp", {"extra_body": {"minp": 0.1}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(client: Any, field: str, more: dict[str, Any], stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "stream": stream} | more)
    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error"


def test_a_wrong_key(served: tuple[ScriptedEngine, int, Any]) -> None:
    port = served[1]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.chat.completions.create(model="tiny", messages=HELLO)
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_the_client_tries_again_when_it_is_told_to(client: Any, engine: ScriptedEngine) -> None:
    refusal = Busy("one moment")
    refusal.retry_after_s = 0.01
    engine.refuse = refusal

    def clear(_: Any) -> None:
        engine.refuse = None

    patient = client.with_options(max_retries=2)
    hooks = patient._client.event_hooks["response"]
    hooks.append(clear)
    try:
        assert patient.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).choices
    finally:
        hooks.remove(clear)


def test_a_stream_that_breaks_in_the_middle(client: Any, engine: ScriptedEngine) -> None:
    engine.fail = (3, Unavailable("mini1 is lost, and nobody can take its layers"))
    stream = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, stream=True)
    begun = [next(stream).choices[0].delta.content for _ in range(4)]
    assert begun == ["", *SAID[:3]]
    with pytest.raises(openai.APIError, match="mini1 is lost"):
        next(stream)
