"""Payloads: the bytes of tensors and their checksum, for `frames.py`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from smolcluster.comm.elastic.transport.messages import ITEM_BYTES
from smolcluster.errors import UserError

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
BLOCK_BYTES = 1 << 18  # of the checksum, and of a slice that is written at once
JOINED_BYTES = 1 << 14  # a payload up to here is copied behind its header: one write instead of three


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    if sys.byteorder != "little":
        raise UserError(
            "this machine is big-endian; tensors travel little-endian, as they lie in memory, so it cannot take part"
        )
    assert tensor.is_cpu, "a payload is a CPU tensor"
    assert tensor.is_contiguous(), "a payload is contiguous"
    if tensor.dtype is torch.bfloat16:  # numpy has no such thing
        tensor = tensor.view(torch.int16)
    return tensor.detach().numpy().reshape(-1).view(np.uint8).data


class Checksum:
    """Of a payload, taken while it passes by.

    Whole blocks of 256 KB are folded at the speed of memory, where a crc32 would take longer than the loopback itself: their
    64-bit words are added up in 512 columns, and what the blocks before gave is multiplied by an odd number, so that
    their order counts. So are the rows of a last block that is not whole, unless it is small. The checksum is the crc32 of
    these sums and of the rest. Whatever happens to the bytes of one row of 4 KB changes a sum; what goes unnoticed is
    a change in one row of a block that another row makes up for, as when the two have changed places.
    """

    _COLUMNS = 512
    _ROW_BYTES = 8 * _COLUMNS
    _FACTOR = np.uint64(0x9E3779B97F4A7C15)

    def __init__(self) -> None:
        self._sums: np.ndarray[Any, np.dtype[np.uint64]] | None = None

    def fold(self, part: memoryview) -> int:
        """Add the whole blocks at the beginning of this part. Return their bytes."""
        whole = len(part) - len(part) % BLOCK_BYTES
        for start in range(0, whole, BLOCK_BYTES):
            self._add(part[start : start + BLOCK_BYTES])
        return whole

    def _add(self, rows: memoryview) -> None:
        sums = np.add.reduce(np.frombuffer(rows, dtype="<u8").reshape(-1, self._COLUMNS), axis=0)
        self._sums = sums if self._sums is None else self._sums * self._FACTOR + sums

    def value(self, rest: memoryview) -> int:
        """After all whole blocks, with what is left of the payload."""
        if len(rest) > JOINED_BYTES:
            rows_bytes = len(rest) - len(rest) % self._ROW_BYTES
            self._add(rest[:rows_bytes])
            rest = rest[rows_bytes:]
        return crc32(rest, crc32(self._sums.tobytes()) if self._sums is not None else 0)


def are_booleans(data: memoryview) -> bool:
    """Return whether every byte is 0 or 1."""
    return bool(np.frombuffer(data, dtype=np.uint8).max(initial=0) <= 1)
