"""A profile is written for the steps and ranks that were asked for, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.equivalence.same_run import COMMON
from tests.world import run_world

from smolcluster.engine.profiler import steps_of
from smolcluster.errors import UserError
from smolcluster.observe.events import Notice


@pytest.mark.parametrize("strategy", ["allreduce", "fsdp"])
def test_the_steps_and_ranks_that_were_asked_for(tmp_path: Path, strategy: str) -> None:
    config = COMMON | {"training.batch_size": 4}
    plain = run_world(2, tmp_path / "plain", config, task="Tiny", strategy=strategy)
    asked = {"training.profile": "3:5", "training.profile_ranks": [1]}
    world = run_world(2, tmp_path / "profiled", config | asked, task="Tiny", strategy=strategy)
    assert world.summary["weights_sha256"] == plain.summary["weights_sha256"]
    folder = tmp_path / "profiled" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["rank1.pt.trace.json", "rank1.txt"]
    names = {event.get("name") for event in json.loads((folder / "rank1.pt.trace.json").read_text())["traceEvents"]}
    assert "aten::addmm" in names or "aten::linear" in names
    assert "Self CPU" in (folder / "rank1.txt").read_text()
    told = [e.message for e in world.ranks[1].events if isinstance(e, Notice) and "profile of 3 steps" in e.message]
    assert len(told) == 1
    assert "waiting for others" in told[0]


def test_steps_are_read() -> None:
    assert steps_of("10") == range(10, 11)
    assert steps_of("10:13") == range(10, 14)
    for wrong in ("", "x", "0", "5:3", "1:2:3", "-1"):
        with pytest.raises(UserError, match="write a step or the first and the last"):
            steps_of(wrong)


def test_what_will_not_be_written_is_said(tmp_path: Path) -> None:
    """Steps after the last, ranks that are not there, a picture of a run that is too short for it."""
    config = {"training.steps": 2, "training.batch_size": 4, "training.eval_steps": 0}
    asked = {"training.profile": "3:5", "training.profile_ranks": [0, 7], "strategy.draw_schedule": True}
    world = run_world(2, tmp_path / "run", config | asked, task="Tiny", strategy="pipeline")
    told = "\n".join(e.message for rank in world.ranks for e in rank.events if isinstance(e, Notice))
    assert "--profile 3:5 writes nothing: the run ends at step 2" in told
    assert "there is no rank 7; the ranks are 0 to 1" in told
    assert "no schedule was drawn" in told
    assert not (tmp_path / "run" / "profile").exists()
