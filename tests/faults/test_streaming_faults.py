"""Streamed rounds of local steps, while members die and join and the server is restarted: every rule of a run holds."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.faults.elastic_history import (
    assert_sound,
    changes,
    commits,
    instance_of,
    lines_of,
    wait_for_counted,
    wait_for_next_step,
)
from tests.world import ElasticWorld, run_elastic_world

STEPS = 101  # many more than a script takes; the last round is shorter
CONFIG: dict[str, Any] = {
    "cluster.plane": "elastic",
    "cluster.num_workers": 2,  # the third comes later
    "training.steps": STEPS,
    "training.batch_size": 4,
    "training.learning_rate": 0.001,
    "training.eval_steps": 0,
    "training.checkpoint_steps": 0,
    "training.seed": 3,
    "strategy.inner_steps": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "fragments": {"strategy.fragments": 2},
    "overlap": {"strategy.overlap": 3},
    "fragments that overlap": {"strategy.fragments": 2, "strategy.overlap": 3},
    "eager": {"strategy.fragments": 2, "strategy.eager": True},
    "encoded": {"strategy.fragments": 2, "strategy.overlap": 3, "strategy.preset": "wan"},
}


def run(kind: str, run_dir: Path, **world: Any) -> ElasticWorld:
    """The world, and whether the anchor was the same on all members after every round."""
    hashes = run_dir / "hashes"
    hashes.mkdir(parents=True)
    environ = {"WEIGHTS": str(hashes), "SLOW_UNTIL": str(run_dir / "done")}
    ended = run_elastic_world(
        3, run_dir / "run", CONFIG | KINDS[kind], task="HashedTiny", strategy="diloco", environ=environ, **world
    )
    assert_sound(ended, steps=STEPS)
    assert ended.summary["replicas_agree"] is True
    found = defaultdict(list)
    for file in hashes.iterdir():
        rows = [line.split() for line in file.read_text().splitlines()]
        for step, digest in rows:
            found[int(step)].append(digest)
    assert {line["step"] for line in commits(lines_of(ended))} == found.keys()
    assert [step for step, digests in sorted(found.items()) if len(set(digests)) > 1] == []
    assert max(len(digests) for digests in found.values()) == 3
    return ended


@pytest.mark.usual(when=lambda kind: kind == "encoded")
@pytest.mark.parametrize("kind", KINDS)
def test_members_die_with_a_round_in_flight_and_join_again(tmp_path: Path, kind: str) -> None:
    """Rank 1 dies when its part of round 8 is sent and it has not heard of its commit; without overlap in that round."""
    dies = 8 if KINDS[kind].keys() & {"strategy.overlap", "strategy.eager"} else 7

    def script(world: ElasticWorld) -> None:
        world.wait_for_exit(1)
        died = time.time()
        wait_for_next_step(world, after=died, without=instance_of(world, 1))
        world.start(1)
        wait_for_counted(world, 1, after=died)
        world.start(2)
        wait_for_counted(world, 2, after=died)
        restarted = time.time()
        world.restart("server")
        for rank in range(3):
            wait_for_counted(world, rank, after=restarted)
        (tmp_path / "done").touch()

    world = run(kind, tmp_path, script=script, start=[0, 1], die_at={1: dies})
    lines = lines_of(world)
    assert len(changes(lines, "joined", 1)) >= 2
    assert sum(line["kind"] == "begin" for line in lines) == 2, "the server was not restarted"
    [left] = changes(lines, "left", 1)[:1]
    last = max(line["step"] for line in commits(lines) if line["time"] < left["time"])
    assert last < 8
