"""Many tensors together against one at a time: the same bytes, the same numbers, the same refusals."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from smolcluster.comm.codecs import Codec, CodecError, FlatEncoding, flat, flat_blocks, flat_encoding, make_codec
from smolcluster.comm.codecs.bits import add_fields, ones_of, read_fields
from smolcluster.comm.codecs.flat import Decoded

CPU = torch.device("cpu")
seeds = st.integers(0, 2**31)
dims = st.lists(st.integers(0, 20), max_size=3).map(tuple)
large = st.sampled_from([(768,), (4096,), (4097,), (64, 64), (65, 130), (130, 64), (63, 200), (3, 5, 7, 11), (9000,)])
many_shapes = st.lists(dims | large, min_size=1, max_size=6)
kinds = st.sampled_from(["normal", "zeros", "some zeros", "equal", "tiny", "wide"])


def codecs() -> st.SearchStrategy[Codec]:
    blocks = st.integers(1, 300)
    return st.one_of(
        st.sampled_from(["bf16", "fp16", "fp32"]).map(make_codec),
        blocks.map(lambda block: make_codec("int8", block=block)),
        blocks.map(lambda block: make_codec("int4", block=block)),
        st.tuples(st.integers(1, 4096), st.integers(0, 8)).map(lambda kb: make_codec("blocktopk", k=kb[0], bits=kb[1])),
    )


def drawn(shape: tuple[int, ...], seed: int, kind: str = "normal") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator)
    if kind == "zeros":
        return torch.zeros(shape)
    if kind == "some zeros":
        return tensor * (torch.rand(shape, generator=generator) < 0.02)
    if kind == "equal":
        return tensor.sign() * 0.3
    if kind == "tiny":
        return tensor * 2.0**-140
    return tensor * 10.0 ** torch.randint(-12, 3, shape, generator=generator) if kind == "wide" else tensor


def layout_of(shapes: list[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"tensor{i}", shape) for i, shape in enumerate(shapes)]


def filled(encoding: FlatEncoding, tensors: list[Tensor]) -> Tensor:
    buffer = encoding.zeros(CPU)
    for view, tensor in zip(encoding.views(buffer), tensors, strict=True):
        view.copy_(tensor)
    return buffer


def one_by_one(codec: Codec, tensors: list[Tensor]) -> Tensor:
    parts = [torch.zeros(codec.nbytes(tensor.shape), dtype=torch.uint8) for tensor in tensors]
    for part, tensor in zip(parts, tensors, strict=True):
        codec.encode(tensor, part)
    return torch.cat(parts)


def joined(encoding: FlatEncoding, parts: Iterable[Decoded]) -> list[Tensor]:
    buffer = encoding.zeros(CPU)
    for part in parts:
        part.add_to(buffer, 1.0)
    return encoding.views(buffer)


def decoded(encoding: FlatEncoding, data: Tensor) -> list[Tensor]:
    return joined(encoding, encoding.decode(data))


@given(codecs(), many_shapes, seeds, kinds)
@example(make_codec("blocktopk", k=128), [(130, 70), (768,), (5000,), (768,), (0,), ()], 1, "normal")
@example(make_codec("int4", block=7), [(3,), (50,), (0, 4), (7,)], 1, "normal")
def test_many_tensors_are_the_payloads_of_each(codec: Codec, shapes: list[Any], seed: int, kind: str) -> None:
    tensors = [drawn(shape, seed + i, kind) for i, shape in enumerate(shapes)]
    encoding = flat_encoding(codec, layout_of(shapes))
    payload, parts = encoding.encode(filled(encoding, tensors))
    assert torch.equal(payload, one_by_one(codec, tensors))
    assert all(map(torch.equal, joined(encoding, parts), decoded(encoding, payload)))
    for part, tensor, found in zip(
        torch.split(payload, encoding.sizes), tensors, decoded(encoding, payload), strict=True
    ):
        out = torch.empty(tensor.shape)
        codec.decode(part, out)
        assert torch.equal(found, out)


@pytest.mark.parametrize("name", ["bf16", "int4", "int8", "blocktopk"])
@pytest.mark.parametrize("limit", [5000, 10**9])
def test_pieces_and_batches_do_not_matter(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, constant in ((flat, "CPU_PIECE"), (flat_blocks, "BATCH_NUMBERS")):
        monkeypatch.setattr(module, constant, limit)
    shapes: list[Any] = [(64, 64), (100,), (130, 70), (20000,), (0,), (100,), (7,)]
    codec, tensors = make_codec(name), [drawn(shape, i) for i, shape in enumerate(shapes)]
    encoding = flat_encoding(codec, layout_of(shapes))
    payload, _ = encoding.encode(filled(encoding, tensors))
    assert torch.equal(payload, one_by_one(codec, tensors))
    for tensor, found in zip(tensors, decoded(encoding, payload), strict=True):
        out = torch.empty(tensor.shape)
        codec.decode(one_by_one(codec, [tensor]), out)
        assert torch.equal(found, out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_other_types_and_strides(dtype: torch.dtype) -> None:
    codec, encoding = make_codec("blocktopk"), flat_encoding(make_codec("blocktopk"), layout_of([(130, 70), (768,)]))
    tensors = [drawn((70, 130), 1).to(dtype).T, drawn((1536,), 2).to(dtype)[::2]]
    assert torch.equal(encoding.encode(filled(encoding, tensors))[0], one_by_one(codec, tensors))


def check_alike(codec: Codec, encoding: FlatEncoding, data: Tensor) -> bool:
    """Decode together and one by one. Returns whether both refused."""
    before, outs, refused = data.clone(), [torch.zeros(shape) for shape in encoding.shapes], False
    for part, out in zip(torch.split(data, encoding.sizes), outs, strict=True):
        try:
            codec.decode(part, out)
        except CodecError:
            refused = True
    if refused:
        with pytest.raises(CodecError, match=r"tensor\d+: "):
            decoded(encoding, data)
    else:
        assert all(map(torch.equal, decoded(encoding, data), outs))
        assert all(out.isfinite().all() for out in outs)
    assert torch.equal(data, before)
    return refused


@given(codecs().filter(lambda codec: not codec.lossless), many_shapes, seeds)
def test_random_bytes_are_decoded_or_refused_alike(codec: Codec, shapes: list[Any], seed: int) -> None:
    encoding, generator = flat_encoding(codec, layout_of(shapes)), torch.Generator().manual_seed(seed)
    check_alike(codec, encoding, torch.randint(0, 256, (encoding.nbytes,), dtype=torch.uint8, generator=generator))


@given(
    codecs().filter(lambda codec: not codec.lossless),
    many_shapes,
    seeds,
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), min_size=1, max_size=4),
)
def test_flipped_bits_are_decoded_or_refused_alike(
    codec: Codec, shapes: list[Any], seed: int, flips: list[Any]
) -> None:
    encoding = flat_encoding(codec, layout_of(shapes))
    data = one_by_one(codec, [drawn(shape, seed + i) for i, shape in enumerate(shapes)])
    for place, bit in flips if len(data) else []:
        data[place % len(data)] ^= 1 << bit
    check_alike(codec, encoding, data)


def test_every_damaged_bit_is_treated_alike() -> None:
    codec, shapes = make_codec("blocktopk"), [(130, 70), (300,), (64, 64)]
    encoding = flat_encoding(codec, layout_of(shapes))
    data = one_by_one(codec, [drawn(shape, i) for i, shape in enumerate(shapes)])
    refused = 0
    for place in range(0, len(data), 3):
        damaged = data.clone()
        damaged[place] ^= 1 << place % 8
        refused += check_alike(codec, encoding, damaged)
    assert refused > 0


@pytest.mark.parametrize("name", ["bf16", "int4", "blocktopk"])
def test_what_cannot_be_encoded_or_has_another_length_is_refused(name: str) -> None:
    encoding = flat_encoding(make_codec(name), layout_of([(64, 64), (10,)]))
    for wrong in (math.nan, math.inf):
        buffer = filled(encoding, [drawn((64, 64), 1), drawn((10,), 2)])
        encoding.views(buffer)[1][3] = wrong
        with pytest.raises(CodecError, match="finite"):
            encoding.encode(buffer)
    for length in (0, encoding.nbytes - 1, encoding.nbytes + 1):
        with pytest.raises(CodecError, match="is not a payload"):
            encoding.decode(torch.zeros(length, dtype=torch.uint8))
    with pytest.raises(CodecError, match="is not a payload"):
        encoding.decode(torch.zeros(encoding.nbytes))


@pytest.mark.parametrize("name", ["topk", "randk", "powersgd"])
def test_other_codecs_encode_one_tensor_at_a_time(name: str) -> None:
    with pytest.raises(ValueError, match="one tensor at a time"):
        flat_encoding(make_codec(name), layout_of([(4,)]))
    with pytest.raises(ValueError, match="unbiased"):
        flat_encoding(make_codec("int8", unbiased=True), layout_of([(4,)]))


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), seeds)
def test_bit_fields_come_back(widths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    width, gap = torch.tensor(widths), torch.randint(0, 9, (len(widths),), generator=generator)
    fields = torch.randint(0, 2**16, (len(widths),), generator=generator) & ((1 << width) - 1)
    positions = (width + gap).cumsum(0) - width
    data = torch.zeros(int(positions[-1]) // 8 + 5, dtype=torch.int32)
    add_fields(data, positions, fields, width=16)
    data = data.to(torch.uint8)
    assert torch.equal(read_fields(data, positions, width), fields)
    by_hand = sum(int(f) << int(p) for f, p in zip(fields, positions, strict=True))
    assert int.from_bytes(data.numpy().tobytes(), "little") == by_hand
    assert ones_of(data).tolist() == [i for i in range(by_hand.bit_length()) if by_hand >> i & 1]


class Operations(TorchDispatchMode):
    """Counts the operations that torch runs."""

    number = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.number += not operation.is_view
        return operation(*arguments, **(keywords or {}))


@pytest.mark.parametrize("name", ["bf16", "int4", "int8", "blocktopk"])
def test_decoding_takes_as_many_operations_for_many_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "CPU_PIECE", flat.PIECE)
    counts = []
    for number in (3, 40):
        encoding = flat_encoding(make_codec(name), layout_of([(65, 130), (768,)] * number))
        payload, _ = encoding.encode(filled(encoding, [drawn(shape, 1) for shape in encoding.shapes]))
        with Operations() as operations:
            decoded(encoding, payload)
        counts.append(operations.number)
    assert counts[0] == counts[1] < 200
