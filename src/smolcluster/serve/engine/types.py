"""What is asked of a model and what comes back: the words that all of `serve/` is written in.

Ask      a sequence of tokens to be continued, and how          the service asks, in tokens
Token    one that was chosen                                    the engine yields
Engine   from the one to the other                              one process or many machines: the same to callers
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from smolcluster.errors import SmolclusterError

Finish = Literal["stop", "length"]

# Fields of values that come over the network. Strict: no text is taken for a number, and no true for 1.
MOST_NAME = 200
Name = Annotated[str, Field(strict=True, max_length=MOST_NAME)]
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Amount = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a token is chosen from the logits. The defaults are the model's own distribution."""

    temperature: Amount = 1.0  # 0: the likeliest token, whatever else is said here but the penalties
    top_k: Positive | None = None
    top_p: Amount = 1.0
    repetition_penalty: Amount = 1.0  # of tokens seen, the prompt's too: divides positive logits, multiplies negative
    presence_penalty: Real = 0.0  # subtracted once from every token generated so far
    frequency_penalty: Real = 0.0  # subtracted for each time that it was generated
    seed: Annotated[int, Field(strict=True, ge=-(2**63))] = (
        0  # the choice at a position depends on this, the position and the logits, and on nothing else
    )
    logprobs: Whole | None = None  # of the chosen token and so many of the likeliest; None: none

    @property
    def looks_back(self) -> bool:
        """Whether the choice depends on the tokens before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """A sequence to be continued. At least one token; the prompt and `max_tokens` together fit the context."""

    tokens: tuple[int, ...]
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()  # after one of these nothing more comes; it is not told itself
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The next token of a sequence; the last one of it has `finish`.

    With `finish="stop"` there is no token: -1. Nor with "length" where the memory was full before the sequence was over.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their logprobs, the likeliest first
    finish: Finish | None = None


class Busy(SmolclusterError):
    """As many wait as may. Ask again later."""

    retry_after_s: float = 1.0


class Unavailable(SmolclusterError):
    """Some layers are on no machine. One may come back."""

    retry_after_s: float = 5.0


class RetriesExhausted(SmolclusterError):
    """The machines that are there could not do it, several times. Others may."""

    retry_after_s: float = 5.0


class Engine(Protocol):
    """Continues sequences. All methods are called on one event loop."""

    @property
    def model_context(self) -> int:
        """The most tokens of a sequence that the model is made for, prompt and answer together."""

    @property
    def context(self) -> int:
        """The same, where the machines that are there have memory for fewer."""

    def stream(self, ask: SequenceRequest) -> AsyncGenerator[Token, None]:
        """The tokens that follow. Closing the generator frees everything that the sequence held, at once.

        Raises Busy or NobodyThere before the first token; NobodyThere or GivenUp later when its machines are lost for good.
        """

    def state(self) -> dict[str, Any]:
        """For /health, /config and the page: who holds which layers, and what each has done.

        {"ready": true, "model": "smollm2", "layers": 30, "codec": "fp16",
         "stages": [{"layers": [0, 14],                                                      the first and the last of it
                     "machines": [{"name": "mini1", "device": "cpu", "tokens": 812, "busy": 0.41, "sequences": 2,
                                   "state": "ready"}]}, ...],                                or loading, failed, spare
         "spares": [{"name": "pi5", ...}],
         "there": 3, "wanted": 2,                                                            machines, and how many must be
         "lost": [{"name": "mini9", "stage": 1, "why": "...", "at": 1700000000.0, ...}],     in the last minute
         "problems": ["pi5: 2 GB are too little"],                                           of those that hold nothing
         "running": 2, "waiting": 0}
        """
