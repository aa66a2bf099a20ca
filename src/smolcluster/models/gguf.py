"""Read decoders from GGUF files of llama.cpp and its converters.

    ours                    llama, qwen2, qwen3                 gpt2
    attention.qkv           attn_q, attn_k, attn_v              attn_qkv
    mlp.up                  ffn_gate, ffn_up                    ffn_up
    head                    output, or token_embd if it is missing

Files of the architecture `llama` have the rows of q and k in another order: their rotary positions rotate the pair
(2i, 2i + 1) of a head, ours and Hugging Face's (i, i + E/2). They are permuted here. `qwen2` and `qwen3` have our order.

    type    block of weights    bytes    a weight
    F32, F16, BF16    1         4, 2, 2  itself
    Q8_0              32        34       d q              q: int8
    Q4_0              32        18       d (q - 8)        q: 4 bits; the first 16 weights have the lower halves of the bytes
    Q4_1              32        20       d q + m
    Q6_K              256       210      d s (q - 32)     q: 6 bits, s: int8 for each 16; the head of most files in Q4

The file is mapped: a part of a model reads only its own tensors. The header is not read with the `gguf` package, which takes
seconds for a large vocabulary and trusts the sizes in a damaged file. Here every count is checked against the size of the
file before anything is allocated.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from smolcluster.models.architecture import Architecture, GGUFLayout
from smolcluster.models.parts import cast, check_depth, check_shapes, part_of, their_names, their_shapes
from smolcluster.models.protocols import DecoderConfig
from smolcluster.models.registry import ARCHITECTURES, fields_of

MAGIC, VERSIONS = b"GGUF", (2, 3)
_HEADER_LIMIT_BYTES = 64 << 20  # vocabularies of 260,000 tokens take 10 MB
_LARGEST = 1 << 31
_CHUNK = 1 << 20  # weights unpacked at a time

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9

# Tensor types by their number in the file: name, weights and bytes of a block.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
KNOWN_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q6_K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of packed weights in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]  # in torch's order; the file has it reversed
    offset: int
    size: int


class GGUF:
    """An open file. Raises ValueError with its name if it is damaged or not supported."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():  # opening a pipe would block until it has a writer
            raise ValueError(f"{self.path}: not a regular file")
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"{self.path}: not a GGUF file: it is empty") from error
        try:
            self.metadata, self.tensors, header_bytes = _read_header(self._map)
            architecture, self._layout = _named(self.metadata)
            self.config = _config(architecture, self._layout, self.metadata, self.tensors)
            self._shapes = self.config.shapes()
            self._check()
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        self.header_sha256 = hashlib.sha256(self._map[:header_bytes]).hexdigest()

    @property
    def architecture(self) -> str:
        return self._layout.architecture

    def load(
        self,
        layers: range,
        *,
        first: bool,
        last: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> dict[str, Tensor]:
        """Return the parameters of a part of the model (parts.py), under our names."""
        names = part_of(self._shapes, self.config, layers, first=first, last=last)
        try:
            return {name: self._parameter(name, dtype).to(device) for name in names}
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _parameter(self, name: str, dtype: torch.dtype) -> Tensor:
        result = torch.empty(self._shapes[name], dtype=dtype)
        row = 0
        for theirs in their_names(self._layout.names, name):
            stored = self.tensors[theirs]
            into = result[row : row + stored.shape[0]]
            self._unpack(stored, into)
            if self._layout.adjacent_pairs and ".attn_q." in theirs:
                _sort_pairs(into, self.config.num_heads)
            if self._layout.adjacent_pairs and ".attn_k." in theirs:
                _sort_pairs(into, self.config.num_kv_heads)
            row += stored.shape[0]
        return result

    def _unpack(self, stored: Stored, into: Tensor) -> None:
        columns = stored.shape[-1]
        rows = math.prod(stored.shape) // columns
        packed = np.frombuffer(self._map, np.uint8, stored.size, stored.offset).reshape(rows, -1)
        flat = into.view(rows, columns)
        step = max(1, _CHUNK // columns)
        for row in range(0, rows, step):
            try:
                weights = torch.from_numpy(_unpack(packed[row : row + step], stored.kind))
            except FloatingPointError as error:
                raise ValueError(f"{stored.name} contains NaN or infinity") from error
            flat[row : row + step] = cast(stored.name, weights, into.dtype)

    def _check(self) -> None:
        """Check names, shapes and types of all tensors, whatever part will be loaded."""
        found = {name: stored.shape for name, stored in self.tensors.items()}
        check_shapes(found, their_shapes(self._layout.names, self.config))
        for stored in self.tensors.values():
            if stored.kind not in KNOWN_TYPES:
                raise ValueError(
                    f"{stored.name} has the type {stored.kind}, which is not read here: only {', '.join(KNOWN_TYPES)}; "
                    "convert the model's original weights to one of them, such as with: "
                    "llama-quantize --pure MODEL.gguf OUT.gguf Q8_0"
                )


# The header


class _Cursor:
    """Reads the header sequentially, with bounds checks."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.end = data, 0, min(len(data), _HEADER_LIMIT_BYTES)

    def take(self, size: int, what: str) -> int:
        """Skip `size` bytes and return their offset."""
        begin = self.at
        if size > self.end - begin:
            if self.end < len(self.data):
                raise ValueError(f"its header is larger than {_HEADER_LIMIT_BYTES >> 20} MiB, at {what}")
            raise ValueError(
                f"cut off or damaged in its header: {what} takes {size} bytes, {self.end - begin} are left"
            )
        self.at = begin + size
        return begin

    def number(self, form: str, what: str) -> int:
        value: int = struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]
        return value

    def text(self, what: str) -> str:
        size = self.number("<Q", what)
        begin = self.take(size, what)
        try:
            return self.data[begin : begin + size].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"damaged in its header: {what} is not UTF-8") from error

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind in _SCALARS:
            return _plain(self._numbers(kind, 1, what)[0])
        if kind != _ARRAY:
            raise ValueError(f"damaged in its header: {what} has the type {kind}, which does not exist")
        kind, count = self.number("<I", what), self.number("<Q", what)
        if kind == _STRING:
            if 8 * count > self.end - self.at:
                raise ValueError(f"cut off or damaged in its header: {what} says that it has {count} strings")
            return [self.text(what) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{what} is a list of the type {kind}, which is not read here")
        return self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> npt.NDArray[Any]:
        dtype = np.dtype(_SCALARS[kind])
        begin = self.take(count * dtype.itemsize, what)
        return np.frombuffer(self.data[begin : self.at], dtype)


def _plain(value: Any) -> Any:
    """Convert a float32 to the shortest equal decimal: 1e-05, not 9.999999747378752e-06."""
    return float(str(value)) if isinstance(value, np.float32) else value.item()


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, Stored], int]:
    """Return metadata, tensors, and the size of the header."""
    if data[:4] != MAGIC:
        raise ValueError(f"not a GGUF file: it begins with {bytes(data[:4])!r}, not with {MAGIC!r}")
    cursor = _Cursor(data)
    cursor.take(4, "the magic")
    version = cursor.number("<I", "the version")
    if version not in VERSIONS:
        raise ValueError(
            f"GGUF version {version} is not read here: only {' and '.join(map(str, VERSIONS))}, little-endian"
        )
    num_tensors, num_values = cursor.number("<Q", "the number of tensors"), cursor.number("<Q", "the number of values")
    if 24 * num_tensors + 13 * num_values > cursor.end:  # the minimum size of each
        raise ValueError(
            f"cut off or damaged in its header: {num_tensors} tensors and {num_values} values do not fit {len(data)} bytes"
        )

    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text("the name of a value")
        if key in metadata:
            raise ValueError(f"damaged in its header: {key} is there twice")
        metadata[key] = cursor.value(cursor.number("<I", key), key)

    found = [_read_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise ValueError(f"damaged in its header: general.alignment is {alignment}")
    begin = -(-cursor.at // alignment) * alignment
    return metadata, _place(found, begin=begin, size=len(data), alignment=alignment), cursor.at


def _read_tensor(cursor: _Cursor) -> Stored:
    name = cursor.text("the name of a tensor")
    num_dims = cursor.number("<I", name)
    if not 1 <= num_dims <= 4:
        raise ValueError(f"damaged in its header: {name} has {num_dims} dimensions")
    shape = tuple(cursor.number("<Q", name) for _ in range(num_dims))[::-1]
    kind = cursor.number("<I", name)
    offset = cursor.number("<Q", name)
    if kind not in _TYPES:
        raise ValueError(f"{name} has the type {kind}, which is not read here: only {', '.join(KNOWN_TYPES)}")
    called, weights, size = _TYPES[kind]
    if shape[-1] % weights or not all(0 < length <= _LARGEST for length in shape):
        raise ValueError(f"damaged in its header: {name} has the shape {shape} in blocks of {weights} ({called})")
    return Stored(name=name, kind=called, shape=shape, offset=offset, size=math.prod(shape) // weights * size)


def _place(found: list[Stored], *, begin: int, size: int, alignment: int) -> dict[str, Stored]:
    """Return the tensors by name with absolute offsets. Checks that they lie in the file and do not overlap."""
    placed: dict[str, Stored] = {}
    end = begin
    for tensor in sorted(found, key=lambda one: one.offset):
        offset = begin + tensor.offset
        if tensor.name in placed:
            raise ValueError(f"damaged in its header: {tensor.name} is there twice")
        if tensor.offset % alignment or offset < end:
            raise ValueError(
                f"damaged in its header: {tensor.name} lies at {tensor.offset}, over another or not aligned"
            )
        end = offset + tensor.size
        if end > size:
            raise ValueError(f"{tensor.name} is cut off: it ends at byte {end} of a file of {size}")
        placed[tensor.name] = replace(tensor, offset=offset)
    return placed


# The shape


def _named(metadata: Mapping[str, Any]) -> tuple[Architecture, GGUFLayout]:
    known = {layout.architecture: (one, layout) for one in ARCHITECTURES.values() for layout in one.layouts}
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"the architecture is {name!r}; known: {', '.join(known)}")
    return known[name]


def _config(
    architecture: Architecture, layout: GGUFLayout, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]
) -> DecoderConfig:
    """Return the configuration in the header. Raises ValueError for an unsupported one."""
    if metadata.get("split.count", 0) not in (0, 1):
        raise ValueError("it is one of several files of a model; join them with: llama-gguf-split --merge FIRST OUT")
    given, rotary = _Given(metadata, layout.architecture), layout.rotary
    for name in ("token_embd.weight", "blk.0.ffn_up.weight"):
        if name not in tensors or len(tensors[name].shape) != 2:
            raise ValueError(f"{name} is missing or no matrix: these are not the weights of a language model")
    fields: dict[str, Any] = {
        "vocab_size": given.number("vocab_size", default=tensors["token_embd.weight"].shape[0]),
        "model_dim": given.number("embedding_length"),
        "num_layers": given.number("block_count"),
        "num_heads": given.number("attention.head_count"),
        "ff_dim": given.number("feed_forward_length"),
        "max_seq_len": given.number("context_length"),
        "norm_eps": given.fraction("attention.layer_norm_rms_epsilon" if rotary else "attention.layer_norm_epsilon"),
        "tie_head": "output.weight" not in tensors,
    }
    # Compare the sizes with the tensors before anything of these sizes is described.
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    _check_size("block_count", fields["num_layers"], len(blocks))
    check_depth(fields["num_layers"], len(tensors), where="block_count")
    _check_size("vocab_size", fields["vocab_size"], tensors["token_embd.weight"].shape[0])
    _check_size("embedding_length", fields["model_dim"], tensors["token_embd.weight"].shape[1])
    _check_size("feed_forward_length", fields["ff_dim"], tensors["blk.0.ffn_up.weight"].shape[0])
    fields["num_kv_heads"] = given.number("attention.head_count_kv", default=fields["num_heads"])
    if rotary:
        fields["rope_theta"] = given.fraction("rope.freq_base", default=10000.0)
        fields["bias"] = "blk.0.attn_output.bias" in tensors
        fields["qkv_bias"] = "blk.0.attn_q.bias" in tensors
        fields["head_dim"] = given.number("attention.key_length", default=fields["model_dim"] // fields["num_heads"])
    else:
        positions = tensors.get("position_embd.weight")
        if positions is None:
            raise ValueError("position_embd.weight is missing")
        _check_size("context_length", fields["max_seq_len"], positions.shape[0])
    known = fields_of(architecture.config)  # fixed options are checked with the names and shapes of the tensors
    config = architecture.config(**{key: value for key, value in (fields | dict(layout.parts)).items() if key in known})
    given.check_plain(config, tensors)
    return config


class _Given:
    """The header's values under the architecture's name."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata, self._architecture = metadata, architecture

    def number(self, key: str, *, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _LARGEST:
            raise ValueError(f"{self._architecture}.{key} is {_short(value)}, which is not supported")
        return value

    def fraction(self, key: str, *, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, float) or not 0 < value < _LARGEST:
            raise ValueError(f"{self._architecture}.{key} is {_short(value)}, which no model has")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if value is None:
            raise ValueError(f"{self._architecture}.{key} is missing")
        return value

    def check_plain(self, config: DecoderConfig, tensors: Mapping[str, Stored]) -> None:
        """Raise ValueError for options that would change the arithmetic."""
        if "rope_freqs.weight" in tensors:
            raise ValueError(
                "rope_freqs.weight changes the rotary positions (Llama 3.1 and later), which is not supported: "
                "only plain rotary positions"
            )
        plain = {
            "rope.dimension_count": (config.head_dim,),
            "attention.key_length": (config.head_dim,),
            "attention.value_length": (config.head_dim,),
            "rope.scaling.type": ("none",),
            "rope.scaling.factor": (1.0, 0.0),
            "rope.scale_linear": (1.0, 0.0),
            "attention.sliding_window": (0,),
            "attention.causal": (True,),
            "expert_count": (0,),
        }
        for key, known in plain.items():
            value = self._metadata.get(f"{self._architecture}.{key}", known[0])
            if not any(type(value) is type(one) and value == one for one in known):
                raise ValueError(
                    f"{self._architecture}.{key} is {_short(value)}, which is not supported: only {known[0]!r}"
                )


def _check_size(key: str, stated: int, found: int) -> None:
    if stated != found:
        raise ValueError(f"{key} is {stated}, but the tensors have {found}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# Weights


def _sort_pairs(rows: Tensor, heads: int) -> None:
    """Permute pairs (2i, 2i + 1) of each head to (i, i + E/2), in place."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    rows.copy_(pairs.transpose(1, 2).reshape(rows.shape))


def _unpack(packed: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    """Unpack rows of blocks to rows of weights. Raises FloatingPointError for NaN and infinity."""
    if kind in ("F32", "F16"):
        return _finite(packed.view("<f4" if kind == "F32" else "<f2").astype(np.float32))
    if kind == "BF16":
        return _finite((packed.view("<u2").astype(np.uint32) << 16).view(np.float32))
    blocks = packed.reshape(-1, next(size for called, _, size in _TYPES.values() if called == kind))
    weights = _unpack_k6(blocks) if kind == "Q6_K" else _unpack_32(blocks, kind)
    return weights.reshape(len(packed), -1)


def _unpack_32(blocks: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    weights = np.empty((len(blocks), 32), np.float32)
    if kind == "Q8_0":
        weights[:] = blocks[:, 2:].view(np.int8)
        weights *= _halves(blocks[:, :2])
        return weights
    packed = blocks[:, 2:] if kind == "Q4_0" else blocks[:, 4:]
    weights[:, :16], weights[:, 16:] = packed & 15, packed >> 4
    if kind == "Q4_0":
        weights -= 8
    weights *= _halves(blocks[:, :2])
    if kind == "Q4_1":
        weights += _halves(blocks[:, 2:4])
    return weights


def _unpack_k6(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Unpack two halves of 128 weights. A half is four rows of 32: lower 4 bits in 64 bytes, upper 2 bits in 32 bytes."""
    weights = np.empty((len(blocks), 2, 4, 32), np.float32)
    lower, upper = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    for row in range(4):
        low = lower[:, :, row % 2] >> (4 * (row // 2)) & 15
        weights[:, :, row] = low | (upper >> (2 * row) & 3) << 4
    weights -= 32
    by_scale = weights.reshape(-1, 16, 16)
    by_scale *= blocks[:, 192:208].view(np.int8)[:, :, None].astype(np.float32)
    by_scale *= _halves(blocks[:, 208:])[:, :, None]
    return weights


def _halves(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the scales of blocks. If they are finite, so are the weights."""
    return _finite(np.ascontiguousarray(packed).view("<f2").astype(np.float32))


def _finite(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if not np.isfinite(values).all():
        raise FloatingPointError
    return values
