"""The files of a write-ahead log: how their frames are written and read.

A log file is written front to back by one process and never changed. It is a sequence of frames:

    open      always first: the number of records before this file
    record    JSON, then the little-endian bytes of its tensors
    seal      records before this number are on the disk itself, not only in the page cache

    frame = kind (4) | length of the JSON (4) | length of the tensor (8) | number (8) | crc of tensor and JSON (4)
            | crc of all this (4) | JSON, padded with spaces so that the tensor is aligned | tensor

Every byte is covered by a checksum, and a length is used only after its checksum was right.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

OPEN, RECORD, SEAL = b"SJ1O", b"SJ1R", b"SJ1S"
_HEAD = struct.Struct("<4sIQQI")
_CRC = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _CRC.size
_ALIGNMENT = 64


class JournalRecord(NamedTuple):
    meta: dict[str, Any]
    payload: Tensor | None


@dataclass(slots=True, kw_only=True)
class LogFile:
    """A log file as read. `trouble`: empty, `torn` (the end of a frame is missing) or `damaged`."""

    path: Path
    size: int
    start: int | None = None
    records: list[JournalRecord] = field(default_factory=list)
    whole: int = 0  # bytes before the trouble
    sealed: int = 0
    trouble: str = ""


def make_frame(
    kind: bytes, number: int, *, text: bytes = b"", payload_bytes: int = 0, crc: int = 0, at: int = 0
) -> bytes:
    """Return a frame without its tensor, whose checksum is `crc`. `at`: its offset in the file."""
    if payload_bytes:
        text += b" " * (-(at + _HEAD_BYTES + len(text)) % _ALIGNMENT)
    head = _HEAD.pack(kind, len(text), payload_bytes, number, zlib.crc32(text, crc))
    return head + _CRC.pack(zlib.crc32(head)) + text


class _Head(NamedTuple):
    kind: bytes
    text_bytes: int
    payload_bytes: int
    number: int
    crc: int


def _head_at(view: memoryview, offset: int) -> _Head | None:
    raw = view[offset : offset + _HEAD_BYTES]
    if raw.nbytes < _HEAD_BYTES or _CRC.unpack(raw[_HEAD.size :])[0] != zlib.crc32(raw[: _HEAD.size]):
        return None
    return _Head(*_HEAD.unpack(raw[: _HEAD.size]))


def read_log(path: Path) -> LogFile:
    """Read frames while they are whole and in sequence; behind the first bad one look for seals only."""
    found = LogFile(path=path, size=path.stat().st_size)
    if not found.size:
        return found
    with path.open("rb") as file:
        # Copy on write: changing a tensor does not change the file.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    view = memoryview(data)
    while found.whole < found.size:
        head = _head_at(view, found.whole)
        if head is None:
            found.trouble = "torn" if found.size - found.whole < _HEAD_BYTES else "damaged"
            break
        text_at = found.whole + _HEAD_BYTES
        payload_at = text_at + head.text_bytes
        end = payload_at + head.payload_bytes
        if end > found.size:
            found.trouble = "torn"
            break
        if head.crc != zlib.crc32(view[text_at:payload_at], zlib.crc32(view[payload_at:end])) or not _take(
            found, head, data, text_at, payload_at
        ):
            found.trouble = "damaged"
            break
        found.whole = end
    if found.trouble:
        found.sealed = max(found.sealed, _last_seal(data, view, found.whole))
    return found


def _take(found: LogFile, head: _Head, data: mmap.mmap, text_at: int, payload_at: int) -> bool:
    """Add a whole frame; return False when it is out of sequence."""
    if head.kind == OPEN and found.start is None:
        found.start = head.number
    elif found.start is None:
        return False
    elif head.kind == SEAL:
        found.sealed = max(found.sealed, head.number)
    elif head.kind == RECORD and head.number == found.start + len(found.records):
        meta, tensor = json.loads(data[text_at:payload_at])
        found.records.append(JournalRecord(meta, tensor and _tensor(data, payload_at, head.payload_bytes, *tensor)))
    else:
        return False
    return True


def _tensor(data: mmap.mmap, offset: int, num_bytes: int, dtype: str, shape: list[int]) -> Tensor:
    if num_bytes == 0:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    raw = torch.frombuffer(data, dtype=torch.uint8, count=num_bytes, offset=offset)
    return raw.view(getattr(torch, dtype)).reshape(shape)


def _last_seal(data: mmap.mmap, view: memoryview, offset: int) -> int:
    """Return the highest seal behind `offset`."""
    sealed = 0
    while (offset := data.find(SEAL, offset)) >= 0:
        head = _head_at(view, offset)
        sealed = max(sealed, head.number if head is not None else 0)
        offset += 1
    return sealed
