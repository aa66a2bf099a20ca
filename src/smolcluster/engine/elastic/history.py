"""The history of an elastic run, which can be checked afterwards.

history.jsonl in the run directory has a line for every server that started, every committed step and every membership change.
`check` verifies the rules that a run must keep, whatever was killed, stalled or partitioned:

    every step is committed once, in order, without gaps, also across restarts of the server
    epochs never decrease; an epoch has one server, and a server that was replaced commits nothing more
    a gradient (instance, seq) is counted once, and only from a member
    a sample is counted once, and none is lost: counted and open samples make up the stream so far

The journal is authoritative, and this file is its readable copy. A server appends a line to the journal first (in the metadata
of the record), then adds it here. When a server starts, `reconcile` adds the lines that a crash left out and removes those
of steps that the journal does not have. Call `flush` before a snapshot of the journal deletes its records.

The file grows with the run, and a server must restart within seconds. So it is read from its end, only as far as the journal's
records go back.

Lines are plain JSON. This module does not import torch.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from smolcluster.durable_files import Closing
from smolcluster.observe.jsonl import json_object, lines_backwards

logger = logging.getLogger(__name__)

_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)

Ranges = list[tuple[NonNegativeInt, PositiveInt]]


class LeaseState(BaseModel):
    """The state of the leases (`Leases.state_dict`): all samples before `position` are counted, except the holes."""

    model_config = ConfigDict(frozen=True)

    position: NonNegativeInt
    holes: Ranges = []


class _BaseLine(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    epoch: int
    time: float = Field(default_factory=lambda: round(time.time(), 3))

    def fields(self) -> dict[str, Any]:
        """Return the line as JSON fields."""
        return self.model_dump(mode="json")


class Begin(_BaseLine):
    """A server starts: the first of a run, or one that replaces another. All members join again."""

    kind: Literal["begin"] = "begin"
    server: str
    next_step: int
    data: LeaseState | None = None


class ContributionLine(BaseModel):
    """One gradient in a committed step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    instance: str
    seq: int
    ranges: Ranges
    samples: NonNegativeInt


class CommitLine(_BaseLine):
    """A round is committed; `step` is its last step. `digest`: of the weights or the update after it."""

    kind: Literal["commit"] = "commit"
    server: str
    step: int
    steps: Annotated[int, Field(ge=1)] = 1  # of its round, this one included
    contributors: list[ContributionLine]
    digest: str = ""
    data: LeaseState | None = None

    def fields(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"steps"} if self.steps == 1 else None)


class MemberLine(_BaseLine):
    """`joined`, `left`, `evicted` and `paused` change who is a member; any other event (`refused`, ...) is only noted."""

    kind: Literal["member"] = "member"
    event: str
    rank: int
    instance: str
    reason: str = ""


HistoryLine = Begin | CommitLine | MemberLine
_LINE: TypeAdapter[HistoryLine] = TypeAdapter(Annotated[HistoryLine, Field(discriminator="kind")])


class History(Closing):
    """Write history.jsonl. When `add` returns, the kernel has the line.

    A line that cannot be written (the disk is full) is logged as an error and kept for the next attempt; training continues.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, _APPEND, 0o644)
        self._unwritten = b""
        self._failing = False
        #: The highest epoch that was ever used here, by lines that `reconcile` cuts off, too: a new server's is higher.
        self.epoch = 0
        size = os.fstat(self._fd).st_size
        whole = 0  # bytes up to the last line that has its end and its contents
        for start, raw in lines_backwards(path, size):
            if (found := json_object(raw)) is not None and raw.endswith(b"\n"):
                whole = whole or start + len(raw)
                if isinstance(epoch := found.get("epoch"), int):
                    self.epoch = epoch
                    break
        self._cut(whole, "of a line that was being written")

    def add(self, line: HistoryLine) -> None:
        self.epoch = max(self.epoch, line.epoch)
        self._unwritten += json.dumps(line.fields()).encode() + b"\n"
        self._write()

    def reconcile(self, lines: Iterable[Mapping[str, Any] | HistoryLine], *, next_step: int) -> None:
        """Make the file match the journal, whose last lines are `lines` and whose next step is `next_step`.

        Truncates the file before the line that commits that step: a power cut lost it from the journal, or the run resumes
        from a checkpoint. Then adds the missing lines of the journal.
        """
        last = [line if isinstance(line, Mapping) else line.fields() for line in lines]
        begins = _Beginning(last, next_step)
        whole = os.fstat(self._fd).st_size
        kept: set[str] = set()
        for start, raw in lines_backwards(self.path, whole):
            found = json_object(raw) or {}
            if _is_beyond(found, next_step):
                whole = start
                kept.clear()  # all lines after it are cut off too
            elif begins.is_after(found):
                break
            else:
                kept.add(_text(found))
        self._cut(whole, f"of steps from {next_step} on, which do not count")
        for fields in last:
            if _is_beyond(fields, next_step):
                break
            if _text(fields) not in kept:
                self.add(_LINE.validate_python(fields))

    def flush(self) -> None:
        """Return when every line is on the disk itself. Raises OSError."""
        self._write()
        if self._unwritten:
            raise OSError(f"{self.path}: {self._unwritten.count(10)} lines could not be written")
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            self._write()
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.error("%s cannot be written, its lines are kept in memory: %s", self.path, error)
            self._failing = True

    def _cut(self, size: int, what: str) -> None:
        excess = os.fstat(self._fd).st_size - size
        if excess:
            logger.warning("%s: cut off its last %d bytes, %s", self.path, excess, what)
            os.ftruncate(self._fd, size)


def stream(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a history. One that is being written is left out; any other that is not JSON is
    `{"kind": "damaged"}`."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for raw in file:
            if raw.endswith(b"\n"):
                yield json_object(raw) or {"kind": "damaged"}


def read(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a history, as `stream` yields them."""
    return list(stream(path))


def last_commit(path: Path) -> int:
    """Return the last committed step, 0 if there is none. Reads the end of the file only."""
    with contextlib.suppress(FileNotFoundError):
        for _, raw in lines_backwards(path, path.stat().st_size):
            found = json_object(raw) or {}
            if found.get("kind") == "commit" and isinstance(step := found.get("step"), int):
                return step
    return 0


def check(lines: Iterable[Mapping[str, Any]], *, data: Mapping[str, Any] | None = None) -> list[str]:
    """Return the violations of the rules, a sentence each; [] for a sound history.

    `data`: the state of the leases after the last step, from a checkpoint or the server, to compare with.
    """
    checker = _Checker()
    for number, fields in enumerate(lines, start=1):
        try:
            line = _LINE.validate_python(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            checker.violations.append(f"line {number} is not a line of a history: {where}: {first['msg']}")
        else:
            checker.take(line)
    if data is not None:
        checker.check_data("at the end", LeaseState.model_validate(data))
    return checker.violations


class _Checker:
    """Take lines in order and keep the state that later ones must agree with."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._say = self.violations.append
        self.epoch: int | None = None
        self.servers: dict[int, str] = {}  # by epoch
        self.server: str | None = None
        self.next_step: int | None = None
        self.members: dict[str, int] = {}  # ranks by instance
        self.seqs: dict[tuple[str, int], int] = {}  # the step that counted it
        self.counted = _Positions()

    def take(self, line: HistoryLine) -> None:
        if isinstance(line, Begin):
            self._begin(line)
        elif isinstance(line, CommitLine):
            self._commit(line)
        else:
            self._member(line)

    def _begin(self, line: Begin) -> None:
        self._check_epoch(line, f"server {line.server} began")
        if self.server is None:
            if line.data is not None:
                self.counted = _Positions.of(line.data)
        else:
            if line.epoch in self.servers:
                self._say(
                    f"server {line.server} began in epoch {line.epoch}, which belongs to {self.servers[line.epoch]}"
                )
            if self.next_step is not None and line.next_step != self.next_step:
                self._say(f"server {line.server} began with step {line.next_step}, but step {self.next_step} was next")
            if line.data is not None:
                self.check_data(f"when server {line.server} began", line.data)
        self.server, self.servers[line.epoch], self.next_step = line.server, line.server, line.next_step
        self.members.clear()

    def _commit(self, line: CommitLine) -> None:
        # The step and its server.
        self._check_epoch(line, f"step {line.step} was committed")
        if self.server is None:
            self._say(f"step {line.step} was committed before any server began")
        elif line.server != self.server:
            self._say(f"step {line.step} was committed by server {line.server}, but {self.server} was the server")
        owner = self.servers.setdefault(line.epoch, line.server)
        if owner != line.server and line.server == self.server:
            self._say(f"step {line.step} was committed by server {line.server} in epoch {line.epoch} of server {owner}")
        first = line.step - line.steps + 1
        if self.next_step is not None and first < self.next_step:
            self._say(f"step {first} was committed again or too late: step {self.next_step} was next")
        elif self.next_step is not None and first > self.next_step:
            self._say(f"step {first} was committed, but step {self.next_step} was next: a step is missing")
        self.next_step = max(line.step + 1, self.next_step or 0)

        # Its gradients and samples.
        if not line.contributors:
            self._say(f"step {line.step} was committed without any gradient")
        for part in line.contributors:
            self._contribution(line, part)
        if line.data is not None:
            self.check_data(f"after step {line.step}", line.data)

    def _contribution(self, line: CommitLine, part: ContributionLine) -> None:
        who = f"rank {part.rank} ({part.instance})"
        if self.members.get(part.instance) != part.rank:
            self._say(f"step {line.step} counted {who}, which was no member in epoch {line.epoch}")
        if (part.instance, part.seq) in self.seqs:
            before = self.seqs[part.instance, part.seq]
            self._say(f"step {line.step} counted gradient {part.seq} of {who}, already counted in step {before}")
        self.seqs[part.instance, part.seq] = line.step
        if sum(count for _, count in part.ranges) != part.samples:
            self._say(f"step {line.step} counted {part.samples} samples of {who}, but its ranges are {part.ranges}")
        for start, count in part.ranges:
            for first, end in self.counted.add(start, start + count):
                self._say(f"step {line.step} counted samples {first} to {end - 1} of {who}, already counted before")

    def _member(self, line: MemberLine) -> None:
        self._check_epoch(line, f"rank {line.rank} ({line.instance}) {line.event}")
        if line.event == "joined":
            for instance, rank in self.members.items():
                if rank == line.rank:
                    self._say(f"rank {line.rank} joined as {line.instance} while it was a member as {instance}")
            self.members[line.instance] = line.rank
        elif line.event in ("left", "evicted", "paused"):
            self.members.pop(line.instance, None)

    def _check_epoch(self, line: HistoryLine, what: str) -> None:
        if self.epoch is not None and line.epoch < self.epoch:
            self._say(f"{what} in epoch {line.epoch}, after epoch {self.epoch}")
        self.epoch = max(line.epoch, line.epoch if self.epoch is None else self.epoch)

    def check_data(self, when: str, data: LeaseState) -> None:
        """Check that exactly the positions before `position` are counted, except the holes. Report each difference once."""
        expected = _Positions.of(data)
        for first, end in expected.minus(self.counted):
            self._say(f"{when}, samples {first} to {end - 1} are lost: never counted, and not to be read again")
        for first, end in self.counted.minus(expected):
            self._say(f"{when}, samples {first} to {end - 1} would be read again, though they are counted")
        self.counted = expected


class _Positions:
    """A set of stream positions, as disjoint [start, end) in order."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    @classmethod
    def of(cls, data: LeaseState) -> _Positions:
        positions, start = cls(), 0
        for hole, count in sorted(data.holes):
            positions.add(start, hole)
            start = hole + count
        positions.add(start, data.position)
        return positions

    def add(self, start: int, end: int) -> list[tuple[int, int]]:
        """Add [start, end); return the parts that were in the set before."""
        if start >= end:
            return []
        # Merge all intervals that overlap or touch it.
        low, high = bisect.bisect_left(self.ends, start), bisect.bisect_right(self.starts, end)
        touched = list(zip(self.starts[low:high], self.ends[low:high], strict=True))
        self.starts[low:high] = [min([start, *(s for s, _ in touched)])]
        self.ends[low:high] = [max([end, *(e for _, e in touched)])]
        shared = [(max(s, start), min(e, end)) for s, e in touched]
        return [(s, e) for s, e in shared if s < e]

    def minus(self, other: _Positions) -> list[tuple[int, int]]:
        """Return the intervals that are in this set and not in the other."""
        left = []
        for start, end in zip(self.starts, self.ends, strict=True):
            for s, e in zip(other.starts, other.ends, strict=True):
                if e > start and s < end:
                    if s > start:
                        left.append((start, s))
                    start = e
            if start < end:
                left.append((start, end))
        return left


class _Beginning:
    """Where the lines of a journal start in a file whose steps and epochs never decrease."""

    def __init__(self, lines: Sequence[Mapping[str, Any]], next_step: int) -> None:
        members = [line for line in lines if _step_of(line) is None]
        self._step = min([s for line in lines if (s := _step_of(line)) is not None], default=next_step)
        self._epoch = min([int(line["epoch"]) for line in members], default=None)

    def is_after(self, found: Mapping[str, Any]) -> bool:
        """Return whether all lines of the journal come after this line of the file."""
        step, epoch = _step_of(found), found.get("epoch")
        if step is None or step >= self._step:
            return False
        return self._epoch is None or (isinstance(epoch, int) and epoch < self._epoch)


def _step_of(fields: Mapping[str, Any]) -> int | None:
    """Return the last step that was committed when this line was written; None: unknown."""
    step, following = fields.get("step"), fields.get("next_step")
    if fields.get("kind") == "commit" and isinstance(step, int):
        return step
    return following - 1 if fields.get("kind") == "begin" and isinstance(following, int) else None


def _text(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True)


def _is_beyond(fields: Mapping[str, Any], next_step: int) -> bool:
    """Return whether `next_step` was committed before this line or by it."""
    step = _step_of(fields)
    return step is not None and step >= next_step


def main(arguments: Sequence[str]) -> int:
    """`python -m smolcluster.engine.elastic.history RUN/history.jsonl`: print the violations of a history."""
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        print("usage: python -m smolcluster.engine.elastic.history RUN/history.jsonl", file=sys.stderr)
        return 2
    kinds: Counter[str] = Counter()

    def counted() -> Iterator[dict[str, Any]]:
        for line in stream(Path(arguments[0])):
            kinds[str(line.get("kind"))] += 1
            yield line

    violations = check(counted())
    for violation in violations:
        print(violation)
    order = "NOT in order" if violations else "in order"
    print(f"{kinds['commit']} committed rounds under {kinds['begin']} server(s): {order}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
