"""Read a run from the files of its directory: while it trains, after it has ended, and again from the start when it is resumed.

    config.yaml      the configuration            history.jsonl    members that joined, left, were evicted (elastic plane)
    metrics.jsonl    the rows of every rank       checkpoints/     saved checkpoints
    summary.json     the outcome                  logs/            warnings and errors

`poll` reads new data and is cheap if there is none. The state has a bounded size, however long the run is; `snapshot_stream`
turns it into plain values. Nothing is written, and invalid lines are skipped.
"""

from __future__ import annotations

import dataclasses
import math
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from smolcluster.dashboard.downsample import finite, limit_for, moment
from smolcluster.dashboard.follow import LineFollower, lstat, read_file, read_start
from smolcluster.dashboard.ranks import LEFT_REASON, RankRecord
from smolcluster.dashboard.run_curve import RunCurve, WorkerMeans, is_alive
from smolcluster.dashboard.run_files import (
    MAX_TEXT,
    flat_config,
    list_checkpoints,
    log_names,
    parse_count,
    parse_time,
    process_of_log,
    truncated,
)
from smolcluster.dashboard.step_times import StepTimes
from smolcluster.observe.jsonl import json_object
from smolcluster.observe.run_state import counts_own_steps

MAX_RANKS = 1024
MAX_EVENTS = 400
MAX_WAITING = 1000  # rows of workers waiting for a row of the server
LOG_TAIL_BYTES = 256 << 10  # of a log, searched for warnings when a run is opened
QUIET_S = 30.0  # after this time without a write, a run without a summary is silent
COPIED_S = 60.0  # a summary file newer than the end of the run by more was copied
SAME_DEATH_S = 30.0  # between the server's and the launcher's record of one death
ROSTER = b'"logger": "smolcluster.comm.elastic.membership.roster"'
_DIED = re.compile(r"(?P<who>worker (?P<rank>\d{1,4})|the server) died \((?P<how>[^()]{1,200})\)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event on the time line."""

    time: float
    kind: str  # begin, join, leave, lost, evict, checkpoint, warning, error, end
    text: str
    rank: int | None = None
    step: int | None = None


class RunReader:
    """Reads one run. `now` is the clock of this machine. `last_bytes`: of long files read only this much of the end, which is
    enough for the state of the run."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time, last_bytes: int | None = None) -> None:
        self.path, self.now, self._last_bytes = path, now, last_bytes
        self.host = socket.gethostname()
        self.local_facts: dict[str, Any] = {}  # of this machine, for rows that have none
        self.beginnings = 0  # how many times the run was read from its start
        self._begin()

    def _begin(self) -> None:
        self.ranks: dict[int, RankRecord] = {}
        self.run_curve = RunCurve()
        self.workers = WorkerMeans()
        self.events: deque[RunEvent] = deque(maxlen=MAX_EVENTS)
        self.num_events = 0
        self.config: dict[str, str] = {}
        self.summary: dict[str, Any] = {}
        self.checkpoints: list[dict[str, Any]] = []
        self.last_row_time: float | None = None
        self._recorded: float | None = None  # the latest row of the rank that writes the summary, by its clock
        self._elapsed = 0.0  # seconds since the first row; clocks of two machines are never compared
        self.has_more = False  # there is more to read than one poll took
        self.beginnings += 1
        self.first_time: float | None = None
        self._step_times = StepTimes()
        self._waiting: deque[tuple[RankRecord, dict[str, Any]]] = deque()  # rows whose step of the run is not known yet
        self._diverged: set[int] = set()
        self._servers = 0
        self._deaths: dict[int, tuple[float, str]] = {}  # by rank: when and how its process died, from the launcher
        self._named_in_logs: dict[int, tuple[str, str]] = {}  # rank: role, host
        self._metrics = LineFollower(self.path / "metrics.jsonl", skip_to_last=self._last_bytes)
        self._history = LineFollower(self.path / "history.jsonl", skip_to_last=self._last_bytes)
        self._logs: dict[str, LineFollower] = {}
        self._stamps: dict[str, tuple[int, int, int] | None] = {}  # inode, size, modified in ns

    # Reading

    def poll(self) -> bool:
        """Read new data. Return True if there was any."""
        history, metrics = self._history.poll(), self._metrics.poll()
        if history.restarted or metrics.restarted:  # the run went back to an earlier step
            self._begin()
            history, metrics = self._history.poll(), self._metrics.poll()
        if self._last_bytes is not None and self.first_time is None:
            self._read_first_time()
        found = self._read_config() | self._read_logs()
        for line in history.lines:
            self._take_history(line)
        for line in metrics.lines:
            self._take_row(line)
        found |= self._read_checkpoints() | self._read_summary()
        self.has_more = history.more or metrics.more
        if not self.has_more and self.status() not in ("starting", "training", "silent"):
            self._draw_waiting(until=math.inf if self._step_times.known else -math.inf)
            self.run_curve.flush()
        return bool(found or history.lines or metrics.lines)

    def poll_to_the_end(self) -> None:
        self.poll()
        while self.has_more:
            self.poll()

    def _read_first_time(self) -> None:
        for follower in (self._history, self._metrics):
            row = json_object(read_start(follower.path).partition(b"\n")[0]) or {}
            when = moment(row.get("time"))
            if when is not None:  # the history first: it has the server's clock, rows have the workers' clocks
                self.first_time = when
                return

    # Files that are replaced, not appended to

    def _changed(self, name: str) -> bool:
        """Return True if this file or folder differs from the last call."""
        found = lstat(self.path / name)
        stamp = None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)
        changed = name not in self._stamps or self._stamps[name] != stamp
        self._stamps[name] = stamp
        return changed

    def _read_config(self) -> bool:
        if not self._changed("config.yaml"):
            return False
        raw = read_file(self.path / "config.yaml", max_bytes=1 << 20)
        self.config = flat_config(raw or b"")
        return True

    def _read_summary(self) -> bool:
        if not self._changed("summary.json"):
            return False
        raw = read_file(self.path / "summary.json", max_bytes=1 << 20)
        before, self.summary = self.summary, json_object(raw or b"") or {}
        if self.summary and self.summary != before and self.ended:  # the same summary may be written again
            status, error = str(self.summary.get("status", "")), str(self.summary.get("error", ""))
            text = f"{status}: {error}" if error else status
            when = moment(self.summary.get("finished")) or self.now()
            self._add_event(RunEvent(time=when, kind="error" if status == "failed" else "end", text=truncated(text)))
        return True

    def _read_checkpoints(self) -> bool:
        if not self._changed("checkpoints"):
            return False
        self.checkpoints = list_checkpoints(self.path / "checkpoints")
        return True

    # Rows

    def _take_row(self, line: bytes) -> None:
        row = json_object(line)
        if row is None:
            return
        step, rank = finite(row.get("step")), row.get("rank", 0)
        if step is None or not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            return
        record = self._rank(rank)
        if record is None:
            return
        row["step"], row["rank"] = int(step), rank
        written = moment(row.get("time")) or self.now()
        row["time"] = when = record.time_of(row["step"], written)
        record.role = "server" if row.get("role") == "server" else "worker"
        record.host = str(row.get("host", ""))[:MAX_TEXT]
        if not record.spans:
            record.spans = [[when, None]]
        self.last_row_time = max(when, self.last_row_time or when)
        if record.role == "server" or self._history.modified is None:  # by the clock of the run
            self.first_time = min(when, self.first_time or when)
        if record.role == "server" or (rank == 0 and not self.run_curve.served):
            self._recorded = written
        self._elapsed = record.record_arrival(when, elapsed=self._elapsed)
        config = self._stamps.get("config.yaml")
        resumed = record.last is not None and config is not None and record.last["time"] < config[2] / 1e9 < when
        self._notice_divergence(row)
        if record.role == "server":
            self._step_times.add(when, int(step))
            record.take(row, step=step, time=when, resumed=resumed)
            self._draw_waiting(until=when)
        elif counts_own_steps(self.strategy):
            self._waiting.append((record, record.take(row, step=None, time=when, resumed=resumed)))
            self._draw_waiting(until=-math.inf)
        else:
            self._draw_worker(record, record.take(row, step=step, time=when, resumed=resumed), step)
        self.run_curve.add(row, num_workers=self.num_workers, pause_s=record.longest_pause_s)

    def _draw_waiting(self, *, until: float) -> None:
        """Add to the curves the rows, up to the time `until`, of workers with local step counts, once the server's rows give
        the step of the run. At most MAX_WAITING rows wait: clocks may differ."""
        waiting, self._waiting = self._waiting, deque()
        too_many = len(waiting) - MAX_WAITING
        for index, (record, row) in enumerate(waiting):
            if row["time"] <= until or index < too_many:
                step = float(row["step"])
                if self._step_times.known:
                    step = self._step_times.step_at(row["time"], rank=record.rank, last=self.total_steps)
                record.curve.add(row, step=step, time=row["time"])
                self._draw_worker(record, row, step)
            else:
                self._waiting.append((record, row))

    def _draw_worker(self, record: RankRecord, row: dict[str, Any], step: float) -> None:
        """Add a row to the means over the workers."""

        def alive(rank: int) -> bool:
            other = self.ranks[rank]
            pause_s = max(record.longest_pause_s, other.longest_pause_s)
            return is_alive(self._elapsed - other.last_row_at, pause_s=pause_s)

        self.workers.add(row, step=step, alive=alive)

    def _notice_divergence(self, row: Mapping[str, Any]) -> None:
        rank, loss = row["rank"], row.get("loss")
        if finite(loss) is not None:
            self._diverged.discard(rank)
        elif loss is not None and rank not in self._diverged:
            self._diverged.add(rank)
            name = self.ranks[rank].name
            text = truncated(f"the loss of {name} is {loss} at step {row['step']}")
            self._add_event(RunEvent(time=row["time"], kind="warning", text=text, rank=rank, step=row["step"]))

    def _rank(self, rank: int) -> RankRecord | None:
        record = self.ranks.get(rank)
        if record is None and len(self.ranks) < MAX_RANKS:
            record = self.ranks[rank] = RankRecord(rank)
            limit = limit_for(len(self.ranks))
            for each in self.ranks.values():
                each.curve.set_limit(limit)
        return record

    # The history of an elastic run

    def _take_history(self, line: bytes) -> None:
        if b'"kind": "commit"' in line:  # most lines; membership is in the others
            return
        fields = json_object(line)
        if fields is None:
            return
        when = moment(fields.get("time")) or self.now()
        self.first_time = min(when, self.first_time or when)
        if fields.get("kind") == "begin":
            self._servers += 1
            restarted = self._servers > 1
            step = finite(fields.get("next_step"))
            text = f"the server is back, at step {int(step or 1) - 1}" if restarted else "the server began"
            self._add_event(RunEvent(time=when, kind="begin", text=truncated(text)))
            for record in self.ranks.values():
                if record.member == "joined":
                    record.mark_absent("waiting", when, "the server is back")
        elif fields.get("kind") == "member":
            rank = fields.get("rank")
            known = self._rank(rank) if isinstance(rank, int) and not isinstance(rank, bool) else None
            if known is not None:
                self._take_member(known, str(fields.get("event", "")), when, str(fields.get("reason", "")))

    def _take_member(self, record: RankRecord, event: str, when: float, reason: str) -> None:
        match event:
            case "joined":
                since = record.absent_since
                killed = f"; {record.reason}" if record.reason.startswith("killed") else ""
                rejoined = f"{record.name} is back" + ("" if since is None else f" after {when - since:.0f} s{killed}")
                text = rejoined if record.spans else f"{record.name} joined"
                record.mark_joined(when)
                kind = "join"
            case "left" if reason == LEFT_REASON:
                record.mark_absent("left", when, reason)
                kind, text = "leave", f"{record.name} has left"
            case "left":
                died, how = self._deaths.get(record.rank, (-math.inf, ""))
                record.mark_absent("lost", when, how if abs(when - died) < SAME_DEATH_S else reason)
                kind, text = "lost", f"{record.name} is gone: {reason}"
            case "evicted":
                record.mark_absent("evicted", when, reason)
                kind, text = "evict", f"{record.name} was evicted: {reason}"
            case "paused":
                record.mark_absent("waiting", when, reason)
                kind, text = "warning", f"{record.name} is paused: {reason}"
            case _:
                kind, text = "warning", f"{record.name} {event}: {reason}"
        self._add_event(RunEvent(time=when, kind=kind, text=truncated(text), rank=record.rank))

    # Logs: warnings and errors

    def _read_logs(self) -> bool:
        if self._changed("logs"):
            for name in log_names(self.path):
                if name not in self._logs:
                    path = self.path / "logs" / name
                    self._logs[name] = LineFollower(path, max_bytes=LOG_TAIL_BYTES, skip_to_last=LOG_TAIL_BYTES)
                    if (process := process_of_log(name)) is not None:
                        role, rank, host = process
                        self._named_in_logs[rank] = (role, host)
        found = False
        for name, follower in self._logs.items():
            result = follower.poll()
            found |= bool(result.lines)
            for line in result.lines:
                self._take_log_line(name, line)
        return found

    def _take_log_line(self, name: str, line: bytes) -> None:
        if name.startswith("launcher-"):
            self._take_launcher_line(line)
            return
        is_problem = b'"level": "INFO"' not in line and b'"level": "DEBUG"' not in line
        is_membership = b" is gone: " in line or b" is paused: " in line
        if is_problem and is_membership and ROSTER in line and self._history.modified:
            return  # also in the history
        starts = b"starts as process" in line
        if not (is_problem or starts):
            return
        fields = json_object(line)
        if fields is None or "message" not in fields:
            return
        when, rank = parse_time(fields.get("time")) or self.now(), fields.get("rank")
        rank = rank if isinstance(rank, int) and fields.get("role") != "server" else None
        if is_problem:
            kind = "warning" if fields.get("level") == "WARNING" else "error"
            who = "" if rank is None else f"worker {rank}: "
            self._add_event(RunEvent(time=when, kind=kind, text=truncated(who + str(fields["message"])), rank=rank))
        elif not self._history.modified and isinstance(fields.get("rank"), int):
            self._add_event(RunEvent(time=when, kind="join", text=f"worker {fields['rank']} started", rank=rank))

    def _take_launcher_line(self, line: bytes) -> None:
        """Record the cause of a process's death: its peers only see a broken connection."""
        fields = json_object(line) or {}
        died = _DIED.match(str(fields.get("message", "")))
        if died is None:
            return
        rank = None if died["rank"] is None else int(died["rank"])
        how = re.sub(r"^killed by (\w+)$", r"killed (\1)", died["how"])
        when = parse_time(fields.get("time")) or self.now()
        if rank is not None:
            self._deaths[rank] = (when, how)
            record = self.ranks.get(rank)
            if record is not None and record.member == "lost":
                record.reason = how[:MAX_TEXT]
        self._add_event(RunEvent(time=when, kind="lost", text=truncated(f"{died['who']}: {how}"), rank=rank))

    def events_by_time(self) -> list[RunEvent]:
        """Return all events. A checkpoint is an event until it is removed."""
        saved = [RunEvent(time=c["time"], kind="checkpoint", text=c["text"], step=c["step"]) for c in self.checkpoints]
        return sorted([*self.events, *saved], key=lambda event: event.time)

    def _add_event(self, event: RunEvent) -> None:
        self.events.append(event)
        self.num_events += 1

    # State

    @property
    def strategy(self) -> str:
        return str(self.summary.get("strategy") or self.config.get("strategy.name", ""))

    @property
    def num_workers(self) -> int | None:
        return parse_count(self.config.get("cluster.num_workers", ""))

    @property
    def total_steps(self) -> int | None:
        return parse_count(self.config.get("training.steps", ""))

    @property
    def log_interval(self) -> int:
        """Steps between two rows of a rank."""
        return parse_count(self.config.get("logging.log_interval", "")) or 1

    @property
    def started(self) -> float | None:
        """The time when the configuration was written: data is loaded before the first row. Of a resumed run, the first row."""
        config = self._stamps.get("config.yaml")
        if self.first_time is None or config is None:
            return self.first_time
        return min(self.first_time, config[2] / 1e9)

    @property
    def ended(self) -> bool:
        """True if the summary is of this attempt: a resumed run has the summary of the previous attempt."""
        if not self.summary:
            return False
        summary, config = self._stamps.get("summary.json"), self._stamps.get("config.yaml")
        finished = moment(self.summary.get("finished"))
        copied = finished is not None and summary is not None and abs(summary[2] / 1e9 - finished) > COPIED_S
        if summary and config and config[2] > summary[2] and not copied:  # a resume rewrites the configuration
            return False
        return finished is None or self._recorded is None or self._recorded <= finished + 2.0

    @property
    def finished(self) -> float | None:
        """The time when the run ended."""
        return moment(self.summary.get("finished")) if self.ended else None

    def status(self) -> str:
        """Return starting, training or silent; after the end: finished, failed or interrupted."""
        if self.ended:
            return str(self.summary.get("status") or "finished")[:40]
        quiet = self.quiet_s()
        if self.last_row_time is None:
            return "silent" if quiet > 4 * QUIET_S else "starting"
        interval = self.log_interval
        longest = max((record.pause_s(log_interval=interval) for record in self.ranks.values()), default=0.0)
        return "silent" if quiet > max(QUIET_S, 6 * longest) else "training"

    def quiet_s(self) -> float:
        """Return the seconds since the last write."""
        stamps = [f.modified for f in (self._metrics, self._history, *self._logs.values()) if f.modified is not None]
        config = self._stamps.get("config.yaml")
        stamps += [config[2] / 1e9] if config else []
        return self.now() - max(stamps) if stamps else 0.0

    def age_s(self, record: RankRecord) -> float:
        """Return the seconds since the last row of this rank. Clocks of machines are not compared: they may differ."""
        if record.last is None or self._metrics.modified is None:
            return 0.0
        return self.now() - self._metrics.modified + self._elapsed - record.last_row_at

    def all_ranks(self) -> list[RankRecord]:
        """Return all ranks, including expected ones without a row: workers in order, then the server."""
        named = dict(self._named_in_logs)
        for rank in range(min(self.num_workers or 0, MAX_RANKS)):
            named.setdefault(rank, ("worker", ""))
        for rank, (role, host) in named.items():
            if rank == -1:  # a server's log does not name its rank
                rank = self.num_workers if self.num_workers is not None else MAX_RANKS
                if any(m.role == "server" for m in self.ranks.values()):
                    continue
            record = self._rank(rank)
            if record is not None and record.last is None:
                record.role, record.host = role, record.host or host
        return sorted(self.ranks.values(), key=lambda record: (record.role == "server", record.rank))

    def log_bytes(self) -> int:
        """Return the total size of all logs: it changes with every new line."""
        return sum(filter(None, (follower.size for follower in self._logs.values())))
