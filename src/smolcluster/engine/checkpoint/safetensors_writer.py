"""Write tensors to safetensors files, and hash a set of weights.

The format is that of the safetensors library: eight bytes with the length of the header (little-endian), the header as JSON
padded with spaces to a multiple of eight, then the raw little-endian bytes of every tensor without gaps. Tensors with larger
elements come first, so that each one is aligned.

This writer needs no second copy of the tensors, hashes while writing, and releases the GIL for large buffers. Files are read
with the library (`lazy_tensors.py`), whose checks of a header (lengths, overlaps, overflow) are well tested.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from smolcluster.durable_files import OutputFile
from smolcluster.errors import UserError

CHUNK_BYTES = 16 << 20  # large enough that taking the GIL between two chunks costs nothing

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class HashedFile:
    """Count and hash the bytes written to a file."""

    def __init__(self, file: OutputFile) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        for chunk in _chunks(data):
            self._sha256.update(chunk)
            self._file.write(chunk)
            self.size += chunk.nbytes

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()


@dataclasses.dataclass(frozen=True)
class TensorFile:
    """The contents of one file: the header, the distinct tensors in file order, and the aliases of tied ones."""

    header: bytes
    tensors: list[Tensor]
    aliases: dict[str, str]

    @classmethod
    def plan(cls, tensors: Mapping[str, Tensor]) -> TensorFile:
        """Lay out a file without writing it. Tied tensors are stored once, under the first of their names."""
        for name, tensor in tensors.items():
            _check_storable(name, tensor)
        aliases = find_aliases(tensors)
        order = sorted((name for name in tensors if name not in aliases), key=lambda n: (-tensors[n].itemsize, n))

        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in order:
            tensor = tensors[name]
            end = offset + tensor.numel() * tensor.itemsize
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % 8)
        return cls(len(text).to_bytes(8, "little") + text, [tensors[name] for name in order], aliases)

    def write_to(self, file: HashedFile) -> None:
        file.write(self.header)
        for tensor in self.tensors:
            file.write(tensor_bytes(tensor))


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of identical views of one memory: {alias: first name}, in sorted order."""
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.numel() == 0:
            continue
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if first.setdefault(view, name) != name:
            aliases[name] = first[view]
    return aliases


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the elements in row-major order as little-endian bytes: a view, no copy, of a dense tensor on the CPU."""
    assert sys.byteorder == "little", "checkpoints are written on little-endian machines only"
    dense = tensor.detach().cpu().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 to compare two sets of weights.

    For each name in sorted order: the name, the element type and the shape, each in UTF-8 and ended by a zero byte
    (`blocks.0.attn.weight\\0float32\\0768,256\\0`; the shape of a scalar is empty), then the elements in row-major order as
    little-endian bytes. Tied tensors count under each of their names.
    """
    sha256 = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = ",".join(str(size) for size in tensor.shape)
        sha256.update(f"{name}\0{dtype}\0{shape}\0".encode())
        sha256.update(tensor_bytes(tensor))
    return sha256.hexdigest()


def _chunks(data: bytes | memoryview) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, view.nbytes, CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def _check_storable(name: str, tensor: Tensor) -> None:
    if name == "__metadata__":
        raise UserError("a tensor cannot be named '__metadata__': safetensors reserves that name; rename it")
    if tensor.dtype not in _NAMES or tensor.layout is not torch.strided or tensor.is_meta:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
        what = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise UserError(f"tensor '{name}' ({what}) cannot be saved; a checkpoint contains dense tensors of {known}")
