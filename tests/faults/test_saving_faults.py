"""What a run has saved when an evaluation goes wrong, or takes too long."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.equivalence.same_run import COMMON
from tests.world import ElasticWorld, run_elastic_world, run_world

from smolcluster.engine.checkpoint.store import CheckpointStore


@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_an_evaluation_without_a_result_does_not_cost_the_best_checkpoint(tmp_path: Path, plane: str) -> None:
    """The losses are 1, NaN, 3, 2: what comes after the NaN is no new best."""
    config = COMMON | {"training.batch_size": 4, "training.steps": 20, "training.eval_steps": 2}
    config |= {"training.checkpoint_steps": 2, "training.max_checkpoints_to_keep": 1}
    rows: list[Any]
    if plane == "mesh":
        rows = run_world(1, tmp_path, config, task="NanInBetween", strategy="single").ranks[0].rows()
    else:
        rows = run_elastic_world(1, tmp_path, config, task="NanInBetween", slow={0: 0.02}).server.rows()
    losses = [row.val_loss for row in rows if row.val_loss is not None]
    assert losses[0] == 1.0
    assert math.isnan(losses[1])
    assert losses[2] == 3.0
    best = CheckpointStore(tmp_path / "checkpoints", keep=1).best()
    assert best is not None
    assert json.loads((best / "manifest.json").read_text(encoding="utf-8"))["metrics"]["val_loss"] == 1.0


def test_a_stop_saves_and_leaves_without_an_evaluation(tmp_path: Path) -> None:
    """Not even one that is due at this step: whoever stops the run may not wait for it."""
    config = COMMON | {"training.batch_size": 4, "training.steps": 1000, "training.eval_steps": 5}
    world = run_world(2, tmp_path, config, task="Tiny", hook=("stop_after", 5))
    assert [rank.status for rank in world.ranks] == [130] * 2
    assert [row.val_loss for row in world.ranks[0].rows()] == [None] * 5
    assert Path(world.summary["checkpoint"]).name == "step-00000005"


def test_a_stop_at_the_last_step_saves_before_it_evaluates(tmp_path: Path) -> None:
    config = COMMON | {"training.batch_size": 4, "training.steps": 5}
    saved = {"SAVED": str(tmp_path / "checkpoints")}
    world = run_world(2, tmp_path, config, task="SavedBeforeEvaluated", hook=("stop_after", 5), environ=saved)
    assert [rank.failed for rank in world.ranks] == [None] * 2
    assert [rank.status for rank in world.ranks] == [0] * 2
    assert world.ranks[0].rows()[-1].val_loss == world.summary["val_loss"] > 0
    assert Path(world.summary["checkpoint"]).name == "step-00000005"


@pytest.mark.parametrize("strategy", ["syncps", "allreduce"])
def test_a_server_that_is_stopped_does_not_wait_for_an_evaluation(tmp_path: Path, strategy: str) -> None:
    config = COMMON | {"training.batch_size": 1, "training.steps": 10_000, "training.eval_steps": 5}
    asked = tmp_path / "asked"

    def script(world: ElasticWorld) -> None:
        world.wait_for_step(12)  # one evaluation runs, one waits
        world.ask_to_stop("server")
        asked.touch()

    world = run_elastic_world(
        1,
        tmp_path / "run",
        config,
        task="LongEvaluation",
        strategy=strategy,
        script=script,
        environ={"ASKED": str(asked)},
    )
    assert world.server.status == 130
    assert {row.val_loss for row in world.server.rows()} == {None}
    assert {5, 10} <= {row.step for row in world.server.rows()}
    assert int(Path(world.summary["checkpoint"]).name.removeprefix("step-")) == world.server.step
