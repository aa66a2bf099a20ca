"""fp16 over many growth intervals: the scale grows until a gradient overflows, falls, and grows again, for all alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.equivalence.same_run import COMMON
from tests.world import run_elastic_world, run_world

from smolcluster.engine.checkpoint.snapshot import read_checkpoint

STEPS = 45  # fifteen intervals: a scale that only doubled would end at 2^31
CONFIG = COMMON | {"training.steps": STEPS, "training.precision": "fp16"}


def saved_scale(summary: dict[str, Any]) -> float:
    assert summary["status"] == "finished"
    return float(read_checkpoint(Path(summary["checkpoint"])).state["strategy"]["loss_scale"]["value"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    world = run_world(1, tmp_path_factory.mktemp("single"), CONFIG, task="ShortIntervals", strategy="single")
    assert 2 <= world.summary["skipped"] <= STEPS / 3, "the scale was never too high"
    return saved_scale(world.summary)


def test_replicas_find_the_scale_that_one_process_finds(tmp_path: Path, alone: float) -> None:
    world = run_world(2, tmp_path, CONFIG, task="ShortIntervals", strategy="allreduce")
    assert world.summary["skipped"] >= 2
    assert alone / 4 <= saved_scale(world.summary) <= 4 * alone


@pytest.mark.usual(when=lambda strategy, options: strategy in ("fsdp", "edp") or bool(options))
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("allreduce", {}),
        ("allreduce", {"strategy.staleness_bound": 2}),
        ("fsdp", {"strategy.fsdp_stage": 1}),
        ("syncps", {}),
        ("edp", {}),
    ],
    ids=["allreduce", "staleness", "fsdp", "syncps", "edp"],
)
def test_members_that_come_and_go_find_it_too(
    tmp_path: Path, alone: float, strategy: str, options: dict[str, Any]
) -> None:
    """An overflow is refused, and the scale of all is halved; what is saved is that scale."""
    world = run_elastic_world(2, tmp_path, CONFIG | options, task="ShortIntervals", strategy=strategy)
    assert set(world.statuses.values()) == {0}, world.story()
    refusals = [notice for notice in world.server.notices() if "is refused" in notice]
    assert len(refusals) >= 2
    assert all("overflowed in fp16 at loss scale" in notice for notice in refusals), refusals
    assert len(refusals) <= 2 * STEPS / 3, "as many overflows as there are intervals, at most, on each worker"
    # With steps in flight, how large gradients become depends on when each is applied: some overflow at a lower scale.
    least = alone / (16 if options.get("strategy.staleness_bound") or strategy == "edp" else 4)
    assert least <= saved_scale(world.summary) <= 4 * alone
    assert world.summary["members_lost"] == 0
