"""An engine and a tokenizer without a model: bytes are tokens, and a test scripts the answers."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import random
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from tests.server_thread import served

from smolcluster.errors import UserError
from smolcluster.serve.engine.types import SequenceRequest, Token
from smolcluster.serve.http import server as http
from smolcluster.serve.http.service import Service, ServiceLimits
from smolcluster.web.connections import HttpLimits

END, BEGIN = 256, 257
SAID = "The quick brown fox jumps over the lazy dog. "


class ByteText:
    vocab_size = 258
    stop_tokens = frozenset({END})
    has_template = True

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[-1]["content"] == "a word that fits no template":
            raise UserError("roles must take turns")
        return [BEGIN, *self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))]

    def detokenizer(self, *, begins: bool = True) -> ByteDetokenizer:
        return ByteDetokenizer(begins=begins)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


class ByteDetokenizer:
    """Drops the space before the first token."""

    def __init__(self, *, begins: bool) -> None:
        self._decoder, self._begins = codecs.getincrementaldecoder("utf-8")("replace"), begins

    def push(self, token: int) -> str:
        begins, self._begins = self._begins, False
        return "" if begins and token == 32 else self._decoder.decode(bytes([token]) if token < 256 else b"")

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


def usual(ask: SequenceRequest) -> list[int]:
    """Return the same sentence repeatedly when greedy, else letters drawn from the seed."""
    if ask.sampling.temperature == 0:
        said = SAID.encode()
        return [said[i % len(said)] for i in range(ask.max_tokens)]
    return list(random.Random(ask.sampling.seed).choices(b"abcdefghijklmnopqrstuvwxyz", k=ask.max_tokens))


class ScriptedEngine:
    """Answers a request with what `script` returns for it. Tests wait for its semaphores, not for time."""

    def __init__(self, script: Callable[[SequenceRequest], list[int]] = usual, *, context: int = 512) -> None:
        self.context = self.model_context = context
        self.script = script
        self.asks: list[SequenceRequest] = []
        self.open = 0
        self.begun, self.freed = threading.Semaphore(0), threading.Semaphore(0)
        self.refuse: Exception | None = None
        self.fail: tuple[int, Exception] | None = None  # after so many tokens
        self.hold_after: int | None = None  # so many tokens, until the sequence is closed
        self.pace_s = 0.0  # of a token
        self.ready = True
        self.looked = 0  # number of calls of `state`
        self.more: dict[str, Any] = {}

    async def stream(self, ask: SequenceRequest) -> AsyncGenerator[Token, None]:
        if self.refuse is not None:
            raise self.refuse
        self.asks.append(ask)
        self.open += 1
        self.begun.release()
        try:
            tokens = self.script(ask)
            for i, token in enumerate(tokens):
                await asyncio.sleep(self.pace_s)
                if self.fail is not None and self.fail[0] == i:
                    raise self.fail[1]
                if self.hold_after == i:
                    await asyncio.Event().wait()
                if token in ask.stop_tokens:
                    yield Token(token=-1, finish="stop")
                    return
                yield self._told(token, ask, last=i + 1 == ask.max_tokens)
        finally:
            self.open -= 1
            self.freed.release()

    def _told(self, token: int, ask: SequenceRequest, *, last: bool) -> Token:
        finish: Any = "length" if last else None
        wanted = ask.sampling.logprobs
        if wanted is None:
            return Token(token=token, finish=finish)
        top = tuple(((token + n) % 256, -0.5 - n) for n in range(wanted))
        return Token(token=token, logprob=-0.5, top=top, finish=finish)

    def state(self) -> dict[str, Any]:
        self.looked += 1
        machine = {"name": "mini1", "device": "cpu", "tokens": 0, "busy": 0.0, "sequences": self.open, "state": "ready"}
        stages = [{"layers": [0, 14], "machines": [machine]}, {"layers": [15, 29], "machines": [machine]}]
        return {
            "ready": self.ready,
            "model": "tiny",
            "layers": 30,
            "stages": stages,
            "spares": [],
            "running": self.open,
            "waiting": 0,
            **self.more,
        }


def service_of(engine: ScriptedEngine, **limits: Any) -> Service:
    return Service(engine, ByteText(), model_name="tiny", limits=ServiceLimits(**limits))


@contextlib.contextmanager
def serving(
    engine: ScriptedEngine, *, http_limits: HttpLimits | None = None, place: Any = None, **limits: Any
) -> Iterator[int]:
    """Run the service on a free port of loopback until the end of the block."""
    said = {"port": 0, "limits": http_limits or HttpLimits(shutdown_s=1), **(place or {})}

    def serve(ready: Callable[[str], None], until: threading.Event) -> None:
        asyncio.run(http.serve(service_of(engine, **limits), http.HttpSettings(**said), ready=ready, until=until))

    with served(serve) as port:
        yield port
