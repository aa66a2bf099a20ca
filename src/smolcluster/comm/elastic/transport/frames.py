"""The bytes of a message.

A frame is a header of 128 bytes, then meta (a JSON object in UTF-8; none is no bytes), then the payload as it lies in
memory, then the payload's checksum. Everything is little-endian.

    offset  size  field
    0       4     magic           "SMOL"
    4       2     version         of this layout; these first six bytes stay where they are in every version
    6       1     kind            transport.Kind
    7       1     dtype           0: no payload; else 1 + its place in DTYPES
    8       1     codec           its place in CODECS
    9       1     ndim            0 to 8
    10      2     flags           bit 0: a checksum of 4 bytes follows the payload
    12      4     epoch           of the sender's view
    16      8     cluster         public id of the token; zeros: no token
    24      8     run             zeros: the sender does not know it yet
    32      8     step
    40      4     channel
    44      4     meta length
    48      8     payload length
    56      64    shape           eight numbers of 8 bytes; zeros beyond ndim
    120     4     crc32 of the meta
    124     4     crc32 of the 124 bytes before it

A frame is believed step by step, and nothing is allocated for a part before everything ahead of it was checked. What does not
pass ends the link:

    FrameError
    ├── ForeignBytes      this is not our protocol at all
    ├── WrongVersion      it is, but another version; names both
    ├── Malformed         a field that no sender of ours would write
    ├── TooLarge          beyond a limit
    ├── Corrupt           a checksum does not fit
    ├── Unexpected        in order, but not now or not here: before the handshake, of another cluster or run
    └── NotWanted         the receiver has no place for this payload

`payloads.py` has what concerns tensors; it is imported with the first payload, so that launchers do without torch.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn
from zlib import crc32

from smolcluster.comm.elastic.transport.messages import ITEM_BYTES, Head, Kind, Message
from smolcluster.errors import SmolclusterError

if TYPE_CHECKING:
    from torch import Tensor

    from smolcluster.comm.elastic.transport.payloads import Checksum

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
META_BRACKETS = 1 << 16  # lists and objects: more of them, all empty, would keep a thread busy for half a second
PAYLOAD_BYTES = 1 << 32

STAGING_BYTES = 1 << 14  # what is read ahead while the next part's place is not known
READ_BYTES = 1 << 20  # of a payload at once: it is still in the cache when its checksum is taken

NO_CLUSTER = bytes(8)
NO_RUN = bytes(8)


class FrameError(SmolclusterError):
    """Bytes that are not a message for us; the link they came from has to end."""


class ForeignBytes(FrameError):
    """Not our protocol."""


class WrongVersion(FrameError):
    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"the peer speaks version {theirs} of the protocol and this side version {VERSION}; "
            "install the same version of smolcluster on both"
        )


class Malformed(FrameError):
    """A field that no sender of ours would write."""


class TooLarge(FrameError):
    """Beyond a limit."""


class Corrupt(FrameError):
    """A checksum does not fit."""


class Unexpected(FrameError):
    """Not now, or not here."""


class NotWanted(FrameError):
    """The receiver has no place for this payload."""


def run_bytes(run: str) -> bytes:
    """A run id (16 hex digits, or empty) as the header has it."""
    return bytes.fromhex(run) if run else NO_RUN


# Meta


def encode_meta(meta: Mapping[str, Any]) -> bytes:
    """Raises ValueError for what JSON cannot say, NaN and infinity among it."""
    return json.dumps(meta, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() if meta else b""


def shared(message: Message) -> Message:
    """Encode its meta now, for a message that goes to many."""
    message.encoded = encode_meta(message.meta)
    return message


def decode_meta(data: bytes) -> dict[str, Any]:
    """An object of bounded depth whose numbers are finite and fit 64 bits, and whose strings can be written anywhere."""
    if not data:
        return {}
    _check_depth(data)
    try:
        meta = json.loads(data.decode(), parse_int=_integer, parse_float=_finite, parse_constant=_no_constant)
        if b"\\u" in data:  # half a surrogate pair makes a string that nothing can print
            json.dumps(meta, ensure_ascii=False).encode()
    except ValueError as error:
        raise Malformed(f"meta is not the JSON that is spoken here: {error}") from error
    if not isinstance(meta, dict):
        raise Malformed(f"meta is a JSON {type(meta).__name__}, not an object")
    return meta


# A string, even one that does not end, or a bracket. Goes over every byte once.
_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


def _check_depth(data: bytes) -> None:
    """Before the parser goes down with it."""
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
    """A message ready to be written."""

    head: bytes  # header and meta; of a small frame all of it
    payload: memoryview | None  # what follows, as it lies in the sender's tensor
    checked: bool

    @property
    def nbytes(self) -> int:
        return len(self.head) + (0 if self.payload is None else len(self.payload) + 4 * self.checked)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """In order, none larger than a block but perhaps the head. A checksum is taken while the block before is on its way."""
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
    """`checked`: with a checksum of the payload, for a channel that has none of its own."""
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


# Reading


@dataclass(frozen=True, slots=True)
class _Header:
    """What a header says: of a message that has no meta and no payload yet, and of these two."""

    message: Message
    meta_bytes: int
    meta_crc: int
    dtype: str = ""  # empty: no payload
    shape: tuple[int, ...] = ()
    payload_bytes: int = 0
    checked: bool = False


def _nowhere(_: Head) -> None:
    """Where payloads belong that nobody wants."""


class Parser:
    """Messages out of a stream of bytes, whatever pieces it comes in.

    The reader asks for `buffer`, puts bytes there, and reports how many with `fed`, which gives the messages that are
    complete now. While a payload is under way `buffer` is the rest of the tensor that `place` named; otherwise a small
    buffer that may take in several small frames at once. After a FrameError the stream is of no use any more.
    """

    def __init__(
        self,
        *,
        place: Callable[[Head], Tensor | None],
        run: Callable[[], bytes] = lambda: NO_RUN,
        cluster: bytes | None = NO_CLUSTER,
        meta_bytes: int = META_BYTES,
        payload_bytes: int = PAYLOAD_BYTES,
        checked: bool = True,
    ) -> None:
        """`cluster` None: whatever the first frame says. `checked`: payloads without a checksum are refused."""
        self.cluster = cluster
        self.authenticated = False  # before that, only the handshake is listened to
        self._place, self._run = place, run
        self._meta_bytes, self._payload_bytes, self._checked = meta_bytes, payload_bytes, checked
        self._staging: memoryview | None = None  # made when the first byte comes: most idle connections never send one
        self._start = self._end = 0  # what of it is read and not yet used
        self._target: memoryview | None = None
        self._filled = 0
        self._frames: Iterator[Message | None] = self._parse()

    def buffer(self) -> memoryview:
        """Where the next bytes belong. Never empty."""
        if self._target is not None:
            return self._target[self._filled : self._filled + READ_BYTES]
        if self._staging is None:
            self._staging = memoryview(bytearray(STAGING_BYTES))
        if self._start > 0:
            left = self._end - self._start
            self._staging[:left] = bytes(self._staging[self._start : self._end])
            self._start, self._end = 0, left
        return self._staging[self._end :]

    def close(self) -> None:
        """Nothing more will come: let go of everything now, not when the garbage collector finds the circle we are in."""
        self._frames, self._place = iter(()), _nowhere
        self._staging = self._target = None

    @property
    def due_bytes(self) -> int:
        """What is still to come of the payload that is under way; 0 between payloads."""
        return 0 if self._target is None else len(self._target) - self._filled

    def fed(self, count: int) -> Iterator[Message]:
        """So many bytes were put into `buffer`. A message is given before the next one is looked at."""
        if self._target is not None:
            self._filled += count
        else:
            self._end += count
        for message in self._frames:
            if message is None:
                return
            yield message

    def _parse(self) -> Iterator[Message | None]:
        """Frame after frame; None where more bytes are needed."""
        while True:
            yield from self._wait_for(PREFIX.size)
            magic, version = PREFIX.unpack(self._peek(PREFIX.size))
            if magic != MAGIC:
                raise ForeignBytes(f"the peer speaks something else: it begins with {magic!r}")
            if version != VERSION:
                raise WrongVersion(version)

            yield from self._wait_for(HEADER.size)
            header = self._check(self._take(HEADER.size))

            if header.meta_bytes <= STAGING_BYTES:
                yield from self._wait_for(header.meta_bytes)
                data = self._take(header.meta_bytes)
            else:
                large = bytearray(header.meta_bytes)
                yield from self._fill(memoryview(large))
                data = bytes(large)
            message = header.message
            if crc32(data) != header.meta_crc:
                raise Corrupt(f"the meta of a {message.kind.name} was damaged on the way")
            message.meta = decode_meta(data)
            if header.dtype:
                head = Head.of(message, dtype=header.dtype, shape=header.shape, nbytes=header.payload_bytes)
                message.payload = checked_place(self._place(head), head)
                yield from self._receive_payload(header, message.payload)
            yield message

    def _receive_payload(self, header: _Header, payload: Tensor) -> Iterator[None]:
        from smolcluster.comm.elastic.transport import payloads

        target, checksum = payloads.memory(payload), payloads.Checksum() if header.checked else None
        yield from self._fill(target, checksum)
        if checksum is not None:
            yield from self._wait_for(4)
            rest = target[len(target) - len(target) % payloads.BLOCK_BYTES :]
            if checksum.value(rest) != int.from_bytes(self._take(4), "little"):
                raise Corrupt(f"the payload of a {header.message.kind.name} was damaged on the way")
        if header.dtype == "bool" and not payloads.are_booleans(target):
            raise Malformed("a boolean that is neither true nor false")

    def _check(self, data: bytes) -> _Header:
        """Everything a header can be wrong about."""
        # Magic and version were checked before the rest was read.
        kind, dtype, codec, ndim, flags, epoch, cluster, run, step, channel, meta_bytes, payload_bytes, *rest = (
            HEADER.unpack(data)[2:]
        )
        shape, meta_crc, header_crc = tuple(rest[:ndim]), rest[-2], rest[-1]
        if crc32(data[:-4]) != header_crc:
            raise Corrupt("a header was damaged on the way")
        try:
            kind = Kind(kind)
        except ValueError:
            raise Malformed(f"there is no message of kind {kind}") from None
        name = kind.name
        if not self.authenticated and kind not in OF_THE_HANDSHAKE:
            raise Unexpected(f"{name} before the handshake")
        if self.authenticated and kind in ONLY_IN_THE_HANDSHAKE:
            raise Unexpected(f"{name} after the handshake")
        if self.cluster is None:
            self.cluster = cluster
        if cluster != self.cluster:
            raise Unexpected(f"{name} of another cluster")
        if self.authenticated and NO_RUN not in (run, ours := self._run()) and run != ours:
            raise Unexpected(f"{name} of run {run.hex()}; this is run {ours.hex()}")

        most = self._meta_bytes if self.authenticated else HANDSHAKE_META_BYTES
        if meta_bytes > most:
            raise TooLarge(f"{name} with {meta_bytes} bytes of meta; at most {most} are allowed")
        if codec >= len(CODECS):
            raise Malformed(f"{name} with codec number {codec}")
        if ndim > MAX_DIMS or any(rest[ndim:MAX_DIMS]):
            raise Malformed(f"{name} with a shape that says {ndim} dimensions and has others")
        message = Message(kind=kind, step=step, channel=channel, epoch=epoch, codec=CODECS[codec])
        if dtype == 0:
            if payload_bytes or ndim or flags:
                raise Malformed(f"{name} with a payload of no type")
            return _Header(message, meta_bytes, meta_crc)

        if kind not in WITH_PAYLOAD:
            raise Malformed(f"{name} with a payload")
        if dtype > len(DTYPE_NAMES):
            raise Malformed(f"{name} with type number {dtype}")
        if payload_bytes > self._payload_bytes:
            raise TooLarge(f"{name} with a payload of {payload_bytes} bytes; at most {self._payload_bytes} are allowed")
        dtype_name = DTYPE_NAMES[dtype - 1]
        itemsize = ITEM_BYTES[dtype_name]
        # An empty tensor can be too large too.
        if math.prod(size or 1 for size in shape) * itemsize > self._payload_bytes:
            raise TooLarge(f"{name} of shape {list(shape)}")
        if math.prod(shape) * itemsize != payload_bytes:
            raise Malformed(f"{name}: {dtype_name} of shape {list(shape)} does not take {payload_bytes} bytes")
        if flags & ~CHECKED or (self._checked and not flags & CHECKED):
            raise Malformed(f"{name} with flags {flags:#x}")
        return _Header(message, meta_bytes, meta_crc, dtype_name, shape, payload_bytes, bool(flags & CHECKED))

    # Bytes

    def _wait_for(self, count: int) -> Iterator[None]:
        while self._end - self._start < count:
            yield None

    def _peek(self, count: int) -> bytes:
        assert self._staging is not None
        return bytes(self._staging[self._start : self._start + count])

    def _take(self, count: int) -> bytes:
        data = self._peek(count)
        self._start += count
        return data

    def _fill(self, target: memoryview, checksum: Checksum | None = None) -> Iterator[None]:
        """What is there already, then straight from the socket. Whole blocks go into the checksum."""
        assert self._staging is not None
        staged = min(len(target), self._end - self._start)
        target[:staged] = self._staging[self._start : self._start + staged]
        self._start += staged
        self._target, self._filled = target, staged
        folded = 0
        while True:
            if checksum is not None:
                folded += checksum.fold(target[folded : self._filled])
            if self._filled == len(target):
                break
            yield None
        self._target = None


def checked_place(tensor: Tensor | None, head: Head) -> Tensor:
    """What a handler answered to `place`, if the payload fits there."""
    if tensor is None:
        raise NotWanted(f"{head.kind.name} of step {head.step}: no place for {head.dtype} of shape {list(head.shape)}")
    fits = str(tensor.dtype) == f"torch.{head.dtype}" and tensor.nbytes == head.nbytes and tensor.is_contiguous()
    assert fits, f"place gave {tensor.dtype} of {tensor.nbytes} bytes for {head.dtype} of {head.nbytes}"
    return tensor
