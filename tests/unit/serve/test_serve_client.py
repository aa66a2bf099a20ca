"""The chat in the terminal and the client below it, against a server on loopback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.serve.fake_chat import STORY, Fake, break_off, err, pieces, refuse
from tests.places import eventually
from tests.unit.scripted_engine import SAID, ScriptedEngine
from tests.unit.scripted_engine import serving as scripted

from smolcluster.cli import main
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.serve.client.http import ServerClient, ServerFailed
from smolcluster.serve.client.terminal import Chat, TerminalText, print_chunks, read_all
from smolcluster.serve.engine.types import Unavailable

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
ASKED = [{"role": "user", "content": "hello"}]


@contextlib.contextmanager
def answering(raw: bytes) -> Iterator[str]:
    """A server that says this to whoever comes first, whatever it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(raw)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(300)


# The client


def test_an_answer_comes_in_pieces(fake: Fake) -> None:
    client = ServerClient(fake.url)
    assert client.models() == ["smollm2"]
    found = list(client.chat(ASKED, options={"model": "smollm2", "temperature": 0.5}))
    assert "".join(piece.text for piece in found) == STORY
    assert len([piece for piece in found if piece.text]) == len(fake.words)
    assert [piece.finish for piece in found if piece.finish] == ["stop"]
    assert found[-1].tokens == len(fake.words)
    sent = {"model": "smollm2", "temperature": 0.5, "messages": ASKED, "stream": True}
    assert fake.bodies == [sent | {"stream_options": {"include_usage": True}}]


def test_a_completion_streamed_or_whole(fake: Fake) -> None:
    fake.words = [" upon", " a", " time"]
    for stream in (True, False):
        found = list(ServerClient(fake.url).complete("Once", options={"model": "m"}, stream=stream))
        assert "".join(piece.text for piece in found) == " upon a time"
        assert [piece.tokens for piece in found if piece.tokens] == [3]
    assert [body.get("stream") for body in fake.bodies] == [True, None]
    assert {body["prompt"] for body in fake.bodies} == {"Once"}


def test_closing_the_generator_closes_the_connection(fake: Fake) -> None:
    fake.hold_at = 2
    found = ServerClient(fake.url).chat(ASKED, options={})
    assert next(found).text == "Here"
    found.close()
    eventually(lambda: fake.left == 1, what="the server hears that nobody listens")


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (400, UserError, "temperature is too high"),
        (404, UserError, "temperature is too high"),
        (401, UserError, "needs an API key: give it with --key or in SMOLCLUSTER_API_KEY"),
        (429, ServerFailed, "temperature is too high; try again in 3 s"),
        (503, ServerFailed, "temperature is too high; try again in 3 s"),
        (500, ServerFailed, r"failed \(500\): temperature is too high"),
    ],
)
def test_refusals(fake: Fake, status: int, kind: type[SmolclusterError], words: str) -> None:
    fake.next.append(refuse(status, "temperature is too high", retry_after="3"))
    with pytest.raises(kind, match=words) as raised:
        list(ServerClient(fake.url).chat(ASKED, options={}))
    assert raised.value.exit_code == (2 if kind is UserError else 1)
    if status in (429, 503):
        assert isinstance(raised.value, ServerFailed)
        assert raised.value.retry_after_s == 3


def test_a_stream_that_breaks_off_is_no_answer(fake: Fake) -> None:
    client = ServerClient(fake.url)
    for turn, words in (
        (break_off(3), "lost the connection"),
        (err(2, "the last machine is gone"), "the last machine is gone"),
    ):
        fake.next.append(turn)
        found: list[str] = []
        with pytest.raises(ServerFailed, match=words):
            found.extend(piece.text for piece in client.chat(ASKED, options={}))
        assert found == fake.words[: turn.cut_at or turn.error_at]


def test_a_key(fake: Fake) -> None:
    fake.key = "a-key-for-the-test"
    with pytest.raises(UserError, match="needs an API key: give it with"):
        ServerClient(fake.url).models()
    with pytest.raises(UserError, match="invalid API key"):
        ServerClient(fake.url, key="another").models()
    assert ServerClient(fake.url, key=fake.key).models() == ["smollm2"]
    printed = ServerClient(f"{fake.url}/#key={fake.key}")  # what `smolcluster serve` prints
    assert printed.models() == ["smollm2"]
    assert fake.key not in printed.url
    with pytest.raises(UserError, match="--key has characters"):
        ServerClient(fake.url, key="two\r\nlines: x")


def test_a_refused_connection_names_the_command() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        UserError, match=f"no server at http://127.0.0.1:{port}; start one with: smolcluster serve smollm2"
    ):
        ServerClient(f"http://127.0.0.1:{port}").models()


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://x:99999", "http://[::1", "http://a b/", "http://me:secret@x", "http://a\nb"]
)
def test_invalid_addresses(url: str) -> None:
    with pytest.raises(UserError, match="address") as raised:
        ServerClient(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["{0}", "http://{0}/", "http://{0}/v1", "http://{0}/v1/"])
def test_ways_to_write_an_address(fake: Fake, url: str) -> None:
    assert ServerClient(url.format(fake.url.removeprefix("http://"))).models() == ["smollm2"]


def test_answers_of_other_servers() -> None:
    page = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>"
    with answering(page) as url, pytest.raises(ServerFailed, match=r"invalid response|lost the connection"):
        ServerClient(url).models()
    with answering(b"SSH-2.0-OpenSSH_9.2\r\n") as url, pytest.raises(UserError, match="cannot connect"):
        ServerClient(url).models()
    hollow = b'HTTP/1.1 200 OK\r\ncontent-length: 29\r\n\r\n{"data": [{"id": 1}, 2, null]}'
    with answering(hollow) as url, pytest.raises(ServerFailed, match=r"invalid response|no model|lost the connection"):
        ServerClient(url).models()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    for body, words in (
        (b"data: {nonsense\n\n", "invalid response"),
        (b"data: [1]\n\n", "invalid response"),
        (b"data: " + b"[" * 200_000 + b"\n\n", "invalid response"),
        (b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n', "lost the connection"),
        (b"data: " + b"x" * (1 << 20) + b"\n", "a line longer than 1 MiB"),
    ):
        # It hangs up at once, and that may be heard before what it said.
        with answering(head + body) as url, pytest.raises(ServerFailed, match=f"{words}|lost the connection"):
            list(ServerClient(url).chat(ASKED, options={}))


# What reaches the terminal


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["\x1b[31mred\x1b[0m"], "red"),
        (["a\x1b", "[31", "mb"], "ab"),
        (["a\x1b", "]0;title\x07b"], "a]0;titleb"),
        (["\x1b", "\x1b", "[2J", "x"], "x"),
        (["end\x1b["], "end["),
        (["\x9b31m", "\r", "\x08", "x\n\ty"], "31mx\n\ty"),
        (["\x1b[" + "1" * 100, "m", "z"], None),
        (["\u202egnp.exe"], "gnp.exe"),
        (["\u0645\u06cc\u200c", "\u062e"], "\u0645\u06cc\u200c\u062e"),  # Persian joins, or not
        (["\ud83d"], ""),
    ],
)
def test_escape_sequences_are_removed(given: list[str], shown: str | None) -> None:
    filtered = TerminalText()
    found = "".join(map(filtered.push, given)) + filtered.flush()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", found)
    if shown is not None:
        assert found == shown


def test_escape_sequences_are_removed_wherever_pieces_end(fake: Fake) -> None:
    text = "one \x1b[1;31mtwo\x1b[0m three\x1b[K"
    for at in range(len(text) + 1):
        for then in range(at, len(text) + 1):
            filtered = TerminalText()
            parts = (text[:at], text[at:then], text[then:])
            assert "".join(map(filtered.push, parts)) + filtered.flush() == "one two three"


def test_characters_outside_the_terminals_encoding(fake: Fake) -> None:
    fake.words = ["naïve ", "日本"]
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_chunks(ServerClient(fake.url).chat(ASKED, options={}), out)
    out.seek(0)
    assert out.read() == "na?ve ??\n"


# The conversation


def talk(fake: Fake, *lines: str | type[BaseException], **options: object) -> tuple[int, str, Chat]:
    """Says these lines; a type is raised instead of one."""
    left = iter(lines)

    def read(prompt: str) -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line

    out = io.StringIO()
    chat = Chat(client=ServerClient(fake.url), model="smollm2", read=read, out=out, **options)  # type: ignore[arg-type]
    return chat.run(), out.getvalue(), chat


def test_a_conversation_remembers(fake: Fake) -> None:
    fake.words = ["I ", "see."]
    status, out, _ = talk(fake, "my name is Ada", "", "who am I?", system="Be kind.")
    assert status == 0
    assert [m["role"] for m in fake.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert fake.bodies[1]["messages"][2]["content"] == "I see."
    assert out.count("I see.\n") == 2
    assert "tokens/s, first after" in out


def test_a_model_without_a_template_continues_the_text(fake: Fake) -> None:
    fake.words = [" upon", " a time."]
    status, out, chat = talk(
        fake, "/system Be brief.", "Once", "Then", continues=True, example_prompts=["The sea is wide"]
    )
    assert status == 0
    assert [body["prompt"] for body in fake.bodies] == ["Once", "Once upon a time.\nThen"]
    assert "write the beginning of a text to continue, such as: The sea is wide" in out
    assert "/system has no effect: this model has no chat template; put it before your text" in out
    assert chat.system == ""


def test_wait_ready(fake: Fake) -> None:
    fake.tell(ready=False)
    told: list[str] = []

    def tell(words: str) -> None:
        told.append(words)
        fake.tell(ready=True)

    ServerClient(fake.url).wait_ready(tell)
    assert told == ["1 of 2 stages ready"]
    fake.tell(ready=False)
    with pytest.raises(ServerFailed, match="still not ready after 0 s: 1 of 2 stages ready"):
        ServerClient(fake.url).wait_ready(told.append, timeout_s=0)
    fake.tell(problems=["pi5: \x1b[2J2 GB are\x07 too little"])
    with pytest.raises(ServerFailed, match=r"0 s: 1 of 2 stages ready; pi5: 2 GB are too little$"):
        ServerClient(fake.url).wait_ready(told.append, timeout_s=0)


def test_several_lines(fake: Fake) -> None:
    talk(fake, "one\\", "two", '"""', "a", "/quit", 'b"""', '"""all in one"""', "//etc/passwd")
    asked = [body["messages"][-1]["content"] for body in fake.bodies]
    assert asked == ["one\ntwo", "a\n/quit\nb", "all in one", "/etc/passwd"]


def test_commands(fake: Fake, tmp_path: Path) -> None:
    fake.words = ["yes"]
    path = tmp_path / "talk.json"
    lines = ["/help", "/set temperature 0.7", "/set top-k 5", "/set seed -", "/set", "/system Be brief.", "really?"]
    status, out, _ = talk(fake, *lines, "/retry", f"/save {path}", f"/save {path}", "/new", "/retry", "/quit", "never")
    assert status == 0
    assert [(body["temperature"], body["top_k"], len(body["messages"])) for body in fake.bodies] == [(0.7, 5, 2)] * 2
    assert [m["role"] for m in json.loads(path.read_text(encoding="utf-8"))] == ["system", "user", "assistant"]
    assert "exists; choose another name" in out
    assert "there is nothing to retry" in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/hlep", "did you mean '/help'?"),
        ("/set temperatur 1", "did you mean 'temperature'?"),
        ("/set temperature hot", "'hot' is not a number"),
        ("/set temperature 3", "outside 0 to 2"),
        ("/set temperature nan", "outside 0 to 2"),
        ("/set top_k 1.5", "not a whole number"),
        ("/save", "needs one file name"),
        ("/save /nowhere/at/all/x.md", "cannot be written"),
        ("/save /tmp/a\0b.md", "cannot be written: embedded null byte"),
        ("/save ~nosuchuser/x.md", "~nosuchuser/x.md: there is no such home directory"),
        ('/save "a" "b', '"a" "b is not a file name: no closing quotation'),
    ],
)
def test_invalid_commands_do_not_end_the_conversation(fake: Fake, line: str, words: str) -> None:
    status, out, _ = talk(fake, line, "/quit")
    assert status == 0
    assert words in out
    assert fake.bodies == []


def test_a_failed_request_can_be_retried(fake: Fake) -> None:
    fake.words = ["fine"]
    fake.next.extend([refuse(503, "layers 3-5 are on no machine", retry_after="5"), break_off(0)])
    status, out, chat = talk(fake, "hello", "/retry", "/retry")
    assert status == 0
    assert "layers 3-5 are on no machine; try again in 5 s; /retry to try again" in out
    assert "lost the connection" in out
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]


def test_a_rejected_message_is_removed(fake: Fake) -> None:
    fake.words = ["fine"]
    fake.next.append(refuse(400, "messages: 201 tokens; the model's context is 128"))
    status, out, chat = talk(fake, "much too long", "hi")
    assert status == 0
    assert "the model's context is 128; your message was removed" in out
    assert [m["content"] for m in chat.messages] == ["hi", "fine"]
    assert fake.bodies[1]["messages"] == [{"role": "user", "content": "hi"}]


def test_ctrl_c_twice_leaves(fake: Fake) -> None:
    status, out, _ = talk(fake, KeyboardInterrupt, "/set", KeyboardInterrupt, KeyboardInterrupt, "never")
    assert status == 130
    assert out.count("Ctrl-C again leaves") == 2
    assert fake.bodies == []


# The commands


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    """Run a command with this text in its standard input; return exit status, output and errors."""

    def run(*arguments: str, text: str = "", **env: str) -> tuple[Any, str, str]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code, *capsys.readouterr()

    return run


def test_a_question_through_a_pipe(fake: Fake, command: Callable[..., Any]) -> None:
    fake.words = ["\x1b[1mbold\x1b", "[0m ", "words"]
    asked = ("chat", fake.url, "--system", "Be brief.", "--max-tokens", "7")
    assert command(*asked, text="Why?\nBecause?\n") == (0, "bold words\n", "")
    assert [m["content"] for m in fake.bodies[0]["messages"]] == ["Be brief.", "Why?\nBecause?"]
    assert fake.bodies[0]["max_tokens"] == 7


def test_a_pipe_into_a_model_without_a_template(fake: Fake, command: Callable[..., Any]) -> None:
    fake.chat, fake.words = False, [" upon a time"]
    assert command("chat", fake.url, text="Once\n") == (0, " upon a time\n", "")
    assert fake.bodies[0]["prompt"] == "Once"
    status, _, err = command("chat", fake.url, "--system", "Be brief.", text="Once\n")
    assert (status, len(fake.bodies)) == (2, 1)
    assert "--system has no effect: this model has no chat template" in err.replace("\n", " ")


@pytest.mark.parametrize("asked", [("chat",), ("generate", "Once", "--url")])
def test_commands_wait_for_stages_that_are_starting(fake: Fake, asked: tuple[str, ...]) -> None:
    fake.tell(ready=False)
    fake.words = ["yes"]
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "smolcluster", *asked, fake.url]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdin.write("Once\n")
        process.stdin.close()
        process.stdin = None
        assert process.stderr.readline() == "waiting: 1 of 2 stages ready\n"
        assert fake.bodies == []
        fake.tell(ready=True)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (0, "yes\n", "")


def test_a_model_in_place_of_the_address(tmp_path: Path, command: Callable[..., Any]) -> None:
    status, _, err = command("chat", str(tmp_path), text="Why?\n")
    assert status == 2
    assert f"for a model: smolcluster serve {tmp_path}, then: smolcluster chat" in err.replace("\n", "")


def test_generate(fake: Fake, command: Callable[..., Any]) -> None:
    fake.key, fake.words = "a-key-for-the-test", [" upon", " a time"]
    options = ("--url", fake.url, "--temperature", "0", "--seed", "3", "--stop", "x", "--stop", "y")
    assert command("generate", "Once", *options, SMOLCLUSTER_API_KEY=fake.key) == (0, " upon a time\n", "")
    sent = {k: fake.bodies[0][k] for k in ("prompt", "temperature", "seed", "stop", "model", "stream")}
    expected = {"prompt": "Once", "temperature": 0, "seed": 3, "stop": ["x", "y"], "model": "smollm2", "stream": True}
    assert sent == expected
    whole = ("generate", "-", "--url", fake.url, "--no-stream", "--key", fake.key)
    assert command(*whole, text="There was\n") == (0, " upon a time\n", "")
    assert (fake.bodies[1]["prompt"], "stream" in fake.bodies[1]) == ("There was", False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("chat",), "the question is empty"),
        (("chat", "--temperature", "9"), "--temperature 9.0 is outside 0 to 2"),
        (("generate", ""), "the prompt is empty"),
        (("generate", "x", "--max-tokens", "0"), "--max-tokens 0 is outside"),
        (("generate", "x", "--url", "ftp://x"), "is not the address of a server"),
    ],
)
def test_mistakes_end_with_two(arguments: tuple[str, ...], words: str, command: Callable[..., Any]) -> None:
    status, _, err = command(*arguments)
    assert status == 2
    assert words in err
    assert "Traceback" not in err


def test_standard_input_that_is_not_text() -> None:
    with pytest.raises(UserError, match=r"the question is not utf-8 text: .* at byte 0"):
        read_all(io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"), what="the question")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no pseudo-terminals here")
def test_in_a_terminal(fake: Fake) -> None:
    """Streams while it is typed; Ctrl-C stops the answer, a second leaves with 130."""
    import pty

    fake.words, fake.hold_at = pieces("one two three four"), 2
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "smolcluster", "chat", fake.url],
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        preexec_fn=_with_terminal,
        env=os.environ | {"TERM": "xterm", "NO_COLOR": "1"},
    )
    os.close(side)
    seen = bytearray()

    def reading() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while part := os.read(main, 4096):
                seen.extend(part)

    thread = threading.Thread(target=reading)
    thread.start()

    def appears(words: bytes) -> Callable[[], bool]:
        return lambda: words in seen

    try:
        eventually(appears(b"> "), what="the prompt", timeout_s=60)
        os.write(main, b"count\n")
        eventually(appears(b"one two"), what="a part of the answer")
        os.write(main, b"\x03")
        eventually(appears(b"stopped; Ctrl-C again leaves"), what="that it was stopped")
        eventually(lambda: fake.left == 1, what="the server hears of it")
        assert b"three" not in seen
        os.write(main, b"\x03")
        assert process.wait(300) == 130
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        thread.join(300)
        os.close(main)


def _with_terminal() -> None:
    """The terminal of the new session is the one on stdin: so Ctrl-C there becomes a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_before_the_real_service() -> None:
    engine = ScriptedEngine()
    with scripted(engine) as port:
        client = ServerClient(f"http://127.0.0.1:{port}")
        assert client.models() == ["tiny"]
        options = {"model": "tiny", "temperature": 0.0, "max_tokens": len(SAID), "seed": 3, "top_k": 5, "stop": ["dog"]}
        for found in (client.chat(ASKED, options=options), client.complete("hello", options=options, stream=False)):
            told = list(found)
            assert "".join(piece.text for piece in told) == SAID.partition("dog")[0]
            assert "stop" in [piece.finish for piece in told]
        engine.refuse = Unavailable("layers 15 to 29 are on no machine")
        with pytest.raises(ServerFailed, match="layers 15 to 29 are on no machine; try again in 5 s"):
            list(client.chat(ASKED, options=options))
        engine.refuse, engine.hold_after = None, 3
        found = client.chat(ASKED, options=options)
        assert next(found).text == "T"
        found.close()
        eventually(lambda: engine.open == 0, what="the engine is free again")
        with pytest.raises(UserError, match="'other' is not served here; available: tiny"):
            list(client.complete("x", options={"model": "other"}))
