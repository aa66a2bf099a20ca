"""Payloads: the memory of tensors, and its checksum."""

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
BLOCK_BYTES = 1 << 18  # of the checksum, and of one write
JOINED_BYTES = 1 << 14  # payloads up to this size are copied after their header: one write instead of three


def memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    if sys.byteorder != "little":
        raise UserError("this machine is big-endian, which is not supported: tensors are sent as little-endian memory")
    assert tensor.is_cpu, "a payload is a CPU tensor"
    assert tensor.is_contiguous(), "a payload is contiguous"
    if tensor.dtype is torch.bfloat16:  # numpy has no bfloat16
        tensor = tensor.view(torch.int16)
    return tensor.detach().numpy().reshape(-1).view(np.uint8).data


class Checksum:
    """Incremental checksum of a payload, at memory speed (a crc32 of all bytes would be slower than loopback).

    The 64-bit words of each block of 256 KB are added up in 512 columns; the sums of earlier blocks are multiplied by an odd
    number first, so that the order of blocks matters. The rows of an incomplete last block are treated in the same way, unless
    it is small. The checksum is the crc32 of these sums and of the remaining bytes. Any change within one row of 4 KB is
    detected; changes in two rows of a block that cancel out, such as swapped rows, are not.
    """

    _COLUMNS = 512
    _ROW_BYTES = 8 * _COLUMNS
    _FACTOR = np.uint64(0x9E3779B97F4A7C15)

    def __init__(self) -> None:
        self._sums: np.ndarray[Any, np.dtype[np.uint64]] | None = None

    def fold(self, part: memoryview) -> int:
        """Add the complete blocks at the start of this part. Returns their bytes."""
        whole = len(part) - len(part) % BLOCK_BYTES
        for start in range(0, whole, BLOCK_BYTES):
            self._add(part[start : start + BLOCK_BYTES])
        return whole

    def _add(self, rows: memoryview) -> None:
        sums = np.add.reduce(np.frombuffer(rows, dtype="<u8").reshape(-1, self._COLUMNS), axis=0)
        self._sums = sums if self._sums is None else self._sums * self._FACTOR + sums

    def value(self, rest: memoryview) -> int:
        """Return the checksum. `rest`: what follows the last complete block."""
        if len(rest) > JOINED_BYTES:
            rows_bytes = len(rest) - len(rest) % self._ROW_BYTES
            self._add(rest[:rows_bytes])
            rest = rest[rows_bytes:]
        return crc32(rest, crc32(self._sums.tobytes()) if self._sums is not None else 0)


def are_booleans(data: memoryview) -> bool:
    """Return whether every byte is 0 or 1."""
    return bool(np.frombuffer(data, dtype=np.uint8).max(initial=0) <= 1)
