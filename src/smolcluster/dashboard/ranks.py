"""One rank of a run, from its rows and the history, and its state:

starting   expected, no row yet                           training   rows arrive
waiting    a server without workers, or a worker whose    silent     no row for longer than expected
           server has just restarted                      lost       its connection broke, or it was killed
left       it exited cleanly while the run continues      evicted    the server evicted it
finished   the run finished                               stopped    the run ended early, for another reason
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from smolcluster.dashboard.downsample import Curve, finite
from smolcluster.dashboard.links import ByteCounts
from smolcluster.dashboard.run_files import MAX_TEXT

RankState = Literal[
    "starting", "waiting", "training", "silent", "lost", "left", "evicted", "finished", "stopped"
]  # fmt: skip

FIELDS = (
    *("loss", "grad_norm", "tokens_per_s", "samples_per_s", "step_time_s", "compute_s", "comm_s", "wait_s"),
    *("staleness", "sent_per_s", "received_per_s"),
)
SILENT_S = 8.0  # a rank is silent after this time without a row, and at least SILENT_PAUSES expected intervals
SILENT_PAUSES = 4.0
RATE_S = 5.0  # window of bytes per second
MAX_SPANS = 50

# The reason of a worker that exits cleanly: comm.elastic.transport.api.LEFT, whose module imports torch.
LEFT_REASON = "it has left"


@dataclass(slots=True, eq=False)
class RankRecord:
    rank: int
    role: str = "worker"
    host: str = ""
    curve: Curve = field(default_factory=lambda: Curve(FIELDS))
    first: dict[str, Any] | None = None
    last: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # of its machine, from its rows
    sent: float = 0.0
    received: float = 0.0
    longest_pause_s: float = 0.0  # between two of its latest rows
    last_row_at: float = 0.0  # when its latest row arrived, in seconds since the first row of the run
    set_back_s: float = 0.0  # by how much its clock was set back
    member: Literal["", "joined", "left", "lost", "evicted", "waiting"] = ""  # from the history
    reason: str = ""
    losses: int = 0  # how often it was lost or evicted
    spans: list[list[float | None]] = field(default_factory=list)  # times of participation: from, to
    _counted: tuple[float, float] = (0.0, 0.0)  # byte counts of its latest row, since its process started
    _recent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=64))

    def pause_s(self, *, log_interval: int) -> float:
        """Return the expected pause between two rows, from its latest rows and the duration of its steps."""
        step_s = finite((self.last or {}).get("step_time_s")) or 0.0
        return max(self.longest_pause_s, step_s * log_interval)

    @property
    def name(self) -> str:
        return "server" if self.role == "server" else f"worker {self.rank}"

    def time_of(self, step: int, written: float) -> float:
        """Return the time of a row, corrected after the clock was set back: a later step must not have an earlier time.
        (An earlier step with an earlier time only arrived late.)"""
        if self.last is not None:
            if written >= self.last["time"]:
                self.set_back_s = 0.0
            elif step > self.last["step"] and written + self.set_back_s < self.last["time"]:
                self.set_back_s = self.last["time"] - written
        return written + self.set_back_s

    def record_arrival(self, time: float, *, elapsed: float) -> float:
        """Record a row. Return the seconds since the first row of the run, by this rank's clock or by `elapsed`."""
        if self.last is not None:
            elapsed = max(elapsed, self.last_row_at + time - self.last["time"])
        self.last_row_at = elapsed
        return elapsed

    def take(self, row: dict[str, Any], *, step: float | None, time: float, resumed: bool = False) -> dict[str, Any]:
        """Add a row to the curve. Return it with bytes per second and the time spent waiting.

        `resumed`: the run was resumed since the last row. `step`: the step of the run; None if not known yet: the caller adds
        the row to the curve later.
        """
        late = self.last is not None and time < self.last["time"]
        if not late:
            self._count(row, time)
            if self.last is not None and not (resumed or self._was_absent(self.last["time"], time)):
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

    def count(self) -> ByteCounts:
        """Return the bytes of all processes that had this rank, and per second over the last rows."""
        sent_per_s, received_per_s = self._rates()
        return ByteCounts(sent=self.sent, received=self.received, sent_per_s=sent_per_s, received_per_s=received_per_s)

    def _rates(self) -> tuple[float, float]:
        if len(self._recent) < 2:
            return 0.0, 0.0
        (t0, sent0, received0), (t1, sent1, received1) = self._recent[0], self._recent[-1]
        return ((sent1 - sent0) / (t1 - t0), (received1 - received0) / (t1 - t0)) if t1 > t0 else (0.0, 0.0)

    def mark_joined(self, time: float) -> None:
        self.member, self.reason = "joined", ""
        self.end_span(time)
        self.spans = [*self.spans[-MAX_SPANS + 1 :], [time, None]]

    def mark_absent(self, how: Literal["left", "lost", "evicted", "waiting"], time: float, reason: str) -> None:
        self.member, self.reason = how, reason[:MAX_TEXT]
        self.losses += how in ("lost", "evicted")
        self._recent.clear()
        self.end_span(time)

    @property
    def absent_since(self) -> float | None:
        """The time when its last participation ended."""
        return self.spans[-1][1] if self.spans else None

    def _was_absent(self, since: float, until: float) -> bool:
        return any(to is not None and since <= to <= until for _, to in self.spans)

    def end_span(self, time: float) -> None:
        if self.spans and self.spans[-1][1] is None:
            self.spans[-1][1] = time

    def _count(self, row: Mapping[str, Any], time: float) -> None:
        """Add the bytes since the last row. The counts of a restarted process begin at zero."""
        now = (finite(row.get("bytes_sent")) or 0.0, finite(row.get("bytes_received")) or 0.0)
        restarted = now[0] < self._counted[0] or now[1] < self._counted[1]
        before = (0.0, 0.0) if restarted else self._counted
        self.sent += now[0] - before[0]
        self.received += now[1] - before[1]
        self._counted = now
        if restarted:
            self._recent.clear()
        self._recent.append((time, self.sent, self.received))
        while len(self._recent) > 2 and time - self._recent[1][0] >= RATE_S:
            self._recent.popleft()


def waiting_s(row: Mapping[str, Any]) -> float | None:
    """Return the time of a step that is neither compute nor communication: waiting for data, for others, for the next lease."""
    step_s, compute_s, comm_s = map(finite, map(row.get, ("step_time_s", "compute_s", "comm_s")))
    if step_s is None or compute_s is None or comm_s is None:
        return None
    return max(0.0, step_s - compute_s - comm_s)


def state_of(
    record: RankRecord, *, status: str, age_s: float, log_interval: int = 1, alone: bool = False, named: bool = False
) -> RankState:
    """Return the state of a rank, from the `status` of the run and the `age_s` of its last row. It writes a row every
    `log_interval` steps. `alone`: a server without workers. `named`: the error of the run names this rank."""
    if status == "finished":
        return "lost" if record.member == "lost" else "evicted" if record.member == "evicted" else "finished"
    if status in ("failed", "interrupted"):
        if named or (status == "failed" and record.member == "lost"):
            return "lost"
        return "evicted" if record.member == "evicted" else "stopped"
    if record.member in ("left", "lost", "evicted", "waiting"):
        return record.member
    if record.last is None:
        return "starting"
    if age_s > max(SILENT_S, SILENT_PAUSES * record.pause_s(log_interval=log_interval)):
        return "waiting" if alone and status == "training" else "silent"
    return "training"


def known_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the valid facts of a machine in a row: short texts and finite numbers, by the names of `observe.machine`."""
    texts = {
        name: str(facts[name])[:MAX_TEXT] for name in ("device", "device_name") if isinstance(facts.get(name), str)
    }
    numbers = {
        name: number
        for name in (
            *("cores", "load", "memory_used_bytes", "memory_total_bytes", "temperature_c"),
            *("device_memory_used_bytes", "device_memory_total_bytes", "device_temperature_c"),
        )
        if (number := finite(facts.get(name))) is not None
    }
    return texts | numbers
