"""Encoded contributions to rounds: every member sends the others those of its gradients that they sum.

Where members come and go. A part is encoded once, tensor by tensor, when backward is over. A round that is combined again,
in another view, sends the same bytes again to those who sum them there: nothing more is lost by it.

Error feedback (`codecs/feedback.py`): rounds are encoded in order, each against the residual of the one before, also with
several in flight. A part that does not count (left out, or too late) is taken back, and the residual is what it was before.
Where later parts were encoded against it already, the whole residual is dropped instead: that of a refused gradient must not
reach the sums. A tensor without a gradient is not sent; its residual waits.

Gradients are encoded as means over a member's samples and weighted by whoever sums them, so that their magnitude, and that of
the residual, does not depend on the batch size.

A message, for n tensors:

    8 bytes     weight, float64: samples, or targets that count
    4 bytes     0, or 1 + the place of a member whose part could not be read
    n bytes     1 if the tensor was used, else 0
    ...         every tensor as the codec writes it; zeros where it was not used, or nothing counts
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from smolcluster.comm.codecs import Codec, CodecError, Feedback, Packer
from smolcluster.comm.codecs.feedback import Memory, tensors_of
from smolcluster.comm.group import Group, Work
from smolcluster.comm.rounds import Unreadable

HEAD = struct.Struct("<dI")


class Layout:
    """The bytes of a message for some tensors."""

    def __init__(self, packers: Sequence[Packer]) -> None:
        self._packers = packers
        ends = itertools.accumulate((packer.nbytes for packer in packers), initial=HEAD.size + len(packers))
        self._first, *self._ends = ends
        self.nbytes = [self._first, *self._ends][-1]

    def write(
        self, weight: float, used: Sequence[bool], encoded: Sequence[Tensor | None], *, unreadable: int = 0
    ) -> Tensor:
        head = torch.frombuffer(bytearray(HEAD.pack(weight, unreadable) + bytes(used)), dtype=torch.uint8)
        empty = (torch.zeros(packer.nbytes, dtype=torch.uint8) for packer in self._packers)
        return torch.cat([head, *(e if e is not None else z for e, z in zip(encoded, empty, strict=True))])

    def read(self, data: Tensor) -> tuple[float, int, list[bool]]:
        """Return weight, unreadable and used. Raises CodecError for what `write` cannot have made."""
        head = data[: self._first].numpy().tobytes()
        weight, unreadable = HEAD.unpack_from(head)
        flags = head[HEAD.size :]
        if not 0 <= weight < 2**53 or max(flags, default=0) > 1:
            raise CodecError(f"its head is no use: weight {weight:g}")
        return weight, unreadable, [bool(flag) for flag in flags]

    def decode(self, data: Tensor, index: int) -> Tensor:
        """Return one of the tensors."""
        packer, end = self._packers[index], self._ends[index]
        tensor = torch.empty(packer.shapes[0])
        packer.decode(data[end - packer.nbytes : end], [tensor])
        return tensor


@dataclass(slots=True)
class Part:
    """What this member contributes to one round."""

    step: int
    weight: float = 0.0
    used: list[bool] = field(default_factory=list)
    encoded: list[Tensor | None] = field(default_factory=list)
    norm: float = 0.0  # as decoded; NaN: it could not be encoded
    before: Mapping[str, Memory] = field(default_factory=dict)  # the residual that it was encoded against
    after: Mapping[str, Memory] | None = None  # and what it left; None: it counts, or is taken back
    arriving: dict[int, tuple[Tensor, Work]] = field(default_factory=dict)
    leaving: list[Work] = field(default_factory=list)


class Contributions:
    def __init__(self, parameters: Mapping[str, nn.Parameter], *, codec: Codec, num_slots: int) -> None:
        self.parameters = list(parameters.values())
        self.packers = [Packer([(name, tuple(p.shape))], codec) for name, p in parameters.items()]
        self.names = list(parameters)
        self._feedback, self._needs_feedback = Feedback(), codec.feedback
        self._slots = [self._nothing(0) for _ in range(num_slots)]
        self._unclaimed: set[int] = set()  # in flight when the view was formed, and not combined again yet

    def formed(self, group: Group, wants: Sequence[Sequence[int]], *, step: int) -> None:
        """Send to each member of this group the tensors that it wants. `step`: the last one that was committed."""
        self._group, self._wants = group, wants
        self._layouts = [Layout([self.packers[j] for j in row]) for row in wants]
        self._next = step + 1
        self._unclaimed = {slot for slot, part in enumerate(self._slots) if part.after is not None}
        for part in self._slots:
            part.arriving, part.leaving = {}, []

    def start(self, slot: int, *, weight: float, scale: float) -> None:
        """Backward begins. What was in flight and is not any more came too late."""
        for late in sorted(self._unclaimed, key=lambda s: -self._slots[s].step):
            self._take_back(self._slots[late])
        self._unclaimed.clear()
        self._slots[slot] = self._nothing(self._number(slot))
        self._slots[slot].weight, self._scale = weight, scale

    def finish(self, slot: int) -> None:
        """Encode the gradients on the parameters, and send them."""
        part = self._slots[slot]
        part.used = [p.grad is not None for p in self.parameters]
        part.before = self._feedback.memories
        try:
            if part.weight:
                part.encoded, part.norm = self._encode(self.key(slot))
                part.after = self._feedback.memories
                self._feedback.commit()
        except CodecError:
            self._feedback.memories = part.before
            self._slots[slot] = part = self._nothing(part.step)
            part.norm = math.nan
        for parameter in self.parameters:
            parameter.grad = None
        self._send(slot)

    def again(self, slot: int, *, zero: bool) -> None:
        """Send my part once more, in the present group; `zero`: it is left out."""
        self._unclaimed.discard(slot)
        step = self._number(slot)
        if zero:
            self._take_back(self._slots[slot])
            self._slots[slot] = self._nothing(step)
        self._slots[slot].step = step
        self._send(slot)

    def counted(self, slot: int) -> None:
        """The round is committed: its part is not needed any more."""
        self._slots[slot] = self._nothing(self._slots[slot].step)

    def done(self, slot: int) -> bool:
        """Whether all parts for me are here."""
        return all(work.done for _, work in self._slots[slot].arriving.values())

    def wait(self, slot: int) -> None:
        for _, work in self._slots[slot].arriving.values():
            work.wait()

    def wait_sent(self, slot: int) -> None:
        for work in self._slots[slot].leaving:
            work.wait()

    def norm(self, slot: int) -> float:
        """Of my part as the others decode it, weighted."""
        return self._slots[slot].norm * (self._slots[slot].weight or 1.0)

    def key(self, slot: int) -> int:
        """Seeds what is random in a round: alike on all members, so that randk keeps the same places of parts and sum."""
        return self._slots[slot].step * len(self.packers)

    def mean(self, slot: int) -> tuple[float, dict[int, Tensor | None]]:
        """Return the weight of all parts, and the mean of each tensor that I sum, in the order of ranks.

        None: nobody used it. Raises Unreadable for a part that cannot be decoded.
        """
        me, part = self._group.rank, self._slots[slot]
        row, layout = self._wants[me], self._layouts[me]
        parts = {place: data for place, (data, _) in part.arriving.items()}
        parts[me] = layout.write(part.weight, [part.used[j] for j in row], [part.encoded[j] for j in row])
        heads: dict[int, tuple[float, list[bool]]] = {}
        for place in sorted(parts):
            try:
                weight, _, used = layout.read(parts[place])
            except CodecError as error:
                raise Unreadable(place, f"its part cannot be read: {error}") from error
            heads[place] = weight, used
        total = sum(weight for weight, _ in heads.values())
        means: dict[int, Tensor | None] = {}
        for index, j in enumerate(row):
            mean: Tensor | None = None
            for place, (weight, used) in heads.items():
                if not used[index]:
                    continue
                if mean is None:
                    mean = torch.zeros(self.packers[j].shapes[0])
                if weight:
                    try:
                        mean.add_(layout.decode(parts[place], index), alpha=weight / total)
                    except CodecError as error:
                        raise Unreadable(place, f"its part cannot be read: {error}") from error
            means[j] = mean
        return total, means

    def own_state(self) -> dict[str, Tensor]:
        """Return the residual after the last round that is committed: parts in flight are not in it."""
        flying = [part for part in self._slots if part.after is not None]
        first = min(flying, key=lambda part: part.step, default=None)
        return tensors_of(self._feedback.memories if first is None else first.before)

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        self._feedback.load_state_dict(tensors)

    def _encode(self, key: int) -> tuple[list[Tensor | None], float]:
        encoded: list[Tensor | None] = []
        norms = []
        for j, (packer, parameter) in enumerate(zip(self.packers, self.parameters, strict=True)):
            if parameter.grad is None:
                encoded.append(None)
                continue
            gradient = parameter.grad.detach().to("cpu", torch.float32) / self._scale
            data = torch.empty(packer.nbytes, dtype=torch.uint8)
            packer.encode([gradient], data, key=key + j, feedback=self._feedback if self._needs_feedback else None)
            packer.decode(data, [gradient])
            norms.append(float(torch.linalg.vector_norm(gradient)))
            encoded.append(data)
        return encoded, math.hypot(*norms)

    def _send(self, slot: int) -> None:
        """To each what it wants, beginning with the next: so nobody is everybody's first."""
        part, group, n, me = self._slots[slot], self._group, self._group.size, self._group.rank
        part.arriving, part.leaving = {}, []
        for place in [*range(me + 1, n), *range(me)]:
            row, layout = self._wants[place], self._layouts[place]
            if row:
                data = layout.write(part.weight, [part.used[j] for j in row], [part.encoded[j] for j in row])
                part.leaving.append(group.send(data, to=place, tag=2 * slot))
        if self._wants[me]:
            for place in [*range(me), *range(me + 1, n)]:
                data = torch.empty(self._layouts[me].nbytes, dtype=torch.uint8)
                part.arriving[place] = data, group.recv(data, source=place, tag=2 * slot)

    def _take_back(self, part: Part) -> None:
        """As if it had not been encoded, if nothing was encoded since."""
        if part.after is not None:
            self._feedback.memories = part.before if self._feedback.memories is part.after else {}
            part.after = None

    def _number(self, slot: int) -> int:
        """The step of the next round, which has this slot."""
        self._next += (slot - self._next) % len(self._slots)
        self._next += 1
        return self._next - 1

    def _nothing(self, step: int) -> Part:
        return Part(step, used=[False] * len(self.packers), encoded=[None] * len(self.packers))
