"""One bit per number, and what its feedback brings later."""

from __future__ import annotations

import pytest
import torch

from smolcluster.comm.codecs import CodecError, Feedback
from smolcluster.comm.codecs.sign import Sign
from smolcluster.comm.elastic.collectives.packed_tensors import PackedTensors


@pytest.mark.parametrize("count", [1, 7, 8, 9, 4096, 4097, 10000])
def test_each_number_has_its_sign_and_the_mean_magnitude_of_its_block(count: int) -> None:
    codec, x = Sign(), torch.randn(count, generator=torch.Generator().manual_seed(count))
    data = torch.zeros(codec.nbytes(x.shape), dtype=torch.uint8)
    assert len(data) == -(-count // 8) + 4 * -(-count // 4096)
    codec.encode(x, data)
    out = torch.empty(count)
    codec.decode(data, out)
    for start in range(0, count, 4096):
        block = x[start : start + 4096]
        expected = torch.where(block >= 0, 1.0, -1.0) * block.abs().mean()
        torch.testing.assert_close(out[start : start + 4096], expected)


def test_zeros_stay_zeros_and_the_largest_numbers_do_not_overflow() -> None:
    for value in (0.0, torch.finfo(torch.float32).max):
        codec, x = Sign(), torch.full((5000,), value)
        data, out = torch.zeros(codec.nbytes(x.shape), dtype=torch.uint8), torch.empty(5000)
        codec.encode(x, data)
        codec.decode(data, out)
        torch.testing.assert_close(out, x, rtol=1e-3, atol=0)


def test_a_scale_that_no_mean_can_have_is_refused() -> None:
    codec = Sign()
    for scale in (-1.0, float("nan")):
        data = torch.cat([torch.tensor([scale]).view(torch.uint8), torch.zeros(1, dtype=torch.uint8)])
        with pytest.raises(CodecError):
            codec.decode(data, torch.empty(8))


def test_with_feedback_the_sum_of_changes_follows() -> None:
    """Steps of Adam are alike in size: after many, what is missing is about as much as one step."""
    packed = PackedTensors([("w", (64, 64)), ("b", (64,))], codec=Sign(), bucket_bytes=1 << 10)
    draws, feedback = torch.Generator().manual_seed(0), Feedback()
    wanted = {name: torch.zeros(shape) for name, shape in (("w", (64, 64)), ("b", (64,)))}
    followed = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    for step in range(200):
        change = {name: 1e-3 * torch.randn(tensor.shape, generator=draws) for name, tensor in wanted.items()}
        into = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
        for channel, payload in packed.encode(change, key=step, feedback=feedback):
            packed.decode(channel, payload, into)
        for name in wanted:
            wanted[name] += change[name]
            followed[name] += into[name]
    for name in wanted:
        assert (wanted[name] - followed[name]).abs().mean() < 2e-3
        assert wanted[name].abs().mean() > 8e-3
