"""How much one server gives, and to how many at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Beyond one of these a request is refused: 400 for what is in it, 413 for its size, 429 for how many there are."""

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
