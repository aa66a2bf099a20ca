"""Running means belong to the first worker, on the elastic plane as on the mesh plane."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.nn.functional as F
from tests.equivalence.same_run import Single, weights
from tests.tasks import spirals
from tests.world import run_elastic_world
from torch import nn

CONFIG = {
    "training.steps": 8,
    "training.batch_size": 6,
    "training.learning_rate": 0.01,
    "training.eval_steps": 0,
    "training.seed": 3,
    "lr_schedule.warmup_iters": 2,
    "cluster.plane": "elastic",
    "strategy.worker_update_interval": 1,
}


@pytest.mark.parametrize("strategy", ["syncps", "edp", "allreduce", "fsdp"])
def test_the_evaluated_model_has_the_running_means_of_training(tmp_path: Path, strategy: str) -> None:
    workers = 1 if strategy == "edp" else 2
    world = run_elastic_world(workers, tmp_path, CONFIG, task="BatchNorm", strategy=strategy)
    assert set(world.statuses.values()) == {0}, world.story()
    saved = weights(world)
    assert saved["1.running_mean"].abs().sum() > 0
    assert (saved["1.running_var"] - 1).abs().sum() > 0

    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)).double()
    model.load_state_dict(saved)
    x, y = spirals()
    expected = F.cross_entropy(model.eval()(x[:50]), y[:50]).item()
    assert world.summary["val_loss"] == pytest.approx(expected, rel=1e-9)


def test_one_worker_has_the_running_means_of_single(tmp_path: Path, single: Single) -> None:
    alone = run_elastic_world(1, tmp_path, CONFIG, task="BatchNorm", strategy="syncps")
    first, second = weights(single(CONFIG | {"cluster.plane": "mesh"}, "BatchNorm")), weights(alone)
    for name in ("1.running_mean", "1.running_var"):
        assert second[name].tolist() == pytest.approx(first[name].tolist(), abs=2e-5)
