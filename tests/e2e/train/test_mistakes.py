"""Mistakes in a user's own code, and checkpoints that are not what they should be: told plainly, nothing runs away."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.world import run_world

from smolcluster.engine.checkpoint.store import CheckpointStore

COMMON = {"training.steps": 6, "training.batch_size": 8, "training.eval_steps": 0}

UNGUARDED = """
import smolcluster, torch
from torch import nn

class Line(smolcluster.Task):
    def model(self):
        return nn.Linear(1, 1)
    def train_data(self):
        return (torch.ones(64, 1),)
    def loss(self, model, batch):
        return model(batch[0]).square().mean()

smolcluster.train(Line, workers=2, overrides={"training.steps": 2})
"""


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_script_without_a_main_guard_does_not_multiply(tmp_path: Path) -> None:
    """Each worker imports the script to find the task; the call in it must not start workers again."""
    ended = run_script(tmp_path, UNGUARDED)
    assert ended.returncode == 1
    assert 'if __name__ == "__main__":' in ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_guarded_class_trains(tmp_path: Path) -> None:
    guard = 'if __name__ == "__main__":\n    smolcluster.train('
    ended = run_script(tmp_path, UNGUARDED.replace("smolcluster.train(", guard))
    assert ended.returncode == 0, ended.stderr
    assert "finished: allreduce, 2 workers, 2 steps" in ended.stdout


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("LossIsAnInt", "must return a tensor, the mean over the batch, not int"),
        ("LossIsAVector", r"not a tensor of shape \(8, 2\)"),
        ("LossIsDetached", "does not depend on the model's parameters"),
        ("NoParameters", "has no parameters to train"),
        ("NotAModel", "must return a torch.nn.Module, not NoneType"),
        ("Lazy", "lazy layers"),
        ("NoData", "the training data is empty"),
        ("SparseTable", "make 0 without sparse=True"),
    ],
)
def test_a_mistake_in_a_task_is_told(tmp_path: Path, task: str, message: str) -> None:
    world = run_world(1, tmp_path / "run", COMMON, task=task, strategy="single")
    assert world.ranks[0].status == 2
    failed = world.ranks[0].failed
    assert re.search(message, failed.message)


def test_weights_that_are_not_numbers_do_not_push_out_good_checkpoints(tmp_path: Path) -> None:
    config = COMMON | {"training.checkpoint_steps": 1, "training.max_checkpoints_to_keep": 1}
    world = run_world(1, tmp_path / "run", config, task="TurnsToNan", strategy="single")
    assert world.ranks[0].status == 1
    saved = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000003"]
    notices = [e.message for e in world.ranks[0].events if type(e).__name__ == "Notice"]
    assert any("step 4 is not saved" in text for text in notices)


@pytest.mark.parametrize("change", [{"sampler": None}, {"strategy": "x"}, {"best_val_loss": "x"}])
def test_an_edited_state_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    run_world(1, tmp_path / "run", COMMON | {"training.checkpoint_steps": 3}, task="Tiny", strategy="single")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    snapshot = CheckpointStore(checkpoint.parent, keep=1).load(checkpoint)
    state = {key: value for key, value in (snapshot.state | change).items() if value is not None}
    edited = CheckpointStore(tmp_path / "edited", keep=1).save(dataclasses.replace(snapshot, state=state))
    again = run_world(1, tmp_path / "again", COMMON, task="Tiny", strategy="single", resume=edited)
    assert again.ranks[0].status == 2
    failed = again.ranks[0].failed
    assert "is not what this version writes" in failed.message


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"training.optimizer": "adamw"}, r"AdamW's state \(exp_avg, exp_avg_sq, step\) and this run uses SGD"),
        ({"training.optimizer": "sgd"}, r"SGD's state \(momentum_buffer\) and this run uses AdamW"),
        ({"training.optimizer": "sgd", "training.momentum": 0.0}, "no optimizer state, as with plain SGD"),
    ],
    ids=["adamw", "sgd", "plain sgd"],
)
def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, saved: dict[str, Any], said: str) -> None:
    before = COMMON | {"training.checkpoint_steps": 3} | saved
    run_world(1, tmp_path / "run", before, task="Tiny", strategy="single")
    other = "sgd" if saved["training.optimizer"] == "adamw" else "adamw"
    again = run_world(
        2,
        tmp_path / "again",
        COMMON | {"training.optimizer": other},
        task="Tiny",
        strategy="fsdp",
        resume=tmp_path / "run" / "checkpoints" / "step-00000003",
    )
    for rank in again.ranks:
        assert rank.status == 2
        assert re.search(said, rank.failed.message)


def test_samples_add_up_after_a_change_of_workers(tmp_path: Path) -> None:
    run_world(3, tmp_path / "run", COMMON | {"training.batch_size": 5, "training.checkpoint_steps": 3}, task="Tiny")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    two = run_world(2, tmp_path / "two", COMMON, task="Tiny", resume=checkpoint)
    assert two.summary["samples"] == 3 * 15 + 3 * 16
    assert two.summary["steps"] == 6
    told = [e.message for e in two.ranks[0].events if type(e).__name__ == "Notice"]
    assert "the global batch is 16 samples; it was 15 before the checkpoint" in told
