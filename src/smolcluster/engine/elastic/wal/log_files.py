"""The files of a write-ahead log: how their frames are written and read.

A log file is only appended to, by one process. It is a sequence of frames:

    open      always first: the number of records before this file
    record    JSON, then the little-endian bytes of its tensors
    sync      all records before this number have been fsynced

    frame = kind (4) | length of the JSON (4) | length of the tensor (8) | number (8) | crc of tensor and JSON (4)
            | crc of all this (4) | JSON, padded with spaces so that the tensor is aligned | tensor

Every byte is covered by a checksum, and a length is used only after its checksum was verified.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

OPEN, RECORD, SYNC = b"SJ1O", b"SJ1R", b"SJ1S"
_HEAD = struct.Struct("<4sIQQI")
_CRC = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _CRC.size
_ALIGNMENT = 64


class JournalRecord(NamedTuple):
    meta: dict[str, Any]
    payload: Tensor | None


@dataclass(slots=True, kw_only=True)
class LogFile:
    """A log file as read. `damage`: `torn` where the end of a frame is missing, `corrupt` where its contents are wrong."""

    path: Path
    size: int
    start: int | None = None
    records: list[JournalRecord] = field(default_factory=list)
    valid_bytes: int = 0  # before the damage
    synced: int = 0  # the number of the last sync marker
    damage: Literal["", "torn", "corrupt"] = ""


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
    """Read frames while they are complete and in sequence; after the first invalid one, scan for sync markers only."""
    found = LogFile(path=path, size=path.stat().st_size)
    if not found.size:
        return found
    with path.open("rb") as file:
        # Copy on write: changing a tensor does not change the file.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    view = memoryview(data)
    while found.valid_bytes < found.size:
        head = _head_at(view, found.valid_bytes)
        if head is None:
            found.damage = "torn" if found.size - found.valid_bytes < _HEAD_BYTES else "corrupt"
            break
        text_at = found.valid_bytes + _HEAD_BYTES
        payload_at = text_at + head.text_bytes
        end = payload_at + head.payload_bytes
        if end > found.size:
            found.damage = "torn"
            break
        if head.crc != zlib.crc32(view[text_at:payload_at], zlib.crc32(view[payload_at:end])) or not _take(
            found, head, data, text_at, payload_at
        ):
            found.damage = "corrupt"
            break
        found.valid_bytes = end
    if found.damage:
        found.synced = max(found.synced, _last_sync(data, view, found.valid_bytes))
    return found


def _take(found: LogFile, head: _Head, data: mmap.mmap, text_at: int, payload_at: int) -> bool:
    """Add a complete frame; return False when it is out of sequence."""
    if head.kind == OPEN and found.start is None:
        found.start = head.number
    elif found.start is None:
        return False
    elif head.kind == SYNC:
        found.synced = max(found.synced, head.number)
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


def _last_sync(data: mmap.mmap, view: memoryview, offset: int) -> int:
    """Return the highest sync marker after `offset`."""
    synced = 0
    while (offset := data.find(SYNC, offset)) >= 0:
        head = _head_at(view, offset)
        synced = max(synced, head.number if head is not None else 0)
        offset += 1
    return synced
