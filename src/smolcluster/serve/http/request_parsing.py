"""Parse the JSON of a request into a CompletionRequest. Pure: no HTTP, no model.

Fields are

    read        with OpenAI's meaning, and top_k and repetition_penalty
    ignored     known to OpenAI, without effect here: IGNORED
    refused     known to OpenAI, not supported: UNSUPPORTED; null and values without effect pass
    unknown     refused, with the nearest known name
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from smolcluster.serve.http.service import BadRequest, CompletionRequest

Json = dict[str, Any]

# Fields

_NUMBERS = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("n", "max_tokens", "top_k", "seed")
_SHARED = (*_NUMBERS, *_INTEGERS, "model", "stop", "stream", "stream_options", "logprobs")
CHAT_FIELDS = (*_SHARED, "messages", "max_completion_tokens", "top_logprobs")
COMPLETION_FIELDS = (*_SHARED, "prompt", "echo", "best_of", "suffix")
SIMPLE_FIELDS = (*_NUMBERS, "max_tokens", "top_k", "seed", "model", "stop", "stream")

IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "moderation", "verbosity"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort"),
        *("parallel_tool_calls", "tool_choice", "function_call"),  # of no tools
    }
)
# Unsupported fields, with the values that have no effect.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Fields of a message that may be null or empty; name may be anything.
_OF_MESSAGES = frozenset({"name", "refusal", "annotations", "audio", "function_call", "tool_calls"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request, and the format of its response."""

    request: CompletionRequest
    stream: bool
    include_usage: bool


def read_chat(body: Json) -> ParsedRequest:
    _check_names(body, CHAT_FIELDS)
    wanted = _flag(body, "logprobs")
    most_likely = _integer(body, "top_logprobs")
    if most_likely is not None and not wanted:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    newer = "max_completion_tokens"
    name = newer if body.get(newer) is not None else "max_tokens"
    request = CompletionRequest(
        **_shared(body) | {"max_tokens": _integer(body, name)},
        messages=_messages(body),
        max_tokens_field=name,
        logprobs=(most_likely or 0) if wanted else None,
        logprobs_field="top_logprobs",
    )
    return _with_stream_options(body, request)


def read_completion(body: Json) -> ParsedRequest:
    _check_names(body, COMPLETION_FIELDS)
    return _with_stream_options(
        body, CompletionRequest(**_shared(body), prompts=_prompts(body), logprobs=_integer(body, "logprobs"))
    )


def read_simple_chat(body: Json) -> ParsedRequest:
    """`{"message": "...", "system": "...", "history": [messages]}`, or `{"messages": [...]}`."""
    _check_names(body, (*SIMPLE_FIELDS, "message", "text", "system", "history", "messages"))
    if body.get("messages") is not None:
        for name in ("message", "text", "history"):
            if body.get(name) is not None:
                raise BadRequest(f"{name} and messages were both given; give one of them", name)
        messages = _messages(body)
    else:
        name = _one_of(body, ("message", "text"))
        messages = _messages(body, "history") if body.get("history") else []
        messages = [*messages, {"role": "user", "content": _string(body[name], name)}]
    if body.get("system") is not None:
        messages = [{"role": "system", "content": _string(body["system"], "system")}, *messages]
    return _with_stream_options(body, CompletionRequest(**_shared(body), messages=messages))


def read_simple_query(body: Json) -> ParsedRequest:
    """`{"prompt": "..."}` or `{"query": "..."}`: a text to continue."""
    names = ("prompt", "query", "text")
    _check_names(body, (*SIMPLE_FIELDS, *names))
    name = _one_of(body, names)
    return _with_stream_options(body, CompletionRequest(**_shared(body), prompts=[_string(body[name], name)]))


def read_key(body: Json) -> str:
    """Read the body of /login."""
    _check_names(body, ("key",), ())
    return _string(body.get("key"), "key")


def _with_stream_options(body: Json, request: CompletionRequest) -> ParsedRequest:
    stream, options = _flag(body, "stream"), body.get("stream_options")
    if options is None:
        return ParsedRequest(request=request, stream=stream, include_usage=False)
    if not isinstance(options, dict):
        raise _wrong("stream_options", "an object", options)
    if not stream:
        raise BadRequest("stream_options needs stream: true", "stream_options")
    _check_names(options, ("include_usage", "include_obfuscation"), (), "stream_options.")
    _flag(options, "include_obfuscation", "stream_options.")
    return ParsedRequest(
        request=request, stream=stream, include_usage=_flag(options, "include_usage", "stream_options.")
    )


def _shared(body: Json) -> Json:
    model = body.get("model")  # none: the one that is served
    stop = body.get("stop")
    if stop is None:
        stops: Sequence[str] = ()
    elif isinstance(stop, str):
        stops = [_string(stop, "stop")]
    elif isinstance(stop, list):
        stops = [_string(text, f"stop[{i}]") for i, text in enumerate(stop)]
    else:
        raise _wrong("stop", "a string or a list of strings", stop)
    given: Json = {name: _number(body, name) for name in _NUMBERS}
    given |= {name: _integer(body, name) for name in _INTEGERS}
    given["n"] = 1 if given["n"] is None else given["n"]
    return given | {"model": None if model is None else _string(model, "model"), "stop": stops}


def _messages(body: Json, name: str = "messages") -> list[dict[str, str]]:
    given = body.get(name)
    if given is None:
        raise BadRequest(f"{name} is missing", name)
    if not isinstance(given, list):
        raise _wrong(name, "a list", given)
    return [_message(message, f"{name}[{i}]") for i, message in enumerate(given)]


def _message(message: Any, at: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _wrong(at, "an object with role and content", message)
    _check_names(message, ("role", "content", *_OF_MESSAGES), (), f"{at}.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise BadRequest(f"{at}.role is {_shown(role)}; it must be one of {known}", f"{at}.role")
    for name in _OF_MESSAGES:
        if message.get(name) and name != "name":
            raise BadRequest(f"{at}.{name} is not supported here", f"{at}.{name}")
    if isinstance(content, list):
        text = "".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(content))
    else:
        text = _string(content, f"{at}.content")
    return {"role": _ROLES[role], "content": text}


def _part(part: Any, at: str) -> str:
    if not isinstance(part, dict):
        raise _wrong(at, "an object with type and text", part)
    if part.get("type") != "text":
        raise BadRequest(f"{at}.type is {_shown(part.get('type'))}; only text is supported here", f"{at}.type")
    return _string(part.get("text"), f"{at}.text")


def _prompts(body: Json) -> list[str | list[int]]:
    """Read a string, a list of strings, tokens, or lists of tokens."""
    given = body.get("prompt")
    if isinstance(given, str):
        return [_string(given, "prompt")]
    if given is None:
        raise BadRequest("prompt is missing", "prompt")
    if not isinstance(given, list):
        raise _wrong("prompt", "a string or a list", given)
    if given and all(map(_is_integer, given)):
        return [given]
    return [_tokens(one, f"prompt[{i}]") for i, one in enumerate(given)]


def _tokens(given: Any, at: str) -> str | list[int]:
    if isinstance(given, list) and all(map(_is_integer, given)):
        return given
    if isinstance(given, str):
        return _string(given, at)
    raise _wrong(at, "a string or a list of tokens", given)


# Values


def _check_names(body: Json, known: Iterable[str], ignored: Iterable[str] | None = None, at: str = "") -> None:
    known = tuple(known)
    passing = IGNORED | UNSUPPORTED.keys() if ignored is None else frozenset(ignored)
    for name, value in body.items():
        if name in UNSUPPORTED and ignored is None:
            if value is not None and not any(type(value) is type(n) and value == n for n in UNSUPPORTED[name]):
                raise BadRequest(f"{name} is not supported here; leave it out", name)
        elif name not in known and name not in passing:
            near = difflib.get_close_matches(name[:80], known, n=1, cutoff=0.6)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
            shown = _shown(name)[1:-1]
            raise BadRequest(f"unknown field '{at}{shown}'; {hint}", f"{at}{shown}")


def _one_of(body: Json, names: Sequence[str]) -> str:
    given = [name for name in names if body.get(name) is not None]
    if len(given) != 1:
        raise BadRequest(f"give one of {', '.join(names)}" + (", and only one" if given else ""), names[0])
    return given[0]


def _value(body: Json, name: str, kind: Any, expected: str, at: str = "") -> Any:
    """Return a field of this type, or None. A bool is not a number."""
    value = body.get(name)
    if value is not None and not (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
        raise _wrong(at + name, expected, value)
    return value


def _flag(body: Json, name: str, at: str = "") -> bool:
    return bool(_value(body, name, bool, "true or false", at))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(body: Json, name: str) -> int | None:
    number: int | None = _value(body, name, int, "a whole number")
    return number


def _number(body: Json, name: str) -> float | None:
    value = _value(body, name, int | float, "a number")
    try:
        number = None if value is None else float(value)
    except OverflowError:
        number = math.inf
    if number is not None and not math.isfinite(number):
        raise BadRequest(f"{name} is too large", name)
    return number


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name} has a lone surrogate at {error.start}", name) from None
    return value


def _wrong(name: str, expected: str, value: Any) -> BadRequest:
    return BadRequest(
        f"{name} is missing" if value is None else f"{name} must be {expected}, not {_shown(value)}", name
    )


def _shown(value: Any) -> str:
    """Format any value for a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return ascii(value[:80])
    return json.dumps(value)[:80] if not _is_integer(value) or abs(value) < 10**18 else "a very large number"
