"""TensorBoard and W&B in a real run: one run per rank, named as documented, offline without a key."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.world import run_world

CONFIG = {
    "training.steps": 4,
    "training.batch_size": 8,
    "training.learning_rate": 0.01,
    "training.track_gradients": True,
}


def test_tensorboard_files_hold_the_rows_of_every_rank(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    world = run_world(2, tmp_path / "run", CONFIG | {"logging.tensorboard": True}, task="Tiny")
    folders = sorted(p.name for p in (tmp_path / "run" / "tensorboard").iterdir())
    assert folders == [f"ClassicDP-worker-testhost_rank{rank}_lr0.01_bs8" for rank in range(2)]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / folders[0])).Reload()
    rows = world.ranks[0].rows()
    assert [row.step for row in rows] == [1, 2, 3, 4]
    written = [(e.step, e.value, e.wall_time) for e in events.Scalars("train/loss")]
    assert written == [(row.step, pytest.approx(row.loss), row.time) for row in rows]
    gradients = {tag for tag in events.Tags()["scalars"] if tag.startswith("gradients/")}
    assert gradients == {f"gradients/{name}" for name in rows[0].gradient_norms or {}} != set()


def test_wandb_is_offline_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    world = run_world(1, tmp_path / "run", CONFIG | {"logging.wandb": True}, task="Tiny", strategy="single")
    assert world.ranks[0].status == 0
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
