"""Encode and decode one tensor, for the tests of codecs."""

import math

import torch


def random_tensor(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encode(codec, tensor, **arguments):
    out = torch.empty(codec.nbytes(tensor.shape), dtype=torch.uint8)
    return out[: codec.encode(tensor, out, **arguments)]


def decode(codec, data, shape):
    out = torch.full(shape, math.nan)
    codec.decode(data, out)
    return out


def round_trip(codec, tensor, **arguments):
    return decode(codec, encode(codec, tensor, **arguments), tensor.shape)
