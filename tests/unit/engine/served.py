"""A parameter server and its workers without sockets: members that do what a script says."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.engine.members import member

from smolcluster.comm.elastic.membership.roster import Member, MemberGone, MemberMessage
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.compute.precision import AgreedScale
from smolcluster.compute.replica import Replica
from smolcluster.data.leases import Leases
from smolcluster.engine.elastic.parameter_server.asynchronous import AsynchronousServer
from smolcluster.engine.elastic.parameter_server.pushed_rounds import PushedRounds
from smolcluster.engine.elastic.parameter_server.synchronous import SynchronousServer
from smolcluster.strategies.base.replicated import Pushing, Replicated

Event = Callable[[], MemberMessage | MemberGone | None]


class Roster:
    """Members that do what a script says."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.newcomers: list[Member] = []
        self.refused: Counter[str] = Counter()
        self.evicted: list[str] = []
        self.epoch = 0
        self.patience_s = 0.0
        self.script: list[Event] = []

    def in_order(self) -> list[Member]:
        return [self.members[rank] for rank in sorted(self.members)]

    def welcome(self, member: Member) -> None:
        self.newcomers.remove(member)
        self.members[member.rank] = member
        self.renew(member)

    def renew(self, member: Member) -> None:
        self.epoch += 1
        member.epoch = self.epoch

    def evict(self, member: Member, reason: str) -> None:
        self.evicted.append(reason)
        self.script.insert(0, lambda: self.gone(member))

    def gone(self, member: Member, *, back: Member | None = None) -> MemberGone:
        del self.members[member.rank]
        self.epoch += 1
        self.newcomers += [back] if back is not None else []
        return MemberGone(member, "silent")

    def expect(self, *_: Any) -> None: ...
    def release(self, _: Any) -> None: ...

    def get(self, _: float | None = None) -> MemberMessage | MemberGone | None:
        return self.script.pop(0)() if self.script else None


class Server:
    """The server of a strategy, with a model of three numbers, and no sockets."""

    def __init__(
        self, strategy: type[Pushing[Any]], options: Any, monkeypatch: pytest.MonkeyPatch, model: Any = None
    ) -> None:
        self.roster, self.leases, self.warned = Roster(), Leases(), []  # type: ignore[var-annotated]
        self.model = model or torch.nn.Linear(2, 1)
        replica = Replica(
            model=self.model,
            loss=None,  # type: ignore[arg-type]
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1),
            learning_rate=lambda _: 0.1,
            device=torch.device("cpu"),
        )
        server_context = SimpleNamespace(
            scale=AgreedScale(),
            roster=self.roster,
            leases=self.leases,
            record=lambda _: None,
            committed=lambda _: None,
            count=lambda _: None,
            counted={},
        )
        context: Any = SimpleNamespace(
            server_context=server_context,
            server_link=None,
            stop_requested=lambda: not self.roster.script,
            warn=self.warned.append,
            config=SimpleNamespace(training=SimpleNamespace(grad_accumulation=1)),
            total_steps=10,
        )
        monkeypatch.setattr(Replicated, "setup", lambda *_: None)
        trained = strategy(options, context)
        trained.replica = replica
        role = SynchronousServer if trained.combined == "server" else AsynchronousServer
        self.role: Any = role(context, trained)

    def join(self, *ranks: int) -> list[Member]:
        members = [member(rank) for rank in ranks]
        self.roster.newcomers += members
        self.role._welcome()
        return members

    def push(self, who: Member, value: float, *, step: int = 1, epoch: int | None = None, **meta: Any) -> MemberMessage:
        gradient = {name: torch.full_like(p, value) for name, p in self.model.named_parameters()}
        _, payload = next(self.role._gradients.encode(gradient))
        said = {"samples": 4, "loss": "1.0", **meta}
        epoch = who.epoch if epoch is None else epoch
        return MemberMessage(
            who, Message(kind=Kind.PUSH, step=step, channel=0, epoch=epoch, meta=said, payload=payload)
        )


class Worker:
    """A worker of a strategy, with a model of three numbers and a link to a server that sends what a script says."""

    def __init__(self, strategy: type[Pushing[Any]], options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[dict[str, Any]] = []
        self.script: list[Message] = []
        self.leases: deque[Any] = deque()
        model = torch.nn.Linear(2, 1)
        replica = Replica(
            model=model,
            loss=lambda model, part: model(part).square().mean(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            learning_rate=lambda _: 0.1,
            device=torch.device("cpu"),
        )
        context: Any = SimpleNamespace(
            server_context=None,
            server_link=self,
            device=torch.device("cpu"),
            seat=SimpleNamespace(rank=0),
            stale_rejected=0,
        )
        context.open_rounds = PushedRounds
        monkeypatch.setattr(Replicated, "setup", lambda *_: None)
        self.strategy: Any = strategy(options, context)
        self.strategy.replica = replica
        self.strategy.setup(None)

    def send(self, kind: Kind, **fields: Any) -> None:
        self.sent.append({"kind": kind, **fields})

    def get(self, _: float | None = None) -> Message:
        return self.script.pop(0)

    def expect(self, *_: Any) -> None: ...
    def allow(self, *_: Any, **__: Any) -> None: ...
    def release(self, _: Any) -> None: ...

    def pushed(self) -> list[bytes]:
        return [m["payload"].numpy().tobytes() for m in self.sent if m["kind"] is Kind.PUSH]


def adamw(edp: Server) -> Server:
    edp.role.replica.optimizer = torch.optim.AdamW(edp.model.parameters(), lr=0.1)
    return edp


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic
