"""A list of tensors as a few payloads: packed into buckets, encoded, and unpacked on the other side.

Both sides make the same `Parcels` from the same model, so nothing but the encoded numbers crosses the wire, and every
payload's size is known before it comes. While one bucket is on its way the next is being encoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from smolcluster.comm.codecs import Codec, Feedback, Packer
from smolcluster.comm.elastic.mailbox import Payload


class Parcels:
    def __init__(self, layout: Sequence[tuple[str, tuple[int, ...]]], *, codec: Codec, bucket_bytes: int) -> None:
        self.codec = codec
        self.names = [name for name, _ in layout]
        self._parts = [layout[i:j] for i, j in _cut([4 * math.prod(shape) for _, shape in layout], bucket_bytes)]
        self._packers = [Packer(part, codec) for part in self._parts]

    def __len__(self) -> int:
        return len(self._packers)

    @property
    def nbytes(self) -> int:
        return sum(packer.nbytes for packer in self._packers)

    def payloads(self) -> list[Payload]:
        """What each channel carries."""
        return [Payload(torch.uint8, (packer.nbytes,)) for packer in self._packers]

    def encode(
        self, tensors: Mapping[str, Tensor], *, key: int = 0, feedback: Feedback | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Channel and payload, one bucket after the other."""
        for channel, (part, packer) in enumerate(zip(self._parts, self._packers, strict=True)):
            inputs = [tensors[name].detach().to("cpu", torch.float32) for name, _ in part]
            # In memory of its own: the tensors change while it is on its way.
            out = torch.empty(packer.nbytes, dtype=torch.uint8)
            yield channel, packer.encode(inputs, out, key=key * len(self._packers) + channel, feedback=feedback)

    def decode(self, channel: int, payload: Tensor, out: Mapping[str, Tensor]) -> None:
        """Into `out[name]`, for the names of this bucket."""
        self._packers[channel].decode(payload, [out[name] for name, _ in self._parts[channel]])


def _cut(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Consecutive runs of at most `limit` bytes; one that is larger stands alone."""
    runs, start, filled = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and filled + size > limit:
            runs.append((start, i))
            start, filled = i, 0
        filled += size
    return [*runs, (start, len(sizes))] if sizes else []
