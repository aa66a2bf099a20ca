"""The JSON bodies of responses: OpenAI's, complete and in chunks, and those of /chat and /query. Pure: no HTTP, no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smolcluster.serve.http.request_parsing import Json
from smolcluster.serve.http.service import TextChunk, Timing, TokenLogprob, Usage


def error_body(message: str, *, status: int, field: str | None = None, code: str | None = None) -> Json:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def timing_body(seed: int, timing: Timing | None) -> Json:
    """Return the fields that OpenAI does not have: under `smolcluster` in a response or the last chunk of a choice."""
    return {"seed": seed, **asdict(timing or Timing())}


def simple_ending(model: str, last: TextChunk, usage: Usage, seed: int) -> Json:
    """Return the fields of /chat and /query other than the text."""
    return {"model": model, "finish_reason": last.finish, "usage": usage_body(usage), **timing_body(seed, last.timing)}


def spelled(token: bytes) -> str:
    """Return the text of a token, or its escaped bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    def one(token: bytes, logprob: float) -> Json:
        return {"token": spelled(token), "logprob": logprob, "bytes": list(token)}

    content = [
        one(t.token, t.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in t.top]} for t in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    def likeliest(one: TokenLogprob) -> Json:
        """Include the sampled token, even if it is not one of the most likely."""
        return {spelled(token): logprob for token, logprob in (*one.top, (one.token, one.logprob))}

    return {
        "tokens": [spelled(t.token) for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [likeliest(t) for t in tokens],
        "text_offset": [t.offset for t in tokens],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """The response format of one of OpenAI's routes."""

    prefix: str  # of ids
    object: str  # the field `object` of a response
    chunk: str  # and of a chunk
    logprobs: Callable[[Sequence[TokenLogprob]], Json]
    choice: Callable[[str], Json]  # the complete text
    delta: Callable[[str], Json]  # the text of a chunk
    first: tuple[Json, ...] = ()  # before the first chunk of a choice: in a chat, the role


CHAT = ResponseFormat(
    prefix="chatcmpl",
    object="chat.completion",
    chunk="chat.completion.chunk",
    logprobs=chat_logprobs,
    choice=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    delta=lambda text: {"delta": {"content": text} if text else {}},
    first=({"delta": {"role": "assistant", "content": "", "refusal": None}},),
)
COMPLETION = ResponseFormat(
    prefix="cmpl",
    object="text_completion",
    chunk="text_completion",
    logprobs=completion_logprobs,
    choice=lambda text: {"text": text},
    delta=lambda text: {"text": text},
)


def completion_body(
    shape: ResponseFormat, head: Json, choices: Sequence[TextChunk], *, usage: Usage, seed: int, logprobs: bool
) -> Json:
    listed = [
        {
            "index": choice.index,
            **shape.choice(choice.text),
            "logprobs": shape.logprobs(choice.logprobs) if logprobs else None,
            "finish_reason": choice.finish,
        }
        for choice in choices
    ]
    about = timing_body(seed, choices[0].timing)
    return head | {"object": shape.object, "choices": listed, "usage": usage_body(usage), "smolcluster": about}


def chunk_bodies(
    shape: ResponseFormat, head: Json, chunk: TextChunk, *, begins: bool, logprobs: bool, seed: int
) -> list[Json]:
    """Convert a chunk to OpenAI's: its text, then its finish reason. `begins`: the first of its choice."""

    def body(content: Mapping[str, Any], logprobs: Json | None = None, finish: str | None = None) -> Json:
        choice = {"index": chunk.index, **content, "logprobs": logprobs, "finish_reason": finish}
        return head | {"object": shape.chunk, "choices": [choice]}

    bodies = [body(content) for content in shape.first] if begins else []
    if chunk.text or chunk.logprobs:
        bodies.append(body(shape.delta(chunk.text), shape.logprobs(chunk.logprobs) if logprobs else None))
    if chunk.finish is not None:
        last = body(shape.delta(""), finish=chunk.finish)
        bodies.append(last | {"smolcluster": timing_body(seed, chunk.timing)})
    return bodies
