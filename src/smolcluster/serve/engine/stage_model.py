"""Some layers of a model on one machine, and the key-value caches of their sequences.

    tokens or activations ──> [ embedding? | layers a..b | head? ] ──> activations, or logits of the rows with `logits`
                                             │
                                             └ one growing cache for each sequence

A step takes *rows* of different sequences: chunks of prompts, or the token sampled last (`models/ragged.py`). Each row has its
start position, so nothing is rolled back after a failure: rows are sent again from any cached position, and the cache is
truncated there.

After an exception in `run` the caches are consistent: unchanged if the rows were refused (ValueError), else (out of memory, an
interrupt) unchanged or truncated to the `start` of their row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from smolcluster.models.protocols import DecoderConfig, Pipelined, Ragged
from smolcluster.models.registry import build
from smolcluster.serve.engine.types import Flag, Natural, Positive

STEP = 64  # cache capacity is a multiple of this


class Row(NamedTuple):
    """New tokens of one sequence."""

    sequence: Natural
    start: Natural  # the cache must hold this many tokens, and is truncated to them
    count: Positive  # type: ignore[assignment]  # new tokens; shadows tuple.count
    logits: Flag  # the last stage returns the logits after the last token of the row

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRow:
    """A row, and the cache of its sequence, L x 2 x K x room x E."""

    start: int
    count: int
    cache: Tensor


@dataclass(slots=True)
class SequenceCache:
    """Keys and values of one sequence, L x 2 x K x room x E; the first `length` tokens are valid."""

    kv: Tensor
    length: int = 0

    @property
    def room(self) -> int:
        return self.kv.size(3)

    def truncate(self, start: int, *, room: int) -> None:
        """Keep the first `start` tokens, and grow to `room`."""
        self.length = start
        if room > self.room:
            larger = self.kv.new_empty((*self.kv.shape[:3], room, self.kv.size(4)))
            larger[:, :, :, :start] = self.kv[:, :, :, :start]
            self.kv = larger


def cache_capacity(tokens: int, *, room: int, limit: int) -> int:
    """Return the capacity of a cache for `tokens`.

    It grows by at least a quarter: all copies together are at most five times the final size, and at most a fifth of it (plus
    STEP) is unused.
    """
    if tokens <= room:
        return room
    wanted = max(tokens, room + room // 4)
    return min(-(-wanted // STEP) * STEP, limit)


def cache_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one token in the cache of one layer."""
    return 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


class StageModel:
    """Layers and caches. For one thread at a time."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: range,
        *,
        first: bool,
        last: bool,
        weights: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.layers, self.first, self.last = config, layers, first, last
        self.device, self.dtype = device, dtype
        # Names and shapes only: `assign=True` replaces the parameters with the weights.
        with torch.device("meta"):
            model = build(config)
        assert isinstance(model, Pipelined)
        stage = model.stage(layers, first=first, last=last).requires_grad_(False).eval()
        # Not copied if device and dtype match. torch raises RuntimeError with the names of missing and misshapen weights.
        state = {name: weights[name].to(device, dtype) for name, _ in stage.named_parameters() if name in weights}
        stage.load_state_dict(state, assign=True)
        assert isinstance(stage, Ragged)
        self._model = stage
        self._caches: dict[int, SequenceCache] = {}

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], x: Tensor) -> Tensor:
        """Run token ids (N,) on the first stage, else activations (N, D), concatenated over the rows.

        Return activations (N, D); on the last stage logits of the rows with `logits`, in fp32 or wider.
        """
        self._check(rows, x)
        x = x.to(self.device) if self.first else x.to(self.device, self.dtype)
        caches = [self._caches.get(row.sequence) or self._new_cache() for row in rows]
        for row, cache in zip(rows, caches, strict=True):
            cache.truncate(row.start, room=cache_capacity(row.end, room=cache.room, limit=self.config.max_seq_len))
        pieces = [
            CachedRow(start=row.start, count=row.count, cache=cache.kv) for row, cache in zip(rows, caches, strict=True)
        ]
        if self.first:
            x = self._model.embed_pieces(x, pieces)
        x = self._model.run_pieces(x, pieces)
        if self.last:
            x = self._logits(rows, x)
        # Commit the new tokens.
        for row, cache in zip(rows, caches, strict=True):
            cache.length = row.end
            self._caches[row.sequence] = cache
        return x

    def _logits(self, rows: Sequence[Row], x_ND: Tensor) -> Tensor:
        """Return logits after the last token of each row with `logits`. The head is expensive: it runs only on these."""
        ends = accumulate(row.count for row in rows)
        chosen = torch.tensor([end - 1 for row, end in zip(rows, ends, strict=True) if row.logits], dtype=torch.int64)
        logits = self._model.head(x_ND[chosen.to(x_ND.device)])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _new_cache(self) -> SequenceCache:
        shape = (len(self.layers), 2, self.config.num_kv_heads, 0, self.config.head_dim)
        return SequenceCache(torch.empty(shape, device=self.device, dtype=self.dtype))

    def _check(self, rows: Sequence[Row], x: Tensor) -> None:
        """Raise ValueError for rows that cannot be run, before any cache changes. Their fields are valid: `wire.read_batch`."""
        limit = self.config.max_seq_len
        for row in rows:
            if row.end > limit:
                raise ValueError(f"sequence {row.sequence}: {row.end} tokens do not fit max_seq_len {limit}")
        held = self.lengths()
        uncached = [row for row in rows if row.start > held.get(row.sequence, 0)]
        if uncached:
            reasons = ", ".join(
                f"sequence {row.sequence} continues at {row.start}, but {held.get(row.sequence, 0)} tokens are cached"
                for row in uncached
            )
            raise ValueError(f"{reasons}: send them again from the first token")
        total = sum(row.count for row in rows)
        shape = (total,) if self.first else (total, self.config.model_dim)
        if x.shape != shape or (x.dtype != torch.int64 if self.first else not x.is_floating_point()):
            wanted = "int64 token ids" if self.first else "activations"
            raise ValueError(f"got {x.dtype} of shape {tuple(x.shape)}, these rows take {wanted} of shape {shape}")
        if self.first:
            self._check_tokens(rows, x)

    def _check_tokens(self, rows: Sequence[Row], tokens_N: Tensor) -> None:
        # On a GPU an index error is fatal for the process.
        vocab_size = self.config.vocab_size
        tokens = tokens_N.tolist()
        wrong = next((place for place, token in enumerate(tokens) if not 0 <= token < vocab_size), None)
        if wrong is not None:
            ends = accumulate(row.count for row in rows)
            sequence = next(row.sequence for row, end in zip(rows, ends, strict=True) if wrong < end)
            token = tokens[wrong]
            raise ValueError(f"sequence {sequence}: token {token} is outside the vocabulary of {vocab_size}")

    def forget(self, sequence: int) -> None:
        """Free its cache, if it has one."""
        self._caches.pop(sequence, None)

    def lengths(self) -> dict[int, int]:
        """Return the cached tokens of each sequence."""
        return {sequence: cache.length for sequence, cache in self._caches.items()}
