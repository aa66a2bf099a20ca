"""A run, read from its directory alone: while it trains, after it has ended, and from the beginning again when it is resumed.

    config.yaml      what was asked for               history.jsonl    who joined, left, was put out (elastic plane)
    metrics.jsonl    the rows of every rank           checkpoints/     what was saved
    summary.json     how it ended                     logs/            warnings and errors

`poll` takes what is new and is cheap when nothing is. What is kept is of bounded size, however long the run is; `telling.py`
makes plain values of it. Nothing here writes, and no file is trusted: a line that is not what it should be is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import re
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from smolcluster.config.describe import hide_credentials
from smolcluster.dashboard.follow import LineFollower, News, lstat, read_start, read_whole
from smolcluster.dashboard.joining import Joined, is_here
from smolcluster.dashboard.machines import GOOD_BYE, MOST_TEXT, Machine
from smolcluster.dashboard.pace import Pace
from smolcluster.dashboard.thin import Curve, finite, limit_for, moment
from smolcluster.observe.board import counts_own_steps
from smolcluster.observe.jsonl import json_object

MOST_MACHINES = 1024
MOST_EVENTS = 400
MOST_LOGS = 256
LOG_TAIL_BYTES = 256 << 10  # of a log, looked through for warnings when a run is opened
QUIET_S = 30.0  # nothing written for so long, and no summary: the run is not training
COPIED_S = 60.0  # between the end of a run and the time of its summary: files of a copy tell when they were copied
ROSTER = b'"logger": "smolcluster.comm.elastic.membership.roster"'
_SECRET = re.compile(r"(?:^|_)(?:token|secret|password|passphrase|(?:api|access|private|secret)_?key)$", re.IGNORECASE)
SAME_DEATH_S = 30.0  # between what the server and what the launcher write of it
MOST_WAITING = 1000  # rows of workers for a row of the server
_DIED = re.compile(r"(?P<who>worker (?P<rank>\d{1,4})|the server) died \((?P<how>[^()]{1,200})\)")
MOST_BRACKETS = 5000  # of a configuration
_ADDRESS = re.compile(r"[a-z0-9+.-]{1,20}://[^\s\"',]+", re.IGNORECASE)

WORKER_FIELDS = ("step_time_s", "compute_s", "comm_s", "wait_s", "staleness", "sent_per_s", "received_per_s")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something on the time line."""

    time: float
    kind: str  # begin, join, leave, lost, evict, checkpoint, warning, error, end
    text: str
    rank: int | None = None
    step: int | None = None


class RunReader:
    """One run. `now` is the clock of this machine, for what has been silent. `last_bytes`: of long files only so much of the
    end is read, which is enough for how the run is doing."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time, last_bytes: int | None = None) -> None:
        self.path, self.now, self._last_bytes = path, now, last_bytes
        self.host = socket.gethostname()
        self.here: dict[str, Any] = {}  # facts of this machine, where its rows tell none
        self.beginnings = 0  # how often the run was read from its first line
        self._begin()

    def _begin(self) -> None:
        self.machines: dict[int, Machine] = {}
        self.joined = Joined()
        self.workers_curve = Curve(WORKER_FIELDS)
        self.workers_now: dict[str, float] = {}  # its last row: a point may stand for thousands
        self.events: deque[Happening] = deque(maxlen=MOST_EVENTS)
        self.num_events = 0
        self.config: dict[str, str] = {}
        self.summary: dict[str, Any] = {}
        self.checkpoints: list[dict[str, Any]] = []
        self.last_row_time: float | None = None
        self._recorded: float | None = None  # the latest row of the rank that writes the summary, by its clock
        self._passed = 0.0  # seconds since the first row, by the clock of one machine or another: no two are compared
        self.behind = False  # there is more to read than one poll took
        self.beginnings += 1
        self.first_time: float | None = None
        self._pace = Pace()
        self._waiting: deque[tuple[Machine, dict[str, Any]]] = deque()  # rows whose step of the run is not known yet
        self._latest: dict[int, dict[str, Any]] = {}  # derived rows of workers
        self._new_rows = self._num_running = 0
        self._diverged: set[int] = set()
        self._servers = 0
        self._deaths: dict[int, tuple[float, str]] = {}  # by rank: when and how its process ended, by the launcher
        self._named_in_logs: dict[int, tuple[str, str]] = {}  # rank: role, host
        self._metrics = LineFollower(self.path / "metrics.jsonl", skip_to_last=self._last_bytes)
        self._history = LineFollower(self.path / "history.jsonl", skip_to_last=self._last_bytes)
        self._logs: dict[str, LineFollower] = {}
        self._stamps: dict[str, tuple[int, int, int] | None] = {}  # inode, size, modified in ns

    # Reading

    def poll(self) -> bool:
        """Take what is new. True if there was anything."""
        history, metrics = self._history.poll(), self._metrics.poll()
        if history.restarted or metrics.restarted:  # the run went back to an earlier step: so do we
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
        self.behind = history.more or metrics.more
        if not self.behind and self.status() not in ("starting", "training", "silent"):
            self._draw_waiting(until=math.inf if self._pace.known else -math.inf)
            self.joined.flush()
        return bool(found or history.lines or metrics.lines)

    def poll_to_the_end(self) -> None:
        self.poll()
        while self.behind:
            self.poll()

    def _read_first_time(self) -> None:
        """Of the first lines, which are not read otherwise."""
        for follower in (self._history, self._metrics):
            row = json_object(read_start(follower.path).partition(b"\n")[0]) or {}
            when = moment(row.get("time"))
            if when is not None:  # the history is written by the clock of the run, rows by those of workers
                self.first_time = when
                return

    # Files that are written as a whole

    def _changed(self, name: str) -> bool:
        """Whether this file or folder is not as it was when it was last asked for."""
        found = lstat(self.path / name)
        stamp = None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)
        changed = name not in self._stamps or self._stamps[name] != stamp
        self._stamps[name] = stamp
        return changed

    def _read_config(self) -> bool:
        if not self._changed("config.yaml"):
            return False
        raw = read_whole(self.path / "config.yaml", most_bytes=1 << 20)
        self.config = flat_config(raw or b"")
        return True

    def _read_summary(self) -> bool:
        if not self._changed("summary.json"):
            return False
        raw = read_whole(self.path / "summary.json", most_bytes=1 << 20)
        before, self.summary = self.summary, json_object(raw or b"") or {}
        if self.summary and self.summary != before and self.ended:  # the same, written anew, is no news
            status, error = str(self.summary.get("status", "")), str(self.summary.get("error", ""))
            text = f"{status}: {error}" if error else status
            when = moment(self.summary.get("finished")) or self.now()
            self._tell(Happening(time=when, kind="error" if status == "failed" else "end", text=shortened(text)))
        return True

    def _read_checkpoints(self) -> bool:
        if not self._changed("checkpoints"):
            return False
        folder = self.path / "checkpoints"
        names: list[str] = []
        if not folder.is_symlink():
            with contextlib.suppress(OSError):
                names = sorted(entry.name for entry in os.scandir(folder) if _is_checkpoint(entry))[-100:]
        best = (read_whole(folder / "best", most_bytes=256) or b"").decode(errors="replace").strip()
        found = []
        for name in names:
            manifest = json_object(read_whole(folder / name / "manifest.json", most_bytes=4 << 20) or b"")
            if manifest is None:
                continue
            stat = lstat(folder / name)
            saved = 0.0 if stat is None else stat.st_mtime
            found.append(_checkpoint(name, manifest, saved=saved) | {"best": name == best})
        self.checkpoints = found
        return True

    # Rows

    def _take_row(self, line: bytes) -> None:
        row = json_object(line)
        if row is None:
            return
        step, rank = finite(row.get("step")), row.get("rank", 0)
        if step is None or not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            return
        machine = self._machine(rank)
        if machine is None:
            return
        row["step"], row["rank"] = int(step), rank
        said = moment(row.get("time")) or self.now()
        row["time"] = when = machine.time_of(row["step"], said)
        machine.role = "server" if row.get("role") == "server" else "worker"
        machine.host = str(row.get("host", ""))[:MOST_TEXT]
        if not machine.spans:
            machine.spans = [[when, None]]
        self.last_row_time = max(when, self.last_row_time or when)
        if machine.role == "server" or self._history.modified is None:  # by the clock of the run
            self.first_time = min(when, self.first_time or when)
        if machine.role == "server" or (rank == 0 and not self.joined.served):
            self._recorded = said
        self._passed = machine.heard(when, passed=self._passed)
        asked = self._stamps.get("config.yaml")
        resumed = machine.last is not None and asked is not None and machine.last["time"] < asked[2] / 1e9 < when
        self._notice_divergence(row)
        if machine.role == "server":
            self._pace.add(when, int(step))
            machine.take(row, step=step, time=when, resumed=resumed)
            self._draw_waiting(until=when)
        elif counts_own_steps(self.strategy):
            self._waiting.append((machine, machine.take(row, step=None, time=when, resumed=resumed)))
            self._draw_waiting(until=-math.inf)
        else:
            self._draw_worker(machine, machine.take(row, step=step, time=when, resumed=resumed), step)
        self.joined.add(row, num_workers=self.num_workers, pause_s=machine.longest_pause_s)

    def _draw_waiting(self, *, until: float) -> None:
        """Draw rows of workers that count steps of their own, once a row of the server shows which step the run was at. Not
        more than MOST_WAITING wait: clocks may differ."""
        waiting, self._waiting = self._waiting, deque()
        too_many = len(waiting) - MOST_WAITING
        for index, (machine, row) in enumerate(waiting):
            if row["time"] <= until or index < too_many:
                step = float(row["step"])
                if self._pace.known:
                    step = self._pace.step_at(row["time"], rank=machine.rank, last=self.total_steps)
                machine.curve.add(row, step=step, time=row["time"])
                self._draw_worker(machine, row, step)
            else:
                self._waiting.append((machine, row))

    def _draw_worker(self, machine: Machine, row: dict[str, Any], step: float) -> None:
        self._latest[machine.rank] = row
        self._take_workers(step, row["time"], pause_s=machine.longest_pause_s)

    def _take_workers(self, step: float, when: float, *, pause_s: float) -> None:
        """A point of the mean over the workers that are there, when about all of them have a new row."""
        self._new_rows += 1
        if self._new_rows < self._num_running:
            return
        rows = []
        for rank, row in self._latest.items():
            machine = self.machines[rank]
            if is_here(self._passed - machine.heard_at, pause_s=max(pause_s, machine.longest_pause_s)):
                rows.append(row)
        self._new_rows, self._num_running = 0, len(rows)
        mean = {
            name: statistics.fmean(found)
            for name in ("step_time_s", "compute_s", "comm_s", "wait_s", "staleness")
            if (found := [value for row in rows if (value := finite(row.get(name))) is not None])
        }
        total = {name: sum(finite(row.get(name)) or 0.0 for row in rows) for name in ("sent_per_s", "received_per_s")}
        self.workers_now = mean | total
        self.workers_curve.add(self.workers_now, step=step, time=when)

    def _notice_divergence(self, row: Mapping[str, Any]) -> None:
        rank, loss = row["rank"], row.get("loss")
        if finite(loss) is not None:
            self._diverged.discard(rank)
        elif loss is not None and rank not in self._diverged:
            self._diverged.add(rank)
            name = self.machines[rank].name
            text = shortened(f"the loss of {name} is {loss} at step {row['step']}")
            self._tell(Happening(time=row["time"], kind="warning", text=text, rank=rank, step=row["step"]))

    def _machine(self, rank: int) -> Machine | None:
        machine = self.machines.get(rank)
        if machine is None and len(self.machines) < MOST_MACHINES:
            machine = self.machines[rank] = Machine(rank)
            limit = limit_for(len(self.machines))
            for each in self.machines.values():
                each.curve.set_limit(limit)
        return machine

    # The history of an elastic run

    def _take_history(self, line: bytes) -> None:
        if b'"kind": "commit"' in line:  # most lines; members are in the others
            return
        fields = json_object(line)
        if fields is None:
            return
        when = moment(fields.get("time")) or self.now()
        self.first_time = min(when, self.first_time or when)
        if fields.get("kind") == "begin":
            self._servers += 1
            again = self._servers > 1
            step = finite(fields.get("next_step"))
            text = f"the server is back, at step {int(step or 1) - 1}" if again else "the server began"
            self._tell(Happening(time=when, kind="begin", text=shortened(text)))
            for machine in self.machines.values():
                if machine.member == "joined":
                    machine.gone("waiting", when, "the server is back")
        elif fields.get("kind") == "member":
            rank = fields.get("rank")
            known = self._machine(rank) if isinstance(rank, int) and not isinstance(rank, bool) else None
            if known is not None:
                self._take_member(known, str(fields.get("event", "")), when, str(fields.get("reason", "")))

    def _take_member(self, machine: Machine, event: str, when: float, reason: str) -> None:
        match event:
            case "joined":
                since = machine.gone_since
                killed = f"; {machine.reason}" if machine.reason.startswith("killed") else ""
                again = f"{machine.name} is back" + ("" if since is None else f" after {when - since:.0f} s{killed}")
                text = again if machine.spans else f"{machine.name} joined"
                machine.joined(when)
                kind = "join"
            case "left" if reason == GOOD_BYE:
                machine.gone("left", when, reason)
                kind, text = "leave", f"{machine.name} has left"
            case "left":
                died, how = self._deaths.get(machine.rank, (-math.inf, ""))
                machine.gone("lost", when, how if abs(when - died) < SAME_DEATH_S else reason)
                kind, text = "lost", f"{machine.name} is gone: {reason}"
            case "evicted":
                machine.gone("evicted", when, reason)
                kind, text = "evict", f"{machine.name} was put out: {reason}"
            case "paused":
                machine.gone("waiting", when, reason)
                kind, text = "warning", f"{machine.name} is paused: {reason}"
            case _:
                kind, text = "warning", f"{machine.name} {event}: {reason}"
        self._tell(Happening(time=when, kind=kind, text=shortened(text), rank=machine.rank))

    # Logs: only what a person should know

    def _read_logs(self) -> bool:
        if self._changed("logs"):
            for name in log_names(self.path):
                if name not in self._logs:
                    path = self.path / "logs" / name
                    self._logs[name] = LineFollower(path, most_bytes=LOG_TAIL_BYTES, skip_to_last=LOG_TAIL_BYTES)
                    if (seat := seat_of_log(name)) is not None:
                        self._named_in_logs[seat[1]] = (seat[0], seat[2])
        found = False
        for name, follower in self._logs.items():
            news: News = follower.poll()
            found |= bool(news.lines)
            for line in news.lines:
                self._take_log_line(name, line)
        return found

    def _take_log_line(self, name: str, line: bytes) -> None:
        if name.startswith("launcher-"):
            self._take_launcher_line(line)
            return
        trouble = b'"level": "INFO"' not in line and b'"level": "DEBUG"' not in line
        changed = b" is gone: " in line or b" is paused: " in line
        if trouble and changed and ROSTER in line and self._history.modified:
            return  # it is in the history too
        starts = b"starts as process" in line
        if not (trouble or starts):
            return
        fields = json_object(line)
        if fields is None or "message" not in fields:
            return
        when, rank = _timestamp(fields.get("time")) or self.now(), fields.get("rank")
        rank = rank if isinstance(rank, int) and fields.get("role") != "server" else None
        if trouble:
            kind = "warning" if fields.get("level") == "WARNING" else "error"
            who = "" if rank is None else f"worker {rank}: "
            self._tell(Happening(time=when, kind=kind, text=shortened(who + str(fields["message"])), rank=rank))
        elif not self._history.modified and isinstance(fields.get("rank"), int):
            self._tell(Happening(time=when, kind="join", text=f"worker {fields['rank']} started", rank=rank))

    def _take_launcher_line(self, line: bytes) -> None:
        """The launcher knows how a process died; its peers see a connection that broke."""
        fields = json_object(line) or {}
        died = _DIED.match(str(fields.get("message", "")))
        if died is None:
            return
        rank = None if died["rank"] is None else int(died["rank"])
        how = re.sub(r"^killed by (\w+)$", r"killed (\1)", died["how"])
        when = _timestamp(fields.get("time")) or self.now()
        if rank is not None:
            self._deaths[rank] = (when, how)
            machine = self.machines.get(rank)
            if machine is not None and machine.member == "lost":
                machine.reason = how[:MOST_TEXT]
        self._tell(Happening(time=when, kind="lost", text=shortened(f"{died['who']}: {how}"), rank=rank))

    def happenings(self) -> list[Happening]:
        """In the order of time. A checkpoint is one as long as it is kept: there is no record of those that were removed."""
        saved = [Happening(time=c["time"], kind="checkpoint", text=c["text"], step=c["step"]) for c in self.checkpoints]
        return sorted([*self.events, *saved], key=lambda event: event.time)

    def _tell(self, event: Happening) -> None:
        self.events.append(event)
        self.num_events += 1

    # What is known by now

    @property
    def strategy(self) -> str:
        return str(self.summary.get("strategy") or self.config.get("strategy.name", ""))

    @property
    def num_workers(self) -> int | None:
        return count_of(self.config.get("cluster.num_workers", ""))

    @property
    def total_steps(self) -> int | None:
        return count_of(self.config.get("training.steps", ""))

    @property
    def log_interval(self) -> int:
        """Steps between two rows."""
        return count_of(self.config.get("logging.log_interval", "")) or 1

    @property
    def started(self) -> float | None:
        """Data is loaded before the first row: when the configuration was written, unless that was for resuming."""
        asked = self._stamps.get("config.yaml")
        if self.first_time is None or asked is None:
            return self.first_time
        return min(self.first_time, asked[2] / 1e9)

    @property
    def ended(self) -> bool:
        """There is a summary, and it is of this attempt: a resumed run has one of its last."""
        if not self.summary:
            return False
        told, asked = self._stamps.get("summary.json"), self._stamps.get("config.yaml")
        finished = moment(self.summary.get("finished"))
        copied = finished is not None and told is not None and abs(told[2] / 1e9 - finished) > COPIED_S
        if told and asked and asked[2] > told[2] and not copied:  # resuming writes the configuration anew
            return False
        return finished is None or self._recorded is None or self._recorded <= finished + 2.0

    @property
    def finished(self) -> float | None:
        """When it ended, where that is known."""
        return moment(self.summary.get("finished")) if self.ended else None

    def status(self) -> str:
        """starting, training, silent; finished, failed or interrupted when it has ended."""
        if self.ended:
            return str(self.summary.get("status") or "finished")[:40]
        quiet = self.quiet_s()
        if self.last_row_time is None:
            return "silent" if quiet > 4 * QUIET_S else "starting"
        interval = self.log_interval
        longest = max((machine.pause_s(log_interval=interval) for machine in self.machines.values()), default=0.0)
        return "silent" if quiet > max(QUIET_S, 6 * longest) else "training"

    def quiet_s(self) -> float:
        """Since anything was written."""
        stamps = [f.modified for f in (self._metrics, self._history, *self._logs.values()) if f.modified is not None]
        config = self._stamps.get("config.yaml")
        stamps += [config[2] / 1e9] if config else []
        return self.now() - max(stamps) if stamps else 0.0

    def age_s(self, machine: Machine) -> float:
        """Since the last row of this rank. Clocks of machines are not compared: they may be minutes apart."""
        if machine.last is None or self._metrics.modified is None:
            return 0.0
        return self.now() - self._metrics.modified + self._passed - machine.heard_at

    def seats(self) -> list[Machine]:
        """Every machine that is known of, also those that are only expected; workers in order, then the server."""
        named = dict(self._named_in_logs)
        for rank in range(min(self.num_workers or 0, MOST_MACHINES)):
            named.setdefault(rank, ("worker", ""))
        for rank, (role, host) in named.items():
            if rank == -1:  # the server's log does not name its rank
                rank = self.num_workers if self.num_workers is not None else MOST_MACHINES
                if any(m.role == "server" for m in self.machines.values()):
                    continue
            machine = self._machine(rank)
            if machine is not None and machine.last is None:
                machine.role, machine.host = role, machine.host or host
        return sorted(self.machines.values(), key=lambda machine: (machine.role == "server", machine.rank))

    def log_bytes(self) -> int:
        """Of all logs: when it changes, there are new lines."""
        return sum(filter(None, (follower.size for follower in self._logs.values())))


# Pure helpers


def flat_config(raw: bytes) -> dict[str, str]:
    """`training.batch_size` -> `32`. Secrets, and passwords in addresses, are left out; a file that is no configuration gives
    nothing."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if raw.count(b"[") + raw.count(b"{") > MOST_BRACKETS:  # nested without end, they would take for ever
        return {}
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(raw, Loader=loader)):
            return {}  # ours have none, and a few lines of them can stand for gigabytes
        tree = yaml.load(raw, Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    flat: dict[str, str] = {}
    _flatten(tree, "", flat)
    return flat


def _flatten(value: Any, name: str, flat: dict[str, str]) -> None:
    if len(flat) >= 2000:
        return
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}" if name else str(key), flat)
    elif name:
        hidden = _SECRET.search(name.rpartition(".")[2]) and value is not None
        text = "(hidden)" if hidden else value if isinstance(value, str) else json.dumps(value, default=str)
        flat[name] = _ADDRESS.sub(lambda address: hide_credentials(address[0]), text)[:1000]


def log_names(run_dir: Path) -> list[str]:
    """Names of the logs of a run: plain files, not links."""
    folder = run_dir / "logs"
    if folder.is_symlink():
        return []
    try:
        found = [e.name for e in os.scandir(folder) if e.name.endswith(".log") and e.is_file(follow_symlinks=False)]
    except OSError:
        return []
    return sorted(found)[:MOST_LOGS]


def seat_of_log(name: str) -> tuple[str, int, str] | None:
    """`worker-rank1-pi5.log` -> worker, 1, pi5. A server's log does not tell its rank: -1."""
    if found := re.fullmatch(r"worker-rank(\d{1,4})-(.+)\.log", name):
        return "worker", int(found[1]), found[2][:MOST_TEXT]
    if found := re.fullmatch(r"server-(.+)\.log", name):
        return "server", -1, found[1][:MOST_TEXT]
    return None


def _checkpoint(name: str, manifest: Mapping[str, Any], *, saved: float = 0.0) -> dict[str, Any]:
    """`saved`: when, where the manifest does not tell."""
    files = manifest.get("files")
    sizes = [f.get("size") for f in files.values() if isinstance(f, dict)] if isinstance(files, dict) else []
    metrics, step = manifest.get("metrics"), int(name.rpartition("-")[2])
    return {
        "name": name,
        "step": step,
        "text": f"checkpoint of step {step}" + (", the best so far" if manifest.get("best") else ""),
        "time": _timestamp(manifest.get("created")) or saved,
        "bytes": int(sum(filter(None, map(finite, sizes)))),
        "val_loss": finite(metrics.get("val_loss")) if isinstance(metrics, dict) else None,
    }


def count_of(said: str) -> int | None:
    """A number of workers or steps, of a configuration."""
    return int(said) if re.fullmatch(r"[0-9]{1,15}", said) else None


def _is_checkpoint(entry: os.DirEntry[str]) -> bool:
    return re.fullmatch(r"step-\d{1,12}", entry.name) is not None and entry.is_dir(follow_symlinks=False)


def _timestamp(text: Any) -> float | None:
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return moment(datetime.datetime.fromisoformat(str(text)).timestamp())
    return None


def shortened(text: str) -> str:
    return text if len(text) <= 300 else text[:299] + "…"
