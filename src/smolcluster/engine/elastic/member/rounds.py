"""The rounds of a worker on the elastic plane: views, leases and the agreement on each round.

Contributions travel between the workers. A coordinator decides who is a member and which rounds are committed:

    worker                                        coordinator (`coordination/`)
      combine round s with the members of the view
      DONE(s): has the result             ----->  when all members of the view have sent DONE and no gradient is refused:
                                                  record the commit of round s and its samples
      apply round s                       <-----  COMMIT(s), and the lease of a later step

A result is applied only after its COMMIT, so that all replicas apply the same sequence, whatever fails. When a member leaves or
joins there is a new VIEW: results without a COMMIT are discarded, and those rounds are combined again from the contributions
that the remaining members still hold. A refused contribution (not finite, far too large) is left out in the same way. Messages
of an older view are dropped. In a partitioned network only the side with the coordinator can commit.

With a quorum, a member that is late is left out of the view, and its work counts in a later round
(`coordination/late_members.py`): so each contribution is announced to the coordinator, with a WAITING for its step.

A newcomer gets weights and optimizer state from a member, or from the coordinator at the start of a run. It contributes nothing
to rounds that the others have computed. Where every member holds the whole result it first follows outside the view,
while the others train: it gets a state through the coordinator, then the results of the rounds since, and applies them
(`coordination/followers.py`).

A worker may train on alone while it has no link to the coordinator (`alone.py`).

The coordinator's record survives a restart. The workers reconnect and report what they hold; a round whose COMMIT was recorded
and not received is applied from the result that they kept.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.elastic.collectives.group import ElasticGroup
from smolcluster.comm.elastic.collectives.peers import Peers
from smolcluster.comm.elastic.membership.pairwise_keys import parse_keys
from smolcluster.comm.elastic.membership.received_state import SLICE_BYTES
from smolcluster.comm.elastic.membership.server_link import Lease
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.group import PeerLost
from smolcluster.comm.rounds import Combination, Committed, Contribution, Rounds, UnreadableContribution
from smolcluster.comm.view import View, ViewChanged, ViewMember
from smolcluster.engine.elastic.deadline import WAITING_S
from smolcluster.engine.elastic.member.alone import Alone
from smolcluster.engine.elastic.member.busy_time import BusyTime
from smolcluster.engine.elastic.member.member_side import MemberSide
from smolcluster.errors import SmolclusterError
from smolcluster.strategies.base import Context, State
from smolcluster.strategies.base.replicated import Exchanging

log = logging.getLogger(__name__)

STATE_POLL_S = 0.2
CONNECT_S = 5.0  # for workers to connect to each other, unless cluster.silence_timeout is longer


class ElasticRounds(Rounds, MemberSide):
    def __init__(self, strategy: Exchanging[Any], combination: Combination) -> None:
        super().__init__(combination, num_slots=strategy.rounds_in_flight + 1, local_steps=strategy.local_steps)
        self.init_member(strategy)
        state_bytes = 8 * sum(t.nbytes for t in self.replica.weights().values())
        # No timeout: the transport detects dead peers, and the coordinator decides who is evicted.
        self._peers = Peers(
            self._link.transport,
            limit_bytes=max(256 << 20, state_bytes),
            timeout_s=math.inf,
            connect_s=connect_s(self.context),
            proven=True,
        )
        self._keys: dict[str, bytes] = {}  # of the other members, by instance
        self._group: ElasticGroup | None = None
        self._address = self._peers.listen(self._link.local_address, 0)
        self._peers.on_lost = lambda member, reason: self._suspect(member.rank, reason)
        self._peers.on_waiting = self._report_waiting
        self._reported_waiting = 0.0
        self._newest = 0  # epoch of the newest view that was announced; older views are over
        self._disconnected = False  # from the coordinator: no view holds
        self._has_state = False  # of what it owns in the current view
        self._donated: tuple[dict[str, Any], dict[str, Tensor]] | None = None  # a state for a later view
        self._link.at_once(Kind.VIEW, self._announced)
        self._link.at_once(Kind.WELCOME, lambda _: self._abort("this worker was evicted and rejoins"))
        self._link.at_once(None, self._on_disconnected)
        self._busy = BusyTime(computes_on_cpu=self.context.device.type == "cpu")
        self._apply_s = 0.0  # time to apply the last result
        self._round = 0  # the last step of the round that was begun
        self._local: Mapping[str, Any] | None = None  # of the last round: a restarted coordinator needs it
        self._shares: dict[int, list[Tensor]] = {}  # of the next round to follow, in slices
        self._pull: Message | None = None  # an upload that was requested, until no round is under way here
        self._alone = Alone(self.context, self.replica, most_steps=strategy.max_rounds_apart * strategy.local_steps)
        self._late: list[list[int]] = []  # rounds that this worker was late for, each with its leased samples

    def introduction(self) -> dict[str, Any]:
        self.end_alone()
        held = [[flight.step, flight.epoch] for flight in self.flights if flight.reported]
        local = {} if self._local is None else {"local": self._local}
        return {"address": self._address, "updates": self._strategy.version, "held": held, **local}

    def lease(self) -> Lease | None:
        while not self._over:
            self._check_stop()
            self._advance(wait=False)
            if self._trains_alone():
                if (lease := self._alone.lease()) is not None:
                    self._round = 0
                    return lease
            elif self._link.leases and self._group is not None:
                lease = self._link.leases.popleft()
                self._round, self.clip = lease.step, lease.clip
                self._alone.batch = max(1, lease.samples // lease.steps)
                return lease
            if not self._over:
                self._advance(wait=True)
        return None

    def holds(self, step: int) -> bool:
        return step == self._round

    def ends(self, step: int) -> bool:
        return step == self._round

    def share(self, mine: Contribution) -> float:
        return 1 / self._group.size if self._group is not None else 1.0

    def poll(self) -> None:
        self._advance(wait=False)

    def settle(self, *, in_flight: int) -> None:
        while len(self.flights) > in_flight and not self._over and not self._trains_alone():
            self._advance(wait=True)

    def _trains_alone(self) -> bool:
        """Return whether this worker trains without the coordinator; begin to if the link is lost."""
        if not self.alone and self._alone.is_possible and not self._link.connected:
            # A reported result may have been committed: keep it, and apply it if the coordinator sends its COMMIT.
            held = deque(flight for flight in self.flights if flight.reported)
            self._strategy.keep_late([flight for flight in self.flights if not flight.reported], held=held)
            self.flights = held
            self._strategy.begin_alone()
            self._alone.begin()
            self.alone = True
        return self.alone

    def end_alone(self) -> None:
        if self.alone:
            self.alone = False
            self._alone.end()
            self._strategy.end_alone()

    def _starter(self, mine: Contribution, *, counted: bool) -> Callable[[], None]:
        mine.epoch = self._epoch
        return lambda: self.combination.start(mine.slot, weight=mine.weight, scale=mine.scale)

    @contextmanager
    def contribute(
        self, step: int, *, samples: int, weight: float, counted: bool, scale: float
    ) -> Iterator[Contribution]:
        contribution = super().contribute(step, samples=samples, weight=weight, counted=counted, scale=scale)
        with self._busy.computing(), contribution as mine:
            yield mine

    def _contributed(self, mine: Contribution, started: float) -> None:
        assert mine.loss is not None
        mine.host_loss = float(mine.loss)  # waits for the GPU
        mine.compute_s += time.perf_counter() - started
        self._announce(mine)

    def _announce(self, mine: Contribution) -> None:
        """Report that this contribution is complete."""
        if self._strategy.quorum < 1:
            self._link.send(Kind.WAITING, step=mine.step, epoch=self._epoch)

    def _advance(self, *, wait: bool) -> None:
        """Report the oldest result and handle messages of the coordinator. With `wait`, block until something has happened."""
        flight = next((flight for flight in self.flights if not flight.reported), None)
        if flight is not None and not flight.again:
            try:
                # Wait only for the oldest: a later one may need what the others do after its commit.
                if self._combined(flight, wait=wait and flight is self.flights[0]):
                    self._report(flight)
                    wait = False
            except ViewChanged:
                wait = True  # for the next view
            except UnreadableContribution as fault:
                assert self._group is not None
                member = self._group.view.members[fault.place]
                log.warning("%s: %s", member.name, fault)
                self._suspect(member.rank, str(fault))
                wait = True  # for a view without that member
        while (message := self._next_message(wait=wait)) is not None:
            self._handle(message)
            wait = False

    def _combined(self, flight: Contribution, *, wait: bool) -> bool:
        if not wait and not self.combination.done(flight.slot):
            return False
        self.combination.wait(flight.slot)
        return True

    def _next_message(self, *, wait: bool) -> Message | None:
        while (message := self._link.get(WAITING_S if wait else 0)) is None and wait:
            self._report_waiting()
            if self._strategy.max_rounds_apart and not self._link.connected:
                break
        return message

    def _report_waiting(self) -> None:
        """Send WAITING from the training thread, so that a worker that hangs sends none."""
        now = time.monotonic()
        if now - self._reported_waiting >= WAITING_S:
            self._reported_waiting = now
            self._link.send(Kind.WAITING, epoch=self._epoch, meta={"late": self._late} if self._late else {})

    def _report(self, flight: Contribution) -> None:
        mine, held = self.combination.norms(flight.slot)
        mine /= flight.weight or 1.0
        flight.reported = True
        # With local steps most of the computing is before the contribution.
        fixed_s = self._apply_s if self.local_steps > 1 else max(self._apply_s, self._busy.end_step())
        # As text: JSON has no NaN, and all must parse the same number.
        meta: dict[str, Any] = {"mine": repr(mine), "held": repr(held), "loss": repr(flight.host_loss)}
        meta |= {"compute_s": flight.compute_s, "fixed_s": fixed_s, "weight": flight.weight}
        meta |= {"scale": flight.scale, "samples": flight.samples}
        if flight.local is not None:
            meta["local"] = self._local = flight.local
        log.debug("have the result of step %d in view %d", flight.step, self._epoch)
        self._link.send(Kind.DONE, step=flight.step, epoch=self._epoch, meta=meta)

    def _handle(self, message: Message) -> None:
        super()._handle(message)
        match message.kind:
            case Kind.MEMBER:
                self._keys |= parse_keys(message.meta["keys"])
            case Kind.VIEW:
                self._regroup(message)
                self._use_scale(message)  # a donated state carries the donor's scale
            case Kind.STATE if message.payload is not None:
                self._shares.setdefault(message.channel, []).append(message.payload)
            case Kind.COMMIT if "members" in message.meta:
                self._follow(message)
            case Kind.COMMIT if self.flights and message.step == self.flights[0].step:
                if message.meta.get("share"):
                    self._share(self.flights[0])
                self._take_step(weight=float(message.meta["weight"]), norm=float(message.meta["norm"]))
            case Kind.PULL if self._has_state:  # else the next view repeats it
                self._pull = message
            case _:
                pass
        pull, version = self._pull, self._strategy.version
        between = self._strategy.shares_state_in_rounds or not self.flights
        if pull is not None and version >= pull.step and between:
            self._pull = None
            self._upload(version if self.local_steps > 1 else pull.step, first=bool(pull.meta["first"]))

    def _take_step(self, *, weight: float, norm: float) -> None:
        """Apply the oldest round in flight after its commit."""
        flight = self.flights.popleft()
        if weight == 0:  # all its gradients were refused
            self._strategy.apply(Committed(flight.step, flight.slot, empty=True))
            self._combine_again()
            return
        started = time.perf_counter()
        self._strategy.apply(Committed(flight.step, flight.slot, factor=1 / weight, norm=norm))
        self._apply_s = time.perf_counter() - started
        self._combine_again()
        try:
            self.combination.complete()
        except ViewChanged:
            pass  # the next view completes it

    def _share(self, flight: Contribution) -> None:
        """Send this worker's share of a committed result to the coordinator, for newcomers that follow."""
        message = partial(Message, kind=Kind.STATE, step=flight.step)
        pieces = [
            message(channel=number, meta={"share": "more"}, payload=piece)
            for number, share in self.combination.shares(flight.slot).items()
            for piece in _slices(share)
        ]
        self._link.send_bulk([*pieces, message(meta={"share": "last"})])

    def _follow(self, message: Message) -> None:
        """Apply a committed round of the others, as a follower."""
        meta, slot = message.meta, self.slot_of(message.step)
        shares, self._shares = {number: torch.cat(parts) for number, parts in self._shares.items()}, {}
        if meta["weight"]:
            self.combination.follow(slot, shares, members=int(meta["members"]))
        self.flights.append(Contribution(message.step, slot))
        self._strategy.rejoined()  # it starts from what it follows to
        self._take_step(weight=float(meta["weight"]), norm=float(meta["norm"]))

    def _announced(self, epoch: int) -> None:
        """Abort the current view. Runs on the transport's thread, before the message is handled."""
        self._newest = max(self._newest, epoch)
        self._abort("there is a new view")

    def _on_disconnected(self, _: int) -> None:
        """Abort the current view. Runs on the transport's thread."""
        self._disconnected = True
        self._abort("the connection to the coordinator is lost")

    def _abort(self, reason: str) -> None:
        if self._group is not None:
            self._group.abort(ViewChanged(reason))

    def _is_over(self, view: View) -> bool:
        return self._disconnected or view.epoch < self._newest

    def _enter(self, welcome: Message) -> None:
        """Rejoin: apply the commits that were missed, where their results are still here; discard other rounds in flight."""
        for step, (epoch, weight, norm) in sorted((int(s), v) for s, v in welcome.meta.get("recent", {}).items()):
            flight = self.flights[0] if self.flights else None
            if flight is not None and flight.reported and (flight.step, flight.epoch) == (step, epoch):
                self._take_step(weight=weight, norm=norm)
        most = self._strategy.max_rounds_apart
        if late := bool(welcome.meta.get("late")):
            self._late += [[flight.step, flight.samples] for flight in self.flights if flight.samples > 0]
        self._strategy.keep_late(self.flights if late or most else [])
        if not late and not self._late:
            self._strategy.unlease_late()
        if most and (behind := (welcome.step - self._strategy.version) / self.local_steps) > most:
            self._strategy.forget_late(f"it is {behind:g} rounds behind, strategy.max_rounds_apart is {most}")
        if self.flights and not late and not most:
            computed = sum(flight.samples > 0 for flight in self.flights)
            self.context.stale_rejected += computed
            for flight in self.flights:
                self.combination.drop(flight.slot)
            if computed and self._strategy.stops_when_stale:
                raise SmolclusterError("this worker's gradients were too late to count, and strategy.on_stale is stop")
        self.flights.clear()
        self._disconnected, self._pull, self._shares = False, None, {}
        self._round = 0  # its lease is not held any more
        self._strategy.rejoined()
        super()._enter(welcome)
        if late:
            self._reported_waiting = -math.inf
            self._report_waiting()

    def _regroup(self, message: Message) -> None:
        """Enter a new view: form its group and combine again what was not committed in the last."""
        meta, me = message.meta, self.context.seat.rank
        view = View.from_meta(meta["view"])
        ranks, steps = [member.rank for member in view.members], [flight.step for flight in self.flights]
        log.debug("view %d: members %s from step %d on; in flight here: %s", view.epoch, ranks, view.step + 1, steps)
        self._epoch, self._has_state = view.epoch, False
        self._keys = {m.instance: self._keys[m.instance] for m in view.members if m.instance in self._keys}
        self._group = self._peers.form(view, self._keys)
        if self._is_over(view):
            self._group.abort(ViewChanged("a later view is on its way"))
        donations = {int(joiner): int(donor) for joiner, donor in meta["donations"].items()}
        for joiner, donor in donations.items():
            if donor == me and not self._is_over(view):
                self._donate(next(member for member in view.members if member.rank == joiner))
        if me in donations and not self._receive_state(view):
            return  # the next view assigns another donor
        try:
            # After the donation, which replaces the whole state of this worker.
            self.combination.formed(self._group, view, meta["established"])
        except ViewChanged:
            return  # superseded by the next view
        self._has_state = True
        if me in meta["idle"]:
            # The others have computed these steps or hold their leases; those of an earlier view have returned.
            self._link.leases.clear()
            coming = [int(step) for step in meta["rounds"]][: self.num_slots]
            self.flights = deque(Contribution(step, self.slot_of(step)) for step in coming)
            self._strategy.rejoined()
        carried, self._late = self._count_late(meta), []
        left_out = {int(step): ranks for step, ranks in meta["left_out"].items()}
        for flight in self.flights:
            flight.epoch, flight.reported = view.epoch, False
            flight.again = not (carried and flight is self.flights[0])
            flight.left_out = flight.samples == 0 or me in left_out.get(flight.step, ())
            if not flight.again:
                self._strategy.contribute_late(flight)
            self._announce(flight)
        self._combine_again()

    def _count_late(self, meta: Mapping[str, Any]) -> bool:
        """Return whether the work of rounds that this worker was late for counts in the round that the others compute."""
        me = self.context.seat.rank
        if self._late and me not in meta.get("late", ()):
            self._strategy.unlease_late()
            if not self._strategy.max_rounds_apart:
                self._strategy.forget_late("its samples were leased to others")
        return bool(self._late) and me in meta.get("late", ()) and me in meta["idle"]

    def _combine_again(self) -> None:
        """Combine rounds again in the current group, in order, each when no earlier one uses its memory."""
        for place, flight in enumerate(self.flights):
            if not flight.again:
                continue
            if any(self.combination.collide(flight.slot, self.flights[i].slot) for i in range(place)):
                return
            flight.again = False
            self.combination.again(flight.slot, zero=flight.left_out)

    def _receive_state(self, view: View) -> bool:
        """Load the state that a donor sends. Return False when a new view follows instead."""
        while not self._is_over(view):
            self._check_stop()
            self._report_waiting()
            try:
                meta, tensors = self._donated or self._peers.receive_state(STATE_POLL_S)
            except PeerLost:
                continue
            epoch = meta.get("epoch")
            if isinstance(epoch, int) and epoch > view.epoch:
                # Its sender is in the next view already, and sends it only once.
                self._donated = meta, tensors
                return False
            self._donated = None
            if epoch == view.epoch:
                self._strategy.load_state(State.unpacked(tensors, meta["numbers"]))
                self.flights.clear()
                return True
        return False

    def _donate(self, joiner: ViewMember) -> None:
        state = self._strategy.state()
        tensors = {n: t.to("cpu", copy=True).contiguous() for n, t in state.packed().items()}
        self._peers.send_state(joiner, tensors, {"numbers": state.numbers, "epoch": self._epoch})

    def _upload(self, step: int, *, first: bool) -> None:
        """Send this worker's part of the state to the coordinator."""
        state = self._strategy.state()
        mine = set(self.combination.owned(list(state.optimizer)))
        part = {f"w/{n}": t for n, t in state.weights.items() if first}
        part |= {f"o/{n}": t for n, t in state.optimizer.items() if n in mine}
        part |= {f"s/{n}": t for n, t in state.shared.items() if first}
        message = partial(Message, kind=Kind.STATE, step=step, epoch=self._epoch)
        pieces = [
            message(meta={"name": name, "shape": list(tensor.shape)}, payload=piece)
            for name, tensor in part.items()
            for piece in _slices(tensor)
        ]
        last = message(meta={"last": True, "numbers": state.numbers})  # sent also by members that own nothing
        self._link.send_bulk([*pieces, last])

    def _suspect(self, rank: int, reason: str) -> None:
        self._link.send(Kind.SUSPECT, epoch=self._epoch, meta={"rank": rank, "reason": reason})


def connect_s(context: Context) -> float:
    """Return the timeout for workers to connect to each other."""
    return max(CONNECT_S, context.config.cluster.silence_timeout)


def _slices(tensor: Tensor) -> Sequence[Tensor]:
    """Return a copy on the host, flat, in slices."""
    row = tensor.detach().to("cpu", copy=True).reshape(-1)
    return torch.split(row, SLICE_BYTES // row.itemsize)
