"""Rounds where members come and go: views, leases and the agreement on each round.

Contributions travel between the workers. A coordinator, which holds no weights, says who takes part and which rounds count:

    worker                                        coordinator (`coordinator.py`)
      combine round s with the members of the view
      DONE(s): I hold the result          ----->  when all members of the view have said so, and no gradient is absurd:
                                                  record that round s counts, with these samples
      apply round s                       <-----  COMMIT(s), and the lease of a later step

A result is applied only after its COMMIT, so that all replicas apply the same sequence, whatever is lost. When a member dies
or joins there is a new VIEW: results without a COMMIT are thrown away and those rounds are combined again, from what the
survivors still hold. A contribution that does not count (not finite, absurd) is left out in the same way. Messages of an
older view are dropped. Only the side of a cut network that has the coordinator can commit.

A newcomer gets weights and optimizer state from a member, or from the coordinator at the start of a run, and adds nothing to
the rounds that the others have already computed. Where every member holds the whole result it follows first, outside the view,
while the others train: it gets a state by way of the coordinator, then the results of the rounds since, and applies them as
they did (`followers.py`).

The coordinator's record survives it. When it is started again the workers come back with what they hold; a round whose COMMIT
was recorded and not heard is applied from the result they kept.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.elastic.collectives.group import ElasticGroup
from smolcluster.comm.elastic.collectives.peers import Peers
from smolcluster.comm.elastic.membership.proofs import read_keys
from smolcluster.comm.elastic.membership.server_link import Lease
from smolcluster.comm.elastic.membership.server_state import SLICE_BYTES
from smolcluster.comm.elastic.membership.view import View, ViewChanged
from smolcluster.comm.elastic.membership.view import ViewMember as Seated
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.group import PeerLost
from smolcluster.comm.rounds import Combination, Committed, Contribution, Rounds, UnreadableContribution
from smolcluster.engine.elastic.deadline import WAITING_S
from smolcluster.engine.elastic.member_side import MemberSide
from smolcluster.errors import SmolclusterError
from smolcluster.strategies.base import Context, State
from smolcluster.strategies.base.replicated import Exchanging

log = logging.getLogger(__name__)

STATE_POLL_S = 0.2
CONNECT_S = 5.0  # within which workers connect to each other, if silence is not allowed to last longer


class ElasticRounds(Rounds, MemberSide):
    def __init__(self, strategy: Exchanging[Any], combination: Combination) -> None:
        super().__init__(combination, num_slots=strategy.rounds_in_flight + 1, local_steps=strategy.local_steps)
        self._strategy, self.context, self.replica = strategy, strategy.context, strategy.replica
        self.init_member()
        state_bytes = 8 * sum(t.nbytes for t in self.replica.weights().values())
        # However long another one computes: who is dead is the transport's to find out, and the coordinator's to say.
        self._peers = Peers(
            self._line.transport,
            limit_bytes=max(256 << 20, state_bytes),
            timeout_s=math.inf,
            connect_s=connect_s(self.context),
            proven=True,
        )
        self._keys: dict[str, bytes] = {}  # of the other members, by instance
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
        self._line.at_once(Kind.WELCOME, lambda _: self._abort("this worker was put out, and comes again"))
        self._line.at_once(None, self._on_disconnected)
        self._apply_s = 0.0  # what the last step took to apply
        self._round = 0  # that I have begun: the step it ends with
        self._shares: dict[int, list[Tensor]] = {}  # of the next round that I follow, in slices
        self._pull: Message | None = None  # the coordinator wants the state, as soon as no round is under way here

    def introduction(self) -> dict[str, Any]:
        held = [[flight.step, flight.epoch] for flight in self.flights if flight.reported]
        return {"address": self._address, "updates": self.replica.updates, "held": held}

    def lease(self) -> Lease | None:
        while not self._over:
            self._check_stop()
            self._advance(wait=False)
            if self._line.leases and self._group is not None:
                lease = self._line.leases.popleft()
                self._round = lease.step
                return lease
            if not self._over:
                self._advance(wait=True)
        return None

    def ends(self, step: int) -> bool:
        return step == self._round

    def settle(self, *, in_flight: int) -> None:
        while len(self.flights) > in_flight and not self._over:
            self._advance(wait=True)

    def _starter(self, mine: Contribution, *, counted: bool) -> Callable[[], None]:
        mine.epoch = self._epoch
        return lambda: self.combination.start(mine.slot, weight=mine.weight, scale=mine.scale)

    def _contributed(self, mine: Contribution, started: float) -> None:
        assert mine.loss is not None
        mine.said_loss = float(mine.loss)  # a GPU is done only then
        mine.compute_s += time.perf_counter() - started

    def _advance(self, *, wait: bool) -> None:
        """Report the oldest result, and act on what the coordinator says. With `wait`, until something has happened."""
        flight = next((flight for flight in self.flights if not flight.reported), None)
        if flight is not None:
            try:
                # Only the oldest is waited for: another may need what the others do after the commit of the oldest.
                if self._combined(flight, wait=wait and flight is self.flights[0]):
                    self._report(flight)
                    wait = False
            except ViewChanged:
                wait = True  # the next view is on its way
            except UnreadableContribution as fault:
                assert self._group is not None
                member = self._group.view.members[fault.place]
                log.warning("%s: %s", member.name, fault)
                self._suspect(member.rank, str(fault))
                wait = True  # for a view without it
        while (message := self._next_message(wait=wait)) is not None:
            self._handle(message)
            wait = False

    def _combined(self, flight: Contribution, *, wait: bool) -> bool:
        if not wait and not self.combination.done(flight.slot):
            return False
        self.combination.wait(flight.slot)
        return True

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

    def _report(self, flight: Contribution) -> None:
        mine, held = self.combination.norms(flight.slot)
        mine /= flight.weight or 1.0
        flight.reported = True
        # As text: JSON has no NaN, and all must read the same number.
        meta: dict[str, Any] = {"mine": repr(mine), "held": repr(held), "loss": repr(flight.said_loss)}
        meta |= {"compute_s": flight.compute_s, "apply_s": self._apply_s, "weight": flight.weight}
        meta["scale"] = flight.scale
        log.debug("hold the result of step %d in view %d", flight.step, self._epoch)
        self._line.send(Kind.DONE, step=flight.step, epoch=self._epoch, meta=meta)

    def _handle(self, message: Message) -> None:
        super()._handle(message)
        match message.kind:
            case Kind.MEMBER:
                self._keys |= read_keys(message.meta["keys"])
            case Kind.VIEW:
                self._regroup(message)
                self._use_scale(message)  # a state that was donated came with its donor's
            case Kind.STATE if message.payload is not None:
                self._shares.setdefault(message.channel, []).append(message.payload)
            case Kind.COMMIT if "members" in message.meta:
                self._follow(message)
            case Kind.COMMIT if self.flights and message.step == self.flights[0].step:
                if message.meta.get("share"):
                    self._share(self.flights[0])
                self._take_step(weight=float(message.meta["weight"]), norm=float(message.meta["norm"]))
            case Kind.PULL if self._settled:  # or it is asked again in the next view
                self._pull = message
            case _:
                pass
        # Local steps have changed the optimizer's state, and the round they belong to may be under way.
        asked, updates = self._pull, self.replica.updates
        if asked is not None and updates >= asked.step and not (self.local_steps > 1 and self.flights):
            self._pull = None
            self._upload(updates if self.local_steps > 1 else asked.step, first=bool(asked.meta["first"]))

    def _take_step(self, *, weight: float, norm: float) -> None:
        """Apply the oldest round in flight, which is committed."""
        flight = self.flights.popleft()
        if weight == 0:  # no gradient of it was fit to count
            self._strategy.apply(Committed(flight.step, flight.slot, empty=True))
            return
        started = time.perf_counter()
        self._strategy.apply(Committed(flight.step, flight.slot, factor=1 / weight, norm=norm))
        self._apply_s = time.perf_counter() - started
        try:
            self.combination.complete()
        except ViewChanged:
            pass  # completed when the next view is formed

    def _share(self, flight: Contribution) -> None:
        """Send my share of a committed result to the coordinator, for those who follow."""
        shares = self.combination.shares(flight.slot)
        parts = [(number, part) for number, share in shares.items() for part in _slices(share)]
        last = Message(kind=Kind.STATE, step=flight.step, meta={"share": "last"})
        more = [
            Message(kind=Kind.STATE, step=flight.step, channel=number, meta={"share": "more"}, payload=part)
            for number, part in parts
        ]
        self._line.send_beside([*more, last])

    def _follow(self, message: Message) -> None:
        """Apply a round of the others, whose result has come."""
        meta, slot = message.meta, self.slot_of(message.step)
        shares, self._shares = {number: torch.cat(parts) for number, parts in self._shares.items()}, {}
        if meta["weight"]:
            self.combination.follow(slot, shares, members=int(meta["members"]))
        self.flights.append(Contribution(message.step, slot))
        self._take_step(weight=float(meta["weight"]), norm=float(meta["norm"]))

    def _announced(self, epoch: int) -> None:
        """On the transport's thread, long before the message has its turn."""
        self._newest = max(self._newest, epoch)
        self._abort("there is a new view")

    def _on_disconnected(self, _: int) -> None:
        """On the transport's thread."""
        self._away = True
        self._abort("the coordinator is away")

    def _abort(self, reason: str) -> None:
        if self._group is not None:
            self._group.abort(ViewChanged(reason))

    def _is_over(self, view: View) -> bool:
        return self._away or view.epoch < self._newest

    def _enter(self, welcome: Message) -> None:
        """Take part again: with what I hold if it leads to the committed step, else with somebody's state."""
        for step, (epoch, weight, norm) in sorted((int(s), v) for s, v in welcome.meta.get("recent", {}).items()):
            flight = self.flights[0] if self.flights else None
            if flight is not None and flight.reported and (flight.step, flight.epoch) == (step, epoch):
                self._take_step(weight=weight, norm=norm)
        if self.flights:
            computed = sum(flight.samples > 0 for flight in self.flights)
            self.context.stale_rejected += computed
            self.flights.clear()
            if computed and self._strategy.stops_when_stale:
                raise SmolclusterError("this worker's gradients came too late to count, and on_stale is stop")
        self._away, self._pull, self._shares = False, None, {}
        super()._enter(welcome)

    def _regroup(self, message: Message) -> None:
        """Start again, in this view, what was not committed in the last."""
        meta, me = message.meta, self.context.seat.rank
        view = View.from_meta(meta["view"])
        ranks, steps = [member.rank for member in view.members], [flight.step for flight in self.flights]
        log.debug("view %d: members %s from step %d on; in flight here: %s", view.epoch, ranks, view.step + 1, steps)
        self._epoch, self._settled = view.epoch, False
        self._keys = {m.instance: self._keys[m.instance] for m in view.members if m.instance in self._keys}
        self._group = self._peers.form(view, self._keys)
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
            self.combination.formed(self._group, view, meta["established"])
        except ViewChanged:
            return  # the next view is on its way
        self._settled = True
        if me in meta["idle"]:
            # The others have computed these steps, or hold the samples for them.
            coming = [int(step) for step in meta["rounds"]][: self.num_slots]
            self.flights = deque(Contribution(step, self.slot_of(step)) for step in coming)
        left_out = {int(step): ranks for step, ranks in meta["left_out"].items()}
        for flight in self.flights:
            flight.epoch, flight.reported = view.epoch, False
            self.combination.again(flight.slot, zero=flight.samples == 0 or me in left_out.get(flight.step, ()))

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
                self.load_state(State.unpacked(tensors, said["numbers"]))
                self.flights.clear()
                return True
        return False

    def _donate(self, joiner: Seated) -> None:
        state = self._strategy.state()
        tensors = {n: t.to("cpu", copy=True).contiguous() for n, t in state.packed().items()}
        self._peers.send_state(joiner, tensors, {"numbers": state.numbers, "epoch": self._epoch})

    def _upload(self, step: int, *, first: bool) -> None:
        """The coordinator wants to evaluate or save this step."""
        state = self._strategy.state()
        mine = set(self.combination.owned(list(state.optimizer)))
        part = {f"w/{n}": t for n, t in state.weights.items() if first}
        part |= {f"o/{n}": t for n, t in state.optimizer.items() if n in mine}
        part |= {f"s/{n}": t for n, t in state.shared.items() if first}
        last = {"last": True, "numbers": state.numbers}
        self._line.send_beside(
            [
                *(
                    Message(
                        kind=Kind.STATE,
                        step=step,
                        epoch=self._epoch,
                        meta={"name": name, "shape": list(tensor.shape)},
                        payload=piece,
                    )
                    for name, tensor in part.items()
                    for piece in _slices(tensor)
                ),
                Message(kind=Kind.STATE, step=step, epoch=self._epoch, meta=last),  # also who has nothing is waited for
            ]
        )

    def _suspect(self, rank: int, reason: str) -> None:
        self._line.send(Kind.SUSPECT, epoch=self._epoch, meta={"rank": rank, "reason": reason})

    def load_state(self, state: State) -> None:
        self._strategy.load_state(state)


def connect_s(context: Context) -> float:
    """Return within how many seconds workers must have connected to each other."""
    return max(CONNECT_S, context.config.cluster.silence_timeout)


def _slices(tensor: Tensor) -> Sequence[Tensor]:
    """Return a copy of it on the host, as parts of one row."""
    row = tensor.detach().to("cpu", copy=True).reshape(-1)
    return torch.split(row, SLICE_BYTES // row.itemsize)
