"""The service: checks and tokenizes a request, streams its sequences from the engine, and decodes and counts the tokens.

    CompletionRequest ── check, tokenize ──> CompletionJob ── engine ──> TextChunk, ... TextChunk(finish)

Independent of HTTP and JSON. An invalid request is a BadRequest with the name of the field.

Choice j of a request with seed s is the same as a single choice with seed s + j. Without a seed one is drawn, and reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
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

_LONG = 2000  # characters: longer texts are tokenized in a thread
_SEEDS = 1 << 63
_MIN_P = 1e-9
_BUSY = "the queue is full"


# Requests


class BadRequest(SmolclusterError):
    """The value of `field` is invalid. `code` is OpenAI's, if there is one."""

    def __init__(self, message: str, field: str | None, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


class UnknownModel(BadRequest):
    """The requested model is not the one that is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A request. Exactly one of `messages` and `prompts`; None: the server's default."""

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
    max_tokens_field: str = "max_tokens"  # names in the request, for errors
    logprobs_field: str = "logprobs"


# Responses


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token with its logprobs. `offset`: where its text begins in the response."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChunk:
    """Text of a choice; the last chunk has `finish` and `timing`."""

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
    """A validated, tokenized request: one sequence for each choice."""

    sequences: tuple[SequenceRequest, ...]  # in the order of their index
    stop: tuple[str, ...]
    is_chat: bool  # the response is a separate text; else it continues the prompt
    seed: int
    usage: Usage  # counted while it runs


# The service


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Requests above these limits are refused: 400 for their contents, 413 for their size, 429 for their number."""

    max_tokens: int = 1024  # default of requests, which may give more, up to the context
    sequences: int = 64  # running or queued; each choice of each prompt is one
    requests: int = 128  # being read and tokenized: each may hold a body in memory
    choices: int = 16  # of one request: prompts times n
    messages: int = 2048
    stops: int = 8
    stop_characters: int = 256
    chat_logprobs: int = 20  # most likely tokens reported in addition to the sampled one
    completion_logprobs: int = 5
    viewers: int = 64  # of /events
    body_bytes: int = 1 << 20
    body_s: float = 15.0  # to receive a body
    crowded_body_s: float = 1.0  # the same while others wait because of `requests`


class Service:
    """One model, for all clients, on one event loop."""

    def __init__(
        self,
        engine: Engine,
        text: ChatTokenizer,
        *,
        model_name: str,
        limits: ServiceLimits | None = None,
        defaults: SamplingParams | None = None,
        example_prompts: Sequence[str] = (),
    ) -> None:
        """`example_prompts`: suggested by clients if the model has no chat template."""
        self.engine, self.text, self.model_name = engine, text, model_name
        self.limits, self.defaults = limits or ServiceLimits(), defaults or SamplingParams()
        self.example_prompts = tuple(example_prompts)
        self.metrics = Metrics(engine.state)
        self.sequences = 0  # of all running jobs
        self._ending = False

    # Requests

    async def prepare(self, request: CompletionRequest) -> CompletionJob:
        """Check and tokenize. Raises BadRequest, UnknownModel, or Busy."""
        self.check_model(request.model)
        self._check_stop(request.stop)
        sampling = self._sampling(request)
        prompts = await self._prompts(request)
        seed = secrets.randbelow(1 << 32) if request.seed is None else request.seed
        sequences = []
        for tokens in prompts:
            max_tokens = self._max_tokens(request, len(tokens))
            for j in range(request.n):
                sequences.append(
                    SequenceRequest(
                        tokens=tokens,
                        max_tokens=max_tokens,
                        stop_tokens=self.text.stop_tokens,
                        sampling=dataclasses.replace(sampling, seed=(seed + j) % _SEEDS),
                    )
                )
        if self.sequences + len(sequences) > self.limits.sequences:
            raise Busy(_BUSY)
        usage = Usage(prompt_tokens=sum(map(len, prompts)))
        return CompletionJob(
            sequences=tuple(sequences),
            stop=tuple(request.stop),
            is_chat=request.messages is not None,
            seed=seed,
            usage=usage,
        )

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise UnknownModel(
                f"the model '{name[:80]}' is not served here; available: {self.model_name}", "model", "model_not_found"
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
            if not low <= value <= high:  # nor NaN
                raise BadRequest(f"{name} is {_short(value)}; it must be {low:g} to {high:g}", name)
            given[name] = float(value)
        if given.get("top_p") == 0:
            given["top_p"] = _MIN_P  # the most likely alone
        if request.top_k is not None:
            if request.top_k < -1:
                raise BadRequest(f"top_k is {_short(request.top_k)}; it must be 1 or more, or 0 for all", "top_k")
            given["top_k"] = request.top_k if 0 < request.top_k < self.text.vocab_size else None
        if request.seed is not None and not -_SEEDS <= request.seed < _SEEDS:
            raise BadRequest("seed must fit 64 bits", "seed")
        if request.logprobs is not None:
            limit = self.limits.chat_logprobs if request.messages is not None else self.limits.completion_logprobs
            if not 0 <= request.logprobs <= limit:
                raise BadRequest(
                    f"{request.logprobs_field} is {_short(request.logprobs)}; it must be 0 to {limit}",
                    request.logprobs_field,
                )
            given["logprobs"] = request.logprobs
        return dataclasses.replace(self.defaults, **given)

    def _max_tokens(self, request: CompletionRequest, num_prompt: int) -> int:
        """Return the requested or default number, limited by the context."""
        longest, given, name = self.engine.model_context, request.max_tokens, request.max_tokens_field
        if given is not None and not 1 <= given <= longest:
            raise BadRequest(f"{name} is {_short(given)}; it must be 1 to {longest}, the model's context", name)
        context = self.engine.context  # limited by the connected machines
        limit = "the model's context is" if context == longest else "the connected machines have memory for"
        room = context - num_prompt
        if room < 1:
            name = "messages" if request.messages is not None else "prompt"
            raise BadRequest(
                f"{name}: {num_prompt} tokens; {limit} {context}, including at least one of the response",
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

    # Responses

    async def stream(self, job: CompletionJob) -> AsyncGenerator[TextChunk, None]:
        """Yield the chunks of all choices as they are generated. Closing the generator frees their sequences at once.

        Raises Busy or Unavailable before the first chunk, Unavailable later.
        """
        if self.sequences + len(job.sequences) > self.limits.sequences:
            raise Busy(_BUSY)
        self.sequences += len(job.sequences)
        try:
            choices = [self._choice(i, sequence, job) for i, sequence in enumerate(job.sequences)]
            async with contextlib.aclosing(merge(choices)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.sequences -= len(job.sequences)

    async def complete(self, job: CompletionJob) -> list[TextChunk]:
        """Run a job to its end. Return one chunk for each choice."""
        found: list[list[TextChunk]] = [[] for _ in job.sequences]
        async with contextlib.aclosing(self.stream(job)) as chunks:
            async for chunk in chunks:
                found[chunk.index].append(chunk)
        return [
            dataclasses.replace(
                parts[-1],
                text="".join(part.text for part in parts),
                logprobs=tuple(logprobs for part in parts for logprobs in part.logprobs),
            )
            for parts in found
        ]

    def end(self) -> None:
        """End every running response at its next token, with an error."""
        self._ending = True

    async def _choice(
        self, index: int, sequence: SequenceRequest, job: CompletionJob
    ) -> AsyncGenerator[TextChunk, None]:
        """Stream one sequence up to a stop string, a stop token or its length."""
        clock = _TokenClock(self.metrics)
        writing = _TextWriter(self.text, job.stop, begins=job.is_chat, logprobs=sequence.sampling.logprobs is not None)
        unread = len(sequence.tokens)
        finish: Finish = "length"
        async with contextlib.aclosing(self.engine.stream(sequence)) as tokens:
            async for token in tokens:
                if self._ending:
                    raise Unavailable("the server is stopping")
                self.metrics.prompt_tokens, unread = self.metrics.prompt_tokens + unread, 0
                if token.token >= 0:
                    clock.tick()
                    job.usage.completion_tokens += 1
                    self.metrics.generated_tokens += 1
                    text, logprobs = writing.push(token)
                    if text or logprobs:
                        yield TextChunk(index=index, text=text, logprobs=logprobs)
                if writing.stopped or token.finish is not None:
                    finish = token.finish or "stop"
                    break
        text, logprobs = ("", ()) if writing.stopped else writing.flush()  # the sequence is freed by now
        if writing.stopped:
            finish = "stop"
        yield TextChunk(index=index, text=text, logprobs=logprobs, finish=finish, timing=clock.timing())


RANGES = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("repetition_penalty", 0.1, 10.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


class _TokenClock:
    """Token times of a sequence."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self.tokens = metrics, 0
        self._began = self._first = self._last = time.perf_counter()

    def tick(self) -> None:
        now = time.perf_counter()
        if self.tokens == 0:
            self._first = now
            self._metrics.first_token.add(now - self._began)
        else:
            self._metrics.token.add(now - self._last)
        self._last = now
        self.tokens += 1

    def timing(self) -> Timing:
        after, took = self.tokens - 1, self._last - self._first
        return Timing(
            first_token_s=self._first - self._began if self.tokens else None,
            tokens_per_s=after / took if after > 0 and took > 0 else None,
        )


class _TextWriter:
    """Convert tokens to text. A possible beginning of a stop string is held back, with the logprobs of its tokens."""

    def __init__(self, text: ChatTokenizer, stop: Sequence[str], *, begins: bool, logprobs: bool) -> None:
        self._text, self._stops, self._logprobs = text, StopStrings(stop), logprobs
        self._detokenizer = text.detokenizer(begins=begins)
        self._waiting: list[TokenLogprob] = []
        self._decoded = self._written = 0  # characters
        self.stopped = False

    def push(self, token: Token) -> tuple[str, tuple[TokenLogprob, ...]]:
        if self._logprobs:
            self._waiting.append(self._with_logprobs(token))
        return self._add(self._detokenizer.push(token.token))

    def flush(self) -> tuple[str, tuple[TokenLogprob, ...]]:
        """Return what was held back, at the end."""
        text, logprobs = self._add(self._detokenizer.flush())
        if self.stopped:
            return text, logprobs
        waiting, self._waiting = tuple(self._waiting), []
        return text + self._stops.flush(), logprobs + waiting

    def _add(self, decoded: str) -> tuple[str, tuple[TokenLogprob, ...]]:
        self._decoded += len(decoded)
        text, self.stopped = self._stops.push(decoded) if decoded else ("", False)
        self._written += len(text)
        ready = 0
        while ready < len(self._waiting) and self._waiting[ready].offset < self._written:
            ready += 1
        logprobs, self._waiting = tuple(self._waiting[:ready]), self._waiting[ready:]
        return text, logprobs

    def _with_logprobs(self, token: Token) -> TokenLogprob:
        spelled = self._text.token_bytes
        return TokenLogprob(
            token=spelled(token.token),
            logprob=token.logprob if token.logprob is not None else 0.0,
            top=tuple((spelled(other), logprob) for other, logprob in token.top),
            offset=self._decoded,
        )


async def merge(streams: Sequence[AsyncGenerator[TextChunk, None]]) -> AsyncGenerator[TextChunk, None]:
    """Merge streams as items arrive. Closes all of them on exit and when one fails."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for chunk in only:
                yield chunk
        return
    queue: asyncio.Queue[TextChunk | Exception | None] = asyncio.Queue(len(streams))

    async def carry(stream: AsyncGenerator[TextChunk, None]) -> None:
        last: Exception | None = None
        try:
            async with contextlib.aclosing(stream):
                async for chunk in stream:
                    await queue.put(chunk)
        except Exception as error:  # noqa: BLE001 - raised by the consumer
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
    """Format a number for a message, however large."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return "very large" if value > 0 else "very small"
    return f"{value:g}" if isinstance(value, float) else str(value)
