"""Bit fields of any width at any position of a payload, the lowest bit of a byte first; on the device of the tensors."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def add_fields(data: Tensor, positions: Tensor, fields: Tensor, *, width: int) -> None:
    """Write fields of up to `width` bits, which overlap no others, at these bits.

    `data`: the bytes, as int32 and two more than there are. Integers are added, in any order.
    """
    first, shifted = positions >> 3, (fields << (positions & 7)).int()
    for byte in range(-(-(width + 7) // 8)):
        data.index_add_(0, first + byte, (shifted >> 8 * byte) & 255)


def read_fields(data: Tensor, positions: Tensor, widths: Tensor | int) -> Tensor:
    """Read fields of up to 16 bits at these bits; what is beyond the bytes reads as 0.

    Including the bits before it in its first byte, a field touches at most three bytes.
    """
    padded = F.pad(data, (0, 3))
    first = (positions >> 3).clamp_(max=len(data))
    window = padded.index_select(0, first).int()
    for byte in (1, 2):
        window |= padded.index_select(0, first.add_(1)).int() << 8 * byte
    ones = torch.ones((), dtype=torch.int32, device=data.device)
    return (window >> (positions & 7).int()) & ((ones << widths) - 1)


def ones_of(data: Tensor) -> Tensor:
    """Return the positions of all bits that are 1, ascending."""
    if data.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(np.unpackbits(data.numpy(), bitorder="little")))
    places = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[:, None] >> places) & 1).view(-1).nonzero().view(-1)
