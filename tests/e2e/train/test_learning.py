"""Models really learn: to a stated loss on text, to a stated accuracy on handwriting."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.world import run_world


@pytest.mark.slow
def test_a_gpt_learns_the_embedded_text(tmp_path: Path) -> None:
    """Bytes start at ln 256 = 5.55. Letter frequencies alone give about 3.2; below 2.5 it knows which letters follow which."""
    shape = {"model_dim": 64, "num_layers": 2, "num_heads": 2, "max_seq_len": 64}
    config = {f"model.{k}": v for k, v in shape.items()} | {
        "training.batch_size": 8,
        "training.steps": 500,
        "training.learning_rate": 3e-3,
        "training.eval_samples": 256,
        "lr_schedule.warmup_iters": 20,
        "logging.log_interval": 50,
        "data.cache_dir": str(tmp_path / "cache"),
    }
    world = run_world(2, tmp_path / "run", config)
    losses = world.global_losses()
    assert losses[0] == pytest.approx(5.55, abs=0.2)
    assert world.summary["val_loss"] < 2.5
    assert world.summary["val_ppl"] == pytest.approx(2.718281828 ** world.summary["val_loss"], rel=1e-6)
    assert world.summary["tokens"] == 2 * 8 * 64 * 500


@pytest.mark.usual(when=lambda bound: bound == 2)
@pytest.mark.parametrize("bound", [0, 2])
def test_simple_nn_reads_handwriting(tmp_path: Path, bound: int) -> None:
    config = {
        "training.batch_size": 16,
        "training.epochs": 12,
        "training.learning_rate": 5e-3,
        "training.eval_steps": 100,
        "lr_schedule.warmup_iters": 10,
        "logging.log_interval": 50,
        "strategy.staleness_bound": bound,
    }
    world = run_world(2, tmp_path / "run", config, task="Digits")
    assert world.summary["val_accuracy"] > 0.95
    assert world.summary["steps"] == -(-12 * 1437 // 32)
