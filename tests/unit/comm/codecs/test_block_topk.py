"""blocktopk against brute force: what is kept, how places are coded, and how many bytes that takes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.comm.codecs.payloads import encode, random_tensor

from smolcluster.comm.codecs import Feedback, Packer, make_codec
from smolcluster.comm.codecs.block_topk import MAX_RICE, Blocks, pack, quantized, rice, unpack, unrice

SHAPES = [(), (1,), (5,), (4096,), (4097,), (33, 65), (64, 64), (64, 200), (130, 64), (4, 3, 5, 7), (100, 63)]


@given(st.lists(st.integers(0, 4095), min_size=1, max_size=200), st.integers(0, 60))
@example([0, 0, 13], 0)  # nine bits in three bytes, or sixteen in two
def test_gaps_come_back_in_the_fewest_bytes(gaps, more):
    gaps = np.array(gaps, dtype=np.int64)
    data, r = rice(gaps, most_bytes=10**6)
    by_hand = min(
        math.ceil(len(gaps) * r / 8) + math.ceil(sum((int(g) >> r) + 1 for g in gaps) / 8) for r in range(MAX_RICE + 1)
    )
    assert len(data) == by_hand
    bits = "".join("0" * (int(g) >> r) + "1" for g in gaps)
    unary = np.unpackbits(data[math.ceil(len(gaps) * r / 8) :], bitorder="little")
    assert "".join(map(str, unary[: len(bits)])) == bits
    found, used = unrice(np.concatenate([data, np.full(more, 255, np.uint8)]), r, len(gaps), most=200 * 4096)
    assert used == len(data)
    assert np.array_equal(found, gaps)


@given(st.integers(1, 8), st.lists(st.integers(0, 255), max_size=50))
def test_codes_are_packed(bits, codes):
    codes = np.array([code % 2**bits for code in codes], dtype=np.int64)
    data = pack(codes, bits)
    assert len(data) == math.ceil(bits * len(codes) / 8)
    assert np.array_equal(unpack(data, bits, len(codes)), codes)


@pytest.mark.parametrize("shape", SHAPES)
def test_cutting_is_undone(shape):
    tensor, blocks = random_tensor(*shape), Blocks.of(shape)
    rows = blocks.cut(tensor)
    assert rows.shape == (blocks.count, blocks.size)
    assert torch.equal(blocks.joined(rows), tensor)
    assert int((rows != 0).sum()) == tensor.numel()  # the rest is padding


def test_a_tile_is_a_square_of_the_matrix():
    tensor = torch.arange(128 * 192.0).view(128, 192)
    assert torch.equal(Blocks.of(tensor.shape).cut(tensor)[4].view(64, 64), tensor[64:, 64:128])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("k", "bits"), [(1, 2), (64, 2), (500, 4), (64, 0), (4096, 1)])
def test_the_largest_of_each_block_are_kept(shape, k, bits):
    """By brute force, one block at a time."""
    codec, tensor = make_codec("blocktopk", k=k, bits=bits), random_tensor(*shape, seed=k)
    payload, decoded = encode(codec, tensor), torch.empty(shape)
    assert codec.decode(payload, decoded) == len(payload) <= codec.nbytes(shape)
    blocks = Blocks.of(shape)
    kept = min(blocks.size, math.ceil(k * blocks.size / 4096))
    for row, got in zip(blocks.cut(tensor), blocks.cut(decoded), strict=True):
        largest = set(sorted(range(len(row)), key=lambda i: -abs(float(row[i])))[:kept])
        assert {i for i in range(len(row)) if got[i] != 0} <= largest
        if bits == 0:
            assert all(got[i] == row[i].bfloat16() for i in largest)
    if bits:  # each is the mean of its bin
        values = tensor[decoded != 0]
        codes, book = quantized(
            blocks.cut(tensor).gather(1, blocks.cut(tensor).abs().topk(kept, dim=1).indices).view(-1), bits
        )
        assert len(set(decoded[decoded != 0].tolist())) <= 2**bits
        assert set(decoded[decoded != 0].tolist()) <= {float(b.bfloat16()) for b in book}
        assert len(values) <= len(codes)


def test_bytes_are_those_of_the_docstring():
    """Whose bound is reached by places that are as far apart as can be, and kept within it by random ones."""
    codec, tensor = make_codec("blocktopk"), random_tensor(512, 512)
    payload, total = encode(codec, tensor), 64 * 64
    rows = Blocks.of(tensor.shape).cut(tensor)
    places = rows.abs().topk(64, dim=1).indices.sort(dim=1).values.numpy()
    gaps = np.diff(places, axis=1, prepend=-1).reshape(-1) - 1
    r = int(payload[0])
    assert len(payload) == 1 + 8 + total * 2 // 8 + total * r // 8 + math.ceil((total + int((gaps >> r).sum())) / 8)
    bits_per_place = 8 * (len(payload) - 9 - total // 4) / total
    assert 7.3 < bits_per_place < 7.7
    assert codec.nbytes(tensor.shape) == 9 + total // 4 + total  # 8 bits for each place
    comb = torch.zeros(64, 4096)
    comb[:, 63::64] = 1.0
    assert codec.nbytes((64 * 4096,)) - len(encode(codec, comb.view(-1))) <= 64 * 64 // 8


def test_feedback_decays():
    codec, feedback = make_codec("blocktopk", k=64, bits=0), Feedback(decay=0.5)
    packer, gradient = Packer([("a", (4096,))], codec), random_tensor(4096)
    packer.encode([gradient], key=0, feedback=feedback)
    left = feedback.memories["a"].residual.clone()
    payload, decoded = packer.encode([gradient], key=1, feedback=feedback), torch.empty(4096)
    packer.decode(payload, [decoded])
    torch.testing.assert_close(feedback.memories["a"].residual, gradient + 0.5 * left - decoded)
