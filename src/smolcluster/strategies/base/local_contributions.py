"""The contributions of a worker with local steps: on time, late, and computed without the coordinator (elastic plane)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from smolcluster.comm.fragmented import Fragmented
from smolcluster.comm.rounds import Contribution
from smolcluster.config.options import RoundOptions, Streaming
from smolcluster.strategies.base.late_work import LateWork
from smolcluster.strategies.base.local_round import LocalRound
from smolcluster.strategies.base.replicated import Exchanging

log = logging.getLogger(__name__)

LocalStepsT = TypeVar("LocalStepsT", bound=RoundOptions)


class LocalContributions(Exchanging[LocalStepsT]):
    _fragmented: Fragmented
    _anchor: list[Tensor]
    _late: LateWork
    _mine: LocalRound

    @property
    def _streaming(self) -> Streaming:
        return self.options.streaming

    @property
    def _in_round(self) -> bool:
        return self.replica.updates > self._mine.first

    def _put_gradients(self, places: Sequence[int], deltas: Sequence[Tensor]) -> None:
        """Set the distances from the anchor, plus the late work, as gradients."""
        for place, delta in zip(places, deltas, strict=True):
            parameter = self.replica.parameters[place]
            parameter.grad = self._late.add_to(place, delta)
        if not self._streaming.streams:
            torch._foreach_copy_(
                [self.replica.parameters[place].detach() for place in places], [self._anchor[place] for place in places]
            )

    def _local_report(self, done: LocalRound) -> dict[str, Any]:
        """Return the steps of a round and their time, without that of the first, in which code may be compiled."""
        float(done.loss)  # wait for the GPU
        passed_s = time.perf_counter() - done.since
        return {"steps": done.steps, "step_s": passed_s / (done.steps - 1) if done.steps > 1 else done.compute_s}

    def _clipped(self, *, rounds: float) -> dict[str, Any]:
        """Clip a pseudo-gradient of `rounds` rounds that is far above the median.

        Return its norm, as text, and the norm that it was clipped to.
        """
        deltas = [p.grad for p in self.replica.parameters if p.grad is not None]
        norm = float(get_total_norm(deltas))
        median, bound = (rounds * norm for norm in self.rounds.clip or (0.0, math.inf))
        if not bound < norm < math.inf:  # the coordinator refuses one that is not finite
            return {"norm": repr(norm)}
        torch._foreach_mul_(deltas, median / norm)
        return {"norm": repr(norm), "usual": median}

    @torch.no_grad()
    def keep_late(self, late: Iterable[Contribution], *, held: Iterable[Contribution] = ()) -> None:
        for mine in held:
            self._late.committed(self._fragmented.places(mine.slot))  # that contribution includes the buffer
        for mine in late:
            if mine.samples and not self._streaming.streams:
                tensors = zip(self._fragmented.places(mine.slot), self._fragmented.contributed(mine.slot), strict=True)
                self._late.put(dict(tensors), samples=mine.samples, weight=mine.weight, loss=mine.host_loss)
            elif mine.samples:  # the contribution is still in the weights
                self._late.not_committed()
                self._late.put(self._return_to_anchor(), samples=mine.samples, weight=mine.weight, loss=mine.host_loss)
        self._late.not_committed()

    def _return_to_anchor(self) -> dict[int, Tensor]:
        """Set all parameters to the anchor; return their distances from it."""
        pairs = list(zip(self.replica.parameters, self._anchor, strict=True))
        distances = {place: anchor - parameter for place, (parameter, anchor) in enumerate(pairs)}
        for parameter, anchor in pairs:
            parameter.copy_(anchor)
        return distances

    @torch.no_grad()
    def contribute_late(self, mine: Contribution) -> None:
        late = self._late
        mine.samples, mine.weight, mine.host_loss = late.samples, late.weight, late.loss
        places = self._fragmented.places(mine.slot)
        self._put_gradients(places, [self._anchor[place] - self.replica.parameters[place] for place in places])
        self._clipped(rounds=late.rounds)
        late.counted()
        self._fragmented.start(mine.slot, weight=mine.weight)
        self._fragmented.finish(mine.slot)

    @torch.no_grad()
    def begin_alone(self) -> None:
        for place, tensor in self._late.tensors.items():
            parameter = self.replica.parameters[place]
            parameter.sub_(tensor.to(parameter.device, parameter.dtype))
        self._late.clear()

    @torch.no_grad()
    def end_alone(self) -> None:
        rounds = self._mine.steps / self.local_steps
        self._late.put(self._return_to_anchor(), samples=0, weight=0.0, loss=0.0, rounds=rounds)
        self.replica.updates = self._mine.first
        self._mine = LocalRound(self.replica.updates)

    def unlease_late(self) -> None:
        self._late.unleased()

    def forget_late(self, reason: str) -> None:
        if self._late.tensors:
            log.warning("dropped local work that no round has counted: %s", reason)
        self._late.clear()
