"""What the history of a run says of its faults: who counted when, and how long nothing did."""

from __future__ import annotations

import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.world import ElasticWorld, Who

from smolcluster.engine.elastic import history

RECORD = b"SJ1R"  # a frame of a journal begins with it

Lines = list[dict[str, Any]]


def lines_of(world: ElasticWorld) -> Lines:
    """While the run goes on, too: a line that is being written is left out."""
    return history.read(world.run_dir / "history.jsonl")


def commits(lines: Lines) -> Lines:
    return [line for line in lines if line["kind"] == "commit"]


def instances(line: dict[str, Any]) -> set[str]:
    """Whose gradients a commit counted."""
    return {part["instance"] for part in line["contributors"]}


def changes(lines: Lines, event: str, rank: int | None = None) -> Lines:
    """`joined`, `left`, `evicted`; of one rank or of all."""
    return [
        line for line in lines if line["kind"] == "member" and line["event"] == event and rank in (None, line["rank"])
    ]


def instance_of(world: ElasticWorld, rank: int) -> str:
    """Of the process that holds this rank now, or held it last."""
    return str(changes(lines_of(world), "joined", rank)[-1]["instance"])


def first_commit(lines: Lines, *, after: float, without: str = "") -> dict[str, Any] | None:
    """The first committed step after this time that owes nothing to this instance."""
    found = (line for line in commits(lines) if line["time"] >= after and without not in instances(line))
    return next(found, None)


def wait_for_history(
    world: ElasticWorld, question: Callable[[Lines], object], *, what: str, timeout_s: float = 300.0
) -> None:
    world.wait(lambda: bool(question(lines_of(world))), what=what, timeout_s=timeout_s)


def wait_for_next_step(world: ElasticWorld, *, after: float, without: str = "") -> dict[str, Any]:
    """`first_commit`, as soon as there is one."""
    wait_for_history(world, lambda lines: first_commit(lines, after=after, without=without), what="the next step")
    line = first_commit(lines_of(world), after=after, without=without)
    assert line is not None
    return line


def wait_for_counted(world: ElasticWorld, rank: int, *, after: float, timeout_s: float = 300.0) -> None:
    """Until a step committed after this time has counted a gradient of this rank."""

    def counted(lines: Lines) -> bool:
        later = (line for line in commits(lines) if line["time"] >= after)
        return any(part["rank"] == rank for line in later for part in line["contributors"])

    wait_for_history(world, counted, what=f"a gradient of rank {rank}", timeout_s=timeout_s)


def start_and_wait(world: ElasticWorld, rank: int) -> float:
    """Start this worker, and wait for a step that counts its gradient; when it was started."""
    started = time.time()
    world.start(rank)
    wait_for_counted(world, rank, after=started)
    return started


def longest_pause(lines: Lines, *, since: float = 0.0, until: float = float("inf")) -> float:
    """Between two committed steps that follow one another."""
    times = [line["time"] for line in commits(lines)]
    pauses = [b - a for a, b in itertools.pairwise(times) if b > since and a < until]
    return max(pauses, default=0.0)


def bound(lines: Lines, seconds: float, *, steps: int) -> float:
    """How long something may take: `seconds`, or `steps` of this run where the machine is so slow that they take longer.

    Held by `make test-all` alone, on a quiet machine. `tools/chaos` measures the same.
    """
    if os.environ.get("TEST_TIMES") != "1":
        return math.inf
    times = [line["time"] for line in commits(lines)]
    usual: float = statistics.median(b - a for a, b in itertools.pairwise(times))
    return max(seconds, steps * usual)


def assert_sound(world: ElasticWorld, *, steps: int) -> None:
    """The run ended well, kept every rule of a history, and every replica agrees."""
    lines = lines_of(world)
    assert history.check(lines) == []
    rounds = [range(line["step"] - line.get("steps", 1) + 1, line["step"] + 1) for line in commits(lines)]
    assert [step for steps_of in rounds for step in steps_of] == list(range(1, steps + 1))
    assert world.server.status == 0, world.story()
    assert world.summary["status"] == "finished"
    assert world.summary["replicas_agree"] in (True, None)


def log_of(world: ElasticWorld, who: Who = "server") -> str:
    name = "server-*" if who == "server" else f"worker-rank{who}-*"
    return "".join(path.read_text() for path in sorted(Path(world.run_dir, "logs").glob(f"{name}.log")))


def forget_records(folder: Path, count: int) -> None:
    """What a power cut does to a server's journal: the last records have not reached the disk."""
    path = max(folder.glob("log-*"))
    data = path.read_bytes()
    starts = [found.start() for found in re.finditer(re.escape(RECORD), data)]
    assert len(starts) > count
    path.write_bytes(data[: starts[-count]])
