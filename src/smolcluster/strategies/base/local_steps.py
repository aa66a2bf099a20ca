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

Means are weighted by the samples of the round, or by its targets where the task counts them. A round ends with every step that
h / F divides, and with the last step of the run, where it exchanges all fragments. Stop requests take effect when a result is
applied.

The anchor is the model of the run: it is evaluated, saved and exported, and workers that join start from it. A checkpoint of
the mesh plane in the middle of a round also has the local state of each worker and the results in flight, so that the round
continues. On the elastic plane states are taken between rounds.

A round that was too late on the elastic plane waits in an error buffer (`late_work.py`), which counts with the next
contribution, and is kept beside the local state.

The state of the outer optimizer is shared: it is in every checkpoint and is sent to workers that join. That of the inner one is
local; other strategies continue with that of rank 0. On the elastic plane a checkpoint has that of one worker, and each worker
keeps its own on its disk, beside its error feedback: workers that restart in the same run directory continue with it where the
checkpoint does. Workers that join, or rejoin between two checkpoints, start with that of another worker.

Bytes per step and worker, sent and received each, for S bytes of parameters on N workers:   2 (N-1)/N S / h
Memory: the anchor and what is exchanged, beside weights, gradients and the state of both optimizers: 4 S and the optimizers'.
"""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from smolcluster.comm.codecs.feedback import under
from smolcluster.comm.fragmented import Fragmented
from smolcluster.comm.rounds import Combination, Committed, Contribution
from smolcluster.compute.optim import load_named_state, named_state
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import Span
from smolcluster.config.options import RoundOptions, Streaming
from smolcluster.errors import UserError
from smolcluster.parallel.encoding import summed_by_workers
from smolcluster.parallel.fragments import deal
from smolcluster.parallel.placement import Node, Placement, Shape
from smolcluster.strategies.base import Scope, State, StepReport
from smolcluster.strategies.base.late_work import LateWork
from smolcluster.strategies.base.replicated import Exchanging
from smolcluster.tasks.base import Task

log = logging.getLogger(__name__)

LocalStepsT = TypeVar("LocalStepsT", bound=RoundOptions)
WEIGHTS, MOMENTS, ROUND, LATE = "weights/", "optimizer/", "round/", "late/"  # prefixes in `State.own`
OUTER = "outer/"  # prefix in `State.shared`


@dataclass(slots=True)
class _Round:
    """The local progress of a round."""

    first: int  # updates at its start
    samples: int = 0
    weight: float = 0.0
    loss: Tensor | float = 0.0  # the sum of weighted losses
    compute_s: float = 0.0
    counted: bool = False  # the task counts targets
    steps: int = 0
    since: float = 0.0  # the end of its first step, by time.perf_counter


class LocalSteps(Exchanging[LocalStepsT]):
    outer: torch.optim.Optimizer  # the same on all workers

    @abstractmethod
    def outer_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer that moves the anchor. Its gradient is the mean of (anchor - weights after h steps)."""

    @classmethod
    def outer_states(cls, options: LocalStepsT) -> int:
        """Return how many tensors per parameter the outer optimizer keeps: 1 for SGD with momentum."""
        return 0

    @classmethod
    def exchanged(cls, options: LocalStepsT, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        """Return the seats, and what a worker holds and moves in the exchange of a round."""
        return summed_by_workers(options, nodes, shape, rounds=1)

    def combination(self, parameters: Mapping[str, nn.Parameter]) -> Combination:
        """Return how the pseudo-gradients of these parameters are combined, of one round at a time."""
        return self.sum_of_workers(self.options, parameters, slots=1)

    @classmethod
    def plan(cls, options: LocalStepsT, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if options.streaming.overlap and not all(node.stays for node in nodes):
            said = "strategy.overlap is for cluster.plane mesh: on the elastic plane an exchange is waited for; set it to 0"
            return Placement(refusals=[said])
        if options.equal_time and all(node.stays for node in nodes):
            said = (
                "strategy.inner_steps auto is for cluster.plane elastic: on the mesh plane all ranks take as many steps"
            )
            return Placement(refusals=[f"{said}; set it to {options.steps_per_round}"])
        placement = cls.exchanged(options, nodes, shape)
        if shape is None:
            return placement
        size, h = shape.parameters * shape.bytes_per_parameter, options.steps_per_round
        largest = 1.0
        if shape.model is not None and options.streaming.fragments > 1:
            sizes = {name: p.numel() for name, p in shape.model.named_parameters() if p.requires_grad}
            try:
                places = deal(sizes, options.streaming.fragments)
            except UserError as error:
                return Placement(refusals=[str(error)])
            counts = list(sizes.values())
            largest = max(sum(counts[place] for place in each) for each in places) / max(1, sum(counts))
        costs = [
            replace(
                cost,
                parameter_bytes=2 * size,
                optimizer_bytes=cost.optimizer_bytes + size * cls.outer_states(options),
                gradient_bytes=cost.gradient_bytes + size,  # of local steps, beside what is exchanged
                bytes_sent=cost.bytes_sent // h,
                bytes_received=cost.bytes_received // h,
                messages=-(-cost.messages // h),
                bytes_at_once=round(cost.bytes_sent * largest),
            )
            for cost in placement.costs
        ]
        return replace(placement, costs=costs)

    def setup(self, task: Task) -> None:
        super().setup(task)
        self._mine, self._late = _Round(self.replica.updates), LateWork()
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

    @property
    def _streaming(self) -> Streaming:
        return self.options.streaming

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
    def round_timeout(self) -> float | None:
        return self.options.step_timeout

    # A step

    def step(self, batch: Batch) -> StepReport:
        replica, started = self.replica, time.perf_counter()
        if self.equal_time:
            replica.updates = batch.step - 1  # learning rates follow the steps of the run, not of this machine
        rate = replica.learning_rate
        loss = replica.compute(batch)
        norm = replica.apply()
        mine = self._mine
        mine.samples, mine.weight = mine.samples + batch.samples, mine.weight + batch.weight
        mine.loss, mine.counted = mine.loss + loss * batch.weight, batch.counts is not None
        mine.compute_s += time.perf_counter() - started
        mine.steps, mine.since = mine.steps + 1, mine.since or time.perf_counter()
        report = StepReport(loss=loss, grad_norm=norm, learning_rate=rate, samples=batch.samples, tokens=batch.tokens)
        ends = self.rounds.ends(batch.step)
        if ends or self._due(batch.step):
            report.comm = Span(self.context.device)
            if ends:
                self._contribute(batch.step)
            self._settle(batch.step)
            report.comm.end()
            report.stop = self.rounds.stop
        return report

    def _due(self, step: int) -> int:
        """Return how many rounds in flight are to be applied after this step."""
        return sum(flight.step + self._streaming.overlap <= step for flight in self.rounds.flights)

    def _settle(self, step: int) -> None:
        self.rounds.settle(in_flight=len(self.rounds.flights) - self._due(step))

    @torch.no_grad()
    def _contribute(self, step: int) -> None:
        """Contribute the distance from the anchor; without streaming, return to the anchor until the round is committed."""
        if step == self.context.total_steps:  # with all fragments
            self.rounds.settle(in_flight=0)
        slot, done = self.rounds.slot_of(step), self._mine
        local = self._local_report(done) if self.context.fixed_group is None else None
        self._put_gradients(slot)
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
        self._mine = _Round(self.replica.updates)

    def _put_gradients(self, slot: int) -> None:
        for place in self._fragmented.places(slot):
            parameter, anchor = self.replica.parameters[place], self._anchor[place]
            parameter.grad = self._late.add_to(place, anchor - parameter)
            if not self._streaming.streams:
                parameter.copy_(anchor)

    def _local_report(self, done: _Round) -> dict[str, Any]:
        """Return the steps of a round and their time, without that of the first, in which code may be compiled."""
        float(done.loss)  # wait for the GPU
        passed_s = time.perf_counter() - done.since
        return {"steps": done.steps, "step_s": passed_s / (done.steps - 1) if done.steps > 1 else done.compute_s}

    def _clipped(self, *, rounds: float) -> dict[str, Any]:
        """Clip a pseudo-gradient that is far above the usual of so many rounds.

        Return its norm, as text, and the norm that it was clipped to.
        """
        deltas = [p.grad for p in self.replica.parameters if p.grad is not None]
        norm = float(get_total_norm(deltas))
        usual, bound = (rounds * norm for norm in self.rounds.clip or (0.0, math.inf))
        if not bound < norm < math.inf:  # one that is not finite is refused
            return {"norm": repr(norm)}
        torch._foreach_mul_(deltas, usual / norm)
        return {"norm": repr(norm), "usual": usual}

    @torch.no_grad()
    def apply(self, result: Committed) -> None:
        places = self._fragmented.places(result.slot)
        self._late.committed(places)
        parameters: list[Tensor] = [self.replica.parameters[place] for place in places]
        anchors = [self._anchor[place] for place in places]
        if not result.empty:
            local = [parameter.clone() for parameter in parameters] if self._streaming.mixing < 1 else []
            if self._streaming.streams:
                torch._foreach_copy_(parameters, anchors)
            self._fragmented.give(result)
            self.outer.step()
            self.replica.drop_gradients()
            torch._foreach_copy_(anchors, parameters)
            for parameter, mine in zip(parameters, local, strict=False):
                parameter.mul_(self._streaming.mixing).add_(mine, alpha=1 - self._streaming.mixing)
        if not self._streaming.overlap:
            self.replica.updates = result.step
            self._mine = _Round(result.step)

    # Rounds that were too late

    @torch.no_grad()
    def set_aside(self, late: Iterable[Contribution], *, held: Iterable[Contribution] = ()) -> None:
        for mine in held:
            self._late.committed(self._fragmented.places(mine.slot))  # it is in that contribution
        for mine in late:
            if mine.samples and not self._streaming.streams:
                tensors = zip(self._fragmented.places(mine.slot), self._fragmented.contributed(mine.slot), strict=True)
                self._late.put(dict(tensors), samples=mine.samples, weight=mine.weight, loss=mine.said_loss)
            elif mine.samples:  # what was contributed is still in the weights
                self._late.not_committed()
                self._late.put(self._return_to_anchor(), samples=mine.samples, weight=mine.weight, loss=mine.said_loss)
        self._late.not_committed()

    def _return_to_anchor(self) -> dict[int, Tensor]:
        """Return the distance of all parameters from the anchor, which they are set to."""
        pairs = list(zip(self.replica.parameters, self._anchor, strict=True))
        distances = {place: anchor - parameter for place, (parameter, anchor) in enumerate(pairs)}
        for parameter, anchor in pairs:
            parameter.copy_(anchor)
        return distances

    @torch.no_grad()
    def contribute_late(self, mine: Contribution) -> None:
        late = self._late
        mine.samples, mine.weight, mine.said_loss = late.samples, late.weight, late.loss
        self._put_gradients(mine.slot)
        self._clipped(rounds=late.rounds)
        late.counted()
        self._fragmented.start(mine.slot, weight=mine.weight)
        self._fragmented.finish(mine.slot)

    @torch.no_grad()
    def go_on_alone(self) -> None:
        for place, tensor in self._late.tensors.items():
            parameter = self.replica.parameters[place]
            parameter.sub_(tensor.to(parameter.device, parameter.dtype))
        self._late.clear()

    @torch.no_grad()
    def come_back(self) -> None:
        rounds = self._mine.steps / self.local_steps
        self._late.put(self._return_to_anchor(), samples=0, weight=0.0, loss=0.0, rounds=rounds)
        self.replica.updates = self._mine.first
        self._mine = _Round(self.replica.updates)

    def unlease_late(self) -> None:
        self._late.unleased()

    def forget_late(self, reason: str) -> None:
        if self._late.tensors:
            log.warning("what this worker computed and no round has counted is dropped: %s", reason)
        self._late.clear()

    @property
    def _in_round(self) -> bool:
        return self.replica.updates > self._mine.first

    def drain(self) -> None:
        if self.context.fixed_group is not None:
            if self._in_round:
                self._contribute(self.replica.updates)
            self.rounds.settle(in_flight=0)
        super().drain()

    # Evaluation

    def measure(self, task: Task, part: Any) -> dict[str, Tensor]:
        with self._at_anchor():
            return super().measure(task, part)

    @contextmanager
    def _at_anchor(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for number, parameter in enumerate(self.replica.parameters):
            parameter.data, self._anchor[number] = self._anchor[number], parameter.data

    # Saving

    def state(self, of: Scope = "run") -> State:
        state = super().state(of)
        if self.context.server_context is not None:
            return state
        outer = named_state(self.replica.model, self.outer)
        state.shared = {**state.shared, **{f"{OUTER}{name}": tensor for name, tensor in outer.items()}}
        own = dict(state.own)
        if self.context.fixed_group is None or self.context.seat.rank > 0:
            own |= {f"{MOMENTS}{name}": tensor for name, tensor in state.optimizer.items()}
        fixed = self.context.fixed_group is not None
        if self._streaming.streams or (self._in_round and fixed):
            anchors = {id(p): anchor for p, anchor in zip(self.replica.parameters, self._anchor, strict=True)}
            tensors = self.replica.model.state_dict(keep_vars=True)
            trained = {name: anchors[id(tensor)] for name, tensor in tensors.items() if id(tensor) in anchors}
            own |= {f"{WEIGHTS}{name}": state.weights[name] for name in self._names()}
            mine = self._mine
            done = {"first": mine.first, "samples": mine.samples, "weight": mine.weight, "loss": mine.loss}
            own |= {f"{ROUND}{name}": torch.as_tensor(value, dtype=torch.float64) for name, value in done.items()}
            state.weights = {**state.weights, **trained}
        if self._streaming.streams:
            state.numbers["fragments"] = [self._streaming.fragments, self.local_steps]
        state.own = own | {f"{LATE}{name}": tensor for name, tensor in self._late.state(self._names()).items()}
        return state

    def load_state(self, state: State) -> None:
        self._check_fragments(state)
        own = state.own
        moments = {name.removeprefix(MOMENTS): tensor for name, tensor in own.items() if name.startswith(MOMENTS)}
        buffers = {name: tensor for name, tensor in own.items() if not name.startswith((WEIGHTS, MOMENTS, ROUND, LATE))}
        super().load_state(replace(state, optimizer=moments or state.optimizer, own=buffers))
        self._mine = _Round(self.replica.updates)
        if f"{ROUND}first" in own:
            self._load_round(own)
        if late := under(LATE, own):
            self._late.load(self._names(), late)

    def _load_rounds(self, state: State) -> None:
        if self.context.server_context is None:
            outer = {n.removeprefix(OUTER): tensor for n, tensor in state.shared.items() if n.startswith(OUTER)}
            load_named_state(self.replica.model, self.outer, outer)
            torch._foreach_copy_(self._anchor, [parameter.detach() for parameter in self.replica.parameters])
        super()._load_rounds(state)

    def _check_fragments(self, state: State) -> None:
        """Rounds in flight, and the place in a round, are those of other fragments."""
        saved, mine = state.numbers.get("fragments"), [self._streaming.fragments, self.local_steps]
        if saved is not None and list(saved) != mine and (saved[0] != mine[0] or state.numbers.get("in_flight")):
            raise UserError(
                f"the checkpoint was made with strategy.fragments {saved[0]} and inner_steps {saved[0] * saved[1]}, and this "
                f"run has {mine[0]} and {mine[0] * mine[1]}; resume with those, or start a new run from its weights"
            )

    @torch.no_grad()
    def _load_round(self, own: Mapping[str, Tensor]) -> None:
        """Continue in the middle of a round."""
        first, samples, weight, loss = (float(own[f"{ROUND}{name}"]) for name in ("first", "samples", "weight", "loss"))
        self._mine = _Round(int(first), int(samples), weight, loss)
        tensors = self.replica.model.state_dict()
        for name, tensor in own.items():
            if name.startswith(WEIGHTS):
                tensors[name.removeprefix(WEIGHTS)].copy_(tensor)
