"""Who takes part and which rounds count: the agreement behind the strategies without a parameter server.

See `rounds.py` for the workers' side of it. The coordinator holds no weights of its own but those the run starts with,
and those it asks a worker for, to evaluate or save them.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.elastic.membership.proofs import PairKeys
from smolcluster.comm.elastic.membership.roster import Member, MemberGone, MemberMessage
from smolcluster.comm.elastic.membership.verdict import Complaint, Strikes, is_lone, verdict
from smolcluster.comm.elastic.membership.view import View
from smolcluster.comm.elastic.membership.view import ViewMember as Seated
from smolcluster.comm.elastic.transport.frames import shared
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.compute.buffers import not_finite
from smolcluster.compute.claims import Claims
from smolcluster.compute.gate import TRIES
from smolcluster.compute.replica import Replica
from smolcluster.engine.elastic.coordination.followers import Followers
from smolcluster.engine.elastic.deadline import ComputeWatch
from smolcluster.engine.elastic.rounds import CONNECT_S
from smolcluster.engine.elastic.server_side import RETURN_S, ServerSide, send_state
from smolcluster.errors import SmolclusterError
from smolcluster.strategies.base import Commit, Context, State, StepReport
from smolcluster.strategies.base.replicated import replica_state

log = logging.getLogger(__name__)

NORM_TOLERANCE = 1e-3  # norms of one sum, as machines of different kinds add them up
SUSPICION_S = (
    0.5  # after the last complaint: all ends of broken links have complained, and the dead are gone by themselves
)
MOST_SUSPICION_S = 2.0  # after the first complaint, however many follow
WITNESS_S = 1.0  # beyond that, for a second witness of a single complaint: the other end complains if it cannot connect
SILENT_S = 1.0  # a member that was not heard for so long is cut off from here, too
QUARANTINE_S = (0.0, 10.0, 30.0, 60.0)  # how long an evicted member stays out, the first time and later


@dataclass(slots=True, eq=False)
class StateUpload:
    """The state of one step, as it comes from the workers that hold it."""

    step: int
    epoch: int
    missing: list[Member]
    parts: dict[str, list[Tensor]] = field(default_factory=dict)  # of each tensor, as rows
    shapes: dict[str, list[int]] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Put them together, once: each part is let go as soon as its tensor is whole."""
        shapes = self.shapes.items()
        return {name: torch.cat([part.view(-1) for part in self.parts.pop(name)]).view(s) for name, s in shapes}


class Coordinator(ServerSide):
    def __init__(
        self,
        context: Context,
        replica: Replica,
        *,
        rounds_ahead: int,
        whole: bool,
        local_steps: int = 1,
        tokens_per_sample: int = 1,
        step_timeout_s: float | None = None,
        connect_s: float = CONNECT_S,
    ) -> None:
        """`rounds_ahead`: rounds a worker may have in flight, with the one it computes; `local_steps` of each.

        `whole`: every member holds the whole result of a round.
        """
        self.context, self.replica = context, replica
        self.shared: Mapping[str, Tensor] = {}
        self.tokens_per_sample = tokens_per_sample
        self.init_serving()
        self._ahead, self._whole, self._local_steps = rounds_ahead, whole, local_steps
        self._committed = 0  # the last step of the last round that counts
        # The step whose state is in this process; what a run begins with is made from its seed, also a second time.
        self._state_step = -1
        self._view_due = False
        self._view_epoch = -1  # of the present view; the roster's is beyond it as soon as anybody comes or goes
        self._view_instances: set[str] = set()  # instances of the present view
        self._complaints: dict[Complaint, float] = {}  # in the present view, and when each first came
        self._strikes = Strikes()
        self._watch = ComputeWatch(step_timeout_s)
        self._claims = Claims(self.server_context.count)
        self._connect_s = connect_s
        self._pair_keys = PairKeys()
        self._quarantined_until: dict[int, float] = {}  # rank -> until when it may not come back
        self._disagreements = 0  # how often in a row the results of the next step differed
        self._no_holder_since: float | None = None  # nobody here has the weights
        self._without_state: set[int] = set()  # ranks that wait for the state
        self._done: dict[int, dict[int, dict[str, Any]]] = {}  # step -> rank -> what it said, in the present view
        self._left_out: dict[int, set[int]] = {}  # step -> ranks whose gradient does not count
        self._recent: dict[int, tuple[int, float, float]] = {}  # step -> view, weight and norm of its commit
        self._established: list[str] = []  # instances of the last view that committed a step
        self._upload: StateUpload | None = None
        self._wanted: list[int] = []  # steps whose state is asked for next
        self._rounds: list[int] = []  # that members have samples for, and that are not committed: their last steps
        self._rejected_states = 0  # how many states in a row came with a part missing
        weights_bytes = sum(tensor.nbytes for tensor in replica.weights().values())
        self._followers = Followers(weights_bytes=weights_bytes, warn=context.warn)

    def serve(self) -> None:
        self.restore()
        weights = self.replica.weights().values()
        self._roster.allow(Kind.STATE, most_bytes=8 * sum(t.nbytes for t in weights) + 2**20)
        self.wait_for_workers()
        while self._committed < self.context.total_steps and not self.context.stop_requested():
            self._iterate()
            while self._rounds and self._committed < self.context.total_steps and self._agreed(self._rounds[0]):
                self._commit(self._rounds[0])
        self._fetch_last()

    def restore(self) -> None:
        """Begin where the record ends."""
        self._committed = self.server_context.first_step
        self._state_step = self.replica.updates if self.server_context.fresh or self._committed == 0 else -1
        self._recent, self._established = dict(self.server_context.recent), list(self.server_context.established)

    def replay(self, commit: Commit) -> None:
        """Nothing to do again: the workers have the weights."""

    def load_state(self, state: State) -> None:
        """The tensors themselves become the state: it is replaced, not changed, so that whoever saves or sends what was there
        before needs no copy."""
        self.replica.adopt_state_dict(state.weights, state.optimizer, state.numbers)
        self.shared = state.shared

    def shared_state(self) -> Mapping[str, Tensor]:
        return self.shared

    def load_shared(self, tensors: Mapping[str, Tensor]) -> None:
        self.shared = tensors

    def copied_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        state = replica_state(self.replica)
        state.shared = self.shared
        return {n: t.to("cpu").contiguous() for n, t in state.packed().items()}, state.numbers

    def _iterate(self) -> None:
        """See who is here, and hear one of them."""
        self._advance_followers()
        if (self._view_due or any(map(self._may_enter_view, self._roster.newcomers))) and not self._holder_may_return():
            self._form_view()
        self._listen()
        self._evict_unreachable()
        self._evict_hung()

    def _listen(self) -> None:
        event = self._roster.get(0.1)
        if isinstance(event, MemberGone):
            self._on_lost(event.member)
        elif isinstance(event, MemberMessage):
            member, message = event.member, event.message
            if message.kind is Kind.STATE and "share" in message.meta:
                if (objection := self._followers.take(member, message)) is not None:
                    self._roster.evict(member, objection)
            elif message.kind is Kind.STATE:
                self._take_state(member, message)
            elif message.epoch == self._roster.epoch:  # or it belongs to a view that is over
                if message.kind is Kind.DONE:
                    self._take_done(member, message)
                elif message.kind is Kind.SUSPECT:
                    self._take_suspicion(member, message)
                elif message.kind is Kind.WAITING:
                    self._watch.waits(member.instance, now=time.monotonic())

    # Newcomers that need the state

    def _advance_followers(self) -> None:
        """Bring newcomers that need the state nearer to it. Where nobody goes on meanwhile, or has the whole, none follows."""
        newcomers, leads = self._roster.newcomers, self._whole and self._has_holder()
        needy = [m for m in newcomers if leads and self._is_admissible(m) and not self._is_current(m)]
        follow = [m for m in newcomers if m in self._followers or m in needy]
        self._followers.follow(follow, committed=self._committed)
        if self._followers.lack_state and self._followers.can_start(self._state_step):
            tensors, numbers = self.copied_state()
            meta = {"numbers": numbers, "scale": self.server_context.scale.state_dict()}
            self._followers.start(tensors, meta, step=self._state_step, epoch=self._roster.epoch)
        elif self._followers.lack_state and self._upload is None:
            self._wanted.append(self._committed)
            self._ask()
        self._followers.send(epoch=self._roster.epoch)

    def _has_holder(self) -> bool:
        return any(rank not in self._without_state for rank in self._roster.members)

    # Views

    def _form_view(self) -> None:
        """Everybody who is here takes part, from the first step that is not committed."""
        roster, committed = self._roster, self._committed
        self._view_due = False
        self._complaints.clear()
        if not self._whole:
            self._give_up_upload()  # the parts would be those of two deals
        before, staying = (
            self._view_instances,
            [member for member in roster.in_order() if member.rank not in self._without_state],
        )
        newcomers = sorted(filter(self._may_enter_view, roster.newcomers), key=lambda member: member.rank)
        for member in newcomers:
            roster.welcome(member)
            if not self._is_current(member):
                self._without_state.add(member.rank)
        self._without_state &= roster.members.keys()
        if not roster.members:
            return
        roster.epoch += 1
        members = roster.in_order()
        self._view_instances = {member.instance for member in members}
        new = self._view_instances - before | {member.instance for member in newcomers}
        if staying and not self._has_leases(staying):
            self._regrant(staying)
            staying, newcomers = [], members

        # Those who stay have computed the next steps, or hold the samples for them; whoever comes adds nothing to these.
        stay = {member.rank for member in staying}
        idle = [member.rank for member in members if member.rank not in stay] if staying else []
        donations = self._welcome_all(newcomers)
        for member in members:
            # A pair has the same key in every view: a member that stays lacks those of the new ones only.
            keys = self._pair_keys.of(member.instance, self._view_instances if member.instance in new else new)
            if keys:
                member.link.send(Message(kind=Kind.MEMBER, epoch=roster.epoch, meta={"keys": keys}))

        self._done.clear()
        seated = tuple(Seated(m.rank, m.instance, m.host, m.address) for m in members)
        # The run may have become shorter than what those who stay were lent; if it grows again they are not lent it twice.
        self._rounds = sorted({step for member in staying for step in self.server_context.leases.held(member.instance)})
        self._rounds += self._next_rounds(self._rounds)
        meta = {
            "rounds": self._rounds,
            "view": View(roster.epoch, committed, seated).to_meta(),
            "donations": {str(joiner): donor for joiner, donor in donations.items()},
            "idle": idle,
            "established": self._surviving(),
            "left_out": {str(step): sorted(ranks) for step, ranks in self._left_out.items()},
            "scale": self.server_context.scale.state_dict(),
        }
        # All members get the same view: it is encoded once, and what is for one of them alone is a message of its own.
        roster.send(members, shared(Message(kind=Kind.VIEW, step=committed, epoch=roster.epoch, meta=meta)))
        leases: dict[Member, list[dict[str, Any]]] = {member: [] for member in newcomers if not staying}
        for step, steps in self._with_num_steps(self._rounds):
            for member, lent in leases.items():
                lent.append(self.grant_lease(member, step, steps=steps))
        for member, lent in leases.items():
            member.link.send(Message(kind=Kind.LEASE, step=committed, epoch=roster.epoch, meta={"leases": lent}))
        self._view_epoch = roster.epoch
        self._watch.begin(self._view_instances, now=time.monotonic())
        self._ask()

    def _has_leases(self, members: list[Member]) -> bool:
        """Whether somebody has samples for each of the next steps."""
        held = [self.server_context.leases.held(member.instance) for member in members]
        return all(any(step in leases for leases in held) for step in self._next_rounds([]))

    def _next_rounds(self, rounds: Sequence[int]) -> list[int]:
        """Return the rounds behind these that members may begin: their last steps."""
        further: list[int] = []
        last = rounds[-1] if rounds else self._committed
        while len(rounds) + len(further) < self._ahead and last < self.context.total_steps:
            last = min((last // self._local_steps + 1) * self._local_steps, self.context.total_steps)
            further.append(last)
        return further

    def _with_num_steps(self, rounds: Sequence[int]) -> list[tuple[int, int]]:
        """Each of these rounds, which are not committed, with the number of its steps."""
        before = {step: previous for previous, step in itertools.pairwise([self._committed, *self._rounds])}
        return [(step, step - before[step]) for step in rounds]

    def _regrant(self, members: list[Member]) -> None:
        """Whoever had samples for a step is gone, or was refused: everybody gets others, as at the beginning."""
        self.gate.nothing_counted(self._rounds[0] if self._rounds else self._committed + 1)
        for member in members:
            self.server_context.leases.give_back(member.instance)
        self._left_out.clear()

    def _holder_may_return(self) -> bool:
        """Return True while nobody here has the weights, and a member that held them may still come back."""
        holders = [member for member in self._roster.in_order() if member.rank not in self._without_state]
        holders += filter(self._is_current, self._roster.newcomers)
        if holders or self._state_step == self._committed:
            self._no_holder_since = None
            return False
        if any(map(self._is_current, self._roster.paused)):
            return True  # until its link ends
        now = time.monotonic()
        self._no_holder_since = self._no_holder_since or now
        return now < self._no_holder_since + RETURN_S

    def _may_enter_view(self, newcomer: Member) -> bool:
        follows = newcomer in self._followers and not self._is_current(newcomer)
        return self._is_admissible(newcomer) and not (follows and self._has_holder())

    def _is_admissible(self, newcomer: Member) -> bool:
        return time.monotonic() >= self._quarantined_until.get(newcomer.rank, 0.0)

    def _surviving(self) -> list[str | None]:
        """What the members of the last view that committed held then: theirs still, or lost."""
        knowing = {m.instance for m in self._roster.in_order() if m.rank not in self._without_state}
        return [instance if instance in knowing else None for instance in self._established]

    def _welcome_all(self, newcomers: list[Member]) -> dict[int, int]:
        """A welcome, and the state for those who need it. Returns who gets the state from which other member."""
        donors = [member.rank for member in self._roster.in_order() if member.rank not in self._without_state]
        here = self._without_state and self._state_step == self._committed and (self._whole or not donors)
        tensors, numbers = self.copied_state() if here else ({}, {})
        if here and not donors:
            self._established = []  # everybody starts from what is here
        if self._without_state and not here and not donors:
            raise self._lost()
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

    def _lost(self) -> SmolclusterError:
        ahead = [
            member
            for member in self._roster.in_order()
            if member.rank in self._without_state and self._is_ahead(member)
        ]
        if ahead:
            member, updates = ahead[0], ahead[0].said["updates"]
            return SmolclusterError(
                f"the record of this run ends at step {self._committed} and {member.name} has applied {updates} steps: "
                "the disk has lost the last records, as in a power cut; continue from the last checkpoint with --resume"
            )
        return SmolclusterError(
            f"every worker that held the weights of step {self._committed} is gone; "
            "continue from the last checkpoint with --resume"
        )

    def _is_current(self, member: Member) -> bool:
        """Whether what a newcomer brings leads to the committed step."""
        if self._followers.is_current(member, committed=self._committed):
            return True
        updates, held = member.said.get("updates"), member.said.get("held")
        if self._state_step == self._committed or not isinstance(updates, int) or not isinstance(held, list):
            return False
        if updates <= 0 or self._is_ahead(member):
            return False
        missing = sorted(step for step in self._recent if step > updates)
        if not missing or missing[0] > (updates // self._local_steps + 1) * self._local_steps:
            return updates == self._committed
        return all([step, self._recent[step][0]] in held for step in missing)

    def _is_ahead(self, member: Member) -> bool:
        """It has applied steps that the record does not have, and cannot take them back."""
        updates = member.said.get("updates")
        return isinstance(updates, int) and updates > self._committed

    def _on_lost(self, member: Member) -> None:
        self.server_context.leases.give_back(member.instance)
        self._followers.lost(member.rank, committed=self._committed)
        if member in self._roster.paused and member.rank not in self._without_state:
            # It has every COMMIT so far, or reads it before anything new; what it said when it joined is old.
            member.said = {**member.said, "updates": self._committed, "held": []}
        seated = member.instance in self._view_instances
        self._view_due = self._view_due or seated
        if self._upload is not None and (member in self._upload.missing or (seated and not self._whole)):
            self._give_up_upload()
            self._ask()

    def _take_suspicion(self, member: Member, message: Message) -> None:
        other = message.meta.get("rank")
        if isinstance(other, int) and other in self._roster.members and other != member.rank:
            self._complaints.setdefault((member.rank, other), time.monotonic())

    def _evict_unreachable(self) -> None:
        """Evict as few members as possible, so that all others can reach each other: else nothing is ever summed again."""
        now, members = time.monotonic(), self._roster.members
        complaints = {(a, b): since for (a, b), since in self._complaints.items() if a in members and b in members}
        if not complaints:
            return
        first, last = min(complaints.values()), max(complaints.values())
        wait_s = min(last - first + SUSPICION_S, MOST_SUSPICION_S)
        if is_lone(members, complaints):
            wait_s = self._connect_s + WITNESS_S
        if now < first + wait_s:
            return
        self._complaints.clear()
        silent = [rank for rank, member in members.items() if member.link.silent_s > SILENT_S]
        strikes = {rank: self._strikes.count(rank, now=now) for rank in members}
        for rank in sorted(verdict(members, complaints, silent=silent, strikes=strikes)):
            pairs = sorted({(min(pair), max(pair)) for pair in complaints if rank in pair})
            named = ", ".join(f"{a} and {b}" for a, b in pairs)
            self._quarantine(members[rank], f"workers cannot reach each other: {named}")

    def _evict_hung(self) -> None:
        """Go on without members that compute for too long while others wait; they may join again when they answer."""
        now = time.monotonic()
        if self._view_due or not self._watch.is_due(now):
            return
        step = self._rounds[0] if self._rounds else self._committed + 1
        done = self._done.get(step, {})
        delivered = [member.instance for member in self._roster.in_order() if member.rank in done]
        overdue = self._watch.overdue(delivered=delivered, now=now)
        for member in self._roster.in_order():
            if (busy_s := overdue.get(member.instance)) is not None:
                self._quarantine(member, f"it has computed step {step} for {busy_s:.1f} s while others wait for it")

    def _quarantine(self, member: Member, reason: str) -> None:
        """Evict a member; it may come back after its quarantine."""
        now = time.monotonic()
        times = self._strikes.add(member.rank, now=now)
        self._quarantined_until[member.rank] = now + QUARANTINE_S[min(times, len(QUARANTINE_S)) - 1]
        self._roster.evict(member, reason)
        self._view_due = True

    # Steps

    def _take_done(self, member: Member, message: Message) -> None:
        step, meta = message.step, message.meta
        if not _sound(meta):
            self._roster.evict(member, "what it says of its result is no use")
            return
        ranges = self.server_context.leases.held(member.instance).get(step, [])
        claimed = float(meta.get("weight", 0.0))
        if ranges and (overclaim := self._claims.objection(ranges, claimed)) is not None:
            self._roster.evict(member, overclaim)
            return
        log.debug("%s holds the result of step %d", member.name, step)
        self._without_state.discard(member.rank)
        if step not in self._rounds[: self._ahead]:
            return  # nobody waits for it
        self._done.setdefault(step, {})[member.rank] = meta
        if not ranges:
            return
        objection = self.gate.objection(float(meta["mine"]))
        if objection is not None:
            scale = None if math.isfinite(float(meta["mine"])) else meta.get("scale")
            self.refuse(member, step, objection, scale=scale)
            self._left_out.setdefault(step, set()).add(member.rank)
            self._view_due = True

    def _agreed(self, step: int) -> bool:
        """Every member holds the result of this step, and no gradient in it was refused."""
        members, done = self._roster.members.keys(), self._done.get(step, {})
        if self._view_due or self._view_epoch != self._roster.epoch:
            return False  # a result has the part of one who is gone, and whose samples go to others
        if not members or not done.keys() >= members or self._waits_for_newcomer():
            return False
        sums = [float(said["held"]) for said in done.values()]
        finite = [math.isfinite(held) for held in sums]
        if not (any(finite) if self._whole else all(finite)):
            # Each gradient is finite, or it would have been refused; reduced again, the sum would be the same.
            raise SmolclusterError(
                f"the gradients of step {step} are so large that their sum has overflowed; look at the data, or lower "
                "training.learning_rate"
            )
        if not self._whole or (all(finite) and max(sums) - min(sums) <= NORM_TOLERANCE * max(sums)):
            return True
        # The sum is the same everywhere, or memory or a program is broken: nothing is applied.
        self.context.warn(
            f"the results of step {step} differ between workers ({min(sums):g} to {max(sums):g}): done again"
        )
        self._view_due = True
        self._disagreements += 1
        if self._disagreements > TRIES:
            raise SmolclusterError(
                f"the results of step {step} differ between workers, {TRIES} times in a row: one of the machines is broken"
            )
        if len(done) > 2:
            middle = statistics.median(sums)
            odd = max(done, key=lambda rank: _distance(float(done[rank]["held"]), middle))
            self._roster.evict(self._roster.members[odd], "its result differs from everybody else's")
        return False

    def _waits_for_newcomer(self) -> bool:
        """Local steps: members send a state only when a round is over."""
        return self._followers.waits() and not (self._local_steps > 1 and self._followers.lack_state)

    def _commit(self, step: int) -> None:
        roster, leases = self._roster, self.server_context.leases
        done = self._done.pop(step)
        self._left_out.pop(step, None)
        contributors = []
        loss = samples = weight = 0.0
        for member in roster.in_order():
            if step not in leases.held(member.instance):
                continue
            ranges, said = leases.settle(member.instance, step), done[member.rank]
            count = sum(r.count for r in ranges)
            counted = float(said.get("weight", count))
            loss += float(said["loss"]) * counted
            weight += counted
            samples += count
            if counted:
                self.gate.accept(float(said["mine"]), instance=member.instance)
            compute_s, apply_s = float(said["compute_s"]), float(said["apply_s"])
            self.note_speed(member, samples=count, compute_s=compute_s, fixed_s=apply_s)
            contributors.append(
                {
                    "rank": member.rank,
                    "instance": member.instance,
                    "seq": step,
                    "samples": count,
                    "ranges": [list(r) for r in ranges],
                }
            )
        weight = weight or float(samples > 0)  # nothing counts in any of them: all are zero
        norm = self._norm(done) / (weight or 1.0)
        self._recent[step] = (roster.epoch, weight, norm)
        self._recent = dict(sorted(self._recent.items())[-2 * self._ahead :])
        self._established = [member.instance for member in roster.in_order()]
        recent = {str(s): list(v) for s, v in self._recent.items()}
        numbers = {"recent": recent, "established": self._established}
        self.server_context.scale.committed(str(contributor["instance"]) for contributor in contributors)
        steps = step - self._committed
        self.server_context.record(Commit(step=step, steps=steps, contributors=contributors, numbers=numbers))
        self._committed, self._disagreements = step, 0
        roster.patience_s = self._watch.usual_s
        self._watch.commit({str(part["instance"]) for part in contributors}, now=time.monotonic())

        # One round more, as a rule; several where the run has become longer than it seemed.
        self._rounds.remove(step)
        more = self._next_rounds(self._rounds)
        self._rounds += more
        lengths = self._with_num_steps(more)
        result = {
            "samples": int(samples),
            "weight": weight,
            "norm": norm,
            "scale": self.server_context.scale.state_dict(),
        }
        self._followers.committed(step, result, roster.members)
        if self.server_context.wants(step):
            self._wanted.append(step)
        self._ask()  # before the commit is told of, so that no further round is begun before it is read
        for member in roster.in_order():
            meta: dict[str, Any] = {**result, "share": bool(self._followers)}
            if more:
                meta["leases"] = [self.grant_lease(member, later, steps=steps) for later, steps in lengths]
            member.link.send(Message(kind=Kind.COMMIT, step=step, epoch=roster.epoch, meta=meta))
        self.server_context.committed(
            StepReport(
                loss=torch.tensor(loss / (weight or 1.0)),
                grad_norm=torch.tensor(norm),
                learning_rate=self.replica.rate_of(step - 1),
                samples=int(samples),
                tokens=int(samples) * self.tokens_per_sample,
            )
        )

    def _norm(self, done: dict[int, dict[str, Any]]) -> float:
        """Of the whole sum. One number for all, so that unlike machines clip alike."""
        held = [float(done[rank]["held"]) for rank in sorted(done)]
        return held[0] if self._whole else math.hypot(*held)

    # The state of a step, from the workers that have it

    def _ask(self) -> None:
        """For the newest state that is wanted, which is what the workers have right now."""
        asked = self._holders()
        if self._upload is None and self._wanted and asked:
            step = self._committed
            self._wanted.clear()
            self._upload = StateUpload(step, self._roster.epoch, list(asked))
            for number, member in enumerate(asked):
                meta = {"first": number == 0}
                member.link.send(Message(kind=Kind.PULL, step=step, epoch=self._roster.epoch, meta=meta))

    def _holders(self) -> list[Member]:
        """Whose parts make up the whole state; nobody, while it cannot be told.

        A part is what a member owns in its view. When somebody has gone, its part is nobody's until the next view, where its
        buddy has handed it on; then it may belong to one that has just come. A question behind the VIEW is read after that.
        """
        if self._whole:
            holders = [member for member in self._roster.in_order() if member.rank not in self._without_state]
            return (
                [holders[self._rejected_states % len(holders)]] if holders else []
            )  # buffers are each one's own: ask another one
        return [] if self._view_due or self._view_epoch != self._roster.epoch else self._roster.in_order()

    def _give_up_upload(self) -> None:
        """It is asked for again."""
        if self._upload is not None:
            self._wanted.append(self._upload.step)
            self._upload = None

    def _take_state(self, member: Member, message: Message) -> None:
        upload = self._upload
        if upload is None or member not in upload.missing or not upload.step <= message.step <= self._committed:
            return
        if not self._whole and (upload.epoch, upload.step) != (message.epoch, message.step):
            return  # it answers a question from before this view
        upload.step = message.step  # a member whose round was under way answers after it
        if message.payload is not None:
            name = str(message.meta.get("name"))
            upload.parts.setdefault(name, []).append(message.payload)
            upload.shapes[name] = message.meta.get("shape", list(message.payload.shape))
        if message.meta.get("last"):
            upload.missing.remove(member)
        if not upload.missing:
            self._upload = None
            try:
                state = State.unpacked(upload.tensors(), message.meta["numbers"])
                if "loss_scale" in state.numbers:
                    state.numbers["loss_scale"] = self.server_context.scale.state_dict()  # that is kept here
                if broken := not_finite(state.weights):
                    self._refuse_state(upload.step, f"with NaN or infinite values in {broken}")
                    return
                if lacking := [] if self._whole else self.replica.lacking(state.optimizer, state.numbers):
                    what = f"without the optimizer's for {len(lacking)} parameters, such as {lacking[0]}"
                    self._refuse_state(upload.step, what)
                    return
                self.load_state(state)
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                self._roster.evict(member, f"the state that it sent is no use: {error}")
                return
            self._state_step, self._rejected_states = upload.step, 0
            self.server_context.arrived(upload.step)
            self._ask()  # for what was wanted meanwhile

    def _refuse_state(self, step: int, how: str) -> None:
        """Saved or handed out, it would train on as if nothing were missing. It is asked for again after the next step."""
        what = f"the state of step {step} came {how}"
        self._rejected_states += 1
        if self._rejected_states > TRIES:
            raise SmolclusterError(f"{what}, {TRIES} times in a row; continue from the last checkpoint with --resume")
        self.context.warn(f"{what}: it is not used")
        self._wanted.append(step)

    def _fetch_last(self) -> None:
        """The run ends with its weights here."""
        while self._state_step != self._committed:
            if self._upload is None:
                self._wanted.append(self._committed)
                self._ask()
            if not self._roster.members and not self._roster.newcomers and not self._holder_may_return():
                raise self._lost()
            self._iterate()


def _distance(value: float, middle: float) -> float:
    distance = abs(value - middle)
    return math.inf if math.isnan(distance) else distance


def _sound(meta: dict[str, Any]) -> bool:
    """Whether a DONE has its numbers."""
    try:
        numbers = [float(meta[name]) for name in ("mine", "held", "loss", "compute_s", "apply_s")]
        return bool(numbers) and 0 <= float(meta.get("weight", 0.0)) < 2**53
    except (KeyError, TypeError, ValueError):
        return False
