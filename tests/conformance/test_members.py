"""On the elastic plane a run outlives its workers and its server: they are killed and come back, and every step counts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.cases import Case, all_cases, over
from tests.faults.elastic_history import assert_sound, changes, commits, lines_of, wait_for_counted
from tests.world import ElasticWorld

CASES = all_cases()
STEPS, WORKERS = 150, 3  # many more than the script takes, also on a loaded machine
CONFIG: dict[str, Any] = {
    "training.steps": STEPS,
    "training.batch_size": 4,
    "training.eval_steps": 0,
    "training.checkpoint_steps": 0,
    "training.seed": 3,
    "cluster.num_workers": WORKERS - 1,  # the third comes later
}


@pytest.mark.usual(when=lambda case: case.chosen)
@over([case for case in CASES if case.plane == "elastic"])
def test_members_come_and_die_and_come_back(tmp_path: Path, case: Case) -> None:
    def start(world: ElasticWorld, rank: int) -> None:
        started = time.time()
        world.start(rank)
        wait_for_counted(world, rank, after=started)

    def script(world: ElasticWorld) -> None:
        world.wait_for_step(3)
        start(world, 2)
        for rank in (2, 0):
            world.kill(rank)
            world.wait_for_step(world.server.step + 2)
            start(world, rank)
        restarted = time.time()
        world.restart("server")
        for rank in range(WORKERS):
            wait_for_counted(world, rank, after=restarted)
        done.touch()

    done = tmp_path / "done"
    environ = {"SLOW_UNTIL": str(done)}
    world = case.on(WORKERS).train(
        tmp_path / "run", CONFIG, task="SlowTiny", environ=environ, script=script, start=[0, 1]
    )
    assert isinstance(world, ElasticWorld)
    assert_sound(world, steps=STEPS)
    lines = lines_of(world)
    assert len(changes(lines, "joined")) >= 3 + 2 + WORKERS
    assert sum(line["kind"] == "begin" for line in lines) == 2, "the server was not killed"
    assert {part["rank"] for line in commits(lines) for part in line["contributors"]} == {0, 1, 2}
    assert [seat.status for seat in world.workers] == [0] * WORKERS
