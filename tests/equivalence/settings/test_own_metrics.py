"""A task that measures what it likes, and the quick check of its code before step 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tasks
from tests.equivalence.same_run import COMMON
from tests.world import TASKS, ElasticWorld, World, run_elastic_world, run_world

from smolcluster.config import load_config, resolve
from smolcluster.data.dataset import as_dataset
from smolcluster.engine import trial
from smolcluster.errors import UserError

CONFIG: dict[str, Any] = COMMON | {
    **{"training.steps": 4, "training.batch_size": 8, "training.eval_steps": 2},
    **{"training.best": "right, max", "training.checkpoint_steps": 2},
}
AT_ONCE = {"strategy.worker_update_interval": 1}


def run(where: Path, strategy: str, task: str, config: dict[str, Any] = CONFIG) -> World | ElasticWorld:
    if strategy == "syncps":
        return run_elastic_world(1, where, config | AT_ONCE, task=task, strategy=strategy)
    return run_world(1 if strategy == "single" else 2, where, config, task=task, strategy=strategy)


@pytest.mark.parametrize("strategy", ["allreduce", "pipeline", "syncps"])
def test_any_named_numbers_are_averaged_logged_and_followed(tmp_path: Path, strategy: str) -> None:
    world = run(tmp_path, strategy, "OwnMetrics")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "val_right" in row]
    assert {row["step"] for row in evaluated} == {2, 4}
    assert all({"val_right", "val_seen", "val_positives"} < row.keys() for row in evaluated)
    assert "val_loss" not in evaluated[0]
    last = max(evaluated, key=lambda row: row["step"])
    assert world.summary["val_right"] == last["val_right"]
    assert world.summary["val_loss"] is None
    assert json.loads((tmp_path / "summary.json").read_text())["val_right"] == last["val_right"]
    best = max(evaluated, key=lambda row: (row["val_right"], -row["step"]))
    assert (tmp_path / "checkpoints" / "best").read_text().strip() == f"step-{best['step']:08d}"


@pytest.mark.parametrize("strategy", ["single", "allreduce", "pipeline", "syncps"])
def test_the_quick_check_changes_nothing(tmp_path: Path, strategy: str) -> None:
    """Weights, running means, dropout, what the evaluation draws: bit for bit as in a run without it."""
    config = CONFIG | {"training.steps": 2}
    checked, unchecked = (run(tmp_path / task, strategy, task, config) for task in ("OwnMetrics", "Unchecked"))
    assert checked.summary["weights_sha256"] == unchecked.summary["weights_sha256"]
    assert checked.summary["val_right"] == unchecked.summary["val_right"]
    if strategy != "syncps":  # a server evaluates on a thread whose generators nobody seeds
        assert checked.summary["val_seen"] == unchecked.summary["val_seen"]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("MetricsFail", f"{TASKS}, line"),
        ("MetricsFail", "metrics() of MetricsFail failed: IndexError: tuple index out of range"),
        ("MetricsAreALoss", "metrics() of MetricsAreALoss must return a dict of named numbers, not Tensor"),
        ("MetricIsAVector", "metrics() of MetricIsAVector: 'scores' must be one number, not a tensor of shape (8,)"),
        ("BackwardFails", "the backward pass of loss() of BackwardFails failed: NotImplementedError: not written yet"),
        ("SampleFails", "sample() of SampleFails failed: KeyError: 'prompt'"),
        ("SampleIsText", "sample() of SampleIsText must return a prompt and a text, or None, not 'once upon a time'"),
        ("CountIsNegative", "count() of CountIsNegative must return the number of targets that count, or None, not -1"),
        ("Double", "training.best = 'right, max': metrics() of Double has no 'right'; known: loss"),
    ],
)
def test_mistakes_show_before_the_first_step(tmp_path: Path, task: str, said: str) -> None:
    config = CONFIG if task == "Double" else CONFIG | {"training.best": "loss"}
    world = run_world(2, tmp_path, config, task=task)
    assert said in world.refusal
    assert not [row for rank in world.ranks for row in rank.rows()]


def test_a_metric_that_is_misspelt_is_suggested(tmp_path: Path) -> None:
    world = run_world(1, tmp_path, CONFIG | {"training.best": "rihgt, max"}, task="OwnMetrics")
    assert "metrics() of OwnMetrics has no 'rihgt'; did you mean 'right'? known: " in world.refusal


def test_a_server_finds_mistakes_before_it_listens(tmp_path: Path) -> None:
    world = run_elastic_world(1, tmp_path, CONFIG, task="SampleFails", strategy="syncps", start=[], script=ended)
    assert (world.server.failed.kind, world.address) == ("user", "")


def ended(world: ElasticWorld) -> None:
    world.wait_for_exit("server")


@pytest.mark.parametrize("config", [{}, {"training.compile": True}], ids=["large", "compiled"])
def test_a_backward_pass_that_would_take_long_is_left_out(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tasks.BackwardFails(resolve(load_config([], overrides=config)))
    if not config:
        monkeypatch.setattr(trial, "BACKWARD_BYTES", 8)
    trial._train(task, task.model(), as_dataset(task.train_data()), 8, torch.device("cpu"))
    monkeypatch.undo()
    task.config.training.compile = False
    with pytest.raises(UserError, match=r"the backward pass of loss\(\)"):
        trial._train(task, task.model(), as_dataset(task.train_data()), 8, torch.device("cpu"))
