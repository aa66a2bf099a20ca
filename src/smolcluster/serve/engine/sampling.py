"""Sample the next token from the logits of a sequence, in this order, which other engines use too:

    repetition penalty      for all tokens so far, prompt included: divides positive logits, multiplies negative
    presence, frequency     subtracted from generated tokens: once, and once for each occurrence
    temperature 0           greedy: the largest logit, the lowest id among equals; the steps below are skipped
    temperature             logits divided by it
    top-k                   keeps exactly the k most likely
    top-p                   keeps the fewest of them, most likely first, with at least this probability
    draw                    in proportion to the remaining probabilities

Of equally likely tokens the lower id is kept. Log probabilities are of the unmodified logits.

**The draw is reproducible on another machine.** u in [0, 1) is a hash of the seed and the position in the sequence; the token
is the first, in order of ids, at which the cumulative probability exceeds u.

Arithmetic is fp64, in numpy, which is faster than torch for one row.
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
NUCLEUS = (1024, 8192)  # top-p sorts this many of the most likely first, and all only if these are too few
BLOCK = 256  # length of partial sums
IMPOSSIBLE = -9999.0  # a log probability


class TokenSampler:
    """The sampling of one sequence. `sample` has no side effects; `accept` adds a token."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        *,
        position: int | None = None,
    ) -> None:
        """`position` of the next token, if not all earlier tokens are given."""
        self.sampling = sampling
        self.position = len(prompt) + len(generated) if position is None else position
        self._seen = set(prompt) | set(generated) if sampling.repetition_penalty != 1 else set()
        self._generated = Counter(generated)

    @property
    def plain(self) -> bool:
        """Return whether sampling is greedy on the unmodified logits, without logprobs."""
        one = self.sampling
        return one.temperature == 0 and one.logprobs is None and not one.looks_back

    def accept(self, token: int) -> None:
        self.position += 1
        self._generated[token] += 1
        if self.sampling.repetition_penalty != 1:
            self._seen.add(token)

    def choose(self, logits_V: Tensor) -> Token:
        """Return the next token. Raises ValueError if the largest logit is not finite."""
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


def sample(choosers: Sequence[TokenSampler], logits_BV: Tensor) -> list[Token]:
    """Return the next token of each sequence. Greedy rows on a GPU are sampled there."""
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
    """Return a token drawn with u after temperature, top-k and top-p."""
    ids: Ids | None = None  # None: all, so that nothing is gathered
    if sampling.top_k is not None and sampling.top_k < len(logits):
        ids = likeliest(logits, sampling.top_k)
        logits = logits[ids]
    weights = logits.astype(np.float64)
    weights -= weights.max()
    with np.errstate(over="ignore"):  # a tiny temperature: all but the largest become 0
        weights /= sampling.temperature
    np.exp(weights, out=weights)
    if sampling.top_p < 1:
        kept = nucleus(weights, sampling.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    place = first_beyond(weights, u)
    return place if ids is None else int(ids[place])


def first_beyond(weights: Floats, u: float) -> int:
    """Return the first index at which the cumulative weight exceeds u times the total; never one of weight 0."""
    # Sums of blocks, then inside one block: a cumulative sum over all is slow.
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)).cumsum()
    wanted = u * blocks[-1]
    block = int(np.searchsorted(blocks, wanted, side="right"))
    end = min((block + 1) * BLOCK, len(weights))
    inside = weights[block * BLOCK : end].cumsum() + (blocks[block - 1] if block else 0.0)
    place = block * BLOCK + int(np.searchsorted(inside, wanted, side="right"))
    # The two sums may differ by rounding.
    return place if place < end else int(np.flatnonzero(weights[:end])[-1])


def likeliest(numbers: Floats, count: int) -> Ids:
    """Return the sorted indices of the `count` largest; of equal ones the first."""
    if count >= len(numbers):
        return np.arange(len(numbers))
    return at_least(numbers, np.partition(numbers, len(numbers) - count)[len(numbers) - count], count)


def at_least(numbers: Floats, threshold: float, count: int) -> Ids:
    """As `likeliest`, given the smallest of these numbers."""
    places = np.flatnonzero(numbers >= threshold)
    surplus = len(places) - count
    if surplus:
        equal = np.flatnonzero(numbers[places] == threshold)
        places = np.delete(places, equal[-surplus:])
    return places


def nucleus(weights: Floats, share: float) -> Ids:
    """Return the indices of the fewest weights with this share of the sum, at least one."""
    wanted = share * weights.sum()
    for looked_at in (*NUCLEUS, len(weights)):
        first = max(len(weights) - looked_at, 0)
        largest = np.sort(np.partition(weights, first)[first:] if first else weights)[::-1]
        sums = largest.cumsum()
        if not first or sums[-1] >= wanted:
            break
    last = min(int(np.searchsorted(sums, wanted, side="left")), len(sums) - 1)
    return at_least(weights, largest[last], last + 1)


def with_logprobs(token: int, logits: Floats, count: int) -> Token:
    """Return the token with its logprob and those of the most likely tokens, clamped at -9999 as OpenAI does: JSON has no
    infinity."""
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    ids = likeliest(exact, count) if count > 0 else np.empty(0, np.int64)
    ids = ids[np.argsort(-exact[ids], kind="stable")]
    np.maximum(exact, IMPOSSIBLE, out=exact)
    top = tuple((int(one), float(exact[one])) for one in ids)
    return Token(token=token, logprob=float(exact[token]), top=top)


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), a hash of seed and position."""
    digest = hashlib.blake2b(f"{seed},{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def must_be_finite(largest: float) -> None:
    if not np.isfinite(largest):
        raise ValueError(f"the largest logit is {largest}: the model overflowed, or its weights are damaged")


def to_numpy(logits: Tensor) -> Floats:
    array: Floats = logits.detach().to("cpu", torch.promote_types(logits.dtype, torch.float32)).numpy()
    return array
