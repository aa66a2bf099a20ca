"""Encode a message as a frame. `parser.py` is the other direction.

A frame is a header of 128 bytes, then meta (a JSON object in UTF-8; empty: no bytes), then the payload's memory, then the
payload's checksum. Everything is little-endian.

    offset  size  field
    0       4     magic           "SMOL"
    4       2     version         of this layout; these first six bytes are the same in every version
    6       1     kind            messages.Kind
    7       1     dtype           0: no payload; else 1 + its index in DTYPE_NAMES
    8       1     codec           its index in CODECS
    9       1     ndim            0 to 8
    10      2     flags           bit 0: a checksum of 4 bytes follows the payload
    12      4     epoch           of the sender's view
    16      8     cluster         public id of the token; zeros: no token
    24      8     run             id of the run; zeros: the sender does not know it yet
    32      8     step
    40      4     channel
    44      4     meta length
    48      8     payload length
    56      64    shape           eight numbers of 8 bytes; zeros beyond ndim
    120     4     crc32 of the meta
    124     4     crc32 of the 124 bytes before it

The parser validates a frame part by part, and allocates memory for a part only when everything before it is valid. An invalid
frame ends the link:

    FrameError
    ├── UnknownProtocol      the first bytes are not those of this protocol
    ├── WrongVersion         another version of it; names both
    ├── Malformed            an invalid field
    ├── TooLarge             beyond a limit
    ├── Corrupt              a checksum does not match
    ├── Unexpected           valid, but not in this state: before the handshake, of another cluster or run
    └── UnexpectedPayload    the receiver has no buffer for this payload

`payloads.py` handles tensors; it is imported with the first payload, so that launchers work without torch.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from zlib import crc32

from smolcluster.comm.elastic.transport.messages import ITEM_BYTES, Kind, Message
from smolcluster.errors import SmolclusterError

VERSION = 1
MAGIC = b"SMOL"
HEADER = struct.Struct("<4sHBBBBHI8s8sQIIQ8QII")
PREFIX = struct.Struct("<4sH")
MAX_DIMS = 8
CHECKED = 1  # flag: a checksum follows the payload

DTYPE_NAMES = tuple(ITEM_BYTES)
CODECS = (
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "topk",
    "randk",
    "powersgd",
    "int4",
    "blocktopk",
)  # numbers on the wire: append only

WITH_PAYLOAD = frozenset({Kind.STATE, Kind.PUSH, Kind.AVERAGE, Kind.WEIGHTS, Kind.CHUNK, Kind.ROWS})
OF_THE_HANDSHAKE = frozenset({Kind.HELLO, Kind.PROOF, Kind.ACCEPT, Kind.REFUSE, Kind.BYE})
ONLY_IN_THE_HANDSHAKE = frozenset({Kind.HELLO, Kind.PROOF, Kind.ACCEPT})
META_BYTES = 1 << 20
HANDSHAKE_META_BYTES = 4096
META_DEPTH = 32
META_BRACKETS = 1 << 16  # lists and objects: parsing a megabyte of empty ones takes half a second
PAYLOAD_BYTES = 1 << 32

NO_CLUSTER = bytes(8)
NO_RUN = bytes(8)


class FrameError(SmolclusterError):
    """The received bytes are not a valid message; the link ends."""


class UnknownProtocol(FrameError):
    """The peer does not speak our protocol."""


class WrongVersion(FrameError):
    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"the peer speaks version {theirs} of the protocol and this side version {VERSION}; "
            "install the same version of smolcluster on both"
        )


class Malformed(FrameError):
    """A field is invalid."""


class TooLarge(FrameError):
    """A size is beyond its limit."""


class Corrupt(FrameError):
    """A checksum does not match."""


class Unexpected(FrameError):
    """The message is valid, but not in this state of the connection."""


class UnexpectedPayload(FrameError):
    """The receiver has no buffer for this payload."""


def run_bytes(run: str) -> bytes:
    """Return a run id (16 hex digits, or empty) as the header stores it."""
    return bytes.fromhex(run) if run else NO_RUN


# Meta


def encode_meta(meta: Mapping[str, Any]) -> bytes:
    """Encode meta as JSON. Raises ValueError for values that JSON does not have, such as NaN and infinity."""
    return json.dumps(meta, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() if meta else b""


def with_encoded_meta(message: Message) -> Message:
    """Encode the meta once, for a message with many receivers. Returns the message."""
    message.encoded = encode_meta(message.meta)
    return message


def decode_meta(data: bytes) -> dict[str, Any]:
    """Parse meta. Depth is bounded, numbers are finite and fit 64 bits, strings can be encoded as UTF-8."""
    if not data:
        return {}
    _check_depth(data)
    try:
        meta = json.loads(data.decode(), parse_int=_integer, parse_float=_finite, parse_constant=_no_constant)
        if b"\\u" in data:  # a lone surrogate cannot be encoded
            json.dumps(meta, ensure_ascii=False).encode()
    except ValueError as error:
        raise Malformed(f"meta is not valid JSON: {error}") from error
    if not isinstance(meta, dict):
        raise Malformed(f"meta is a JSON {type(meta).__name__}, not an object")
    return meta


# A string, even an unterminated one, or a bracket. Linear: visits every byte once.
_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


def _check_depth(data: bytes) -> None:
    """Limit nesting before json.loads, which recurses."""
    if data.count(b"[") + data.count(b"{") <= META_DEPTH:
        return
    depth = brackets = 0
    for token in _BRACKETS.finditer(data):
        first = data[token.start()]
        if first in b"[{":
            depth += 1
            brackets += 1
            if depth > META_DEPTH:
                raise TooLarge(f"meta is nested deeper than {META_DEPTH}")
            if brackets > META_BRACKETS:
                raise TooLarge(f"meta has more than {META_BRACKETS} lists and objects")
        elif first in b"]}":
            depth -= 1


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**64:
        raise ValueError(f"the number {digits[:24]} does not fit 64 bits")
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:24]} is too large")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


# Writing


@dataclass(frozen=True, slots=True)
class Frame:
    """An encoded message."""

    head: bytes  # header and meta; the whole frame if it is small
    payload: memoryview | None  # the sender's tensor, not a copy
    checked: bool

    @property
    def nbytes(self) -> int:
        return len(self.head) + (0 if self.payload is None else len(self.payload) + 4 * self.checked)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the head, then blocks of the payload. A block's checksum is taken while the one before is being sent."""
        yield self.head
        if self.payload is None:
            return
        from smolcluster.comm.elastic.transport.payloads import BLOCK_BYTES, Checksum

        checksum, size = Checksum(), len(self.payload)
        for start in range(0, size, BLOCK_BYTES):
            block = self.payload[start : start + BLOCK_BYTES]
            if self.checked:
                checksum.fold(block)
            yield block
        if self.checked:
            yield checksum.value(self.payload[size - size % BLOCK_BYTES :]).to_bytes(4, "little")


def encode(
    message: Message,
    *,
    cluster: bytes = NO_CLUSTER,
    run: bytes = NO_RUN,
    checked: bool = True,
    meta_bytes: int = META_BYTES,
) -> Frame:
    """Encode a message. `checked`: append a checksum of the payload, for a channel without integrity (no TLS)."""
    meta = message.encoded or encode_meta(message.meta)
    if len(meta) > meta_bytes:
        raise ValueError(f"{message.kind.name} with {len(meta)} bytes of meta; at most {meta_bytes} are allowed")
    dtype = 0
    shape: tuple[int, ...] = ()
    payload: memoryview | None = None
    if message.payload is not None:
        from smolcluster.comm.elastic.transport import payloads

        assert message.kind in WITH_PAYLOAD, f"{message.kind.name} has no payload"
        dtype = 1 + DTYPE_NAMES.index(str(message.payload.dtype).removeprefix("torch."))
        shape, payload = tuple(message.payload.shape), payloads.memory(message.payload)
    fields = HEADER.pack(
        MAGIC,
        VERSION,
        message.kind,
        dtype,
        CODECS.index(message.codec),
        len(shape),
        CHECKED if checked and payload is not None else 0,
        message.epoch,
        cluster,
        run,
        message.step,
        message.channel,
        len(meta),
        0 if payload is None else len(payload),
        *shape,
        *(0,) * (MAX_DIMS - len(shape)),
        crc32(meta),
        0,
    )
    head = fields[:-4] + crc32(fields[:-4]).to_bytes(4, "little") + meta
    if payload is None or len(payload) > payloads.JOINED_BYTES:
        return Frame(head, payload, checked)
    tail = crc32(payload).to_bytes(4, "little") if checked else b""
    return Frame(b"".join((head, payload, tail)), None, checked)
