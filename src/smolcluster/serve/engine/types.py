"""The interface of an inference engine, in one process or on several machines: `SequenceRequest` in, `Token`s out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from smolcluster.errors import SmolclusterError

Finish = Literal["stop", "length"]

# Types of fields from the network. Strict: a string is not converted to a number, nor true to 1.
MAX_NAME = 200
Name = Annotated[str, Field(strict=True, max_length=MAX_NAME)]
Flag = Annotated[bool, Field(strict=True)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Amount = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a token is sampled from the logits. By default, from the model's unmodified distribution."""

    temperature: Amount = 1.0  # 0: greedy, after the penalties
    top_k: Positive | None = None
    top_p: Amount = 1.0
    # Of all tokens so far, prompt included: divides positive logits, multiplies negative.
    repetition_penalty: Amount = 1.0
    presence_penalty: Real = 0.0  # subtracted once from every token generated so far
    frequency_penalty: Real = 0.0  # subtracted for each time that it was generated
    # A token depends only on this, its position and the logits.
    seed: Annotated[int, Field(strict=True, ge=-(2**63))] = 0
    logprobs: Natural | None = None  # how many top tokens to report in addition to the sampled one

    @property
    def looks_back(self) -> bool:
        """Return whether the result depends on earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """A sequence to continue. At least one token; prompt and `max_tokens` together fit the context."""

    tokens: tuple[int, ...]
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()  # end the sequence; not yielded
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The next token of a sequence; the last one of it has `finish`.

    `token` is -1 with `finish="stop"`, and with "length" if the memory was full.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # most likely tokens and their logprobs, in descending order
    finish: Finish | None = None


class Busy(SmolclusterError):
    """The queue is full. Retry later."""

    retry_after_s: float = 1.0


class Unavailable(SmolclusterError):
    """Some layers are not loaded on any stage. Retry later."""

    retry_after_s: float = 5.0


class RetriesExhausted(SmolclusterError):
    """The connected machines failed several times. Retry later."""

    retry_after_s: float = 5.0


class PromptTooLong(SmolclusterError):
    """The prompt does not fit into the memory of the connected machines."""


class Engine(Protocol):
    """All methods are called on one event loop."""

    @property
    def model_context(self) -> int:
        """The model's longest sequence: prompt and generated tokens."""

    @property
    def context(self) -> int:
        """`model_context`, limited by the memory of the connected machines."""

    def stream(self, request: SequenceRequest) -> AsyncGenerator[Token, None]:
        """Yield the generated tokens. Closing the generator frees the sequence at once.

        Raises Busy, Unavailable or PromptTooLong before the first token; Unavailable or RetriesExhausted later if its machines
        stay lost.
        """

    def state(self) -> dict[str, Any]:
        """Return the state for /health, /config and the page: which machine holds which layers, and its load.

        {"ready": true, "model": "smollm2", "layers": 30, "codec": "fp16",
         "stages": [{"layers": [0, 14],                                                      first and last
                     "machines": [{"name": "mini1", "device": "cpu", "tokens": 812, "busy": 0.41, "sequences": 2,
                                   "state": "ready"}]}, ...],                                or loading, failed, spare
         "spares": [{"name": "pi5", ...}],
         "there": 3, "wanted": 2,                                                            connected and wanted machines
         "lost": [{"name": "mini9", "stage": 1, "why": "...", "at": 1700000000.0, ...}],     in the last minute
         "problems": ["pi5: 2 GB are too little"],                                           of machines without layers
         "running": 2, "waiting": 0}
        """
