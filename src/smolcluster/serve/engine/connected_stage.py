"""The front's state of one stage process: its offer, its assignment, and its recent work."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from smolcluster.comm.elastic.transport.api import Link
from smolcluster.serve.engine.wire import StageOffer

RECENT_S = 5.0  # window of `busy`


@dataclass(slots=True)
class ConnectedStage:
    link: Link
    offer: StageOffer | None = None  # None: not joined yet
    assignment: int = 0  # number of the latest
    layers: range | None = None  # of that assignment
    held: bool = False  # the layers are loaded
    room: int = 0  # tokens whose caches fit the remaining memory
    problem: str = ""
    failures: int = 0  # to load an assignment
    tokens: int = 0
    work: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=4096))  # time, and seconds computed

    @property
    def name(self) -> str:
        return self.offer.name if self.offer is not None else self.link.peer.host

    @property
    def state(self) -> str:
        if self.held:
            return "ready"
        return "failed" if self.problem else "spare" if self.layers is None else "loading"

    def to_json(self, now: float, *, sequences: int) -> dict[str, Any]:
        recent = [seconds for at, seconds in list(self.work) if at >= now - RECENT_S]
        return {
            "name": self.name,
            "device": self.offer.device if self.offer is not None else "",
            "tokens": self.tokens,
            "busy": round(min(1.0, sum(recent) / RECENT_S), 2),
            "sequences": sequences,
            "state": self.state,
        }
