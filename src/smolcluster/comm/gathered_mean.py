"""The mean of encoded contributions that every member gathers from all others. Used on both planes.

    every member     encodes its contribution, once, with its error feedback
                     gathers the encoded contributions of all members
                     decodes them in rank order and takes the mean: replicas stay bit-identical

All tensors are encoded and decoded together (`codecs/flat.py`), on the GPU if they are there: only payloads cross to the host.

For local SGD, which contributes all tensors at once and rarely: each member sends one message per round, and one round is in
flight at a time. A ring would have to encode the sum again at every hop.

Bytes per round and member, sent and received each, for S encoded bytes on N members:   (N-1) S
With more than `MAX_GATHERED` members the mean is encoded again instead (`encoded_sum.py`).

With `senders` each number is averaged over the members that sent it (where it decodes to a number other than 0); otherwise over
all members, and a number that was not sent counts as 0.

Error feedback becomes final when the round is committed. A round that is combined again sends the same bytes; a round that is
not committed leaves the feedback unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import get_total_norm

from smolcluster.comm.codecs import Codec, CodecError, Feedback, Packer, flat_encoding
from smolcluster.comm.codecs.feedback import Memory, add_left_out, memories_of, tensors_of, under
from smolcluster.comm.contributions import MessageLayout, of_names
from smolcluster.comm.group import Done, Group, Work
from smolcluster.comm.rounds import Combination, Committed, UnreadableContribution
from smolcluster.comm.view import View

MAX_GATHERED = 8  # members


class GatheredMean(Combination):
    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Group | None,
        *,
        codec: Codec,
        decay: float = 1.0,
        senders: bool = False,
    ) -> None:
        """`group`: of a fixed membership; None: `formed` sets it. `decay`: of error feedback."""
        self._parameters = list(parameters.values())
        self._names, layout = list(parameters), [(name, tuple(p.shape)) for name, p in parameters.items()]
        self._flat = flat_encoding(codec, layout)
        self._layout = MessageLayout([Packer([each], codec) for each in layout], range(len(layout)))
        self._codec, self._senders = codec, senders
        self._feedback = Feedback(decay=decay)
        self._settled: Mapping[str, Memory] = {}  # after the last round that was committed
        self._fake = any(isinstance(p, FakeTensor) for p in self._parameters)  # a memory estimate: nothing to encode
        self._weight, self._norm, self._stop, self._sent = 0.0, 0.0, False, torch.empty(0, dtype=torch.uint8)
        self._mean: tuple[float, list[Tensor | None]] | None = None
        self._work: Work = Done()
        if group is not None:
            self._group = group

    def formed(self, group: Group, view: View, established: Sequence[str | None]) -> None:
        self._group = group

    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        self._weight, self._stop = weight, stop

    def finish(self, slot: int) -> None:
        self._feedback.memories, self._norm = self._settled, 0.0
        encoded: Mapping[int, Tensor | None] = {}
        if self._weight:
            try:
                encoded = self._encode({j: p.grad for j, p in enumerate(self._parameters) if p.grad is not None})
            except CodecError:  # not finite: contribute nothing
                self._feedback.memories, self._weight, self._norm = self._settled, 0.0, math.nan
        for parameter in self._parameters:
            parameter.grad = None
        self._write(encoded)
        self._send()

    def again(self, slot: int, *, zero: bool) -> None:
        if zero:
            self._feedback.memories, self._weight, self._norm, self._stop = self._settled, 0.0, 0.0, False
            self._write({})
        self._send()

    def drop(self, slot: int) -> None:
        self._feedback.memories = self._settled

    def done(self, slot: int) -> bool:
        return self._work.done

    def wait(self, slot: int) -> None:
        self._work.wait()
        if self._mean is None:
            rows = self._gathered.to("cpu").view(self._group.size, -1)
            self._stops = float(rows[:, -1].sum())
            self._mean = self._mean_of([row[:-1] for row in rows])

    def stop_count(self, slot: int) -> Tensor:
        return torch.tensor([self._stops])

    def results(self, slot: int) -> list[Tensor | None]:
        assert self._mean is not None
        return self._mean[1]

    def put(self, slot: int, results: Sequence[Tensor | None]) -> None:
        self._mean, self._stops, self._work = (1.0, list(results)), 0.0, Done()

    def contributed(self, slot: int) -> list[Tensor]:
        """Return what is sent plus what error feedback keeps of it, minus what it held before."""
        return [self._contributed(j, name) for j, name in enumerate(self._names)]

    def _contributed(self, j: int, name: str) -> Tensor:
        if not self._weight:
            return torch.full(self._flat.shapes[j], self._norm if math.isnan(self._norm) else 0.0)
        before, after = self._settled.get(name), self._feedback.memories.get(name)
        return add_left_out(self._layout.decode(self._message, j), before, after, decay=self._feedback.decay)

    def norms(self, slot: int) -> tuple[float, float]:
        assert self._mean is not None
        weight, means = self._mean
        return self._norm, weight * float(get_total_norm([mean for mean in means if mean is not None]))

    def give(self, result: Committed) -> None:
        assert self._mean is not None
        for parameter, mean in zip(self._parameters, self._mean[1], strict=True):
            parameter.grad = None if mean is None else mean.to(parameter.device, parameter.dtype)
        self._settled, self._mean = self._feedback.memories, None

    def shares(self, slot: int) -> dict[int, Tensor]:
        return {self._group.rank: self._message}

    def follow(self, slot: int, shares: Mapping[int, Tensor], *, members: int) -> None:
        if shares.keys() != set(range(members)) or any(len(m) != self._layout.nbytes for m in shares.values()):
            raise ValueError(f"got the contributions of {len(shares)} members, expected {members}")
        self._feedback.memories = self._settled
        self._mean = self._mean_of([shares[place] for place in range(members)])

    def own_state(self) -> dict[str, Tensor]:
        """Return the feedback after the last round with a contribution."""
        return {f"{self._codec.name}/{name}": tensor for name, tensor in tensors_of(self._feedback.memories).items()}

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        mine = of_names(self._names, under(f"{self._codec.name}/", tensors))
        self._settled = self._feedback.memories = memories_of(mine)

    def _encode(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor | None]:
        """Return the bytes of each tensor, on the device where they were encoded."""
        if not gradients:
            return {}
        flat = (self._flat.empty if len(gradients) == len(self._parameters) else self._flat.zeros)(self._device)
        views = {j: view for j, view in enumerate(self._flat.views(flat)) if j in gradients}
        torch._foreach_copy_(list(views.values()), [gradient.detach() for gradient in gradients.values()])
        if self._codec.feedback:
            self._feedback.keep(self._feedback.add_all({self._names[j]: view for j, view in views.items()}))
        if self._fake:
            return {j: torch.zeros(self._flat.sizes[j], dtype=torch.uint8) for j in gradients}
        (payload, decoded), norm = self._flat.encode(flat), 0.0
        for part in decoded:
            # Of the decoded values, which the other members check.
            norm = math.hypot(norm, self._weight * float(torch.linalg.vector_norm(part.values)))
            if self._codec.feedback:
                part.add_to(flat, -1.0)
        self._norm = norm
        parts = torch.split(payload, self._flat.sizes)
        return {j: parts[j] for j in gradients}

    @property
    def _device(self) -> torch.device:
        """The device for encoding and decoding: CUDA or the CPU. Other devices do not support all operations."""
        device = self._parameters[0].device
        return device if device.type == "cuda" else torch.device("cpu")

    def _write(self, encoded: Mapping[int, Tensor | None]) -> None:
        """Make a new message: an earlier one may still be in transit."""
        self._sent = self._layout.write(self._weight, encoded, tail=bytes([self._stop]), pinned=self._pinned)

    @property
    def _message(self) -> Tensor:
        """This member's contribution: what it sends without the last byte, which is 1 if it requests a stop."""
        return self._sent[:-1]

    @property
    def _pinned(self) -> bool:
        """Return whether to use pinned memory to send and receive. CUDA caches it for the next round."""
        return self._device.type == "cuda" and not self._fake

    def _send(self) -> None:
        device, self._mean = self._group.device, None
        mine = self._sent.to(device)
        pinned = self._pinned and device.type == "cpu"
        self._gathered = torch.empty(self._group.size * len(mine), dtype=torch.uint8, device=device, pin_memory=pinned)
        self._work = self._group.all_gather(self._gathered, mine)

    def _mean_of(self, messages: Sequence[Tensor]) -> tuple[float, list[Tensor | None]]:
        """Return the weight of all messages, and the mean of each tensor; None for one that no member used."""
        if self._fake:
            return 1.0, [torch.zeros(shape) for shape in self._flat.shapes]
        by_place = dict(enumerate(messages))
        heads = self._layout.heads(by_place)
        total = sum(weight for weight, _ in heads.values())
        mean = self._flat.zeros(self._device)
        counted = torch.zeros_like(mean) if self._senders else None
        for place, (weight, used) in heads.items():
            if weight:
                self._add(by_place[place], used, weight / total, mean, counted, place=place)
        if counted is not None:
            mean.div_(counted.masked_fill_(counted == 0, 1.0))
        used_by_any = [any(each) for each in zip(*(used for _, used in heads.values()), strict=True)]
        views = self._flat.views(mean)
        return total, [view if used else None for view, used in zip(views, used_by_any, strict=True)]

    def _add(
        self,
        message: Tensor,
        used: Sequence[bool],
        share: float,
        mean: Tensor,
        counted: Tensor | None,
        *,
        place: int,
    ) -> None:
        """Add a member's share to the mean. Raises UnreadableContribution for one that cannot be decoded."""
        data = self._layout.encoded(message)
        if not all(used):
            parts = zip(
                torch.split(data, self._flat.sizes), torch.split(self._nothing, self._flat.sizes), used, strict=True
            )
            data = torch.cat([mine if is_used else nothing for mine, nothing, is_used in parts])
        try:
            decoded = self._flat.decode(data.to(mean.device))
        except CodecError as error:
            raise UnreadableContribution(place, f"its contribution cannot be decoded: {error}") from error
        for part in decoded:
            part.add_to(mean, share)
            if counted is not None:
                part.sent.add_to(counted, share)

    @cached_property
    def _nothing(self) -> Tensor:
        """The payload of zeros."""
        return self._flat.encode(self._flat.zeros(torch.device("cpu")))[0]
