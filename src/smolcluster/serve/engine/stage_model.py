"""Some layers of a model on one machine, and the keys and values of the sequences that pass through them.

    tokens or activations ──> [ embedding? | layers a..b | head? ] ──> activations, or logits where they were asked for
                                             │
                                             └ per sequence: a cache that grows with it

A step takes *rows*: pieces of different sequences, some tokens of a prompt or the one that was chosen last, side by side
(`models/ragged.py`). The sender gives for each how many tokens came before. So nothing has to be undone after a failure:
rows are sent again from any position that is held, and what was held beyond it is forgotten.

After an exception in `run` no cache is torn:

    the rows were refused       (ValueError)                        every cache is as before
    anything later              (out of memory, an interrupt)       each cache of the rows is as before, or cut to its `start`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from smolcluster.models.protocols import DecoderConfig, Pipelined, Ragged
from smolcluster.models.registry import build
from smolcluster.serve.engine.types import Flag, Positive, Whole

STEP = 64  # tokens; a cache has room for a multiple of it


class Row(NamedTuple):
    """New tokens of one sequence."""

    sequence: Whole
    start: Whole  # tokens of it that the cache must hold already; what it holds beyond that is forgotten
    count: Positive  # type: ignore[assignment]  # new tokens; nobody asks a row for tuple.count
    answer: Flag  # the last part gives the logits behind the last of them

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRow:
    """A row, and the keys and values before and of it, L x 2 x K x room x E."""

    start: int
    count: int
    cache: Tensor


@dataclass(slots=True)
class KeyValueCache:
    """Keys and values of one sequence, L x 2 x K x room x E. The first `length` tokens count."""

    kv: Tensor
    length: int = 0

    @property
    def room(self) -> int:
        return self.kv.size(3)

    def cut(self, start: int, *, room: int) -> None:
        """Keep the first `start` tokens, with room for so many."""
        self.length = start
        if room > self.room:
            larger = self.kv.new_empty((*self.kv.shape[:3], room, self.kv.size(4)))
            larger[:, :, :, :start] = self.kv[:, :, :, :start]
            self.kv = larger


def cache_capacity(tokens: int, *, room: int, limit: int) -> int:
    """How large to make a cache that must hold `tokens`.

    At least a quarter more than it was: then all the copying of a cache that grows costs no more than five times its last
    size, and no more than a fifth of it lies idle, and a step.
    """
    if tokens <= room:
        return room
    wanted = max(tokens, room + room // 4)
    return min(-(-wanted // STEP) * STEP, limit)


def cache_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Of each layer."""
    return 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


class StageModel:
    """Layers of a model on one machine, and the caches of the sequences that pass through it. For one thread at a time."""

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
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= config.num_layers:
            raise ValueError(f"{layers} is no range of the {config.num_layers} layers of this model")
        self.config, self.layers, self.first, self.last = config, layers, first, last
        self.device, self.dtype = device, dtype
        # Names and shapes only: the weights take the places of parameters that hold nothing.
        with torch.device("meta"):
            whole = build(config)
        assert isinstance(whole, Pipelined)
        stage = whole.stage(layers, first=first, last=last).requires_grad_(False).eval()
        stage.load_state_dict(self._take(stage, weights), assign=True)
        assert isinstance(stage, Ragged)
        self._model = stage
        self._caches: dict[int, KeyValueCache] = {}

    def _take(self, stage: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of this part. One that is in its place and of its type already is not copied."""
        taken = {}
        for name, parameter in stage.named_parameters():
            if name not in weights:
                raise ValueError(f"the weights have no {name}")
            tensor = weights[name]
            if tensor.shape != parameter.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the model takes {tuple(parameter.shape)}")
            taken[name] = tensor.to(device=self.device, dtype=self.dtype)
        return taken

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], x: Tensor) -> Tensor:
        """Token ids (N,) on the first part, else activations (N, D); the tokens of the rows one after the other.

        Gives activations (N, D); on the last part logits, one line for each row with `answer`, in fp32 at least.
        """
        self._check(rows, x)
        x = x.to(self.device) if self.first else x.to(self.device, self.dtype)
        caches = [self._caches.get(row.sequence) or self._new_cache() for row in rows]
        for row, cache in zip(rows, caches, strict=True):
            cache.cut(row.start, room=cache_capacity(row.end, room=cache.room, limit=self.config.max_seq_len))
        pieces = [
            CachedRow(start=row.start, count=row.count, cache=cache.kv) for row, cache in zip(rows, caches, strict=True)
        ]
        if self.first:
            x = self._model.embed_pieces(x, pieces)
        x = self._model.run_pieces(x, pieces)
        if self.last:
            x = self._answer(rows, x)
        # All went well: now the new tokens count.
        for row, cache in zip(rows, caches, strict=True):
            cache.length = row.end
            self._caches[row.sequence] = cache
        return x

    def _answer(self, rows: Sequence[Row], x_ND: Tensor) -> Tensor:
        """Logits behind the last token of the rows that ask. The head is as wide as the vocabulary: it runs on these alone."""
        ends = accumulate(row.count for row in rows)
        chosen = torch.tensor([end - 1 for row, end in zip(rows, ends, strict=True) if row.answer], dtype=torch.int64)
        logits = self._model.head(x_ND[chosen.to(x_ND.device)])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _new_cache(self) -> KeyValueCache:
        shape = (len(self.layers), 2, self.config.num_kv_heads, 0, self.config.head_dim)
        return KeyValueCache(torch.empty(shape, device=self.device, dtype=self.dtype))

    def _check(self, rows: Sequence[Row], x: Tensor) -> None:
        """Refuse what cannot be run, before anything is touched."""
        if not rows:
            raise ValueError("there are no rows")
        if len({row.sequence for row in rows}) < len(rows):
            raise ValueError("a sequence is in more than one row")
        limit = self.config.max_seq_len
        for row in rows:
            if row.start < 0 or row.count < 1:
                raise ValueError(f"sequence {row.sequence}: {row.count} tokens from position {row.start} make no sense")
            if row.end > limit:
                raise ValueError(f"sequence {row.sequence}: {row.end} tokens do not fit max_seq_len {limit}")
        held = self.lengths()
        lacking = [row for row in rows if row.start > held.get(row.sequence, 0)]
        if lacking:
            told = ", ".join(
                f"sequence {row.sequence} goes on from {row.start}, {held.get(row.sequence, 0)} are held"
                for row in lacking
            )
            raise ValueError(f"{told}: send these again from the first token")
        total = sum(row.count for row in rows)
        shape = (total,) if self.first else (total, self.config.model_dim)
        if x.shape != shape or (x.dtype != torch.int64 if self.first else not x.is_floating_point()):
            wanted = "int64 token ids" if self.first else "activations"
            raise ValueError(f"got {x.dtype} of shape {tuple(x.shape)}, these rows take {wanted} of shape {shape}")
        if self.first:
            self._check_tokens(rows, x)

    def _check_tokens(self, rows: Sequence[Row], tokens_N: Tensor) -> None:
        # On a GPU an id outside the table ends the process's use of it.
        vocab_size = self.config.vocab_size
        tokens = tokens_N.tolist()
        wrong = next((place for place, token in enumerate(tokens) if not 0 <= token < vocab_size), None)
        if wrong is not None:
            ends = accumulate(row.count for row in rows)
            sequence = next(row.sequence for row, end in zip(rows, ends, strict=True) if wrong < end)
            token = tokens[wrong]
            raise ValueError(f"sequence {sequence}: token {token} is outside the vocabulary of {vocab_size}")

    def forget(self, sequence: int) -> None:
        """Free what is held of it. One that is not known is nothing to do."""
        self._caches.pop(sequence, None)

    def lengths(self) -> dict[int, int]:
        """How many tokens are held of each sequence."""
        return {sequence: cache.length for sequence, cache in self._caches.items()}
