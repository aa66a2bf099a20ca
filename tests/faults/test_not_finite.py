"""NaN and infinity on one rank of a fixed world: the step is skipped by all, counted, and harms nobody."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.same_run import COMMON, GPT, weights
from tests.world import Tweak, World, run_world

from smolcluster.observe.events import Notice

SPOILED_STEP = 3
SHORT = COMMON | GPT | {"training.steps": 5, "training.batch_size": 4}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> World:
    """One process, whose third gradient is not finite."""
    config = SHORT | {"training.batch_size": 8}
    environ = {"SPOIL": f"0:{SPOILED_STEP}:nan"}
    return run_world(1, tmp_path_factory.mktemp("one"), config, task="SpoiledGPT", strategy="single", environ=environ)


def test_one_process_skips_the_step_and_counts_it(alone: World) -> None:
    rows = alone.ranks[0].rows()
    assert [row.skipped for row in rows] == [0, 0, 1, 1, 1]
    assert [math.isfinite(row.grad_norm) for row in rows] == [True, True, False, True, True]
    assert (alone.summary["status"], alone.summary["skipped"]) == ("finished", 1)
    assert all(torch.isfinite(tensor).all() for tensor in weights(alone).values())


ON_DEVICE: Tweak = ("smolcluster.compute.replica", "SKIPS_ON", "cpu")  # as on a GPU: the fused optimizer takes the flag


@pytest.mark.usual(
    when=lambda strategy, options, tweaks, **_: (
        bool(tweaks) or strategy in ("allreduce", "pipeline", "tensor") or 3 in options.values()
    )
)
@pytest.mark.parametrize(
    ("strategy", "options", "calls", "tweaks"),
    [
        ("allreduce", {}, "1:3:nan", []),
        ("fsdp", {"strategy.fsdp_stage": 0}, "1:3:inf", []),
        ("fsdp", {"strategy.fsdp_stage": 1}, "1:3:nan", []),
        ("fsdp", {"strategy.fsdp_stage": 1}, "1:3:nan", [ON_DEVICE]),  # of pieces of tensors
        ("fsdp", {"strategy.fsdp_stage": 2}, "1:3:nan", []),
        ("fsdp", {"strategy.fsdp_stage": 3}, "1:3:nan", []),
        ("fsdp", {"strategy.fsdp_stage": 3}, "1:3:nan", [ON_DEVICE]),
        # Rank 1 has the last stage, and takes the loss of two micro-batches in each step.
        ("pipeline", {"strategy.num_microbatches": 2, "training.batch_size": 8}, "1:6:nan", []),
        ("tensor", {"training.batch_size": 8}, "0:3:nan", []),
        ("mesh", {"strategy.tp": 2, "training.batch_size": 8}, "1:3:nan", []),
    ],
)
def test_a_gradient_of_one_rank_that_is_not_finite_is_skipped_by_all(
    tmp_path: Path, alone: World, strategy: str, options: dict[str, Any], calls: str, tweaks: list[Tweak]
) -> None:
    """They go on as one process does that skips the same step."""
    each = dict.fromkeys(range(2), tweaks)
    environ = {"SPOIL": calls}
    world = run_world(2, tmp_path, SHORT | options, task="SpoiledGPT", strategy=strategy, environ=environ, tweaks=each)
    assert [rank.status for rank in world.ranks] == [0, 0], [rank.failed for rank in world.ranks]
    for rank in world.ranks:
        assert [row.skipped for row in rank.rows()] == [0, 0, 1, 1, 1]
    assert (world.summary["status"], world.summary["skipped"]) == ("finished", 1)
    ours, theirs = weights(world), weights(alone)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-8, atol=1e-9, msg=name)


def test_many_skipped_steps_in_a_row_fail_the_run_and_say_why(tmp_path: Path) -> None:
    """The last good checkpoint stays, and nothing is called finished."""
    spoil = ",".join(f"1:{call}:nan" for call in range(4, 60))
    config = COMMON | {"training.steps": 60, "training.checkpoint_steps": 2}
    world = run_world(2, tmp_path, config, task="SpoiledTiny", strategy="allreduce", environ={"SPOIL": spoil})
    assert [rank.status for rank in world.ranks] == [1, 1]
    for rank in world.ranks:
        assert "the gradients of the last 20 steps had NaN or infinite values" in rank.failed.message
    assert any("was skipped" in notice for notice in notices(world))
    assert not (tmp_path / "summary.json").exists() or "finished" not in (tmp_path / "summary.json").read_text()


@pytest.mark.parametrize("strategy", ["single", "allreduce"])
def test_a_run_whose_weights_are_not_finite_is_not_finished(tmp_path: Path, strategy: str) -> None:
    size = 1 if strategy == "single" else 2
    world = run_world(size, tmp_path, COMMON | {"training.steps": 3}, task="EndsBroken", strategy=strategy)
    for rank in world.ranks:
        assert rank.status == 1
        assert "ended at step 3 with NaN or infinite values in 0.weight" in rank.failed.message
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("strategy", ["single", "allreduce", "fsdp"])
def test_running_statistics_of_a_spoiled_batch_are_undone(tmp_path: Path, strategy: str) -> None:
    """Rank 0's are those that count; and each rank's own are finite, or they would spoil the run in the end."""
    size = 1 if strategy == "single" else 2
    config = COMMON | {"training.steps": 5, "training.batch_size": 8}
    world = run_world(size, tmp_path, config, task="SpoiledStatistics", strategy=strategy, environ={"SPOIL": "0:3:nan"})
    assert [rank.status for rank in world.ranks] == [0] * size, [rank.failed for rank in world.ranks]
    saved = weights(world)
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
    assert int(saved["1.num_batches_tracked"]) == 4, "the spoiled batch left no mark, and the others did"
    assert math.isfinite(world.summary["val_loss"])


def notices(world: World) -> list[str]:
    return [event.message for event in world.ranks[0].events if isinstance(event, Notice)]
