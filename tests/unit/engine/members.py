"""A coordinator whose members say what a test lets them say."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.tasks import Tiny
from torch import Tensor

from smolcluster.comm.elastic.membership.mailbox import Mailbox
from smolcluster.comm.elastic.membership.roster import Member, Roster
from smolcluster.comm.elastic.transport.api import Link
from smolcluster.comm.elastic.transport.messages import Kind, Message, Peer
from smolcluster.compute.optim import make_optimizer
from smolcluster.compute.replica import Replica
from smolcluster.config.schema import TrainingConfig
from smolcluster.data.leases import Leases
from smolcluster.engine.elastic.coordination import coordinator, evictions
from smolcluster.engine.elastic.coordination.coordinator import Coordinator
from smolcluster.parallel.shards import owners
from smolcluster.strategies.base import Commit, Context, ServerContext, State

STEPS = 10
DONE = {"mine": "1.0", "held": "1.0", "loss": "1.0", "compute_s": 0.1, "fixed_s": 0.0}
NAMES = [name for name, _ in Tiny(config=None).model().named_parameters()]  # type: ignore[arg-type]
SIZES = [p.numel() for p in Tiny(config=None).model().parameters()]  # type: ignore[arg-type]


class FakeLink:
    """Keeps what is sent."""

    open, silent_s, stalled, queued_bytes = True, 0.0, False, 0

    def __init__(self, rank: int, instance: str = "") -> None:
        self.peer = Peer(role="worker", rank=rank, host="testhost", instance=instance or f"{rank:016x}", run="run")
        self.sent: list[Message] = []

    def send(self, message: Message, **_: Any) -> None:
        self.sent.append(message)

    def close(self, reason: str) -> None:
        self.open = False

    def last(self, kind: Kind) -> Message:
        return [message for message in self.sent if message.kind is kind][-1]

    def count(self, kind: Kind) -> int:
        return sum(message.kind is kind for message in self.sent)


def member(rank: int, **fields: Any) -> Member:
    return Member(rank=rank, link=cast(Link, FakeLink(rank)), batch_size=4, **fields)


class Scripted(Coordinator):
    """Leases four samples at a time, and keeps what it loads in the run."""

    run: Run

    def load_state(self, state: State) -> None:
        self.run.loaded = state

    def copied_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"w/x": torch.zeros(1)}, {"updates": 0}

    def _batch_size(self, member: Member) -> int:
        return 4


def set_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time of the coordinator, which the test moves."""
    now = [1000.0]
    for module in (coordinator, evictions):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


class Run:
    """A coordinator whose events a test makes, one after the other."""

    def __init__(
        self,
        *,
        replicated: bool,
        committed: int = 0,
        has: bool = True,
        step_timeout_s: float | None = None,
        rounds_ahead: int = 1,
        local_steps: int = 1,
        quorum: float = 1.0,
        total_steps: int = STEPS,
    ) -> None:
        self.mailbox = Mailbox()
        self.warnings: list[str] = []
        self.saved: dict[int, State] = {}
        model = Tiny(config=None).model()  # type: ignore[arg-type]
        self.replica = Replica(
            model=model,
            loss=lambda *_: torch.zeros(()),
            optimizer=make_optimizer(model, TrainingConfig()),
            learning_rate=lambda _: 0.1,
            device=torch.device("cpu"),
        )
        roster = Roster(
            self.mailbox,
            plan={},
            admit=lambda link, meta: Member(
                rank=link.peer.rank,
                link=link,
                batch_size=4,
                address=meta.get("address", f"127.0.0.1:{1000 + link.peer.rank}"),
                said=meta,
            ),
            on_event=lambda *_: None,
            on_change=lambda *_: None,
            epoch=1,
        )
        server_context = ServerContext(
            roster=roster,
            leases=Leases(),
            expected=0,
            fresh=has,
            first_step=committed,
            record=lambda commit: self.commits.append(commit),
            committed=lambda report: None,
            wants=lambda step: True,
            arrived=lambda step: self.saved.setdefault(step, self.loaded),
        )
        context = SimpleNamespace(
            total_steps=total_steps,
            warn=self.warnings.append,
            stop_requested=lambda: False,
            server_context=server_context,
        )
        self.roster, self.server_context = roster, server_context
        self.links: dict[int, FakeLink] = {}
        self.commits: list[Commit] = []
        self.coordinator = Scripted(
            cast(Context, context),
            self.replica,
            rounds_ahead=rounds_ahead,
            local_steps=local_steps,
            replicated=replicated,
            step_timeout_s=step_timeout_s,
            quorum=quorum,
        )
        self.coordinator.run = self
        self.coordinator.restore()

    # What happens

    def join(self, *ranks: int, **said: Any) -> None:
        self.knock(*ranks, **said)
        self.go_on()

    def join_together(self, *ranks: int, updates: Sequence[int] = ()) -> None:
        """In one view. `updates`: the steps that each says it has applied."""
        for number, rank in enumerate(ranks):
            self.knock(rank, **({"updates": updates[number], "held": []} if updates else {}))
        while len(self.roster.newcomers) < len(ranks):
            self.roster.get(0)
        self.go_on()

    def knock(self, *ranks: int, **said: Any) -> None:
        for rank in ranks:
            self.links[rank] = FakeLink(rank, f"{len(self.links):08x}{rank:08x}")
            self.mailbox.linked(self._link(rank))
            self.hear(rank, Message(kind=Kind.JOIN, meta=said))

    def leave(self, rank: int) -> None:
        self.mailbox.unlinked(self._link(rank), "its connection closed")

    def hear(self, rank: int, message: Message) -> None:
        self.mailbox.received(self._link(rank), message)

    def commit(self, step: int, *, held: float = 1.0, others: float | None = None) -> None:
        """Everybody has the result of this step; `others`: what all but the first hold."""
        for place, rank in enumerate(self.roster.members):
            norm = held if place == 0 or others is None else others
            epoch = self.links[rank].last(Kind.VIEW).epoch
            self.hear(rank, Message(kind=Kind.DONE, step=step, epoch=epoch, meta=DONE | {"held": repr(norm)}))
        self.go_on()

    def go_on(self) -> None:
        """Until nothing is left to hear."""
        while True:
            before = self.mailbox._queue.qsize() + len(self.roster._news)
            self.coordinator._iterate()
            while self.coordinator._rounds and self.coordinator._agreed(self.coordinator._rounds[0]):
                self.coordinator._commit(self.coordinator._rounds[0])
            if not before and not self.coordinator._view_due:
                return

    def _link(self, rank: int) -> Link:
        return cast(Link, self.links[rank])

    # The state of a step, as a member of fsdp sends it

    def part(self, rank: int) -> dict[str, Tensor]:
        """Weights from the first, optimizer state from each owner, by the member's own view."""
        pull, view = self.links[rank].last(Kind.PULL), self.links[rank].last(Kind.VIEW)
        ranks = [member["rank"] for member in view.meta["view"]["members"]]
        own = [n for n, o in zip(NAMES, owners(SIZES, len(ranks)), strict=True) if o == ranks.index(rank)]
        state = {f"o/exp_avg/{name}": torch.zeros(1) for name in own}
        return state | ({"w/x": torch.zeros(1)} if pull.meta["first"] else {})

    def upload(self, rank: int, part: dict[str, Tensor], *, but: int = 0, epoch: int | None = None) -> None:
        """In answer to the last question; `but`: so many of the last tensors have not arrived yet."""
        pull = self.links[rank].last(Kind.PULL)
        for number, (name, tensor) in enumerate(part.items(), start=1):
            if number <= len(part) - but:
                meta = {"name": name, "last": number == len(part), "numbers": {"updates": pull.step}}
                at = pull.epoch if epoch is None else epoch
                self.hear(rank, Message(kind=Kind.STATE, step=pull.step, epoch=at, meta=meta, payload=tensor))
        self.go_on()

    def with_state(self) -> dict[int, set[str]]:
        """For each step that was saved, the parameters with optimizer state."""
        return {step: {key.split("/", 1)[1] for key in state.optimizer} for step, state in self.saved.items()}


# The results of rounds, for members that follow


def share(run: Run, *ranks: int, step: int, nbytes: int = 64) -> None:
    """These members send their share of a result."""
    for rank in ranks:
        part = torch.full((nbytes,), rank, dtype=torch.uint8)
        run.hear(rank, Message(kind=Kind.STATE, step=step, channel=rank, meta={"share": "more"}, payload=part))
        run.hear(rank, Message(kind=Kind.STATE, step=step, meta={"share": "last"}))
    run.go_on()


def sent_to(run: Run, rank: int, kind: Kind) -> list[tuple[int, int]]:
    return [(message.step, message.channel) for message in run.links[rank].sent if message.kind is kind]
