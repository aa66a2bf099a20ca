"""`pipeline`, all schedules, computes what `single` computes, over real processes and sockets.

Tolerances as in test_allreduce.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.equivalence.same_run import COMMON, GPT, assert_same_run
from tests.world import run_world

GPT4 = GPT | {"model.num_layers": 4}
SCHEDULES = ["sequential", "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_gpt_equals_single(tmp_path: Path, schedule: str, size: int) -> None:
    """A tied head, on the first rank and the last, or on the first alone."""
    layers = {"model.num_layers": 2 * size if schedule in ("interleaved", "zero-bubble", "zbv") else 4}
    config = COMMON | GPT | layers | {"training.batch_size": 12, "training.grad_accumulation": 2}
    one = run_world(1, tmp_path / "one", config, task="DoubleGPT", strategy="single")
    many = run_world(
        size, tmp_path / "many", config | {"strategy.schedule": schedule}, task="DoubleGPT", strategy="pipeline"
    )
    assert_same_run(one, many, tolerance=1e-9)
    assert one.summary["val_loss"] == pytest.approx(many.summary["val_loss"], rel=1e-9)
