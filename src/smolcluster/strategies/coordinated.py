"""What the strategies without a parameter server share on the elastic plane: views, leases and the agreement on each step.

Gradients travel between the workers. A coordinator, which holds no weights, says who takes part and which steps count:

    worker                                        coordinator
      reduce step s with the members of the view
      DONE(s): I hold the result          ----->  when all members of the view have said so, and no gradient is absurd:
                                                  record that step s counts, with these samples
      apply step s                        <-----  COMMIT(s), and the lease of a later step

A result is applied only after its COMMIT, so that all replicas apply the same sequence, whatever is lost. When a member dies
or joins there is a new VIEW: results without a COMMIT are thrown away and those steps are reduced again, from the gradients
the survivors still hold. A gradient that does not count (not finite, absurd) is left out in the same way. Messages of an
older view are dropped. Only the side of a cut network that has the coordinator can commit.

A newcomer gets weights and optimizer state from a member, or from the coordinator at the start of a run, and adds nothing to
the steps that the others have already computed.

The coordinator's record survives it. When it is started again the workers come back with what they hold; a step whose COMMIT
was recorded and not heard is applied from the result they kept.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from smolcluster.comm.elastic.group import ElasticGroup
from smolcluster.comm.elastic.line import Lease
from smolcluster.comm.elastic.messages import Kind, Message
from smolcluster.comm.elastic.peers import Peers
from smolcluster.comm.elastic.proofs import read_keys
from smolcluster.comm.elastic.view import Member as Seated
from smolcluster.comm.elastic.view import View, ViewChanged
from smolcluster.comm.group import PeerLost
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import Span
from smolcluster.errors import SmolclusterError
from smolcluster.strategies.base import Commit, Options, State, StepReport
from smolcluster.strategies.coordinator import CONNECT_S, Coordinator
from smolcluster.strategies.deadline import WAITING_S
from smolcluster.strategies.elastic import Elastic, pack_state, unpack_state
from smolcluster.strategies.placement import Cost, Shape
from smolcluster.tasks.base import Task

log = logging.getLogger(__name__)

STATE_POLL_S = 0.2


class CoordinatedOptions(Options):
    staleness_bound: int = Field(0, ge=0, description="steps in flight; 0 is synchronous")
    on_stale: Literal["drop", "stop"] = Field(
        "drop", description="for gradients that come too late to count: drop them, or stop this worker"
    )
    bucket_mb: float = Field(25.0, gt=0, description="gradients travel in buckets of this size")
    step_timeout: float | None = Field(
        None, gt=0, description="seconds a worker may compute while others wait, before it is evicted; null: adaptive"
    )


CoordinatedT = TypeVar("CoordinatedT", bound=CoordinatedOptions)


def server_cost(shape: Shape) -> Cost:
    """The state that came last, the next one as it comes, and the evaluator's weights."""
    size = shape.parameters * shape.bytes_per_parameter
    return Cost(
        parameter_bytes=3 * size,
        gradient_bytes=0,
        optimizer_bytes=2 * size * shape.optimizer_states,
        bytes_sent=0,
        bytes_received=0,
        messages=0,
    )


@dataclass(slots=True, eq=False)
class Flight:
    """A step that is computed and not yet applied."""

    step: int
    slot: int
    samples: int  # 0: a step of the others, to which this worker adds nothing
    scale: float = 1.0  # of the loss, when it was computed
    weight: float = 0.0  # samples, or targets where the task counts them
    epoch: int = -1  # of the view it is reduced in
    loss: float = 0.0
    compute_s: float = 0.0
    reported: bool = False


class Reduction(ABC):
    """How a step is summed over the members and applied: what the strategies differ in."""

    @abstractmethod
    def formed(self, group: ElasticGroup, view: View, established: Sequence[str | None]) -> None:
        """Reduce in the group of this view from now on.

        `established` are the instances of the last view that committed a step, in its order; None where what a member held
        then is lost. Every member of the new view calls this. May raise ViewChanged.
        """

    @abstractmethod
    def compute(self, batch: Batch, flight: Flight) -> Tensor:
        """My gradient, and start to reduce it. Returns the loss."""

    @abstractmethod
    def restart(self, flight: Flight, *, zero: bool) -> None:
        """Reduce it again, in the present group; `zero`: without a part of mine."""

    @abstractmethod
    def reduced(self, flight: Flight, *, wait: bool) -> bool:
        """Whether its result is there; with `wait`, return only then. Raises ViewChanged."""

    @abstractmethod
    def norms(self, flight: Flight) -> tuple[float, float]:
        """The norm of my own gradient, and of what I hold of the sum."""

    @abstractmethod
    def apply(self, flight: Flight, *, weight: float, norm: float) -> None:
        """Take the step: its sum, divided by the weight of all members, then has this norm."""

    def complete(self) -> None:  # noqa: B027 - nothing is missing by default
        """After `apply`: everybody has the weights of this step. May raise ViewChanged."""

    @abstractmethod
    def upload(self, *, first: bool) -> dict[str, Tensor]:
        """This member's part of the run's state; `first` for one of the members."""


class Coordinated(Elastic[CoordinatedT]):
    reduction: Reduction  # a worker's
    server_has_weights: ClassVar[bool] = False

    def load_state(self, state: State) -> None:
        """On the coordinator, which never trains, the tensors themselves become its state: it is replaced, not changed, so
        that whoever saves or sends what was there before needs no copy."""
        if self.context.office is None:
            super().load_state(state)
            return
        self.replica.adopt_state_dict(state.weights, state.optimizer, state.numbers)

    def copied_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.context.office is None:
            return super().copied_state()
        state = self.state()
        return {n: t.to("cpu").contiguous() for n, t in pack_state(state).items()}, state.numbers

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.num_slots = self.options.staleness_bound + 1
        if self.context.line is not None:
            state_bytes = 8 * sum(t.nbytes for t in self.replica.weights().values())
            # However long another one computes: who is dead is the transport's to find out, and the coordinator's to say.
            self._peers = Peers(
                self._line.transport,
                limit_bytes=max(256 << 20, state_bytes),
                timeout_s=math.inf,
                connect_s=self._connect_s,
                proven=True,
            )
            self._group: ElasticGroup | None = None
            self._address = self._peers.listen(self._line.own_host, 0)
            self._peers.on_lost(lambda member, reason: self._suspect(member.rank, reason))
            self._peers.on_waiting(self._report_waiting)
            self._reported_waiting = 0.0
            # Nobody waits any longer for members that are gone, or for a step that nobody can commit.
            self._newest = 0  # epoch of the newest view that was announced; older ones are over
            self._away = False  # the coordinator is: no view holds
            self._settled = False  # I have what is mine in the present view
            self._donated: tuple[dict[str, Any], dict[str, Tensor]] | None = None  # a state for a view that is to come
            self._line.at_once(Kind.VIEW, self._announced)
            self._line.at_once(None, self._lost_the_line)
            self._flights: deque[Flight] = deque()
            self._apply_s = 0.0  # what the last step took to apply
            self._norm: Tensor | None = None

    @property
    def _connect_s(self) -> float:
        return max(CONNECT_S, self.context.config.cluster.silence_timeout)

    # The worker

    def introduction(self) -> dict[str, Any]:
        held = [[flight.step, flight.epoch] for flight in self._flights if flight.reported]
        return {"address": self._address, "updates": self.replica.updates, "held": held}

    def lease(self) -> Lease | None:
        while not self._over:
            self._check_stop()
            self._advance(wait=False)
            if self._line.leases and self._group is not None:
                return self._line.leases.popleft()
            if not self._over:
                self._advance(wait=True)
        return None

    def step(self, batch: Batch) -> StepReport:
        rate, staleness = self.replica.learning_rate, batch.step - 1 - self.replica.updates
        self._norm = None
        slot = batch.step % self.num_slots
        flight = Flight(batch.step, slot, batch.samples, weight=batch.weight, epoch=self._epoch)
        self._flights.append(flight)
        flight.scale = self.replica.loss_scale
        started = time.perf_counter()
        loss = self.reduction.compute(batch, flight)
        flight.loss = float(loss)
        flight.compute_s = time.perf_counter() - started

        comm = Span(self.context.device)
        while len(self._flights) > self.options.staleness_bound and not self._over:
            self._advance(wait=True)
        comm.end()
        return StepReport(
            loss=loss,
            grad_norm=self._norm,
            learning_rate=rate,
            samples=batch.samples,
            tokens=batch.tokens,
            staleness=staleness,
            comm=comm,
        )

    def _advance(self, *, wait: bool) -> None:
        """Report the oldest result, and act on what the coordinator says. With `wait`, until something has happened."""
        flight = next((flight for flight in self._flights if not flight.reported), None)
        if flight is not None:
            try:
                # Only the oldest is waited for: another may need what the others do after the commit of the oldest.
                if self.reduction.reduced(flight, wait=wait and flight is self._flights[0]):
                    self._report(flight)
                    wait = False
            except ViewChanged:
                wait = True  # the next view is on its way
        while (message := self._next_message(wait=wait)) is not None:
            self._hear(message)
            wait = False

    def _next_message(self, *, wait: bool) -> Message | None:
        while (message := self._line.get(WAITING_S if wait else 0)) is None and wait:
            self._report_waiting()
        return message

    def _report_waiting(self) -> None:
        """On the thread that trains: while it computes, or hangs, nothing is reported."""
        now = time.monotonic()
        if now - self._reported_waiting >= WAITING_S:
            self._reported_waiting = now
            self._line.send(Kind.WAITING, epoch=self._epoch)

    def _report(self, flight: Flight) -> None:
        mine, held = self.reduction.norms(flight)
        flight.reported = True
        # As text: JSON has no NaN, and all must read the same number.
        meta: dict[str, Any] = {"mine": repr(mine), "held": repr(held), "loss": repr(flight.loss)}
        meta |= {"compute_s": flight.compute_s, "apply_s": self._apply_s, "weight": flight.weight}
        meta["scale"] = flight.scale
        log.debug("hold the result of step %d in view %d", flight.step, self._epoch)
        self._line.send(Kind.DONE, step=flight.step, epoch=self._epoch, meta=meta)

    def _hear(self, message: Message) -> None:
        super()._hear(message)
        match message.kind:
            case Kind.VIEW:
                self._regroup(message)
                self._use_scale(message)  # a state that was donated came with its donor's
            case Kind.COMMIT if self._flights and message.step == self._flights[0].step:
                self._take_step(weight=float(message.meta["weight"]), norm=float(message.meta["norm"]))
            case Kind.PULL if self._settled:  # or it is asked again in the next view
                self._upload(message.step, first=bool(message.meta["first"]))
            case _:
                pass

    def _take_step(self, *, weight: float, norm: float) -> None:
        """The oldest step in flight is committed."""
        flight = self._flights.popleft()
        if weight == 0:  # no gradient of it was fit to count
            self.replica.updates += 1
            return
        started = time.perf_counter()
        self.reduction.apply(flight, weight=weight, norm=norm)
        self._apply_s = time.perf_counter() - started
        self._norm = torch.tensor(norm)
        try:
            self.reduction.complete()
        except ViewChanged:
            pass  # completed when the next view is formed

    def _announced(self, epoch: int) -> None:
        """On the transport's thread, long before the message has its turn."""
        self._newest = max(self._newest, epoch)
        if self._group is not None:
            self._group.abort(ViewChanged("there is a new view"))

    def _lost_the_line(self, _: int) -> None:
        """On the transport's thread."""
        self._away = True
        if self._group is not None:
            self._group.abort(ViewChanged("the coordinator is away"))

    def _is_over(self, view: View) -> bool:
        return self._away or view.epoch < self._newest

    def _enter(self, welcome: Message) -> None:
        """Take part again: with what I hold if it leads to the committed step, else with somebody's state."""
        for step, (epoch, weight, norm) in sorted((int(s), v) for s, v in welcome.meta.get("recent", {}).items()):
            flight = self._flights[0] if self._flights else None
            if flight is not None and flight.reported and (flight.step, flight.epoch) == (step, epoch):
                self._take_step(weight=weight, norm=norm)
        if self._flights:
            computed = sum(flight.samples > 0 for flight in self._flights)
            self.stale_rejected += computed
            self._flights.clear()
            if computed and self.options.on_stale == "stop":
                raise SmolclusterError("this worker's gradients came too late to count, and on_stale is stop")
        self._away = False
        super()._enter(welcome)

    def _regroup(self, message: Message) -> None:
        """Start again, in this view, what was not committed in the last."""
        meta, me = message.meta, self.context.seat.rank
        view = View.from_meta(meta["view"])
        ranks, steps = [member.rank for member in view.members], [flight.step for flight in self._flights]
        log.debug("view %d: members %s from step %d on; in flight here: %s", view.epoch, ranks, view.step + 1, steps)
        self._epoch, self._settled = view.epoch, False
        self._group = self._peers.form(view, read_keys(meta["keys"]))
        if self._is_over(view):
            self._group.abort(ViewChanged("a later view is on its way"))
        donations = {int(joiner): int(donor) for joiner, donor in meta["donations"].items()}
        for joiner, donor in donations.items():
            if donor == me and not self._is_over(view):
                self._donate(next(member for member in view.members if member.rank == joiner))
        if me in donations and not self._receive_state(view):
            return  # the next view names another donor
        try:
            # After the donation, which replaces all that is here: what is handed out now must stay.
            self.reduction.formed(self._group, view, meta["established"])
        except ViewChanged:
            return  # the next view is on its way
        self._settled = True
        if me in meta["idle"]:
            # The others have computed these steps, or hold the samples for them.
            last = min(view.step + self.num_slots, int(meta["last"]))
            self._flights = deque(Flight(step, step % self.num_slots, 0) for step in range(view.step + 1, last + 1))
        left_out = {int(step): ranks for step, ranks in meta["left_out"].items()}
        for flight in self._flights:
            flight.epoch, flight.reported = view.epoch, False
            self.reduction.restart(flight, zero=flight.samples == 0 or me in left_out.get(flight.step, ()))

    def _receive_state(self, view: View) -> bool:
        """From the member that the coordinator chose; False when that has come to nothing, and a new view follows."""
        while not self._is_over(view):
            self._check_stop()
            self._report_waiting()
            try:
                said, tensors = self._donated or self._peers.receive_state(STATE_POLL_S)
            except PeerLost:
                continue
            epoch = said.get("epoch")
            if isinstance(epoch, int) and epoch > view.epoch:
                # Its sender has heard of the next view before me, and sends it only once.
                self._donated = said, tensors
                return False
            self._donated = None
            if epoch == view.epoch:
                self.load_state(unpack_state(tensors, said["numbers"]))
                self._flights.clear()
                return True
        return False

    def _donate(self, joiner: Seated) -> None:
        tensors, numbers = self.copied_state()
        self._peers.send_state(joiner, tensors, {"numbers": numbers, "epoch": self._epoch})

    def _upload(self, step: int, *, first: bool) -> None:
        """The coordinator wants to evaluate or save this step."""
        part = self.reduction.upload(first=first)
        numbers = self.state().numbers
        if not part:  # also who has nothing is waited for
            self._line.send(Kind.STATE, step=step, epoch=self._epoch, meta={"last": True, "numbers": numbers})
        for channel, (name, tensor) in enumerate(part.items()):
            meta = {"name": name, "last": channel == len(part) - 1, "numbers": numbers}
            tensor = tensor.to("cpu", copy=True).contiguous()
            self._line.send(Kind.STATE, step=step, channel=channel, epoch=self._epoch, meta=meta, payload=tensor)

    def _suspect(self, rank: int, reason: str) -> None:
        self._line.send(Kind.SUSPECT, epoch=self._epoch, meta={"rank": rank, "reason": reason})

    # The coordinator

    @property
    def results_are_whole(self) -> bool:
        return True

    def serve(self) -> None:
        Coordinator(
            self,
            steps_ahead=self.num_slots,
            whole=self.results_are_whole,
            step_timeout_s=self.options.step_timeout,
            connect_s=self._connect_s,
        ).run()

    def replay(self, commit: Commit) -> None:
        """Nothing to do again: the workers have the weights."""
