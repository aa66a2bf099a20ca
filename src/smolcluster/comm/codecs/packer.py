"""Several tensors as one payload: their encodings in a fixed order.

int8 and int4 of several tensors are encoded and decoded together, in a few operations: the same bytes, sooner for a model
of many small tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smolcluster.comm.codecs.base import Codec, CodecError
from smolcluster.comm.codecs.feedback import Feedback, Memory
from smolcluster.comm.codecs.flat_levels import FlatLevels
from smolcluster.comm.codecs.levels import Int4, Int8

# Spreads consecutive keys far apart, with room for the tensors of a bucket in between.
ODD = 0x9E3779B97F4A7C15
CPU = torch.device("cpu")


class Packer:
    """Encodes a bucket in `nbytes` (at most, if the codec is bounded). Both ends make the same packer."""

    def __init__(self, layout: Sequence[tuple[str, tuple[int, ...]]], codec: Codec) -> None:
        self.codec = codec
        self.names = [name for name, _ in layout]
        self.shapes = [torch.Size(shape) for _, shape in layout]
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"two tensors of a bucket have the same name: {self.names}")
        self._sizes = [codec.nbytes(shape) for shape in self.shapes]
        self.nbytes = sum(self._sizes)
        self._flat: FlatLevels | None = None
        if isinstance(codec, Int4 | Int8) and not codec.unbiased and len(layout) > 1:
            self._flat = FlatLevels(codec, layout)

    def encode(
        self, tensors: Sequence[Tensor], out: Tensor | None = None, *, key: int, feedback: Feedback | None = None
    ) -> Tensor:
        """Return the payload, in `out` or in new memory. `key`: random seed, different for every step.

        Raises CodecError, with the tensor's name, if a tensor cannot be encoded; `feedback` is then unchanged.
        """
        self._check_shapes(tensors)
        if out is None:
            out = torch.empty(self.nbytes, dtype=torch.uint8)
        if out.shape != (self.nbytes,):
            raise ValueError(f"the payload needs {self.nbytes} bytes, the buffer has shape {tuple(out.shape)}")
        if self._flat is not None and self._encode_together(self._flat, tensors, out, feedback):
            return out
        memories: dict[str, Memory] = {}
        end = 0
        for index, (name, tensor) in enumerate(zip(self.names, tensors, strict=True)):
            part = out[end : end + self._sizes[index]]
            own_key = key * ODD + index
            try:
                if feedback is None or self.codec.lossless:
                    end += self.codec.encode(tensor, part, key=own_key)
                else:
                    memories[name], used = self._encode_rest(feedback, name, tensor, part, key=own_key)
                    end += used
            except CodecError as error:
                raise CodecError(f"{name}: {error}") from error
        if feedback is not None:
            feedback.keep(memories)
        return out[:end]

    def decode(self, data: Tensor, outs: Sequence[Tensor], *, padded: bool = False) -> None:
        """Decode into `outs`. Raises CodecError for invalid data; `outs` are then undefined.

        `padded`: the payload of a bounded codec may be followed by padding, up to `nbytes`.
        """
        self._check_shapes(outs)
        fits = data.ndim == 1 and (len(data) == self.nbytes or (self.codec.bounded and len(data) < self.nbytes))
        if data.dtype != torch.uint8 or not fits:
            raise CodecError(f"{tuple(data.shape)} of {data.dtype} is not this bucket's payload of {self.nbytes} bytes")
        if self._flat is not None:
            flat = self._flat.zeros(CPU)
            for decoded in self._flat.decode(data):
                decoded.add_to(flat, 1.0)
            torch._foreach_copy_(list(outs), self._flat.views(flat))
            return
        end = 0
        for name, size, out in zip(self.names, self._sizes, outs, strict=True):
            try:
                end += self.codec.decode(data[end : end + size], out)
            except CodecError as error:
                raise CodecError(f"{name}: {error}") from error
        if end != len(data) and not padded:
            raise CodecError(f"this bucket's payload ends after {end} of {len(data)} bytes")

    def _encode_together(
        self, encoding: FlatLevels, tensors: Sequence[Tensor], out: Tensor, feedback: Feedback | None
    ) -> bool:
        """Encode all tensors; False: one of them cannot be encoded, and nothing has changed."""
        flat = encoding.empty(CPU)
        views = encoding.views(flat)
        torch._foreach_copy_(views, [tensor.detach() for tensor in tensors])
        memories = {} if feedback is None else feedback.add_all(dict(zip(self.names, views, strict=True)))
        try:
            payload, decoded = encoding.encode(flat)
        except CodecError:  # it does not know which
            return False
        out.copy_(payload)
        if feedback is not None:
            for part in decoded:
                part.add_to(flat, -1.0)
            feedback.keep(memories)
        return True

    def _encode_rest(
        self, feedback: Feedback, name: str, gradient: Tensor, part: Tensor, *, key: int
    ) -> tuple[Memory, int]:
        """Encode g + r. Returns the memory with the new residual, and the bytes used."""
        memory = feedback.add(name, gradient)
        wanted = memory.residual
        used = self.codec.encode(wanted, part, key=key, state=memory.state)
        decoded = feedback.scratch(wanted.shape)
        self.codec.decode(part[:used], decoded)
        wanted.sub_(decoded)
        return memory, used

    def _check_shapes(self, tensors: Sequence[Tensor]) -> None:
        if [t.shape for t in tensors] != self.shapes:
            raise ValueError(
                f"this bucket holds shapes {list(map(tuple, self.shapes))}, not {[tuple(t.shape) for t in tensors]}"
            )
