"""Parse messages out of a stream of bytes. `frames.py` documents the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from smolcluster.comm.elastic.transport.frames import (
    CHECKED,
    CODECS,
    DTYPE_NAMES,
    HANDSHAKE_META_BYTES,
    HEADER,
    MAGIC,
    MAX_DIMS,
    META_BYTES,
    NO_CLUSTER,
    NO_RUN,
    OF_THE_HANDSHAKE,
    ONLY_IN_THE_HANDSHAKE,
    PAYLOAD_BYTES,
    PREFIX,
    VERSION,
    WITH_PAYLOAD,
    Corrupt,
    Malformed,
    TooLarge,
    Unexpected,
    UnexpectedPayload,
    UnknownProtocol,
    WrongVersion,
    decode_meta,
)
from smolcluster.comm.elastic.transport.messages import ITEM_BYTES, Head, Kind, Message

if TYPE_CHECKING:
    from torch import Tensor

    from smolcluster.comm.elastic.transport.payloads import Checksum

STAGING_BYTES = 1 << 14  # read ahead while the destination of the next part is not known
READ_BYTES = 1 << 20  # most of a payload per read: so it is still in the cache when its checksum is taken


@dataclass(frozen=True, slots=True)
class _Header:
    """A decoded header: the message without meta and payload, and the sizes of both."""

    message: Message
    meta_bytes: int
    meta_crc: int
    dtype: str = ""  # empty: no payload
    shape: tuple[int, ...] = ()
    payload_bytes: int = 0
    checked: bool = False


def _nowhere(_: Head) -> None:
    """Refuse every payload."""


class Parser:
    """Incremental parser: turns received bytes, in pieces of any size, into messages.

    The reader writes into `buffer()` and calls `fed(count)`, which yields the messages that are complete. Inside a payload
    `buffer()` is the rest of the tensor that `place` returned (no copy); otherwise it is a small staging buffer that may
    receive several frames at once. After a FrameError the parser must not be used.
    """

    def __init__(
        self,
        *,
        place: Callable[[Head], Tensor | None],
        run: Callable[[], bytes] = lambda: NO_RUN,
        cluster: bytes | None = NO_CLUSTER,
        payload_bytes: int = PAYLOAD_BYTES,
        checked: bool = True,
    ) -> None:
        """`cluster` None: take it from the first frame. `checked`: refuse payloads without a checksum."""
        self.cluster = cluster
        self.authenticated = False  # until then only handshake messages are accepted
        self._place, self._run = place, run
        self._payload_bytes, self._checked = payload_bytes, checked
        self._staging: memoryview | None = None  # allocated with the first read: idle connections have none
        self._start = self._end = 0  # received and not yet parsed
        self._target: memoryview | None = None
        self._filled = 0
        self._frames: Iterator[Message | None] = self._parse()

    def buffer(self) -> memoryview:
        """Return the buffer for the next bytes. Never empty."""
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
        """Release everything now: parser and generator form a reference cycle that only the garbage collector would find."""
        self._frames, self._place = iter(()), _nowhere
        self._staging = self._target = None

    @property
    def due_bytes(self) -> int:
        """Return how many bytes of the current payload are missing; 0 between payloads."""
        return 0 if self._target is None else len(self._target) - self._filled

    def fed(self, count: int) -> Iterator[Message]:
        """Parse `count` bytes that were written to `buffer()`. Yields each message before the next one is parsed."""
        if self._target is not None:
            self._filled += count
        else:
            self._end += count
        for message in self._frames:
            if message is None:
                return
            yield message

    def _parse(self) -> Iterator[Message | None]:
        """Yield message after message, and None where more bytes are needed."""
        while True:
            yield from self._wait_for(PREFIX.size)
            magic, version = PREFIX.unpack(self._peek(PREFIX.size))
            if magic != MAGIC:
                raise UnknownProtocol(f"the peer speaks another protocol: its first bytes are {magic!r}")
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
                raise Corrupt(f"the checksum of the meta of a {message.kind.name} does not match")
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
                raise Corrupt(f"the checksum of the payload of a {header.message.kind.name} does not match")
        if header.dtype == "bool" and not payloads.are_booleans(target):
            raise Malformed("a bool payload has a byte other than 0 and 1")

    def _check(self, data: bytes) -> _Header:
        """Decode and validate a header, except magic and version, which were checked before the rest was read."""
        kind, dtype, codec, ndim, flags, epoch, cluster, run, step, channel, meta_bytes, payload_bytes, *rest = (
            HEADER.unpack(data)[2:]
        )
        shape, meta_crc, header_crc = tuple(rest[:ndim]), rest[-2], rest[-1]
        if crc32(data[:-4]) != header_crc:
            raise Corrupt("the checksum of a header does not match")
        try:
            kind = Kind(kind)
        except ValueError:
            raise Malformed(f"unknown message kind {kind}") from None
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

        most = META_BYTES if self.authenticated else HANDSHAKE_META_BYTES
        if meta_bytes > most:
            raise TooLarge(f"{name} with {meta_bytes} bytes of meta; at most {most} are allowed")
        if codec >= len(CODECS):
            raise Malformed(f"{name} with unknown codec number {codec}")
        if ndim > MAX_DIMS or any(rest[ndim:MAX_DIMS]):
            raise Malformed(f"{name} whose shape is not of {ndim} dimensions")
        message = Message(kind=kind, step=step, channel=channel, epoch=epoch, codec=CODECS[codec])
        if dtype == 0:
            if payload_bytes or ndim or flags:
                raise Malformed(f"{name} with a payload but no dtype")
            return _Header(message, meta_bytes, meta_crc)

        if kind not in WITH_PAYLOAD:
            raise Malformed(f"{name} must not have a payload")
        if dtype > len(DTYPE_NAMES):
            raise Malformed(f"{name} with unknown dtype number {dtype}")
        if payload_bytes > self._payload_bytes:
            raise TooLarge(f"{name} with a payload of {payload_bytes} bytes; at most {self._payload_bytes} are allowed")
        dtype_name = DTYPE_NAMES[dtype - 1]
        itemsize = ITEM_BYTES[dtype_name]
        # Zero dimensions must not hide huge ones.
        if math.prod(size or 1 for size in shape) * itemsize > self._payload_bytes:
            raise TooLarge(f"{name} of shape {list(shape)}")
        if math.prod(shape) * itemsize != payload_bytes:
            raise Malformed(f"{name}: {dtype_name} of shape {list(shape)} does not take {payload_bytes} bytes")
        if flags & ~CHECKED or (self._checked and not flags & CHECKED):
            raise Malformed(f"{name} with invalid flags {flags:#x}")
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
        """Fill the target from the staging buffer, then straight from the socket. Adds whole blocks to the checksum."""
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
    """Return the tensor that `Handler.place` gave. Raises UnexpectedPayload for None."""
    if tensor is None:
        raise UnexpectedPayload(
            f"{head.kind.name} of step {head.step}: no buffer for {head.dtype} of shape {list(head.shape)}"
        )
    fits = str(tensor.dtype) == f"torch.{head.dtype}" and tensor.nbytes == head.nbytes and tensor.is_contiguous()
    assert fits, f"place gave {tensor.dtype} of {tensor.nbytes} bytes for {head.dtype} of {head.nbytes}"
    return tensor
