"""Nobody waits for a member of `diloco` that is late, and what it computed counts in a later round.

Each worker moves a number of its own (`OwnNumber`), so the weights at the end say which steps of which worker counted: they
must be those that the history says.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.faults.elastic_history import (
    Lines,
    assert_sound,
    changes,
    commits,
    instance_of,
    instances,
    lines_of,
    wait_for_counted,
    wait_for_history,
)
from tests.world import PROMPT, ElasticWorld, run_elastic_world

from smolcluster.engine.checkpoint.store import read_checkpoint

H, RATE = 4, 0.01
ENOUGH = 6 * H  # steps, after which the deadline is known
SETTINGS: dict[str, Any] = {
    "training.optimizer": "sgd",
    "training.momentum": 0.0,
    "training.weight_decay": 0.0,
    "training.grad_clip_norm": 0.0,
    "training.learning_rate": RATE,
    "training.batch_size": 2,
    "training.seed": 11,
    "training.eval_steps": 0,
    "training.checkpoint_steps": 1000,
    "lr_schedule.min_lr": RATE,
    "lr_schedule.warmup_iters": 0,
    "cluster.plane": "elastic",
    "strategy.inner_steps": H,
    "strategy.outer_lr": 1.0,
    "strategy.outer_momentum": 0.0,
    "strategy.quorum": 0.5,
}
INT8 = {"strategy.codec": "int8"}
CODECS = {"dense": {}, "int8": INT8, "int8, recompressed": INT8 | {"cluster.num_workers": 9}}


def run(run_dir: Path, overrides: dict[str, Any], *, workers: int = 3, **options: Any) -> ElasticWorld:
    options = {"slow": dict.fromkeys(range(workers), 0.02)} | options
    return run_elastic_world(workers, run_dir, SETTINGS | overrides, task="OwnNumber", strategy="diloco", **options)


def without(lines: Lines, instance: str, *, after: float) -> Lines:
    return [line for line in commits(lines) if line["time"] > after and instance not in instances(line)]


def counted_steps(lines: Lines, rank: int) -> float:
    """How many steps of a worker are in the weights: each round is a mean over samples."""
    total = 0.0
    for line in commits(lines):
        parts = {part["rank"]: part["samples"] for part in line["contributors"]}
        total += line.get("steps", 1) * parts.get(rank, 0) / sum(parts.values())
    return total


def assert_weights_are_those_of_the_history(world: ElasticWorld, steps: int, *, tolerance: float = 1e-9) -> None:
    weights = read_checkpoint(world.run_dir / "checkpoints" / f"step-{steps:08d}").weights["w"]
    for rank in range(len(world.workers)):
        expected = RATE * counted_steps(lines_of(world), rank)
        assert float(weights[rank]) == pytest.approx(expected, abs=tolerance), (rank, weights)


class Stall:
    """One worker rests in the middle of a round, if a test says so, and has computed a part of it then."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.environ = {"STALL": f"{rank}:{folder}"}

    def begin(self, world: ElasticWorld) -> None:
        (self.folder / "stall").touch()
        world.wait((self.folder / "stalled").exists, what="the worker to rest")

    def wait_for_rounds(self, world: ElasticWorld, rounds: int) -> None:
        """Until the others have committed so many without it."""
        instance, since = instance_of(world, self.rank), time.time()
        what = f"{rounds} rounds without rank {self.rank}"
        wait_for_history(world, lambda lines: len(without(lines, instance, after=since)) >= rounds, what=what)

    def end(self, world: ElasticWorld) -> None:
        """Until it counts again."""
        ended = time.time()
        (self.folder / "stall").unlink()
        wait_for_counted(world, self.rank, after=ended)


def assert_counts_on_return(world: ElasticWorld, rank: int) -> None:
    """In the first round that is committed after its return, of which it has computed nothing."""
    lines = lines_of(world)
    paused = changes(lines, "paused", rank)[0]
    back = next(line for line in changes(lines, "joined", rank) if line["time"] > paused["time"])
    assert back["instance"] == paused["instance"], "it came back as another process"
    first = next(line for line in commits(lines) if line["time"] >= back["time"])
    assert back["instance"] in instances(first), "its late round counts in no round of the others"


@pytest.mark.usual(when=lambda codec: codec == "dense")
@pytest.mark.parametrize("codec", CODECS)
def test_the_others_go_on_and_the_late_round_counts_in_the_next(tmp_path: Path, codec: str) -> None:
    stall = Stall(tmp_path, 2)

    def script(world: ElasticWorld) -> None:
        world.wait_for_step(ENOUGH)
        stall.begin(world)
        stall.wait_for_rounds(world, 2)
        stall.end(world)

    world = run(tmp_path, {"training.steps": 80} | CODECS[codec], script=script, environ=stall.environ)
    assert_sound(world, steps=80)
    assert "late: no contribution after" in changes(lines_of(world), "paused", 2)[0]["reason"]
    assert_counts_on_return(world, 2)
    assert_weights_are_those_of_the_history(world, 80, tolerance=1e-9 if codec == "dense" else 1e-3)
    assert world.summary["members_lost"] == 0


@pytest.mark.slow  # usually: tests/unit/engine/test_late_members.py
def test_a_silent_worker_keeps_its_round_too(tmp_path: Path) -> None:
    """Its link is silent before the deadline is known: it is paused, as always, and its work counts when it is back."""
    stall = Stall(tmp_path, 1)

    def script(world: ElasticWorld) -> None:
        world.wait_for_step(H)
        stall.begin(world)
        world.freeze(1)
        stall.wait_for_rounds(world, 3)
        world.thaw(1)
        stall.end(world)

    overrides = PROMPT | {"cluster.stall_timeout": 120.0, "training.steps": 80}
    world = run(tmp_path, overrides, script=script, environ=stall.environ)
    assert_sound(world, steps=80)
    assert "silent for" in changes(lines_of(world), "paused", 1)[0]["reason"]
    assert_counts_on_return(world, 1)
    assert_weights_are_those_of_the_history(world, 80)


def test_without_a_quorum_all_are_waited_for(tmp_path: Path) -> None:
    """One of two is no quorum, and the log says who is waited for."""
    said = "waits for worker 1 (testhost): 1 of 2 members have contributed after"

    def script(world: ElasticWorld) -> None:
        world.wait_for_step(ENOUGH)
        world.freeze(1)
        world.wait(lambda: any(said in notice for notice in world.server.notices()), what="the warning")
        world.thaw(1)

    world = run(tmp_path, {"training.steps": 60}, workers=2, script=script)
    assert_sound(world, steps=60)
    assert changes(lines_of(world), "paused") == []
    assert all(len(instances(line)) == 2 for line in commits(lines_of(world)))
    assert_weights_are_those_of_the_history(world, 60)
    [warning] = [notice for notice in world.server.notices() if said in notice]
    assert "and a quorum is 2 (strategy.quorum 0.5)" in warning


@pytest.mark.slow
def test_a_killed_coordinator_costs_the_round_that_is_under_way(tmp_path: Path) -> None:
    """Also while a member is late: what it has computed is not in the record, and its samples are leased again."""
    stall = Stall(tmp_path, 2)

    def script(world: ElasticWorld) -> None:
        world.wait_for_step(ENOUGH)
        stall.begin(world)
        stall.wait_for_rounds(world, 1)
        world.restart("server")
        stall.end(world)

    world = run(tmp_path, {"training.steps": 80}, script=script, environ=stall.environ)
    assert_sound(world, steps=80)
    assert_weights_are_those_of_the_history(world, 80)
