"""Several tensors as one payload: each one encoded, one after the other, in a fixed order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from smolcluster.comm.codecs.base import Codec, CodecError
from smolcluster.comm.codecs.feedback import Feedback, Memory

# Neighbouring keys come to lie far apart, with room for the tensors of a bucket between them.
ODD = 0x9E3779B97F4A7C15


class Packer:
    """The bytes of a bucket. Sender and receiver make it from the same names, shapes and codec."""

    def __init__(self, layout: Sequence[tuple[str, tuple[int, ...]]], codec: Codec) -> None:
        self.codec = codec
        self.names = [name for name, _ in layout]
        self.shapes = [torch.Size(shape) for _, shape in layout]
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"two tensors of a bucket have the same name: {self.names}")
        ends = list(itertools.accumulate((codec.nbytes(shape) for shape in self.shapes), initial=0))
        self._spans = [slice(start, end) for start, end in itertools.pairwise(ends)]
        self.nbytes = ends[-1]

    def encode(
        self, tensors: Sequence[Tensor], out: Tensor | None = None, *, key: int, feedback: Feedback | None = None
    ) -> Tensor:
        """The payload, in `out` or in new memory. `key` seeds what is random: another for every step.

        A single contiguous tensor as fp32, without `out`, is not copied: the payload is a view of it.
        Raises CodecError, with the tensor's name, for one that the codec cannot carry; `feedback` is then as it was.
        """
        self._check_shapes(tensors)
        if out is None and self.codec.lossless and len(tensors) == 1 and _is_plain(tensors[0]):
            return tensors[0].detach().view(-1).view(torch.uint8)
        if out is None:
            out = torch.empty(self.nbytes, dtype=torch.uint8)
        if out.shape != (self.nbytes,):
            raise ValueError(f"the payload has {self.nbytes} bytes, its place {tuple(out.shape)}")
        memories: dict[str, Memory] = {}
        for index, (name, tensor) in enumerate(zip(self.names, tensors, strict=True)):
            part = out[self._spans[index]]
            own_key = key * ODD + index
            try:
                if feedback is None or self.codec.lossless:
                    self.codec.encode(tensor, part, key=own_key)
                else:
                    memories[name] = self._encode_rest(feedback, name, tensor, part, key=own_key)
            except CodecError as error:
                raise CodecError(f"{name}: {error}") from error
        if feedback is not None:
            feedback.keep(memories)
        return out

    def decode(self, data: Tensor, outs: Sequence[Tensor]) -> None:
        """Overwrite `outs`. Raises CodecError for data that cannot be a payload; what `outs` hold is then of no use."""
        self._check_shapes(outs)
        if data.dtype != torch.uint8 or data.shape != (self.nbytes,):
            raise CodecError(f"{tuple(data.shape)} of {data.dtype} is not this bucket's payload of {self.nbytes} bytes")
        for name, span, out in zip(self.names, self._spans, outs, strict=True):
            try:
                self.codec.decode(data[span], out)
            except CodecError as error:
                raise CodecError(f"{name}: {error}") from error

    def _encode_rest(self, feedback: Feedback, name: str, gradient: Tensor, part: Tensor, *, key: int) -> Memory:
        """Encode g + r; what remains is the new residual."""
        memory = feedback.add(name, gradient)
        wanted = memory.residual
        self.codec.encode(wanted, part, key=key, state=memory.state)
        decoded = feedback.scratch(wanted.shape)
        self.codec.decode(part, decoded)
        wanted.sub_(decoded)
        return memory

    def _check_shapes(self, tensors: Sequence[Tensor]) -> None:
        if [t.shape for t in tensors] != self.shapes:
            raise ValueError(
                f"this bucket holds shapes {list(map(tuple, self.shapes))}, not {[tuple(t.shape) for t in tensors]}"
            )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
