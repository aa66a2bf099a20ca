"""Encoded contributions to rounds on the elastic plane: every member sends each tensor's gradient to the member that sums it.

Each tensor is encoded once, when its gradient is final: in the last backward of a step, from the last layer to the first.
Buckets of several tensors are sent meanwhile, always in the same order; each member gets its tensors of a bucket in one
message. A tensor's encoding does not depend on that of others. A round that is combined again, in another view, sends the same
bytes to the new summing members, so nothing more is lost.

A contribution that cannot be encoded (not finite) is sent with weight 0 and its norm reported as NaN, so that the round is
combined again without it.

Error feedback (`codecs/feedback.py`): rounds are encoded in order, each against the residual of the one before, also with
several in flight. A contribution that is not part of the sum (left out, or too late) is rolled back, and the residual with it.
If later contributions were encoded against it already, the residual is dropped completely: the residual of a rejected gradient
must not reach the sums. A tensor without a gradient is not sent; its residual is kept.

Gradients are encoded as means over a member's samples and weighted by the summing member, so that their magnitude, and that of
the residual, does not depend on the batch size.

A message, for n tensors of a bucket:

    8 bytes     weight, float64: samples, or targets in the loss
    4 bytes     0, or 1 + the view index of a member whose contribution could not be decoded
    n bytes     1 if the tensor was used, else 0
    ...         every tensor as the codec writes it; zeros if it was not used, or the contribution is left out
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from smolcluster.comm.buckets import assign_buckets
from smolcluster.comm.codecs import Codec, CodecError, Feedback, Packer
from smolcluster.comm.codecs.feedback import Memory, add_left_out, memories_of, tensors_of
from smolcluster.comm.elastic.collectives.schedule import MAX_PIECE_BYTES, MIN_PIECE_BYTES
from smolcluster.comm.group import Group, Work
from smolcluster.comm.rounds import UnreadableContribution

HEAD = struct.Struct("<dI")


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class MessageLayout:
    """The layout of a message with some of the tensors: those whose indices in `packers` are in `row`."""

    def __init__(self, packers: Sequence[Packer], row: Sequence[int]) -> None:
        self.row, self._packers = row, [packers[j] for j in row]
        ends = itertools.accumulate((packer.nbytes for packer in self._packers), initial=HEAD.size + len(row))
        self._first, *self._ends = ends
        self.nbytes = [self._first, *self._ends][-1]

    def write(
        self,
        weight: float,
        tensors: Mapping[int, Tensor | None],
        *,
        unreadable: int = 0,
        tail: bytes = b"",
        pinned: bool = False,
    ) -> Tensor:
        """Return the message, in host memory, and the tail after it.

        `tensors`: the used ones by index, on any device; None if the contribution is left out. `pinned`: faster from a GPU.
        """
        used = bytes(j in tensors for j in self.row)
        message = torch.empty(self.nbytes + len(tail), dtype=torch.uint8, pin_memory=pinned)
        message[: self._first] = _bytes(HEAD.pack(weight, unreadable) + used)
        if tail:
            message[self.nbytes :] = _bytes(tail)
        for j, (begin, end) in zip(self.row, itertools.pairwise([self._first, *self._ends]), strict=True):
            encoded = tensors.get(j)
            if encoded is None:
                message[begin:end].zero_()
            else:
                message[begin:end].copy_(encoded)
        return message

    def read(self, data: Tensor) -> tuple[float, int, list[bool]]:
        """Return weight, unreadable and used. Raises CodecError for an invalid message."""
        head = data[: self._first].numpy().tobytes()
        weight, unreadable = HEAD.unpack_from(head)
        flags = head[HEAD.size :]
        if not 0 <= weight < 2**53 or max(flags, default=0) > 1:
            raise CodecError(f"invalid head: weight {weight:g}, flags up to {max(flags, default=0)}")
        return weight, unreadable, [bool(flag) for flag in flags]

    def heads(self, messages: Mapping[int, Tensor]) -> dict[int, tuple[float, list[bool]]]:
        """Return weight and used tensors of each member's message. Raises UnreadableContribution for an invalid one."""
        found: dict[int, tuple[float, list[bool]]] = {}
        for place in sorted(messages):
            try:
                weight, _, used = self.read(messages[place])
            except CodecError as error:
                raise UnreadableContribution(place, f"its contribution cannot be decoded: {error}") from error
            found[place] = weight, used
        return found

    def mean(
        self,
        index: int,
        messages: Mapping[int, Tensor],
        heads: Mapping[int, tuple[float, list[bool]]],
        *,
        senders: bool = False,
    ) -> Tensor | None:
        """Return the weighted mean of a tensor over the members, accumulated in rank order; None: no member used it.

        `senders`: a number is averaged over the members that sent it: those from which it decodes to a nonzero number.
        """
        shape, mean = self._packers[index].shapes[0], None
        total, counted = sum(weight for weight, _ in heads.values()), torch.zeros(shape if senders else ())
        for place, (weight, used) in heads.items():
            if not used[index]:
                continue
            mean = torch.zeros(shape) if mean is None else mean
            if weight:
                try:
                    tensor = self.decode(messages[place], index)
                except CodecError as error:
                    raise UnreadableContribution(place, f"its contribution cannot be decoded: {error}") from error
                mean.add_(tensor, alpha=weight / total)
                if senders:
                    counted.add_(tensor != 0, alpha=weight / total)
        return mean.div_(counted.where(counted > 0, 1.0)) if senders and mean is not None else mean

    def encoded(self, data: Tensor) -> Tensor:
        """Return the bytes of all tensors."""
        return data[self._first :]

    def decode(self, data: Tensor, index: int) -> Tensor:
        """Decode one of the tensors."""
        packer, end = self._packers[index], self._ends[index]
        tensor = torch.empty(packer.shapes[0])
        packer.decode(data[end - packer.nbytes : end], [tensor], padded=True)
        return tensor


def pretend(packer: Packer, tensor: Tensor, feedback: Feedback | None) -> None:
    """Allocate the memory of error feedback without encoding, for fake tensors."""
    if feedback is not None:
        (name,) = packer.names
        feedback.keep({name: feedback.add(name, tensor)})


def of_names(names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the saved error feedback (`kind/name`) of these parameters."""
    mine = set(names)
    return {key: tensor for key, tensor in tensors.items() if key.partition("/")[2] in mine}


def buckets_of(sizes: Sequence[int], members: int) -> list[list[int]]:
    """Return the tensors of each bucket for these encoded sizes, from the last tensor to the first.

    Each member gets about one message's worth of a bucket, or a 64th of everything if that is more; less of the first bucket,
    so that communication starts early.
    """
    bucket_of, count = assign_buckets(
        [(torch.uint8, size) for size in sizes],
        bucket_bytes=max(members * MAX_PIECE_BYTES, sum(sizes) // 64),
        first_bucket_bytes=members * MIN_PIECE_BYTES,
    )
    return [[j for j, bucket in enumerate(bucket_of) if bucket == number] for number in range(count)]


@dataclass(slots=True)
class EncodedContribution:
    """This member's contribution to one round."""

    step: int
    weight: float = 0.0
    encoded: dict[int, Tensor | None] = field(default_factory=dict)  # the used tensors; None: left out
    norms: dict[int, float] = field(default_factory=dict)  # of each tensor after decoding
    broken: bool = False  # could not be encoded
    before: Mapping[str, Memory] = field(default_factory=dict)  # the residual it was encoded against
    after: Mapping[str, Memory] | None = None  # the residual it left; None: it was committed or rolled back
    arriving: list[dict[int, tuple[Tensor, Work]]] = field(default_factory=list)  # per bucket, by sender
    leaving: list[Work] = field(default_factory=list)
    sent: int = 0  # number of buckets


class Contributions:
    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, codec: Codec, num_slots: int, decay: float = 1.0
    ) -> None:
        self.parameters = list(parameters.values())
        self.packers = [Packer([(name, tuple(p.shape))], codec) for name, p in parameters.items()]
        self.names = list(parameters)
        self._feedback, self._needs_feedback = Feedback(decay=decay), codec.feedback
        self.fake = any(isinstance(p, FakeTensor) for p in self.parameters)  # a memory estimate: nothing to encode
        self._slots = [EncodedContribution(0) for _ in range(num_slots)]
        self._unclaimed: set[int] = set()  # in flight when the view was formed, not combined again yet
        self._current: int | None = None  # the slot whose last backward is running
        for j, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, j))  # type: ignore[no-untyped-call]

    def formed(self, group: Group, wants: Sequence[Sequence[int]], *, step: int) -> None:
        """Use this group from now on. `wants`: the tensors that each member sums. `step`: the last committed one."""
        self._group = group
        self._buckets = buckets_of([packer.nbytes for packer in self.packers], group.size)
        rows = [[[j for j in bucket if j in wanted] for wanted in map(set, wants)] for bucket in self._buckets]
        # For each bucket, the message to each member that sums some of it.
        self._layouts = [
            {place: MessageLayout(self.packers, row) for place, row in enumerate(of) if row} for of in rows
        ]
        self._next = step + 1
        self._unclaimed = {slot for slot, part in enumerate(self._slots) if part.after is not None}
        for part in self._slots:
            part.arriving, part.leaving = [{} for _ in self._buckets], []

    def start(self, slot: int, *, weight: float, scale: float) -> None:
        """Before the last backward of a step: encode and send each gradient as it becomes ready.

        Rolls back contributions that were in flight before the view and no longer are: they were too late.
        """
        for late in sorted(self._unclaimed, key=lambda s: -self._slots[s].step):
            self._take_back(self._slots[late])
        self._unclaimed.clear()
        self._slots[slot] = EncodedContribution(self._number(slot), weight, before=self._feedback.memories)
        self._current, self._scale = slot, scale
        self._expect(slot)

    def finish(self, slot: int) -> None:
        """After that backward: encode and send the rest.

        The last backward may not have reached every parameter. One that an earlier micro-batch used still has its gradient.
        """
        part = self._slots[slot]
        for j, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self._on_gradient(j, parameter)
        self._current = None
        if part.weight:
            part.after = self._feedback.memories
        self._send(slot, whole=True)

    def again(self, slot: int, *, zero: bool) -> None:
        """Send this member's contribution again, in the current group; `zero`: leave it out."""
        self._unclaimed.discard(slot)
        step = self._number(slot)
        if zero:
            self._take_back(self._slots[slot])
            self._slots[slot] = EncodedContribution(step)
        self._slots[slot].step = step
        self._expect(slot)
        self._send(slot, whole=True)

    def counted(self, slot: int) -> None:
        """Free the contribution of a committed round."""
        self._slots[slot] = EncodedContribution(self._slots[slot].step)

    def contributed(self, slot: int) -> list[Tensor]:
        """Return what this member contributed: what is sent, and what error feedback keeps of it."""
        part = self._slots[slot]
        return [self._contributed(part, j, name) for j, name in enumerate(self.names)]

    def _contributed(self, part: EncodedContribution, j: int, name: str) -> Tensor:
        tensor, data = torch.full(self.packers[j].shapes[0], math.nan if part.broken else 0.0), part.encoded.get(j)
        if data is None:
            return tensor
        self.packers[j].decode(data, [tensor], padded=True)
        return add_left_out(tensor, part.before.get(name), (part.after or {}).get(name), decay=self._feedback.decay)

    def done(self, slot: int) -> bool:
        """Return whether all contributions for this member have arrived."""
        return all(work.done for bucket in self._slots[slot].arriving for _, work in bucket.values())

    def wait(self, slot: int) -> None:
        for bucket in self._slots[slot].arriving:
            for _, work in bucket.values():
                work.wait()

    def wait_sent(self, slot: int) -> None:
        for work in self._slots[slot].leaving:
            work.wait()

    def norm(self, slot: int) -> float:
        """Return the weighted norm of this member's contribution as the others decode it."""
        part = self._slots[slot]
        norm = math.nan if part.broken else math.hypot(*(part.norms[j] for j in sorted(part.norms)))
        return norm * (part.weight or 1.0)

    def key(self, slot: int) -> int:
        """Return the random seed of a round, the same on all members: randk keeps the same indices of parts and sum."""
        return self._slots[slot].step * len(self.packers)

    def mean(self, slot: int, *, senders: bool = False) -> tuple[float, dict[int, Tensor | None]]:
        """Return the total weight, and the mean of each tensor that this member sums (`MessageLayout.mean`).

        None: no member used it. Raises UnreadableContribution for one that cannot be decoded.
        """
        me, part, weight = self._group.rank, self._slots[slot], 0.0
        means: dict[int, Tensor | None] = {}
        for layouts, arrived in zip(self._layouts, part.arriving, strict=True):
            if (layout := layouts.get(me)) is not None:
                parts = {place: data for place, (data, _) in arrived.items()}
                parts[me] = layout.write(part.weight, part.encoded)
                heads = layout.heads(parts)
                total = sum(of for of, _ in heads.values())
                weight = max(
                    weight, total
                )  # smaller only if a contribution is broken, and then the round is not committed
                row = enumerate(layout.row)
                means |= {j: layout.mean(index, parts, heads, senders=senders) for index, j in row}
        return weight, means

    def own_state(self, *, in_flight: bool = False) -> dict[str, Tensor]:
        """Return the residual after the last committed round; `in_flight`: after the last round that was started."""
        flying = [] if in_flight else [part for part in self._slots if part.after is not None]
        first = min(flying, key=lambda part: part.step, default=None)
        return tensors_of(self._feedback.memories if first is None else first.before)

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        self._feedback.memories = memories_of(of_names(self.names, tensors))

    def _on_gradient(self, j: int, parameter: Tensor) -> None:
        """Encode a final gradient, and send every complete bucket in order."""
        if self._current is None:
            return
        part, gradient = self._slots[self._current], parameter.grad
        assert gradient is not None
        parameter.grad = None
        if part.broken:
            return
        part.encoded[j] = None
        if part.weight:
            try:
                part.encoded[j], part.norms[j] = self._encode(j, gradient, key=self.key(self._current) + j)
            except CodecError:
                self._feedback.memories = part.before
                part.weight, part.encoded, part.broken = 0.0, {}, True
        self._send(self._current, whole=False)

    def _encode(self, j: int, gradient: Tensor, *, key: int) -> tuple[Tensor, float]:
        packer, gradient = self.packers[j], gradient.detach().to("cpu", torch.float32) / self._scale
        data, feedback = torch.zeros(packer.nbytes, dtype=torch.uint8), self._feedback if self._needs_feedback else None
        if self.fake:
            pretend(packer, gradient, feedback)
            return data, 0.0
        packer.encode([gradient], data, key=key, feedback=feedback)
        packer.decode(data, [gradient], padded=True)
        return data, float(torch.linalg.vector_norm(gradient))

    def _expect(self, slot: int) -> None:
        """Post the receives for the tensors that this member sums."""
        part, group, me = self._slots[slot], self._group, self._group.rank
        part.arriving, part.leaving, part.sent = [], [], 0
        for layouts in self._layouts:
            arriving: dict[int, tuple[Tensor, Work]] = {}
            for place in range(group.size):
                if place != me and me in layouts:
                    data = torch.empty(layouts[me].nbytes, dtype=torch.uint8)
                    arriving[place] = data, group.recv(data, source=place, tag=2 * slot)
            part.arriving.append(arriving)

    def _send(self, slot: int, *, whole: bool) -> None:
        """Send the complete buckets, in order; `whole`: all remaining ones.

        Each member starts with the next rank, so that not all send to the same member first.
        """
        part, n, me = self._slots[slot], self._group.size, self._group.rank
        while part.sent < len(self._buckets) and (whole or all(j in part.encoded for j in self._buckets[part.sent])):
            layouts = self._layouts[part.sent]
            for place in [*range(me + 1, n), *range(me)]:
                if place in layouts:
                    data = layouts[place].write(part.weight, part.encoded)
                    part.leaving.append(self._group.send(data, to=place, tag=2 * slot))
            part.sent += 1

    def _take_back(self, part: EncodedContribution) -> None:
        """Roll back the residual of a contribution, or drop it if later ones were encoded against it."""
        if part.after is not None:
            self._feedback.memories = part.before if self._feedback.memories is part.after else {}
            part.after = None

    def _number(self, slot: int) -> int:
        """Return the step of the next round with this slot."""
        self._next += (slot - self._next) % len(self._slots)
        self._next += 1
        return self._next - 1
