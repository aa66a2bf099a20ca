"""Pack a list of tensors into buckets, encode each as one payload, and decode it on the other side.

Both sides make the same `PackedTensors` from the same model, so only encoded values are sent, and the receiver knows every
payload's size. One bucket is sent while the next is being encoded. A tensor larger than `max_bytes` is split into slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smolcluster.comm.codecs import Codec, Feedback, Packer
from smolcluster.comm.elastic.membership.mailbox import Payload

MAX_BYTES = 1 << 30  # of a payload
ROUND = 1 << 12  # elements: slices are multiples of every codec's block size


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor, or a slice of one."""

    name: str
    shape: tuple[int, ...]
    part: slice | None = None  # of the tensor as a row; None: all of it

    @property
    def label(self) -> str:
        return self.name if self.part is None else f"{self.name}[{self.part.start}:{self.part.stop}]"

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        tensor = tensors[self.name]
        return tensor if self.part is None else tensor.reshape(-1)[self.part]


class PackedTensors:
    def __init__(
        self,
        layout: Sequence[tuple[str, tuple[int, ...]]],
        *,
        codec: Codec,
        bucket_bytes: int,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`max_bytes`: of a payload; larger tensors are split."""
        self.codec = codec
        self.names = [name for name, _ in layout]
        entries = [e for name, shape in layout for e in _entries(name, shape, codec=codec, max_bytes=max_bytes)]
        sizes = [4 * math.prod(entry.shape) for entry in entries]
        self._parts = [entries[i:j] for i, j in _cut(sizes, min(bucket_bytes, max_bytes))]
        self._packers = [Packer([(entry.label, entry.shape) for entry in part], codec) for part in self._parts]

    def __len__(self) -> int:
        return len(self._packers)

    @property
    def nbytes(self) -> int:
        return sum(packer.nbytes for packer in self._packers)

    def payloads(self) -> list[Payload]:
        """Return the payload of each channel."""
        return [Payload(torch.uint8, (packer.nbytes,)) for packer in self._packers]

    def encode(
        self, tensors: Mapping[str, Tensor], *, key: int = 0, feedback: Feedback | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the channel and payload of each bucket."""
        for channel, (part, packer) in enumerate(zip(self._parts, self._packers, strict=True)):
            inputs = [entry.of(tensors).detach().to("cpu", torch.float32) for entry in part]
            # A new buffer: the tensors change while it is being sent. The payload of a bounded codec is padded.
            out = (torch.zeros if self.codec.bounded else torch.empty)(packer.nbytes, dtype=torch.uint8)
            packer.encode(inputs, out, key=key * len(self._packers) + channel, feedback=feedback)
            yield channel, out

    def decode(self, channel: int, payload: Tensor, out: Mapping[str, Tensor]) -> None:
        """Decode a bucket into `out[name]` for each of its tensors."""
        self._packers[channel].decode(payload, [entry.of(out) for entry in self._parts[channel]], padded=True)


def _entries(name: str, shape: tuple[int, ...], *, codec: Codec, max_bytes: int) -> list[_Entry]:
    """Return the full tensor, or slices of it if its payload would exceed `max_bytes`."""
    if codec.nbytes(torch.Size(shape)) <= max_bytes:
        return [_Entry(name, shape)]
    length, elements = max(ROUND, max_bytes // 5 // ROUND * ROUND), math.prod(shape)
    spans = [slice(start, min(start + length, elements)) for start in range(0, elements, length)]
    return [_Entry(name, (span.stop - span.start,), span) for span in spans]


def _cut(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Return consecutive runs (start, stop) of at most `limit` bytes; a larger entry is a separate run."""
    runs, start, filled = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and filled + size > limit:
            runs.append((start, i))
            start, filled = i, 0
        filled += size
    return [*runs, (start, len(sizes))] if sizes else []
