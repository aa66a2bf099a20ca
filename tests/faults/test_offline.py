"""A laptop that leaves trains on: what it computed alone is merged when it returns, or dropped with a reason.

A relay stands between one worker and the coordinator; a test cuts it. As in `test_late_members.py` each worker moves a number
of its own, so the weights at the end say which steps counted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.elastic_history import (
    assert_sound,
    changes,
    commits,
    instance_of,
    instances,
    lines_of,
    log_of,
    wait_for_counted,
    wait_for_history,
)
from tests.faults.test_late_members import RATE, H, counted_steps, run
from tests.relay import Relay
from tests.world import ElasticWorld

from smolcluster.engine.checkpoint.store import read_checkpoint

LAPTOP, STEPS = 2, 160
WAIT_FOR_ALL = {"strategy.quorum": 1.0, "training.steps": STEPS}


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay() as relay:
        yield relay


def leave_and_return(run_dir: Path, relay: Relay, overrides: dict[str, Any], *, until: str = "") -> ElasticWorld:
    """The laptop is gone while the others commit three rounds, and until its log has this text."""

    def via(rank: int, server: str) -> str:
        if rank != LAPTOP:
            return server
        relay.target = server
        return relay.address

    def script(world: ElasticWorld) -> None:
        world.wait_for_step(2 * H)
        instance, cut = instance_of(world, LAPTOP), time.time()
        relay.cut()

        def three_rounds(lines: list[dict[str, Any]]) -> bool:
            later = [line for line in commits(lines) if line["time"] > cut and instance not in instances(line)]
            return len(later) >= 3

        wait_for_history(world, three_rounds, what="three rounds without the laptop")
        world.wait(lambda: until in log_of(world, LAPTOP), what=until)
        relay.heal()
        wait_for_counted(world, LAPTOP, after=time.time())

    world = run(run_dir, WAIT_FOR_ALL | overrides, script=script, via=via)
    assert_sound(world, steps=STEPS)
    assert len(changes(lines_of(world), "left", LAPTOP)) >= 1
    assert world.summary["replicas_agree"] is True
    return world


def uncounted_steps(world: ElasticWorld) -> float:
    """Steps of the laptop that are in the weights, and in no round of the history."""
    weights = read_checkpoint(world.run_dir / "checkpoints" / f"step-{STEPS:08d}").weights["w"]
    return float(weights[LAPTOP]) / RATE - counted_steps(lines_of(world), LAPTOP)


def test_what_it_computed_alone_is_merged(tmp_path: Path, relay: Relay) -> None:
    overrides = {"strategy.offline": True, "strategy.max_rounds_apart": 1000}
    world = leave_and_return(tmp_path, relay, overrides, until="training alone, for at most")
    said = re.search(r"back after (\d+) steps alone; their (\d+) samples count in no epoch", log_of(world, LAPTOP))
    assert said is not None
    steps, samples = int(said[1]), int(said[2])
    assert samples == 2 * steps
    # A third of the next round is the laptop's: its steps alone, and the round that it could not contribute to.
    merged = 3 * uncounted_steps(world)
    assert any(merged == pytest.approx(steps + begun, abs=1e-6) for begun in (0, H)), (merged, steps)
    assert merged > 0


@pytest.mark.slow
def test_without_the_option_it_waits(tmp_path: Path, relay: Relay) -> None:
    world = leave_and_return(tmp_path, relay, {})
    assert uncounted_steps(world) == pytest.approx(0.0, abs=1e-6)
    assert "alone" not in log_of(world, LAPTOP)


def test_what_is_too_old_is_dropped(tmp_path: Path, relay: Relay) -> None:
    overrides = {"strategy.offline": True, "strategy.max_rounds_apart": 1}
    world = leave_and_return(
        tmp_path, relay, overrides, until=f"{H} steps were taken without the coordinator: waiting for it"
    )
    assert uncounted_steps(world) == pytest.approx(0.0, abs=1e-6)
    assert re.search(
        r"dropped local work that no round has counted: it is \d+ rounds behind, strategy.max_rounds_apart is 1",
        log_of(world, LAPTOP),
    )
