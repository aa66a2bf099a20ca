"""How the next token is chosen from the logits of a sequence.

In this order, as users of other engines expect it:

    repetition penalty      of every token seen, prompt included: positive logits divided by it, negative multiplied
    presence, frequency     subtracted from tokens generated so far: once, and once for each time
    temperature 0           the likeliest now, the lowest id among equals; nothing of what follows
    temperature             logits divided by it
    top-k                   exactly the k likeliest
    top-p                   of these the fewest, the likeliest first, that have at least this share of the probability
    draw                    in proportion to what is left

Where two tokens are equally likely and one is too many, the lower id stays. Log probabilities are of the model's own
distribution: the log softmax of the logits as they came, before all of this.

**The draw can be repeated on another machine.** It takes one number u in [0, 1), a hash of the seed and the position in the
sequence, and the first token, in the order of ids, at which the summed probability exceeds u. So it depends on the seed, the
position and the distribution alone, and in that order of ids two tokens that nearly tie may change places without any effect:
rounding matters only if u lies within it of an edge.

Arithmetic is fp64, in numpy: for one row of a vocabulary it starts sooner than torch does.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smolcluster.serve.engine.types import SamplingParams, Token

Floats = NDArray[np.floating]
Ids = NDArray[np.int64]
NUCLEUS = (1024, 8192)  # top-p looks among so many of the likeliest first, and sorts all only if these are too few
BLOCK = 256  # numbers that are summed before they are looked at
IMPOSSIBLE = -9999.0  # a log probability


class Sampler:
    """One sequence: how its tokens are chosen, and those it has. `sample` changes nothing; `accept` adds a token."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        *,
        position: int | None = None,
    ) -> None:
        """`position` of the token that is chosen next: to be given where the tokens before it are not all here."""
        self.sampling = sampling
        self.position = len(prompt) + len(generated) if position is None else position
        self._seen = set(prompt) | set(generated) if sampling.repetition_penalty != 1 else set()
        self._generated = Counter(generated)

    @property
    def plain(self) -> bool:
        """Whether the next token is the likeliest of the logits as they come, and nothing else is asked."""
        one = self.sampling
        return one.temperature == 0 and one.logprobs is None and not one.looks_back

    def accept(self, token: int) -> None:
        """The sequence goes on with this token."""
        self.position += 1
        self._generated[token] += 1
        if self.sampling.repetition_penalty != 1:
            self._seen.add(token)

    def choose(self, logits_V: Tensor) -> Token:
        """The token that the sequence goes on with. ValueError for logits of which none is the largest number."""
        return self._choose(to_numpy(logits_V))

    def _choose(self, logits: Floats) -> Token:
        best = int(logits.argmax())  # finds NaN before any number
        must_be_finite(float(logits[best]))
        if self.plain:
            return Token(token=best)
        changed = self._penalise(logits)
        if self.sampling.temperature == 0:
            token = int(changed.argmax())
        else:
            u = uniform(self.sampling.seed, self.position)
            token = draw(changed, u, self.sampling)
        if self.sampling.logprobs is None:
            return Token(token=token)
        return with_logprobs(token, logits, self.sampling.logprobs)

    def _penalise(self, logits: Floats) -> Floats:
        one = self.sampling
        if self._seen:
            logits = logits.copy()
            ids = np.fromiter(self._seen, np.int64, len(self._seen))
            seen = logits[ids]
            logits[ids] = np.where(seen > 0, seen / one.repetition_penalty, seen * one.repetition_penalty)
        if self._generated and (one.presence_penalty or one.frequency_penalty):
            logits = logits.copy()
            ids = np.fromiter(self._generated.keys(), np.int64, len(self._generated))
            times = np.fromiter(self._generated.values(), np.float64, len(self._generated))
            logits[ids] -= (one.presence_penalty + one.frequency_penalty * times).astype(logits.dtype)
        return logits


def sample(choosers: Sequence[Sampler], logits_BV: Tensor) -> list[Token]:
    """The next token of each sequence. Where greedy rows lie on a GPU, only their tokens leave it."""
    if logits_BV.device.type == "cpu" or not any(one.plain for one in choosers):
        return [one._choose(logits) for one, logits in zip(choosers, to_numpy(logits_BV), strict=True)]
    largest = logits_BV.max(dim=-1)
    values, ids = largest.values.tolist(), largest.indices.tolist()
    chosen = []
    for row, one in enumerate(choosers):
        must_be_finite(values[row])
        chosen.append(Token(token=ids[row]) if one.plain else one.choose(logits_BV[row]))
    return chosen


def draw(logits: Floats, u: float, sampling: SamplingParams) -> int:
    """A token by its probability after temperature, top-k and top-p: that at which the sum passes u."""
    ids: Ids | None = None  # None: all, so that nothing is gathered
    if sampling.top_k is not None and sampling.top_k < len(logits):
        ids = likeliest(logits, sampling.top_k)
        logits = logits[ids]
    weights = logits.astype(np.float64)
    weights -= weights.max()
    with np.errstate(over="ignore"):  # a temperature next to nothing: all but the likeliest become 0
        weights /= sampling.temperature
    np.exp(weights, out=weights)
    if sampling.top_p < 1:
        kept = nucleus(weights, sampling.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    place = first_beyond(weights, u)
    return place if ids is None else int(ids[place])


def first_beyond(weights: Floats, u: float) -> int:
    """The first place at which the summed weights exceed u times all of them. Never that of a weight of 0."""
    # Sums of blocks first, then inside one of them: running sums over all take longer than all the rest.
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)).cumsum()
    wanted = u * blocks[-1]
    block = int(np.searchsorted(blocks, wanted, side="right"))
    end = min((block + 1) * BLOCK, len(weights))
    inside = weights[block * BLOCK : end].cumsum() + (blocks[block - 1] if block else 0.0)
    place = block * BLOCK + int(np.searchsorted(inside, wanted, side="right"))
    # The two ways of summing may differ in the last digit, and u times the sum may be rounded up to it.
    return place if place < end else int(np.flatnonzero(weights[:end])[-1])


def likeliest(numbers: Floats, count: int) -> Ids:
    """Where the `count` largest numbers stand, in the order of places; of equal ones the first."""
    if count >= len(numbers):
        return np.arange(len(numbers))
    return from_least(numbers, np.partition(numbers, len(numbers) - count)[len(numbers) - count], count)


def from_least(numbers: Floats, least: float, count: int) -> Ids:
    """As `likeliest`, where the least of them is known."""
    places = np.flatnonzero(numbers >= least)
    surplus = len(places) - count
    if surplus:
        equal = np.flatnonzero(numbers[places] == least)
        places = np.delete(places, equal[-surplus:])
    return places


def nucleus(weights: Floats, share: float) -> Ids:
    """Where the fewest weights stand that together have this share of the sum; at least one."""
    wanted = share * weights.sum()
    for looked_at in (*NUCLEUS, len(weights)):
        first = max(len(weights) - looked_at, 0)
        largest = np.sort(np.partition(weights, first)[first:] if first else weights)[::-1]
        sums = largest.cumsum()
        if not first or sums[-1] >= wanted:
            break
    last = min(int(np.searchsorted(sums, wanted, side="left")), len(sums) - 1)
    return from_least(weights, largest[last], last + 1)


def with_logprobs(token: int, logits: Floats, count: int) -> Token:
    """The token with its log probability, and the likeliest tokens with theirs. None is below -9999, which OpenAI writes for
    what cannot be: JSON has no infinity."""
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    ids = likeliest(exact, count) if count > 0 else np.empty(0, np.int64)
    ids = ids[np.argsort(-exact[ids], kind="stable")]
    np.maximum(exact, IMPOSSIBLE, out=exact)
    top = tuple((int(one), float(exact[one])) for one in ids)
    return Token(token=token, logprob=float(exact[token]), top=top)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from these two alone, the same everywhere."""
    digest = hashlib.blake2b(f"{seed},{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def must_be_finite(largest: float) -> None:
    if not np.isfinite(largest):
        raise ValueError(
            f"the largest logit is {largest}: the model's numbers have overflowed, or its weights are damaged"
        )


def to_numpy(logits: Tensor) -> Floats:
    array: Floats = logits.detach().to("cpu", torch.promote_types(logits.dtype, torch.float32)).numpy()
    return array
