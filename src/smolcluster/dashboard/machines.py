"""One process of a run, as its rows and the history tell of it, and the state it is in.

starting   expected, and no row of it yet                 training   its rows come
waiting    a server without workers, or a worker whose    silent     no row for long, and no reason known
           server has just come back                      lost       its connection broke, or it was killed
left       it said good-bye while the run goes on         evicted    the server put it out
finished   the run came to its end                        stopped    the run ended before, for another reason
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from smolcluster.dashboard.links import Count
from smolcluster.dashboard.thin import Curve, finite

State = Literal[
    "starting", "waiting", "training", "silent", "lost", "left", "evicted", "finished", "stopped"
]  # fmt: skip

FIELDS = (
    *("loss", "grad_norm", "tokens_per_s", "samples_per_s", "step_time_s", "compute_s", "comm_s", "wait_s"),
    *("staleness", "sent_per_s", "received_per_s"),
)
SILENT_S = 8.0  # without a row, and at least so many of its own pauses between rows
SILENT_PAUSES = 4.0
RATE_S = 5.0  # over which bytes per second are taken
MOST_SPANS = 50
MOST_TEXT = 120

# The reason that a worker gives when it leaves in good order (comm.elastic.transport.LEFT, which would bring torch with it).
GOOD_BYE = "it has left"


@dataclass(slots=True, eq=False)
class Machine:
    rank: int
    role: str = "worker"
    host: str = ""
    curve: Curve = field(default_factory=lambda: Curve(FIELDS))
    first: dict[str, Any] | None = None
    last: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # of the machine, as its rows tell them
    sent: float = 0.0
    received: float = 0.0
    longest_pause_s: float = 0.0  # between two of its latest rows
    heard_at: float = 0.0  # when its latest row came, as the reader counts the time that has passed
    set_back_s: float = 0.0  # by how much its clock was set back, and so goes on from where it was
    member: Literal["", "joined", "left", "lost", "evicted", "waiting"] = ""  # as the history has it
    reason: str = ""
    losses: int = 0  # how often it was lost or put out
    spans: list[list[float | None]] = field(default_factory=list)  # when it took part: from, to
    _counted: tuple[float, float] = (0.0, 0.0)  # the counts of its latest row, since its process began
    _recent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=64))

    def pause_s(self, *, log_interval: int) -> float:
        """How long to expect between two of its rows: by its latest rows, and by the time of its steps."""
        step_s = finite((self.last or {}).get("step_time_s")) or 0.0
        return max(self.longest_pause_s, step_s * log_interval)

    @property
    def name(self) -> str:
        return "server" if self.role == "server" else f"worker {self.rank}"

    def time_of(self, step: int, said: float) -> float:
        """The time of a row. Where the clock of a machine is set back, later steps have earlier times: they go on from the
        last. (An earlier step with an earlier time is only late.)"""
        if self.last is not None:
            if said >= self.last["time"]:
                self.set_back_s = 0.0
            elif step > self.last["step"] and said + self.set_back_s < self.last["time"]:
                self.set_back_s = self.last["time"] - said
        return said + self.set_back_s

    def heard(self, time: float, *, passed: float) -> float:
        """A row has come. How much time has passed by now, as this machine has it or as the others do."""
        if self.last is not None:
            passed = max(passed, self.heard_at + time - self.last["time"])
        self.heard_at = passed
        return passed

    def take(self, row: dict[str, Any], *, step: float | None, time: float, resumed: bool = False) -> dict[str, Any]:
        """Take a row of this rank and add it to the curve. Returns it with what follows from it: bytes per second, time spent
        waiting. `resumed`: the run was, since its last row. `step`: of the run; None: not known yet, the curve comes later."""
        late = self.last is not None and time < self.last["time"]
        if not late:
            self._count(row, time)
            if self.last is not None and not (resumed or self._was_gone(self.last["time"], time)):
                self.longest_pause_s = max(0.9 * self.longest_pause_s, time - self.last["time"])
            self.first = self.first or row
            self.last = row
            if isinstance(row.get("machine"), dict):
                self.facts = known_facts(row["machine"])
        sent_per_s, received_per_s = self._rates()
        derived = row | {"wait_s": waiting_s(row), "sent_per_s": sent_per_s, "received_per_s": received_per_s}
        if step is not None:
            self.curve.add(derived, step=step, time=time)
        return derived

    def count(self) -> Count:
        """Bytes in all, over every process that this seat has had; and per second, over the last rows."""
        sent_per_s, received_per_s = self._rates()
        return Count(sent=self.sent, received=self.received, sent_per_s=sent_per_s, received_per_s=received_per_s)

    def _rates(self) -> tuple[float, float]:
        if len(self._recent) < 2:
            return 0.0, 0.0
        (t0, sent0, received0), (t1, sent1, received1) = self._recent[0], self._recent[-1]
        return ((sent1 - sent0) / (t1 - t0), (received1 - received0) / (t1 - t0)) if t1 > t0 else (0.0, 0.0)

    def joined(self, time: float) -> None:
        self.member, self.reason = "joined", ""
        self.end_span(time)
        self.spans = [*self.spans[-MOST_SPANS + 1 :], [time, None]]

    def gone(self, how: Literal["left", "lost", "evicted", "waiting"], time: float, reason: str) -> None:
        self.member, self.reason = how, reason[:MOST_TEXT]
        self.losses += how in ("lost", "evicted")
        self._recent.clear()
        self.end_span(time)

    @property
    def gone_since(self) -> float | None:
        """When it was last here, where it has been gone since."""
        return self.spans[-1][1] if self.spans else None

    def _was_gone(self, since: float, until: float) -> bool:
        return any(to is not None and since <= to <= until for _, to in self.spans)

    def end_span(self, time: float) -> None:
        if self.spans and self.spans[-1][1] is None:
            self.spans[-1][1] = time

    def _count(self, row: Mapping[str, Any], time: float) -> None:
        """Counts begin at zero when a process is started again in this seat."""
        now = (finite(row.get("bytes_sent")) or 0.0, finite(row.get("bytes_received")) or 0.0)
        begun_again = now[0] < self._counted[0] or now[1] < self._counted[1]
        before = (0.0, 0.0) if begun_again else self._counted
        self.sent += now[0] - before[0]
        self.received += now[1] - before[1]
        self._counted = now
        if begun_again:
            self._recent.clear()
        self._recent.append((time, self.sent, self.received))
        while len(self._recent) > 2 and time - self._recent[1][0] >= RATE_S:
            self._recent.popleft()


def waiting_s(row: Mapping[str, Any]) -> float | None:
    """What is left of a step beside computing and communicating: for data, for others, for the next lease."""
    step_s, compute_s, comm_s = map(finite, map(row.get, ("step_time_s", "compute_s", "comm_s")))
    if step_s is None or compute_s is None or comm_s is None:
        return None
    return max(0.0, step_s - compute_s - comm_s)


def state_of(
    machine: Machine, *, status: str, age_s: float, log_interval: int = 1, alone: bool = False, named: bool = False
) -> State:
    """`status` of the run, `age_s` since the last row of this rank, which writes one every `log_interval` steps, `alone`: a
    server without workers, `named`: what the run failed of names this rank."""
    if status == "finished":
        return "lost" if machine.member == "lost" else "evicted" if machine.member == "evicted" else "finished"
    if status in ("failed", "interrupted"):
        if named or (status == "failed" and machine.member == "lost"):
            return "lost"
        return "evicted" if machine.member == "evicted" else "stopped"
    if machine.member in ("left", "lost", "evicted", "waiting"):
        return machine.member
    if machine.last is None:
        return "starting"
    if age_s > max(SILENT_S, SILENT_PAUSES * machine.pause_s(log_interval=log_interval)):
        return "waiting" if alone and status == "training" else "silent"
    return "training"


def known_facts(said: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a machine from a row: short texts and numbers that can be drawn, of the names that `observe.machine` gives."""
    texts = {name: str(said[name])[:MOST_TEXT] for name in ("device", "device_name") if isinstance(said.get(name), str)}
    numbers = {
        name: number
        for name in (
            *("cores", "load", "memory_used_bytes", "memory_total_bytes", "temperature_c"),
            *("device_memory_used_bytes", "device_memory_total_bytes", "device_temperature_c"),
        )
        if (number := finite(said.get(name))) is not None
    }
    return texts | numbers
