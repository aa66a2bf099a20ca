"""The coordinator of strategies without a parameter server: it decides who is a member and which rounds are committed.

`member/rounds.py` is the workers' side. The coordinator holds only the weights that a run starts with, and those it requests
from workers to evaluate, save or send on.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.elastic.membership.pairwise_keys import PairwiseKeys
from smolcluster.comm.elastic.membership.roster import Member, MemberGone, MemberMessage
from smolcluster.comm.elastic.transport.frames import with_encoded_meta
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.view import View, ViewMember
from smolcluster.compute.buffers import not_finite
from smolcluster.compute.replica import Replica
from smolcluster.engine.elastic.coordination import results
from smolcluster.engine.elastic.coordination.evictions import Evictions
from smolcluster.engine.elastic.coordination.followers import Followers
from smolcluster.engine.elastic.coordination.held_state import HoldsState
from smolcluster.engine.elastic.coordination.late_members import LateMembers
from smolcluster.engine.elastic.coordination.local_rounds import LocalReport, LocalRounds
from smolcluster.engine.elastic.coordination.rejoining import can_reach, weights_lost
from smolcluster.engine.elastic.coordination.round_numbers import next_rounds, with_num_steps
from smolcluster.engine.elastic.coordination.state_upload import StateUploads, UnusableState
from smolcluster.engine.elastic.deadline import ComputeWatch
from smolcluster.engine.elastic.gradient_gate import MAX_FAILED_ATTEMPTS
from smolcluster.engine.elastic.member.rounds import CONNECT_S
from smolcluster.engine.elastic.server_side import RECONNECT_S, send_state
from smolcluster.engine.elastic.weight_claims import Claims
from smolcluster.errors import SmolclusterError
from smolcluster.strategies.base import Commit, Context, State, StepReport

log = logging.getLogger(__name__)


class Coordinator(HoldsState):
    def __init__(
        self,
        context: Context,
        replica: Replica,
        *,
        rounds_ahead: int,
        replicated: bool,
        local_steps: int = 1,
        equal_time: bool = False,
        tokens_per_sample: int = 1,
        step_timeout_s: float | None = None,
        quorum: float = 1.0,
        connect_s: float = CONNECT_S,
    ) -> None:
        """`rounds_ahead`: rounds that a worker may have in flight. `replicated`: each member holds the complete result.

        `equal_time`: members take different numbers of local steps. `quorum`: share of the members that must have contributed,
        if the others are late; 1: wait for all.
        """
        super().__init__(context, replica, tokens_per_sample=tokens_per_sample)
        self.shared: Mapping[str, Tensor] = {}
        self._rounds_ahead, self._replicated, self._local_steps = rounds_ahead, replicated, local_steps
        self._committed = 0  # the last step of the last committed round
        self._state_step = -1  # the step whose state is in this process
        self._view_due = False
        self._view_epoch = -1  # of the current view; the roster's is higher once a member has joined or left
        self._view_instances: set[str] = set()
        self._watch = ComputeWatch(step_timeout_s)
        self._local = LocalRounds(equal_time=equal_time, clipped=self._roster.clipped, warn=context.warn)
        self._claims = Claims(self.server_context.count)
        self._pairwise_keys = PairwiseKeys()
        self._disagreements = 0  # in a row: attempts at the next step whose results differed
        self._no_holder_since: float | None = None  # no member has the weights
        self._without_state: set[int] = set()  # ranks of members that wait for the state
        self._done: dict[int, dict[int, dict[str, Any]]] = {}  # step -> rank -> its DONE in the current view
        self._left_out: dict[int, set[int]] = {}  # step -> ranks whose gradients were refused
        self._recent: dict[int, tuple[int, float, float]] = {}  # step -> view, weight and norm of its commit
        self._established: list[str] = []  # instances of the last view that committed a step
        self._rounds: list[int] = []  # the last steps of the leased rounds that are not committed
        self._evictions = Evictions(self._roster, connect_s=connect_s)
        self._uploads = StateUploads(
            self._roster,
            replicated=replicated,
            holders=self._upload_sources,
            accept=self._accept_state,
            arrived=self.server_context.arrived,
            warn=context.warn,
        )
        weights_bytes = sum(tensor.nbytes for tensor in replica.weights().values())
        self._followers = Followers(weights_bytes=weights_bytes, warn=context.warn)
        self._late = LateMembers(self.server_context, self._followers, quorum=quorum, warn=context.warn)

    def serve(self) -> None:
        self.restore()
        weights = self.replica.weights().values()
        self._roster.allow(Kind.STATE, max_bytes=8 * sum(t.nbytes for t in weights) + 2**20)
        self.wait_for_workers()
        while self._committed < self.context.total_steps and not self.context.stop_requested():
            self._iterate()
            while self._rounds and self._committed < self.context.total_steps and self._agreed(self._rounds[0]):
                self._commit(self._rounds[0])
        self._fetch_last()

    def restore(self) -> None:
        """Continue after the last recorded step."""
        self._committed = self.server_context.first_step
        self._state_step = self.replica.updates if self.server_context.fresh or self._committed == 0 else -1
        self._recent, self._established = dict(self.server_context.recent), list(self.server_context.established)

    def _iterate(self) -> None:
        """Update membership and handle one event."""
        self._advance_followers()
        if (self._view_due or any(map(self._may_enter_view, self._roster.newcomers))) and not self._holder_may_return():
            self._form_view()
        self._listen()
        for member, reason in self._evictions.unreachable().items():
            self._evict(member, reason)
        if not self._view_due:
            self._late.suspend_late(self._rounds)
        self._evict_hung()

    def _listen(self) -> None:
        event = self._roster.get(0.1)
        if isinstance(event, MemberGone):
            self._on_lost(event.member)
        elif isinstance(event, MemberMessage):
            member, message = event.member, event.message
            if message.kind is Kind.STATE and "share" in message.meta:
                if (error := self._followers.take(member, message)) is not None:
                    self._roster.evict(member, error)
            elif message.kind is Kind.STATE:
                self._uploads.take(member, message, committed=self._committed)
            elif message.epoch == self._roster.epoch:  # else it belongs to an older view
                if message.kind is Kind.DONE:
                    self._take_done(member, message)
                elif message.kind is Kind.SUSPECT:
                    self._evictions.take_suspicion(member, message, leased=max(self._rounds, default=self._committed))
                elif message.kind is Kind.WAITING:
                    self._watch.waits(member.instance, now=time.monotonic())
                    if message.step in self._rounds[:1]:
                        self._late.contributed(member)

    # Newcomers that need the state

    def _advance_followers(self) -> None:
        """Send newcomers what they need to catch up, where a member holds the complete state."""
        self._late.poll(committed=self._committed, alone=not self._has_holder())
        newcomers, has_source = self._roster.newcomers, self._replicated and self._has_holder()
        lacking = [m for m in newcomers if has_source and self._evictions.may_join(m) and not self._is_current(m)]
        lacking_state = [m for m in lacking if not self._late.is_away(m)]
        follow = [m for m in (*newcomers, *self._roster.paused) if m in self._followers or m in lacking_state]
        self._followers.follow(follow, committed=self._committed)
        if self._followers.lack_state and self._followers.can_start(self._state_step):
            tensors, numbers = self.copied_state()
            meta = {"numbers": numbers, "scale": self.server_context.scale.state_dict()}
            self._followers.start(tensors, meta, step=self._state_step, epoch=self._roster.epoch)
        elif self._followers.lack_state and not self._uploads.is_active:
            self._uploads.request(self._committed, wanted=True)
        self._followers.send(epoch=self._roster.epoch)

    def _has_holder(self) -> bool:
        return any(rank not in self._without_state for rank in self._roster.members)

    def _holders(self) -> list[Member]:
        """Return the members that have the state."""
        return [member for member in self._roster.in_order() if member.rank not in self._without_state]

    # Views

    def _form_view(self) -> None:
        """Form a view of all connected members, from the first step that is not committed."""
        roster, committed = self._roster, self._committed
        self._view_due = False
        self._evictions.clear()
        if not self._replicated:
            self._uploads.abandon()  # its parts would come from two views
        before, staying = self._view_instances, self._holders()
        newcomers = self._admit_newcomers()
        if not roster.members:
            return
        roster.epoch += 1
        members = roster.in_order()
        self._view_instances = {member.instance for member in members}
        new = self._view_instances - before | {member.instance for member in newcomers}
        for member in members:
            if member.rank in self._without_state:  # its leases are of a view that ended before it had the state
                self.server_context.leases.release(member.instance)
        if staying and not self._has_leases(staying):
            self._regrant(staying)
            staying = []
        if not staying:
            newcomers = members

        # Members that stay have computed the next rounds or hold their leases; newcomers contribute nothing to these.
        stay = {member.rank for member in staying}
        idle = [member.rank for member in members if member.rank not in stay] if staying else []
        donations = self._welcome_all(newcomers)
        for member in members:
            # A pair keeps its key across views: members that stay lack only the keys of new ones.
            keys = self._pairwise_keys.of(member.instance, self._view_instances if member.instance in new else new)
            if keys:
                member.link.send(Message(kind=Kind.MEMBER, epoch=roster.epoch, meta={"keys": keys}))

        self._done.clear()
        view_members = tuple(ViewMember(m.rank, m.instance, m.host, m.address) for m in members)
        # Leases beyond the end of a run that has become shorter stay valid: it may become longer again.
        self._rounds = sorted({step for member in staying for step in self.server_context.leases.held(member.instance)})
        self._rounds += self._next_rounds(self._rounds)
        late = self._late.enter(newcomers if self._rounds else [])
        meta = {
            "rounds": self._rounds,
            "view": View(roster.epoch, committed, view_members).to_meta(),
            "donations": {str(joiner): donor for joiner, donor in donations.items()},
            "idle": idle,
            "late": [member.rank for member in late],
            "established": self._surviving(),
            "left_out": {str(step): sorted(ranks) for step, ranks in self._left_out.items()},
            "scale": self.server_context.scale.state_dict(),
        }
        # Encoded once for all members; leases differ and go in messages of their own.
        roster.send(members, with_encoded_meta(Message(kind=Kind.VIEW, step=committed, epoch=roster.epoch, meta=meta)))
        self.send_leases([] if staying else newcomers, self._with_num_steps(self._rounds), committed=committed)
        self._late.formed(late, self._rounds)
        self._view_epoch = roster.epoch
        self._watch.begin(self._view_instances, now=time.monotonic())
        self._uploads.request(committed)

    def _admit_newcomers(self) -> list[Member]:
        newcomers = sorted(filter(self._may_enter_view, self._roster.newcomers), key=lambda member: member.rank)
        for member in newcomers:
            self._roster.welcome(member)
            if not self._is_current(member):
                self._without_state.add(member.rank)
        self._without_state &= self._roster.members.keys()
        return newcomers

    def _has_leases(self, members: list[Member]) -> bool:
        """Return whether some member holds a lease of each of the next rounds."""
        held = [self.server_context.leases.held(member.instance) for member in members]
        return all(any(step in leases for leases in held) for step in self._next_rounds([]))

    def _next_rounds(self, rounds: Sequence[int]) -> list[int]:
        return next_rounds(
            rounds,
            committed=self._committed,
            max_in_flight=self._rounds_ahead,
            local_steps=self._local_steps,
            total_steps=self.context.total_steps,
        )

    def _with_num_steps(self, rounds: Sequence[int]) -> list[tuple[int, int]]:
        return with_num_steps(rounds, pending=self._rounds, committed=self._committed)

    def _regrant(self, members: list[Member]) -> None:
        """Take back all leases: every holder of the next round was lost or refused."""
        self.gate.count_failed_attempt(self._rounds[0] if self._rounds else self._committed + 1)
        for member in members:
            self.server_context.leases.release(member.instance)
        self._left_out.clear()

    def _holder_may_return(self) -> bool:
        """Return True while no member has the weights and one that held them may still reconnect."""
        has_holder = self._has_holder() or any(map(self._is_current, self._roster.newcomers))
        if has_holder or self._state_step == self._committed:
            self._no_holder_since = None
            return False
        if any(map(self._is_current, self._roster.paused)):
            return True  # its link is still open
        now = time.monotonic()
        self._no_holder_since = self._no_holder_since or now
        return now < self._no_holder_since + RECONNECT_S

    def _may_enter_view(self, newcomer: Member) -> bool:
        follows = newcomer in self._followers and not self._is_current(newcomer)
        may_join = self._evictions.may_join(newcomer) and not self._late.is_away(newcomer)
        return may_join and not (follows and self._has_holder())

    def _surviving(self) -> list[str | None]:
        """Return the instances of the last view that committed, with None for those that were lost."""
        knowing = {member.instance for member in self._holders()}
        return [instance if instance in knowing else None for instance in self._established]

    def _welcome_all(self, newcomers: list[Member]) -> dict[int, int]:
        """Welcome newcomers, send the state to those without it, or return which member donates it: {joiner: donor}."""
        donors = [member.rank for member in self._holders()]
        here = self._without_state and self._state_step == self._committed and (self._replicated or not donors)
        tensors, numbers = self.copied_state() if here else ({}, {})
        if here and not donors:
            self._established = []  # all members start from the state of this process
        if self._without_state and not here and not donors:
            raise weights_lost(self._roster.in_order(), self._committed)
        donations: dict[int, int] = {}
        arrived = {member.rank for member in newcomers}
        for member in self._roster.in_order():
            meta: dict[str, Any] = {"recent": {str(step): list(v) for step, v in self._recent.items()}}
            if member.rank in self._without_state and here:
                meta["numbers"] = numbers
                send_state(member, tensors, step=self._committed, epoch=self._roster.epoch, meta=meta)
                self._without_state.discard(member.rank)
            elif member.rank in arrived:
                epoch = self._roster.epoch
                member.link.send(Message(kind=Kind.WELCOME, step=self._committed, epoch=epoch, meta=meta))
            if member.rank in self._without_state:
                donations[member.rank] = donors[0]
        return donations

    def _is_current(self, member: Member) -> bool:
        """Return whether a newcomer holds the committed state, or the results that lead to it."""
        if self._followers.is_current(member, committed=self._committed):
            return True
        recent, local_steps = self._recent, self._local_steps
        has_state = self._state_step == self._committed  # then it gets the state from here
        return not has_state and can_reach(member, self._committed, recent=recent, local_steps=local_steps)

    def _on_lost(self, member: Member) -> None:
        self._followers.lost(member.rank, committed=self._committed)
        if member in (*self._roster.paused, *self._roster.newcomers) and member.rank not in self._without_state:
            # It has received every COMMIT so far; what it reported when it joined is outdated.
            member.said = {**member.said, "updates": self._committed, "held": []}
        if member.rank in self._without_state or not self._late.keep(member, self._rounds, committed=self._committed):
            self.server_context.leases.release(member.instance)
        in_view = member.instance in self._view_instances
        self._view_due = self._view_due or in_view
        if self._uploads.waits_for(member) or (in_view and not self._replicated and self._uploads.is_active):
            self._uploads.abandon()
            self._uploads.request(self._committed)

    def _evict(self, member: Member, reason: str) -> None:
        self._evictions.evict(member, reason)
        self._view_due = True

    def _evict_hung(self) -> None:
        """Evict members that compute past the deadline while others wait for them."""
        now = time.monotonic()
        if self._view_due or not self._watch.is_due(now):
            return
        step = self._rounds[0] if self._rounds else self._committed + 1
        done = self._done.get(step, {})
        delivered = [member.instance for member in self._roster.in_order() if member.rank in done]
        overdue = self._watch.overdue(delivered=delivered, now=now)
        for member in self._roster.in_order():
            if (busy_s := overdue.get(member.instance)) is not None:
                self._evict(member, f"it has computed step {step} for {busy_s:.1f} s while others wait for it")

    def grant_lease(self, member: Member, step: int, *, steps: int = 1) -> dict[str, Any]:
        own_steps, terms = self._local.terms(member, self._roster, steps=steps)
        return super().grant_lease(member, step, steps=own_steps) | terms | {"steps": steps}

    # Steps

    def _take_done(self, member: Member, message: Message) -> None:
        step, meta = message.step, message.meta
        if not results.is_well_formed(meta):
            self._roster.evict(member, "its DONE message is malformed")
            return
        if (error := self._local.check_report(member, step, meta, self.server_context.leases)) is not None:
            self._roster.evict(member, error)
            return
        ranges = self.server_context.leases.held(member.instance).get(step, [])
        claimed = float(meta.get("weight", 0.0))
        if ranges and (overclaim := self._claims.rejection_reason(ranges, claimed)) is not None:
            self._roster.evict(member, overclaim)
            return
        log.debug("%s has the result of step %d", member.name, step)
        self._without_state.discard(member.rank)
        if step not in self._rounds[: self._rounds_ahead]:
            return  # not a round in progress
        self._done.setdefault(step, {})[member.rank] = meta
        if not ranges:
            return
        if (reason := self.gate.rejection_reason(float(meta["mine"]))) is not None:
            scale = None if math.isfinite(float(meta["mine"])) else meta.get("scale")
            self.refuse(member, step, reason, scale=scale)
            self._left_out.setdefault(step, set()).add(member.rank)
            self._view_due = True

    def _agreed(self, step: int) -> bool:
        """Return whether every member holds the same result of this round and no gradient in it was refused."""
        members, done = self._roster.members, self._done.get(step, {})
        if self._view_due or self._view_epoch != self._roster.epoch:
            return False  # the result includes a lost member, whose samples are leased again
        if not members or not done.keys() >= members.keys() or self._waits_for_newcomer():
            return False
        difference = results.find_difference(step, done, replicated=self._replicated)
        if not difference:
            return True
        # All members must hold the same sum; else hardware or software is broken, and nothing is applied.
        self.context.warn(f"the results of step {step} differ between workers ({difference}): retrying")
        self._view_due = True
        self._disagreements += 1
        if self._disagreements > MAX_FAILED_ATTEMPTS:
            raise SmolclusterError(
                f"the results of step {step} differ between workers, {MAX_FAILED_ATTEMPTS} times in a row: "
                "one of the machines is broken"
            )
        if (odd := results.odd_one_out(done)) is not None:
            self._roster.evict(members[odd], "its result differs from those of all others")
        return False

    def _waits_for_newcomer(self) -> bool:
        """Return whether to hold the commit for a newcomer. With local steps members send a state only between rounds."""
        return self._followers.waits() and not (self._local_steps > 1 and self._followers.lack_state)

    def _commit(self, step: int) -> None:
        roster = self._roster
        done = self._done.pop(step)
        self._left_out.pop(step, None)
        totals = self._commit_leases(step, done)
        norm = results.sum_norm(done, replicated=self._replicated) / (totals.weight or 1.0)
        self._recent[step] = (roster.epoch, totals.weight, norm)
        self._recent = dict(sorted(self._recent.items())[-2 * self._rounds_ahead :])
        self._established = [member.instance for member in roster.in_order()]
        recent = {str(s): list(v) for s, v in self._recent.items()}
        numbers = {"recent": recent, "established": self._established}
        instances = {str(part["instance"]) for part in totals.contributors}
        self.server_context.scale.committed(instances)
        steps = step - self._committed
        self.server_context.record(Commit(step=step, steps=steps, contributors=totals.contributors, numbers=numbers))
        self._committed, self._disagreements = step, 0
        self._evictions.committed(step)
        roster.patience_s = self._watch.median_s
        self._watch.commit(instances, now=time.monotonic())
        self._late.committed()
        self._announce_commit(step, totals, norm)
        loss, rate = torch.tensor(totals.loss / (totals.weight or 1.0)), self.replica.rate_of(step - 1)
        samples, tokens = totals.samples, totals.samples * self.tokens_per_sample
        self.server_context.committed(
            StepReport(loss=loss, grad_norm=torch.tensor(norm), learning_rate=rate, samples=samples, tokens=tokens)
        )

    def _commit_leases(self, step: int, done: dict[int, dict[str, Any]]) -> results.RoundTotals:
        """Commit the leases of a round and add up the reports of its members."""
        totals, leases = results.RoundTotals(), self.server_context.leases
        counted = [member for member in self._roster.in_order() if step in leases.held(member.instance)]
        self._local.committed([(member, done[member.rank]) for member in counted], step=step)
        for member in counted:
            report = done[member.rank]
            samples, weight = totals.add(member, step, leases.commit(member.instance, step), report)
            if weight:
                self.gate.accept(float(report["mine"]), instance=member.instance)
            compute_s, fixed_s = float(report["compute_s"]), float(report["fixed_s"])
            local = LocalReport.of(report)
            steps = local.steps if local is not None else 1
            self.note_speed(member, samples=samples, compute_s=compute_s, fixed_s=fixed_s, steps=steps)
        totals.weight = totals.weight or float(totals.samples > 0)  # no target counts: all gradients are zero
        return totals

    def _announce_commit(self, step: int, totals: results.RoundTotals, norm: float) -> None:
        """Send COMMIT to all members, with leases of the rounds that they may begin next."""
        self._rounds.remove(step)
        more = self._next_rounds(self._rounds)  # one, or several where the run has become longer
        self._rounds += more
        rounds = self._with_num_steps(more)
        scale = self.server_context.scale.state_dict()
        result = {"samples": totals.samples, "weight": totals.weight, "norm": norm, "scale": scale}
        self._followers.committed(step, result, self._roster.members)
        # Before COMMIT, so that members answer before they begin another round.
        self._uploads.request(step, wanted=self.server_context.wants(step))
        for member in self._roster.in_order():
            meta: dict[str, Any] = {**result, "share": bool(self._followers)}
            if more:
                meta["leases"] = [self.grant_lease(member, later, steps=steps) for later, steps in rounds]
            member.link.send(Message(kind=Kind.COMMIT, step=step, epoch=self._roster.epoch, meta=meta))

    # The state, from the workers that hold it

    def _upload_sources(self, attempt: int) -> list[Member]:
        """Return the members whose parts make up the complete state; [] while that is not known.

        A part is what a member owns in its view. When a member is lost, its part has no owner until the next view, where its
        backup sends it. A PULL sent after the VIEW is read after it.
        """
        if not self._replicated:
            return [] if self._view_due or self._view_epoch != self._roster.epoch else self._roster.in_order()
        holders = self._holders()
        return holders[attempt % len(holders) :][:1] if holders else []  # after a rejected state ask another member

    def _accept_state(self, step: int, state: State) -> None:
        if "loss_scale" in state.numbers:
            state.numbers["loss_scale"] = self.server_context.scale.state_dict()  # the coordinator's own
        if broken := not_finite(state.weights):
            raise UnusableState(f"with NaN or infinite values in {broken}")
        if missing := [] if self._replicated else self.replica.missing_state(state.optimizer, state.numbers):
            raise UnusableState(f"without the optimizer's for {len(missing)} parameters, such as {missing[0]}")
        self.load_state(state)
        self._state_step = step

    def _fetch_last(self) -> None:
        """Wait until this process holds the final state."""
        while self._state_step != self._committed:
            if not self._uploads.is_active:
                self._uploads.request(self._committed, wanted=True)
            if not self._roster.members and not self._roster.newcomers and not self._holder_may_return():
                raise weights_lost(self._roster.in_order(), self._committed)
            self._iterate()
