"""From a request in words to an answer in words: checked, tokenised, asked of the engine, made text again, and counted.

    Request ── check, tokenise ──> Job ── ask the engine ──> Piece, Piece, ... Piece(finish)
                                    │      for every choice of every prompt
                                    └──────────────────────> the same, one whole Piece for each choice

Nothing here knows of HTTP or JSON. What is wrong with a request is a BadRequest that names the field.

Choice j of a request with seed s is what seed s + j alone would give; without a seed one is drawn, and told.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from smolcluster.errors import SmolclusterError, UserError
from smolcluster.observe.text import printable
from smolcluster.serve.engine.types import Busy, Engine, Finish, SamplingParams, SequenceRequest, Token, Unavailable
from smolcluster.serve.http.metrics import Metrics
from smolcluster.serve.text.chat_template import TemplateFailed
from smolcluster.serve.text.conversation import ChatTokenizer, StopStrings

log = logging.getLogger(__name__)

_LONG = 2000  # characters: what takes a while to tokenise does so beside the event loop
_SEEDS = 1 << 63
_LEAST_P = 1e-9
_BUSY = "as many sequences as may run and wait already"


# What is asked for


class BadRequest(SmolclusterError):
    """Something about a request is wrong. `field` names the place; `code` is one of OpenAI's where there is one."""

    def __init__(self, message: str, field: str | None, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


class UnknownModel(BadRequest):
    """It may be served elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What a client asks for. Exactly one of `messages` and `prompts`; None leaves a thing to the server."""

    model: str | None = None
    messages: Sequence[dict[str, str]] | None = None  # role and content
    prompts: Sequence[str | Sequence[int]] | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    temperature: float | None = None
    top_k: int | None = None  # 0 and -1: all
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logprobs: int | None = None
    max_tokens_field: str = "max_tokens"  # how the request called these
    logprobs_field: str = "logprobs"


# What comes back


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token as it is reported where logprobs are asked for. `offset`: where its text begins in the answer."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """Some more text of a choice; its last one has `finish`, and how it went."""

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    first_token_s: float | None = None
    tokens_per_s: float | None = None  # after the first; None for fewer than two


@dataclass(slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob:
    """A request that is in order: what the engine is asked, choice by choice."""

    asks: tuple[SequenceRequest, ...]  # in the order of their index
    stop: tuple[str, ...]
    begins: bool  # a text of its own; else the prompt goes on
    seed: int
    usage: Usage  # counted while it goes on


# The service


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """What one server gives. Beyond it a request is refused: 400 for what is in it, 413 for its size, 429 for how many there
    are."""

    max_tokens: int = 1024  # of an answer, where the request does not say; a request may ask for all of the context
    sequences: int = 64  # continued or waiting at once; each choice of each prompt is one
    requests: int = 128  # that are read and made tokens of at once: each may hold a whole body
    choices: int = 16  # of one request: prompts times n
    messages: int = 2048
    stops: int = 8
    stop_characters: int = 256
    chat_logprobs: int = 20  # the likeliest tokens that are reported beside the chosen one
    completion_logprobs: int = 5
    viewers: int = 64  # of /events
    body_bytes: int = 1 << 20
    body_s: float = 15.0  # for a body to come
    crowded_body_s: float = 1.0  # the same where others wait for `requests` to be fewer


class Service:
    """One model, for all clients. All on one event loop."""

    def __init__(
        self,
        engine: Engine,
        text: ChatTokenizer,
        *,
        model_name: str,
        limits: ServiceLimits | None = None,
        defaults: SamplingParams | None = None,
        chats: bool = True,
        openings: Sequence[str] = (),
    ) -> None:
        """`chats`: the model has a chat template; else pages offer to continue a text, with `openings` to begin from."""
        self.engine, self.text, self.model_name = engine, text, model_name
        self.limits, self.defaults = limits or ServiceLimits(), defaults or SamplingParams()
        self.chats, self.openings = chats, tuple(openings)
        self.metrics = Metrics()
        self.sequences = 0  # of all jobs that go on
        self._ending = False

    # Checking

    async def prepare(self, request: CompletionRequest) -> CompletionJob:
        """Raises BadRequest; UnknownModel; Busy where so many sequences can never begin now."""
        self.check_model(request.model)
        self._check_stop(request.stop)
        sampling = self._sampling(request)
        prompts = await self._prompts(request)
        seed = secrets.randbelow(1 << 32) if request.seed is None else request.seed
        asks = []
        for tokens in prompts:
            max_tokens = self._max_tokens(request, len(tokens))
            for j in range(request.n):
                own = dataclasses.replace(sampling, seed=(seed + j) % _SEEDS)
                asks.append(
                    SequenceRequest(
                        tokens=tokens, max_tokens=max_tokens, stop_tokens=self.text.stop_tokens, sampling=own
                    )
                )
        if self.sequences + len(asks) > self.limits.sequences:
            raise Busy(_BUSY)
        usage = Usage(prompt_tokens=sum(map(len, prompts)))
        begins = request.messages is not None
        return CompletionJob(asks=tuple(asks), stop=tuple(request.stop), begins=begins, seed=seed, usage=usage)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise UnknownModel(
                f"the model '{name[:80]}' is not served here; known: {self.model_name}", "model", "model_not_found"
            )

    def _check_stop(self, stop: Sequence[str]) -> None:
        if len(stop) > self.limits.stops:
            raise BadRequest(f"stop has {len(stop)} strings; give at most {self.limits.stops}", "stop")
        if not all(0 < len(text) <= self.limits.stop_characters for text in stop):
            raise BadRequest(f"stop: each string has 1 to {self.limits.stop_characters} characters", "stop")

    def _sampling(self, request: CompletionRequest) -> SamplingParams:
        given: dict[str, Any] = {}
        for name, low, high in RANGES:
            value = getattr(request, name)
            if value is None:
                continue
            if not (math.isfinite(value) and low <= value <= high):
                raise BadRequest(f"{name} is {_short(value)}; it must be {low:g} to {high:g}", name)
            given[name] = float(value)
        if given.get("top_p") == 0:
            given["top_p"] = _LEAST_P  # the likeliest alone
        if request.top_k is not None:
            if request.top_k < -1:
                raise BadRequest(f"top_k is {_short(request.top_k)}; it must be 1 or more, or 0 for all", "top_k")
            given["top_k"] = request.top_k if 0 < request.top_k < self.text.vocab_size else None
        if request.seed is not None and not -_SEEDS <= request.seed < _SEEDS:
            raise BadRequest("seed must fit 64 bits", "seed")
        if request.logprobs is not None:
            most = self.limits.chat_logprobs if request.messages is not None else self.limits.completion_logprobs
            if not 0 <= request.logprobs <= most:
                raise BadRequest(
                    f"{request.logprobs_field} is {_short(request.logprobs)}; it must be 0 to {most}",
                    request.logprobs_field,
                )
            given["logprobs"] = request.logprobs
        return dataclasses.replace(self.defaults, **given)

    def _max_tokens(self, request: CompletionRequest, num_prompt: int) -> int:
        """Return the number of the request or the usual one, as far as the context has room."""
        longest, given, name = self.engine.model_context, request.max_tokens, request.max_tokens_field
        if given is not None and not 1 <= given <= longest:
            raise BadRequest(f"{name} is {_short(given)}; it must be 1 to {longest}, the model's context", name)
        context = self.engine.context  # of the machines that are there now
        whose = "the model's context is" if context == longest else "the machines that are there have memory for"
        room = context - num_prompt
        if room < 1:
            name = "messages" if request.messages is not None else "prompt"
            raise BadRequest(
                f"{name}: {num_prompt} tokens; {whose} {context}, and an answer needs one at least",
                name,
                "context_length_exceeded",
            )
        return min(room, self.limits.max_tokens if given is None else given)

    async def _prompts(self, request: CompletionRequest) -> list[tuple[int, ...]]:
        choices, n = self.limits.choices, request.n
        if not 1 <= n <= choices:
            raise BadRequest(f"n is {_short(n)}; it must be 1 to {choices}", "n")
        if request.messages is not None:
            return [await self._chat(request.messages)]
        prompts = request.prompts or ()
        if not prompts:
            raise BadRequest("prompt is empty", "prompt")
        if len(prompts) * n > choices:
            raise BadRequest(
                f"{len(prompts)} prompts with n={n} are {len(prompts) * n} choices; at most {choices} at once", "prompt"
            )
        return [await self._prompt(prompt) for prompt in prompts]

    async def _chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        if not messages:
            raise BadRequest("messages is empty", "messages")
        if len(messages) > self.limits.messages:
            raise BadRequest(f"messages has {len(messages)} entries; at most {self.limits.messages}", "messages")
        try:
            tokens = await asyncio.to_thread(self.text.chat, list(messages))
        except TemplateFailed as failed:
            log.warning("%s: %s", failed.public, printable(failed.detail[:_LONG]))
            raise BadRequest(f"messages: {failed.public}", "messages") from None
        except (UserError, ValueError) as error:
            raise BadRequest(f"messages: {error}", "messages") from None
        return self._checked(tokens, "messages")

    async def _prompt(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return self._checked(prompt, "prompt")
        try:
            if len(prompt) > _LONG:
                tokens = await asyncio.to_thread(self.text.prompt, prompt)
            else:
                tokens = self.text.prompt(prompt)
        except (UserError, ValueError) as error:
            raise BadRequest(f"prompt: {error}", "prompt") from None
        return self._checked(tokens, "prompt")

    def _checked(self, tokens: Sequence[int], name: str) -> tuple[int, ...]:
        if not tokens:
            raise BadRequest(f"{name} has no tokens", name)
        size = self.text.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise BadRequest(f"{name} has the token {_short(wrong)}; the vocabulary has {size}", name)
        return tuple(tokens)

    # Answering

    async def stream(self, job: CompletionJob) -> AsyncGenerator[TextChunk, None]:
        """The pieces of all choices, as they come. Closing it frees everything at once.

        Raises Busy or NobodyThere before the first piece, NobodyThere later.
        """
        if self.sequences + len(job.asks) > self.limits.sequences:
            raise Busy(_BUSY)
        self.sequences += len(job.asks)
        try:
            choices = [self._choice(i, ask, job) for i, ask in enumerate(job.asks)]
            async with contextlib.aclosing(merged(choices)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self.sequences -= len(job.asks)

    async def whole(self, job: CompletionJob) -> list[TextChunk]:
        """Return every choice in one piece."""
        found: list[list[TextChunk]] = [[] for _ in job.asks]
        async with contextlib.aclosing(self.stream(job)) as pieces:
            async for piece in pieces:
                found[piece.index].append(piece)
        return [
            dataclasses.replace(
                parts[-1],
                text="".join(part.text for part in parts),
                logprobs=tuple(told for part in parts for told in part.logprobs),
            )
            for parts in found
        ]

    def end(self) -> None:
        """End every answer in the making with its next token, and with an error that gives the reason."""
        self._ending = True

    async def _choice(self, index: int, ask: SequenceRequest, job: CompletionJob) -> AsyncGenerator[TextChunk, None]:
        """One sequence: tokens to text, up to a stop string, the model's own end, or its length."""
        clock = _Clock(self.metrics)
        writing = _Writing(self.text, job.stop, begins=job.begins, logprobs=ask.sampling.logprobs is not None)
        unread = len(ask.tokens)
        finish: Finish = "length"
        async with contextlib.aclosing(self.engine.stream(ask)) as tokens:
            async for token in tokens:
                if self._ending:
                    raise Unavailable("the server is ending")
                self.metrics.prompt_tokens, unread = self.metrics.prompt_tokens + unread, 0
                if token.token >= 0:
                    clock.tick()
                    job.usage.completion_tokens += 1
                    self.metrics.generated_tokens += 1
                    text, told = writing.push(token)
                    if text or told:
                        yield TextChunk(index=index, text=text, logprobs=told)
                if writing.stopped or token.finish is not None:
                    finish = token.finish or "stop"
                    break
        text, told = ("", ()) if writing.stopped else writing.flush()  # the sequence is free by now
        if writing.stopped:
            finish = "stop"
        yield TextChunk(index=index, text=text, logprobs=told, finish=finish, timing=clock.timing())


RANGES = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("repetition_penalty", 0.1, 10.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


class _Clock:
    """When the tokens of a sequence came."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self.tokens = metrics, 0
        self._asked = self._first = self._last = time.perf_counter()

    def tick(self) -> None:
        now = time.perf_counter()
        if self.tokens == 0:
            self._first = now
            self._metrics.first_token.add(now - self._asked)
        else:
            self._metrics.token.add(now - self._last)
        self._last = now
        self.tokens += 1

    def timing(self) -> Timing:
        after, took = self.tokens - 1, self._last - self._first
        return Timing(
            first_token_s=self._first - self._asked if self.tokens else None,
            tokens_per_s=after / took if after > 0 and took > 0 else None,
        )


class _Writing:
    """Tokens to text. What may be the beginning of a stop string waits, and so do the logprobs of its tokens."""

    def __init__(self, text: ChatTokenizer, stop: Sequence[str], *, begins: bool, logprobs: bool) -> None:
        self._text, self._stops, self._logprobs = text, StopStrings(stop), logprobs
        self._detokenizer = text.detokenizer(begins=begins)
        self._waiting: list[TokenLogprob] = []
        self._decoded = self._written = 0  # characters
        self.stopped = False

    def push(self, token: Token) -> tuple[str, tuple[TokenLogprob, ...]]:
        if self._logprobs:
            self._waiting.append(self._told(token))
        return self._add(self._detokenizer.push(token.token))

    def flush(self) -> tuple[str, tuple[TokenLogprob, ...]]:
        """What is left when no more comes."""
        text, told = self._add(self._detokenizer.flush())
        if self.stopped:
            return text, told
        waiting, self._waiting = tuple(self._waiting), []
        return text + self._stops.flush(), told + waiting

    def _add(self, decoded: str) -> tuple[str, tuple[TokenLogprob, ...]]:
        self._decoded += len(decoded)
        text, self.stopped = self._stops.push(decoded) if decoded else ("", False)
        self._written += len(text)
        ready = 0
        while ready < len(self._waiting) and self._waiting[ready].offset < self._written:
            ready += 1
        told, self._waiting = tuple(self._waiting[:ready]), self._waiting[ready:]
        return text, told

    def _told(self, token: Token) -> TokenLogprob:
        spelled = self._text.token_bytes
        return TokenLogprob(
            token=spelled(token.token),
            logprob=token.logprob if token.logprob is not None else 0.0,
            top=tuple((spelled(other), logprob) for other, logprob in token.top),
            offset=self._decoded,
        )


async def merged(streams: Sequence[AsyncGenerator[TextChunk, None]]) -> AsyncGenerator[TextChunk, None]:
    """What comes from any of them, as it comes. All are closed when this is, and when one of them fails."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for piece in only:
                yield piece
        return
    queue: asyncio.Queue[TextChunk | Exception | None] = asyncio.Queue(len(streams))

    async def carry(stream: AsyncGenerator[TextChunk, None]) -> None:
        last: Exception | None = None
        try:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    await queue.put(piece)
        except Exception as error:  # noqa: BLE001 - raised where they are taken
            last = error
        await queue.put(last)

    tasks = [asyncio.create_task(carry(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _short(value: float) -> str:
    """A number as it may stand in a message, however long."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return "very large" if value > 0 else "very small"
    return f"{value:g}" if isinstance(value, float) else str(value)
