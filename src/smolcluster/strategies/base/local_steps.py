"""Local SGD: workers take h local steps between two exchanges, then an outer optimizer takes one step for all.

    for each of h steps:   w <- optimizer(w, clip(local gradient at w))    on each worker (inner optimizer)
    delta  <- anchor - w                                                   the pseudo-gradient
    anchor <- outer optimizer(anchor, mean of delta over workers)          the same on all workers
    w      <- anchor

Federated averaging has plain SGD with rate 1 as its outer optimizer, DiLoCo SGD with Nesterov momentum. A strategy
only defines `outer_optimizer`.

With F `fragments` a round has h / F steps and exchanges one fragment of the model, in turn (`parallel/fragments.py`): each
of them once in h steps. With an `overlap` tau the result is waited for, and applied, tau steps after it was contributed:

    anchor <- outer optimizer(anchor, mean of delta)                       of the fragment
    w      <- (1 - alpha) w + alpha anchor                                 `mixing` alpha; 1: as above

On the elastic plane the anchor moves as soon as a round is committed, so that it is the same on all members after every
commit; the weights still get it tau steps after the contribution. A worker that joins or rejoins begins its next round from
the anchor.

Means are weighted by the samples of the round, or by its targets where the task counts them. A round ends with every step that
h / F divides, and with the last step of the run, where it exchanges all fragments. Stop requests take effect when a result is
applied.

The anchor is the model of the run: it is evaluated, saved and exported, and workers that join start from it
(`local_state.py`). A round that was too late on the elastic plane waits in an error buffer (`late_work.py`), which counts with
the next contribution.

Bytes per step and worker, sent and received each, for S bytes of parameters on N workers:   2 (N-1)/N S / h
Memory: weights, gradients, the anchor and the exchanged tensors, 4 S, and the state of both optimizers.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.comm.fragmented import Fragmented
from smolcluster.comm.rounds import Combination, Committed
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import Span
from smolcluster.errors import UserError
from smolcluster.parallel.encoding import summed_by_workers
from smolcluster.parallel.fragments import deal, largest_share
from smolcluster.parallel.placement import Node, Placement, Shape
from smolcluster.strategies.base import StepReport
from smolcluster.strategies.base.late_work import LateWork
from smolcluster.strategies.base.local_contributions import LocalStepsT
from smolcluster.strategies.base.local_round import LocalRound
from smolcluster.strategies.base.local_state import LocalState
from smolcluster.tasks.base import Task


class LocalSteps(LocalState[LocalStepsT]):
    @abstractmethod
    def outer_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer that moves the anchor. Its gradient is the mean of (anchor - weights after h steps)."""

    @classmethod
    def outer_states(cls, options: LocalStepsT) -> int:
        """Return the number of tensors per parameter that the outer optimizer keeps: 1 for SGD with momentum."""
        return 0

    @classmethod
    def exchanged(cls, options: LocalStepsT, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        """Return the seats, and the memory and traffic of a worker for the exchange of a round."""
        return summed_by_workers(options, nodes, shape, rounds=1)

    def combination(self, parameters: Mapping[str, nn.Parameter]) -> Combination:
        """Return the reduction of the pseudo-gradients of these parameters, of one round at a time."""
        return self.sum_of_workers(self.options, parameters, slots=1)

    @classmethod
    def plan(cls, options: LocalStepsT, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if options.equal_time and all(node.stays for node in nodes):
            said = "strategy.inner_steps auto is for cluster.plane elastic: on the mesh plane all ranks take equally many steps"
            return Placement(refusals=[f"{said}; set it to {options.steps_per_round}"])
        placement = cls.exchanged(options, nodes, shape)
        if shape is None:
            return placement
        size, h = shape.parameter_bytes, options.steps_per_round
        eager = int(options.streaming.eager)
        try:
            largest = largest_share(shape.model, options.streaming.fragments)
        except UserError as error:
            return Placement(refusals=[str(error)])
        costs = [
            replace(
                cost,
                parameter_bytes=(2 + eager) * size,
                optimizer_bytes=cost.optimizer_bytes + size * cls.outer_states(options) * (1 + eager),
                gradient_bytes=cost.gradient_bytes + size,  # of local steps, in addition to the exchanged ones
                bytes_sent=cost.bytes_sent // h,
                bytes_received=cost.bytes_received // h,
                messages=-(-cost.messages // h),
                bytes_at_once=round(cost.bytes_sent * largest),
                bytes_at_end=cost.bytes_sent,
            )
            for cost in placement.costs
        ]
        return replace(placement, costs=costs)

    def setup(self, task: Task) -> None:
        super().setup(task)
        self._mine, self._late = LocalRound(self.replica.updates), LateWork()
        if self.context.server_context is not None:  # a coordinator trains nothing
            return
        trained, last = self.trained, self.context.total_steps
        places = deal({name: p.numel() for name, p in trained.items()}, self._streaming.fragments)
        names = list(trained)
        parts = [self.combination({names[place]: trained[names[place]] for place in each}) for each in places]
        self._fragmented = Fragmented(parts, places, last_step=last)
        self.rounds = self.open_rounds(self._fragmented)
        self.replica.led = False  # each worker checks its own gradients
        self._anchor = [parameter.detach().clone() for parameter in self.replica.parameters]
        self.outer = self.outer_optimizer(self.replica.parameters)
        if self._streaming.eager:
            self._start = [anchor.clone() for anchor in self._anchor]  # the weights that local steps began with
            self._outer_of_mine = self.outer_optimizer(self.replica.parameters)
        self._applied = self.replica.updates  # the last step of the last round in the anchor
        self._arrived: deque[tuple[int, int]] = deque()  # step and slot of results that are not in the weights yet
        self._at_start = False  # the next step begins with the anchor

    @property
    def local_steps(self) -> int:
        return self.options.steps_per_round // self._streaming.fragments

    @property
    def equal_time(self) -> bool:
        return self.options.equal_time

    @property
    def rounds_in_flight(self) -> int:
        return -(-self._streaming.overlap // self.local_steps)

    @property
    def version(self) -> int:
        return self._applied

    @property
    def own_step(self) -> int | None:
        return None if self._in_round else self.replica.updates

    @property
    def shares_state_in_rounds(self) -> bool:
        return super().shares_state_in_rounds or self._streaming.overlap > 0

    @property
    def round_timeout(self) -> float | None:
        return self.options.step_timeout

    # A step

    def step(self, batch: Batch) -> StepReport:
        replica, started = self.replica, time.perf_counter()
        self._begin(batch.step)
        rate = replica.learning_rate
        loss = replica.compute(batch)
        norm = replica.apply()
        mine = self._mine
        mine.samples, mine.weight = mine.samples + batch.samples, mine.weight + batch.weight
        mine.loss, mine.counted = mine.loss + loss * batch.weight, batch.counts is not None
        mine.compute_s += time.perf_counter() - started
        mine.steps, mine.since = mine.steps + 1, mine.since or time.perf_counter()
        report = StepReport(loss=loss, grad_norm=norm, learning_rate=rate, samples=batch.samples, tokens=batch.tokens)
        if self._streaming.overlap:
            self.rounds.poll()
        ends = self.rounds.ends(batch.step)
        if ends or self._is_due(batch.step):
            report.comm = Span(self.context.device)
            if ends:
                self._contribute(batch.step)
            self._await_due(batch.step)
            report.comm.end()
            report.stop = self.rounds.stop
        return report

    @torch.no_grad()
    def _begin(self, step: int) -> None:
        """Before a step: where this worker has joined since the last one, start from the anchor."""
        if self.context.fixed_group is None:
            self.replica.updates = step - 1  # of a worker that joined, further than its last
        if self._at_start:
            torch._foreach_copy_([parameter.detach() for parameter in self.replica.parameters], self._anchor)
            self._arrived.clear()
            self._mine, self._at_start = LocalRound(self.replica.updates), False
            if self._streaming.eager:
                torch._foreach_copy_(self._start, self._anchor)
                self._outer_of_mine.state.clear()

    def _is_due(self, step: int) -> bool:
        """Return whether a result is due in the weights after this step and is not in them yet."""
        oldest = [step for step, _ in self._arrived] + [flight.step for flight in self.rounds.flights]
        return any(self._arrives(since) <= step for since in oldest)

    def _arrives(self, step: int) -> int:
        """Return the step after which the weights get the result of the round that ended with `step`."""
        return min(step + self._streaming.overlap, self.context.total_steps)

    def _await_due(self, step: int) -> None:
        """Wait for the results that are due in the weights after this step."""
        self.rounds.settle(in_flight=sum(self._arrives(flight.step) > step for flight in self.rounds.flights))
        self._mix(step)

    @torch.no_grad()
    def _mix(self, step: int) -> None:
        while self._arrived and self._arrives(self._arrived[0][0]) <= step:
            slot = self._arrived.popleft()[1]
            if not self._streaming.mixing:
                continue
            places = self._fragmented.places(slot)
            weights = [self.replica.parameters[place].detach() for place in places]
            anchors = [self._anchor[place] for place in places]
            if self._streaming.mixing == 1:
                torch._foreach_copy_(weights, anchors)
            else:
                torch._foreach_lerp_(weights, anchors, self._streaming.mixing)

    @torch.no_grad()
    def _contribute(self, step: int) -> None:
        """Contribute the distance from the anchor; without streaming, return to the anchor until the round is committed."""
        slot = self.rounds.slot_of(step)
        before = [slot for _, slot in self._arrived] + [flight.slot for flight in self.rounds.flights]
        if any(self._fragmented.collide(each, slot) for each in before):
            self._await_due(step)
            if self.context.fixed_group is None and not self.rounds.ends(step):
                return  # its lease was lost meanwhile
        done = self._mine
        local = self._local_report(done) if self.context.fixed_group is None else None
        places, starts = self._fragmented.places(slot), self._start if self._streaming.eager else self._anchor
        weights = [self.replica.parameters[place].detach() for place in places]
        deltas = list(torch._foreach_sub([starts[place] for place in places], weights))
        self._put_gradients(places, deltas)
        if local is not None:
            local |= self._clipped(rounds=1 + self._late.rounds)
        leased = self._late.samples  # of rounds that were late, and count now
        self._late.counted()
        if not self._streaming.overlap:
            self.replica.updates = done.first
        with self.rounds.contribute(
            step, samples=done.samples + leased, weight=done.weight, counted=done.counted, scale=1.0
        ) as mine:
            mine.loss = torch.as_tensor(done.loss / (done.weight or 1.0))
            mine.compute_s, mine.local = done.compute_s, local
            mine.start()
        self._mine = LocalRound(self.replica.updates)
        if self._streaming.eager:
            self._step_eagerly(places, deltas, self.rounds.share(mine))

    def _step_eagerly(self, places: Sequence[int], deltas: Sequence[Tensor], share: float) -> None:
        """From the anchor, take the outer step of this worker's share of the mean in flight."""
        for place, delta in zip(places, deltas, strict=True):
            self.replica.parameters[place].copy_(self._anchor[place])
            self.replica.parameters[place].grad = delta * share
        self._outer_of_mine.step()
        self.replica.drop_gradients()
        for place in places:
            self._start[place].copy_(self.replica.parameters[place])

    @torch.no_grad()
    def apply(self, result: Committed) -> None:
        places = self._fragmented.places(result.slot)
        self._late.committed(places)
        if not result.empty:
            with self._at_anchor(places):
                self._fragmented.give(result)
                self.outer.step()
                self.replica.drop_gradients()
        self._applied = result.step
        self._arrived.append((result.step, result.slot))
        if not self._streaming.overlap:
            self._mix(result.step)
            self.replica.updates = result.step
            self._mine = LocalRound(result.step)

    def rejoined(self) -> None:
        self._at_start = True
        if not self._streaming.overlap:
            self.replica.updates = self._applied
            self._mine = LocalRound(self._applied)

    def drain(self) -> None:
        if self.context.fixed_group is not None:
            if self._in_round:
                self._contribute(self.replica.updates)
            self.rounds.settle(in_flight=0)
            self._mix(self.context.total_steps)
        super().drain()

    # Evaluation

    def measure(self, task: Task, part: Any) -> dict[str, Tensor]:
        with self._at_anchor():
            return super().measure(task, part)

    @contextmanager
    def _at_anchor(self, places: Sequence[int] | None = None) -> Iterator[None]:
        """Set the parameters (None: all) to the anchor, and restore them after."""
        places = range(len(self._anchor)) if places is None else places
        self._swap(places)
        try:
            yield
        finally:
            self._swap(places)

    def _swap(self, places: Sequence[int]) -> None:
        for place in places:
            parameter = self.replica.parameters[place]
            parameter.data, self._anchor[place] = self._anchor[place], parameter.data
