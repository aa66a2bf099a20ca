"""Frames: messages survive any split of the stream, and every invalid frame is refused."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.places import at_most
from torch import Tensor

from smolcluster.comm import codecs
from smolcluster.comm.elastic.transport import frames, payloads
from smolcluster.comm.elastic.transport.api import Head, Kind, Message
from smolcluster.comm.elastic.transport.frames import (
    Corrupt,
    FrameError,
    Malformed,
    TooLarge,
    Unexpected,
    UnexpectedPayload,
    UnknownProtocol,
    WrongVersion,
    decode_meta,
    encode,
    encode_meta,
)
from smolcluster.comm.elastic.transport.parser import READ_BYTES, Parser
from smolcluster.comm.elastic.transport.payloads import BLOCK_BYTES, Checksum

CLUSTER = bytes(range(8))
RUN = bytes.fromhex("00112233aabbccdd")


def anywhere(head: Head) -> Tensor:
    return torch.empty(head.shape, dtype=payloads.DTYPES[head.dtype])


def make_parser(place: Callable[[Head], Tensor | None] = anywhere, *, open_: bool = True, **options: Any) -> Parser:
    parser = Parser(place=place, **{"cluster": CLUSTER, "run": lambda: RUN, **options})
    parser.authenticated = open_
    return parser


def to_bytes(message: Message, **options: Any) -> bytes:
    frame = encode(message, **{"cluster": CLUSTER, "run": RUN, **options})
    data = b"".join(frame.chunks())
    assert len(data) == frame.nbytes
    return data


def feed(parser: Parser, data: bytes, pieces: Iterable[int] = ()) -> list[Message]:
    """Everything that comes out, when `data` comes in these pieces and then all the rest."""
    messages: list[Message] = []
    rest, sizes = memoryview(data), iter(pieces)
    while rest:
        buffer = parser.buffer()
        count = min(len(buffer), len(rest), max(1, next(sizes, len(rest))))
        buffer[:count] = rest[:count]
        rest = rest[count:]
        messages += parser.fed(count)
    return messages


def same(a: Message, b: Message) -> bool:
    if (a.payload is None) != (b.payload is None):
        return False
    if a.payload is not None and b.payload is not None:
        equal = a.payload.shape == b.payload.shape and a.payload.dtype == b.payload.dtype
        if not (equal and bytes(payloads.memory(a.payload)) == bytes(payloads.memory(b.payload))):
            return False
    return all(getattr(a, name) == getattr(b, name) for name in ("kind", "step", "channel", "epoch", "codec", "meta"))


def tampered(data: bytes, offset: int, layout: str, value: Any) -> bytes:
    """One field of the header changed, and the header's checksum made to fit."""
    changed = bytearray(data)
    struct.pack_into("<" + layout, changed, offset, value)
    struct.pack_into("<I", changed, 124, crc32(changed[:124]))
    return bytes(changed)


class TestRoundTrip:
    def test_the_layout_is_what_the_table_says(self) -> None:
        """A change here is a new version of the protocol."""
        message = Message(
            kind=Kind.PUSH,
            step=5,
            channel=6,
            epoch=7,
            codec="int8",
            meta={"samples": 3},
            payload=torch.tensor([[1, -1], [2, 3]], dtype=torch.int16),
        )
        meta, payload = b'{"samples":3}', struct.pack("<4h", 1, -1, 2, 3)
        head = b"SMOL" + struct.pack("<HBBBBHI", 1, 32, 7, 3, 2, 1, 7) + CLUSTER + RUN
        head += struct.pack("<QIIQ8Q", 5, 6, len(meta), len(payload), 2, 2, 0, 0, 0, 0, 0, 0)
        head += struct.pack("<I", crc32(meta))
        assert len(head) == 124
        expected = head + struct.pack("<I", crc32(head)) + meta + payload + struct.pack("<I", crc32(payload))
        assert to_bytes(message) == expected

    @pytest.mark.parametrize("dtype", payloads.DTYPES.values(), ids=str)
    @pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4), (1,) * 8, (70_001,)], ids=str)
    def test_every_type_and_shape(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        payload = torch.randint(0, 2, shape).to(dtype)
        message = Message(kind=Kind.STATE, payload=payload)
        (received,) = feed(make_parser(), to_bytes(message))
        assert same(received, message)

    @pytest.mark.parametrize("codec", codecs.CODECS)
    def test_every_codec_has_a_number(self, codec: str) -> None:
        message = Message(kind=Kind.PUSH, codec=codec, payload=torch.zeros(3))
        (received,) = feed(make_parser(), to_bytes(message))
        assert same(received, message)

    def test_a_column_of_a_matrix_is_not_sent_as_another(self) -> None:
        with pytest.raises(AssertionError, match="contiguous"):
            encode(Message(kind=Kind.PUSH, payload=torch.zeros(4, 4)[:, 0]))

    @given(st.lists(st.integers(1, 5000), max_size=200), st.booleans())
    def test_any_pieces_give_the_same_messages(self, pieces: list[int], checked: bool) -> None:
        sent = [
            Message(kind=Kind.ACK, step=1),
            Message(kind=Kind.PUSH, step=2, payload=torch.arange(10_000, dtype=torch.float32)),
            Message(kind=Kind.EVENT, meta={"line": "x" * 30_000}),  # more than fits the staging buffer
            Message(kind=Kind.CHUNK, step=2**64 - 1, channel=2**32 - 1, payload=torch.ones(3), meta={"ä": [1.5, None]}),
            Message(kind=Kind.CHUNK, payload=torch.zeros(0)),
        ]
        data = b"".join(to_bytes(message, checked=checked) for message in sent)
        received = feed(make_parser(checked=False), data, pieces)
        assert len(received) == len(sent)
        assert all(map(same, received, sent))

    def test_a_payload_lands_straight_in_its_place(self) -> None:
        place = torch.zeros(500_000)
        parser = make_parser(lambda head: place)
        sent = torch.rand(500_000)
        data = to_bytes(Message(kind=Kind.PUSH, payload=sent))
        assert feed(parser, data[:1000]) == []
        buffer = parser.buffer()
        received_so_far = 1000 - frames.HEADER.size
        assert buffer.nbytes == min(READ_BYTES, place.nbytes - received_so_far)
        buffer[:4] = b"\xff\xff\xff\xff"
        assert payloads.memory(place)[received_so_far : received_so_far + 4] == b"\xff\xff\xff\xff"
        (message,) = feed(parser, data[1000:])
        assert message.payload is place
        assert torch.equal(place, sent)

    def test_small_frames_share_one_read(self) -> None:
        data = b"".join(to_bytes(Message(kind=Kind.ACK, step=step)) for step in range(100))
        parser = make_parser()
        buffer = parser.buffer()
        buffer[: len(data)] = data
        assert [message.step for message in parser.fed(len(data))] == list(range(100))

    def test_a_message_is_given_before_the_next_is_looked_at(self) -> None:
        """What a receiver learns from one may decide where the next belongs."""
        told: list[object] = []
        parser = make_parser(lambda head: told.append("place") or anywhere(head))  # type: ignore[func-returns-value]
        data = to_bytes(Message(kind=Kind.WELCOME)) + to_bytes(Message(kind=Kind.STATE, payload=torch.ones(2)))
        buffer = parser.buffer()
        buffer[: len(data)] = data
        for message in parser.fed(len(data)):
            told.append(message.kind)
        assert told == [Kind.WELCOME, "place", Kind.STATE]

    def test_no_payload_is_copied_on_the_way_out(self) -> None:
        payload = torch.rand(300_000)
        chunks = list(encode(Message(kind=Kind.PUSH, payload=payload)).chunks())
        payload += 1  # the slices show what is in memory now
        slices = [chunk for chunk in chunks if isinstance(chunk, memoryview)]
        assert b"".join(slices) == bytes(payloads.memory(payload))
        assert max(map(len, slices)) <= BLOCK_BYTES


class TestRefusals:
    """Each with a header whose checksum fits: an honest sender of something that may not be."""

    ACK = to_bytes(Message(kind=Kind.ACK, meta={"a": 1}))
    PUSH = to_bytes(Message(kind=Kind.PUSH, payload=torch.ones(2, 3)))

    @pytest.mark.parametrize(
        ("frame", "offset", "layout", "value", "error", "words"),
        [
            (ACK, 0, "4s", b"HTTP", UnknownProtocol, "HTTP"),
            (ACK, 4, "H", 2, WrongVersion, "version 2 .* version 1"),
            (ACK, 6, "B", 0, Malformed, "kind 0"),
            (ACK, 6, "B", 255, Malformed, "kind 255"),
            (ACK, 7, "B", 1, Malformed, "ACK must not have a payload"),
            (ACK, 8, "B", 200, Malformed, "codec number 200"),
            (ACK, 9, "B", 1, Malformed, "payload but no dtype"),
            (ACK, 10, "H", 1, Malformed, "payload but no dtype"),
            (ACK, 48, "Q", 1, Malformed, "payload but no dtype"),
            (ACK, 44, "I", 2**32 - 1, TooLarge, "4294967295 bytes of meta"),
            (ACK, 120, "I", 0, Corrupt, "meta of a ACK"),
            (PUSH, 7, "B", 0, Malformed, "payload but no dtype"),
            (PUSH, 7, "B", 99, Malformed, "type number 99"),
            (PUSH, 7, "B", 5, Malformed, "does not take 24 bytes"),
            (PUSH, 9, "B", 1, Malformed, "whose shape is not of"),
            (PUSH, 9, "B", 9, Malformed, "whose shape is not of"),
            (PUSH, 9, "B", 255, Malformed, "whose shape is not of"),
            (PUSH, 10, "H", 0, Malformed, "flags 0x0"),
            (PUSH, 10, "H", 3, Malformed, "flags 0x3"),
            (PUSH, 48, "Q", 2**63, TooLarge, "9223372036854775808 bytes"),
            (PUSH, 48, "Q", 25, Malformed, "does not take 25 bytes"),
            (PUSH, 56, "Q", 2**63, TooLarge, "shape"),
            (PUSH, 56, "Q", 0, Malformed, "does not take 24 bytes"),
            (PUSH, 16, "8s", bytes(8), Unexpected, "another cluster"),
            (PUSH, 24, "8s", bytes(range(8)), Unexpected, "run 0001020304050607; this is run 00112233aabbccdd"),
        ],
    )
    def test_of_a_field(
        self, frame: bytes, offset: int, layout: str, value: Any, error: type[FrameError], words: str
    ) -> None:
        asked: list[Head] = []
        parser = make_parser(lambda head: asked.append(head))  # type: ignore[func-returns-value]
        with pytest.raises(error, match=words):
            feed(parser, tampered(frame, offset, layout, value))
        assert not asked, "memory was asked for before everything was checked"

    def test_an_empty_tensor_of_impossible_size(self) -> None:
        empty = to_bytes(Message(kind=Kind.PUSH, payload=torch.zeros(0, 2)))
        with pytest.raises(TooLarge, match="shape"):
            feed(make_parser(), tampered(empty, 64, "Q", 2**62))

    def test_a_run_that_one_side_does_not_know_yet_passes(self) -> None:
        assert feed(make_parser(run=lambda: frames.NO_RUN), self.ACK)
        assert feed(make_parser(), to_bytes(Message(kind=Kind.ACK), run=frames.NO_RUN))

    def test_the_first_frame_names_the_cluster_and_the_next_may_not_change_it(self) -> None:
        parser = make_parser(cluster=None)
        assert feed(parser, self.ACK)
        assert parser.cluster == CLUSTER
        with pytest.raises(Unexpected, match="another cluster"):
            feed(parser, to_bytes(Message(kind=Kind.ACK), cluster=bytes(8)))

    @pytest.mark.parametrize("kind", list(Kind))
    def test_before_the_handshake_only_the_handshake(self, kind: Kind) -> None:
        data = to_bytes(Message(kind=kind))
        if kind in (Kind.HELLO, Kind.PROOF, Kind.ACCEPT, Kind.REFUSE, Kind.BYE):
            assert len(feed(make_parser(open_=False), data)) == 1
        else:
            with pytest.raises(Unexpected, match="before the handshake"):
                feed(make_parser(open_=False), data)

    @pytest.mark.parametrize("kind", [Kind.HELLO, Kind.PROOF, Kind.ACCEPT])
    def test_after_the_handshake_no_handshake(self, kind: Kind) -> None:
        with pytest.raises(Unexpected, match="after the handshake"):
            feed(make_parser(), to_bytes(Message(kind=kind)))

    def test_before_the_handshake_little_meta(self) -> None:
        data = to_bytes(Message(kind=Kind.HELLO, meta={"x": "y" * 4096}))
        with pytest.raises(TooLarge, match="at most 4096"):
            feed(make_parser(open_=False), data)

    def test_limits(self) -> None:
        with pytest.raises(TooLarge, match="at most 1048576 are allowed"):
            feed(make_parser(), to_bytes(Message(kind=Kind.ACK, meta={"x": "y" * 2**20}), meta_bytes=2**21))
        with pytest.raises(TooLarge, match="at most 100 are allowed"):
            feed(make_parser(payload_bytes=100), to_bytes(Message(kind=Kind.PUSH, payload=torch.zeros(26))))

    def test_a_payload_without_a_buffer(self) -> None:
        with pytest.raises(UnexpectedPayload, match=r"PUSH of step 0: no buffer for float32 of shape \[2, 3\]"):
            feed(make_parser(lambda head: None), self.PUSH)

    def test_a_place_of_the_wrong_size_is_our_own_mistake(self) -> None:
        with pytest.raises(AssertionError, match="place gave"):
            feed(make_parser(lambda head: torch.zeros(5)), self.PUSH)

    def test_a_boolean_is_true_or_false(self) -> None:
        data = bytearray(to_bytes(Message(kind=Kind.STATE, payload=torch.tensor([True, False]))))
        data[128] = 2
        data[130:] = struct.pack("<I", crc32(data[128:130]))
        with pytest.raises(Malformed, match="other than 0 and 1"):
            feed(make_parser(), bytes(data))


class TestDamage:
    @pytest.mark.parametrize(
        "message",
        [
            Message(kind=Kind.ACK, meta={"samples": 12}),
            Message(kind=Kind.PUSH, meta={"a": 1}, payload=torch.arange(5, dtype=torch.float32)),
        ],
        ids=["control", "payload"],
    )
    def test_every_single_flipped_bit_is_noticed(self, message: Message) -> None:
        data = to_bytes(message)
        for bit in range(8 * len(data)):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(FrameError):
                feed(make_parser(), bytes(damaged))

    @pytest.mark.parametrize("size", [BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5])
    def test_a_large_payload_with_a_flipped_bit_is_never_delivered(self, size: int) -> None:
        data = bytearray(to_bytes(Message(kind=Kind.PUSH, payload=torch.randint(0, 256, (size,), dtype=torch.uint8))))
        for offset in (128, 128 + size // 2, 128 + size - 1, 128 + size):
            data[offset] ^= 0x10
            with pytest.raises(Corrupt, match="payload of a PUSH"):
                feed(make_parser(), bytes(data))
            data[offset] ^= 0x10
        assert len(feed(make_parser(), bytes(data))) == 1

    def test_nothing_comes_after_an_error(self) -> None:
        parser = make_parser()
        with pytest.raises(Corrupt):
            feed(parser, bytes(TestRefusals.ACK[:-1]) + b"!")
        assert feed(parser, TestRefusals.ACK) == []


class TestChecksum:
    def value(self, data: bytes) -> int:
        checksum, whole = Checksum(), len(data) - len(data) % BLOCK_BYTES
        checksum.fold(memoryview(data)[:whole])
        return checksum.value(memoryview(data)[whole:])

    def test_the_order_of_blocks_counts(self) -> None:
        a, b = bytes(BLOCK_BYTES), b"\x01" * BLOCK_BYTES
        assert len({self.value(x + y) for x in (a, b) for y in (a, b)}) == 4

    def test_every_byte_counts(self) -> None:
        data = bytearray(2 * BLOCK_BYTES + 100)
        untouched = self.value(bytes(data))
        for place in (*range(0, len(data), 9973), BLOCK_BYTES - 1, BLOCK_BYTES, len(data) - 1):
            data[place] ^= 0x80
            assert self.value(bytes(data)) != untouched
            data[place] ^= 0x80


class TestMeta:
    @given(
        st.dictionaries(
            st.text(max_size=10),
            st.recursive(
                st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
                | st.text(max_size=10),
                lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
                max_leaves=20,
            ),
            max_size=5,
        )
    )  # fmt: skip
    def test_there_and_back(self, meta: dict[str, Any]) -> None:
        assert decode_meta(encode_meta(meta)) == meta

    def test_none_is_no_bytes(self) -> None:
        assert encode_meta({}) == b""
        assert decode_meta(b"") == {}

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (b"[1]", "list, not an object"),
            (b"1", "int, not an object"),
            (b"null", "NoneType, not an object"),
            (b"{", "JSON"),
            (b'{"a":1}x', "JSON"),
            (b'{"a":NaN}', "NaN is not a number"),
            (b'{"a":-Infinity}', "-Infinity is not a number"),
            (b'{"a":1e999}', "too large"),
            (b'{"a":18446744073709551616}', "does not fit 64 bits"),
            (b'{"a":-9223372036854775809}', "does not fit 64 bits"),
            (b'{"a":' + b"1" * 5000 + b"}", "does not fit 64 bits"),
            (b'{"a":"\xff"}', "JSON"),
            (b'{"a":"\\ud800"}', "JSON"),
            (b'\xef\xbb\xbf{"a":1}', "JSON"),
        ],
    )
    def test_what_is_refused(self, text: bytes, words: str) -> None:
        with pytest.raises(Malformed, match=words):
            decode_meta(text)

    @pytest.mark.parametrize("opening", [b"[", b'{"a":'])
    @pytest.mark.parametrize("depth", [33, 100_000])
    def test_depth(self, opening: bytes, depth: int) -> None:
        closing = b"]" if opening == b"[" else b"}"
        with pytest.raises(TooLarge, match="nested deeper"):
            decode_meta(b'{"a":' + opening * depth + b"1" + closing * depth + b"}")

    def test_brackets_in_strings_and_many_beside_each_other_are_no_depth(self) -> None:
        meta = {"text": '[{"\\' * 50, "list": [[n] for n in range(100)]}
        assert decode_meta(encode_meta(meta)) == meta

    @pytest.mark.parametrize("text", [b'"\\"' * 300_000, b'[' * 40 + b'"' + b"\\" * 900_000, b'{"' * 500_000])  # fmt: skip
    def test_a_hostile_megabyte_takes_no_time(self, text: bytes) -> None:
        began = time.process_time()
        with pytest.raises(FrameError):
            decode_meta(text)
        assert time.process_time() - began < at_most(1.0)

    @pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, torch.zeros(1)])
    def test_values_that_json_does_not_have_are_refused(self, value: Any) -> None:
        with pytest.raises((ValueError, TypeError)):
            encode(Message(kind=Kind.ACK, meta={"loss": value}))

    def test_meta_beyond_the_limit_is_refused(self) -> None:
        with pytest.raises(ValueError, match="EVENT with 2000011 bytes of meta; at most 1048576"):
            encode(Message(kind=Kind.EVENT, meta={"line": "x" * 2_000_000}))


def test_meta_of_nothing_but_brackets() -> None:
    """A third of a million empty objects take half a second to make: for so long a stage would be silent."""
    decode_meta(b'{"a":[' + b"{}," * (frames.META_BRACKETS - 3) + b"{}]}")
    decode_meta(b'{"a":"' + b"[" * 500_000 + b'"}')
    with pytest.raises(TooLarge, match="lists and objects"):
        decode_meta(b'{"a":[' + b"{}," * 330_000 + b"{}]}")
