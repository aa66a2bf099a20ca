"""All-reduce of encoded gradients: on the elastic plane, and in a group of fixed membership.

    every member     encodes its gradients, and sends each tensor's to the owner of that tensor       (`contributions.py`)
    the owner        decodes them, takes the mean in rank order, encodes it, and sends it to all others
    every member     decodes the same bytes, the owner too: replicas stay bit-identical

Owners get complete tensors, balanced by encoded size. Bytes per step and member, sent and received each, for S encoded bytes on
N members, of which the member owns P:   S + (N-2) P,   which is 2 (N-1)/N S if tensors divide evenly. Contributions are sent
while backward runs, means when all contributions to an owner's tensors have arrived.

The owner has a residual for each mean. It becomes final when the round is committed: a round that is combined again in a
new view is encoded again, against the residual of the last committed round. The residual of a tensor that changes its owner is
dropped.

In a group of fixed membership every round is committed: the weights add up to 1, and `own_state`, after `wait`, includes the
residuals of rounds in flight. The number of members that request a stop is summed as well.

Decoding is bit-identical on all machines, except with powersgd, where machines of different kinds may differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from smolcluster.comm.codecs import Codec, CodecError, Feedback
from smolcluster.comm.codecs.feedback import Memory, memories_of, tensors_of, under
from smolcluster.comm.contributions import Contributions, MessageLayout, of_names, pretend
from smolcluster.comm.elastic.collectives.schedule import piece_elements
from smolcluster.comm.group import Group, Work
from smolcluster.comm.rounds import Combination, Committed, UnreadableContribution
from smolcluster.comm.view import View

PARTS, MEANS = "parts/", "means/"  # name prefixes of error feedback: of contributions, of owned means
Deal = Callable[[Sequence[int], int], Sequence[int]]  # sizes of tensors, number of members -> the owner of each


@dataclass(slots=True)
class Means:
    """The encoded means of one round, by the view index of their owner."""

    messages: dict[int, Tensor] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)
    announced: bool = False  # this member's means were sent
    residual: Mapping[str, Memory] = field(default_factory=dict)  # of this member's means
    # Decoded, on the elastic plane times their weight; None for a tensor that no member used.
    sums: list[Tensor | None] | None = None
    stops: Tensor = field(default_factory=lambda: torch.zeros(1))  # members that request a stop


class EncodedSum(Combination):
    """Every member gets the full sum of gradients, through the owner of each tensor."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Group | None = None,
        *,
        codec: Codec,
        deal: Deal,
        num_slots: int,
        decay: float = 1.0,
        senders: bool = False,
    ) -> None:
        """`group`: of a fixed membership; None: `formed` sets it. `decay`: of error feedback. `senders`: see `mean`."""
        self._parts = Contributions(parameters, codec=codec, num_slots=num_slots, decay=decay)
        self._codec, self._deal, self._senders = codec, deal, senders
        self._feedback = Feedback(decay=decay)
        self._settled: Mapping[str, Memory] = {}  # residual of this member's means after the last committed round
        self._slots = [Means() for _ in range(num_slots)]
        self._fixed, self._stop = group is not None, False
        self._fake = self._parts.fake
        if group is not None:
            self._use(group, step=0)

    def formed(self, group: Group, view: View, established: Sequence[str | None]) -> None:
        self._use(group, step=view.step)
        mine = {self._parts.names[j] for j in self._rows[group.rank]}
        self._settled = {name: memory for name, memory in self._settled.items() if name in mine}
        self._feedback.memories = self._settled

    def _use(self, group: Group, *, step: int) -> None:
        self._group = group
        self._rows, self._layouts = self._dealt(group.size)
        self._parts.formed(group, self._rows, step=step)

    def _dealt(self, members: int) -> tuple[list[list[int]], list[MessageLayout]]:
        """Return the tensors of each owner, and the layout of its message."""
        packers = self._parts.packers
        rows = rows_of(self._deal([packer.nbytes for packer in packers], members), members)
        return rows, [MessageLayout(packers, row) for row in rows]

    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        self._stop = stop
        self._parts.start(slot, weight=weight, scale=scale)

    def finish(self, slot: int) -> None:
        self._parts.finish(slot)
        self._expect(slot)
        if self._fixed:
            means = self._slots[slot]
            means.stops = torch.tensor([float(self._stop)], device=self._group.device)
            means.works.append(self._group.all_reduce(means.stops))

    def again(self, slot: int, *, zero: bool) -> None:
        self._parts.again(slot, zero=zero)
        self._expect(slot)

    def done(self, slot: int) -> bool:
        means = self._slots[slot]
        if not means.announced and self._parts.done(slot):
            self._announce(slot)
        return means.announced and all(work.done for work in means.works)

    def wait(self, slot: int) -> None:
        means = self._slots[slot]
        if not means.announced:
            self._announce(slot)
        self._parts.wait_sent(slot)
        for work in means.works:
            work.wait()
        if means.sums is None:
            means.sums = self._decode(means.messages, self._rows, self._layouts)

    def stop_count(self, slot: int) -> Tensor:
        return self._slots[slot].stops

    def results(self, slot: int) -> list[Tensor | None]:
        sums = self._slots[slot].sums
        assert sums is not None
        return sums

    def put(self, slot: int, results: Sequence[Tensor | None]) -> None:
        self._slots[slot] = Means(announced=True, residual=self._settled, sums=list(results))

    def contributed(self, slot: int) -> list[Tensor]:
        return self._parts.contributed(slot)

    def norms(self, slot: int) -> tuple[float, float]:
        sums = self._slots[slot].sums
        assert sums is not None
        return self._parts.norm(slot), float(get_total_norm([s for s in sums if s is not None]))

    def give(self, result: Committed) -> None:
        means = self._slots[result.slot]
        assert means.sums is not None
        for parameter, summed in zip(self._parts.parameters, means.sums, strict=True):
            parameter.grad = (
                None if summed is None else summed.mul_(result.factor).to(parameter.device, parameter.dtype)
            )
        self._settled = means.residual
        self._parts.counted(result.slot)
        self._slots[result.slot] = Means()

    def shares(self, slot: int) -> dict[int, Tensor]:
        me, messages = self._group.rank, self._slots[slot].messages
        return {me: messages[me]} if me in messages else {}

    def follow(self, slot: int, shares: Mapping[int, Tensor], *, members: int) -> None:
        rows, layouts = self._dealt(members)
        sizes = {place: layout.nbytes for place, layout in enumerate(layouts) if rows[place]}
        if {place: share.nbytes for place, share in shares.items()} != sizes:
            raise ValueError(f"the means of {len(shares)} owners do not match a group of {members} members")
        self._slots[slot] = Means(sums=self._decode(shares, rows, layouts))

    def own_state(self) -> dict[str, Tensor]:
        means = self._feedback.memories if self._fixed else self._settled
        kinds = {PARTS: self._parts.own_state(in_flight=self._fixed), MEANS: tensors_of(means)}
        return {
            f"{self._codec.name}/{kind}{name}": tensor for kind, own in kinds.items() for name, tensor in own.items()
        }

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        mine = under(f"{self._codec.name}/", tensors)
        self._parts.load_own(under(PARTS, mine))
        self._settled = self._feedback.memories = memories_of(of_names(self._parts.names, under(MEANS, mine)))

    def _expect(self, slot: int) -> None:
        """Post the receives for the means of all other owners."""
        means, me = Means(), self._group.rank
        for place, layout in enumerate(self._layouts):
            if place != me and self._rows[place]:
                means.messages[place] = torch.empty(layout.nbytes, dtype=torch.uint8)
                means.works.append(self._group.recv(means.messages[place], source=place, tag=2 * slot + 1))
        self._slots[slot] = means

    def _announce(self, slot: int) -> None:
        """Encode this member's means and send them to all others."""
        means, me = self._slots[slot], self._group.rank
        self._parts.wait(slot)
        means.announced = True
        if not self._rows[me]:
            return
        layout = self._layouts[me]
        try:
            weight, tensors = self._mean(slot)
        except UnreadableContribution as fault:
            # Sent to all members, so that every one can report it.
            means.messages[me] = layout.write(0.0, {}, unreadable=1 + fault.place)
        else:
            key = self._parts.key(slot)
            encoded = {j: self._encode(j, mean, key=key + j) for j in layout.row if (mean := tensors[j]) is not None}
            means.messages[me] = layout.write(weight, encoded)
        means.residual = self._feedback.memories
        for place in [*range(me + 1, self._group.size), *range(me)]:
            means.works.append(self._group.send(means.messages[me], to=place, tag=2 * slot + 1))

    def _mean(self, slot: int) -> tuple[float, dict[int, Tensor | None]]:
        if self._fake:
            return 1.0, {j: torch.zeros(self._parts.packers[j].shapes[0]) for j in self._rows[self._group.rank]}
        return self._parts.mean(slot, senders=self._senders)

    def _encode(self, j: int, mean: Tensor, *, key: int) -> Tensor:
        packer, feedback = self._parts.packers[j], self._feedback if self._codec.feedback else None
        data = torch.zeros(packer.nbytes, dtype=torch.uint8)
        if self._fake:
            pretend(packer, mean, feedback)
            return data
        try:
            packer.encode([mean], data, key=key, feedback=feedback)
        except CodecError:
            # Each contribution is within the codec's range, but the residual or rounding took the mean beyond it.
            limit = self._codec.limit
            packer.encode([mean.clamp(-limit, limit)], data, key=key)
        return data

    def _decode(
        self, messages: Mapping[int, Tensor], rows: Sequence[Sequence[int]], layouts: Sequence[MessageLayout]
    ) -> list[Tensor | None]:
        """Decode all means. Raises UnreadableContribution if an owner's message is invalid, or reports an invalid one."""
        sums: list[Tensor | None] = [None] * len(self._parts.packers)
        if self._fake:
            return [torch.zeros(packer.shapes[0]) for packer in self._parts.packers]
        for place, data in sorted(messages.items()):
            layout = layouts[place]
            try:
                weight, unreadable, used = layout.read(data)
                if unreadable > len(rows):
                    raise CodecError(f"it reports member {unreadable - 1}, which does not exist")
                if unreadable:
                    raise UnreadableContribution(unreadable - 1, "its contribution cannot be decoded")
                for index, j in enumerate(layout.row):
                    if used[index]:
                        sums[j] = layout.decode(data, index).mul_(1.0 if self._fixed else weight)
            except CodecError as error:
                raise UnreadableContribution(place, f"its means cannot be decoded: {error}") from error
        return sums


def rows_of(owner: Sequence[int], members: int) -> list[list[int]]:
    """Return the tensors of each owner."""
    return [[j for j, place in enumerate(owner) if place == member] for member in range(members)]


def shares(sizes: Sequence[int], deal: Deal, members: int) -> list[int]:
    """Return the total size that each member owns."""
    return [sum(sizes[j] for j in row) for row in rows_of(deal(sizes, members), members)]


def messages_of(nbytes: int) -> int:
    """Return the number of messages for this many bytes."""
    return -(-nbytes // piece_elements(nbytes, itemsize=1))
