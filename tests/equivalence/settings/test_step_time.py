"""The time of a step in the rows is that of training: counted once, and without evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.world import run_elastic_world, run_world

from smolcluster.observe.events import StepLogged

CONFIG = {
    "training.steps": 9,
    "training.batch_size": 4,
    "training.eval_steps": 3,
    "training.eval_samples": 8,
    "training.checkpoint_steps": 0,
}


def assert_counted_once(rows: Sequence[StepLogged], *, evaluation_s: float = 0.0) -> None:
    """Between two rows there is no more time than the clock says, less that of an evaluation between them."""
    for before, after in itertools.pairwise(rows):
        counted_s = after.step_time_s * (after.step - before.step)
        evaluated_s = evaluation_s if after.val_loss is not None else 0.0
        assert 0.01 < counted_s < after.time - before.time - evaluated_s + 0.005
        assert after.compute_s + after.comm_s <= after.step_time_s + 1e-6


@pytest.mark.usual(when=lambda workers, interval, **_: interval == workers)
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("allreduce", 2)])
def test_mesh(tmp_path: Path, strategy: str, workers: int, interval: int) -> None:
    config = CONFIG | {"logging.log_interval": interval}
    world = run_world(workers, tmp_path, config, task="Metered", strategy=strategy)
    for rank in world.ranks:
        rows = rank.rows()
        assert [row.step for row in rows if row.val_loss is not None] == [3, 6, 9]
        assert_counted_once(rows, evaluation_s=0.5)
        for row in rows:
            assert row.samples_per_s == pytest.approx(4 / row.step_time_s)
    trained_s = sum(
        row.step_time_s * steps
        for row, steps in zip(rows, [1, *(b.step - a.step for a, b in itertools.pairwise(rows))], strict=True)
    )
    assert world.summary["samples_per_s"] == pytest.approx(workers * 4 * 9 / trained_s, rel=0.2)


@pytest.mark.parametrize(
    "options", [{"strategy.name": "syncps"}, {"strategy.name": "diloco", "strategy.inner_steps": 3}], ids=str
)
def test_elastic(tmp_path: Path, options: dict[str, Any]) -> None:
    """A row of the server that stands for a round has the time of one of its steps."""
    world = run_elastic_world(2, tmp_path, CONFIG | options, task="Metered", strategy=options["strategy.name"])
    for seat in (world.server, *world.workers):
        assert_counted_once(seat.rows())
