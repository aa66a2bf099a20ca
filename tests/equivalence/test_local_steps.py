"""Steps of their own between exchanges: what several workers compute together is what each of them does alone, averaged.

The strategy is the example package's federated averaging.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.elastic_history import assert_sound, wait_for_counted
from tests.plugins import install_fedavg, install_outer
from tests.tasks import Double
from tests.world import ElasticWorld, World, run_elastic_world, run_world

from smolcluster.compute.rng import seed_everything
from smolcluster.config import strategies
from smolcluster.data.sampler import Sampler, ShardedSampler
from smolcluster.engine.checkpoint.snapshot import read_checkpoint

SEED, STEPS, RATE = 5, 7, 0.1
BATCHES = (6, 2, 4)
CONFIG: dict[str, Any] = {
    "training.steps": STEPS,
    "training.seed": SEED,
    "training.optimizer": "sgd",
    "training.momentum": 0.0,
    "training.weight_decay": 0.0,
    "training.grad_clip_norm": 0.0,
    "training.learning_rate": RATE,
    "training.batch_size": BATCHES[2],
    "cluster.workers": ["a", "b", "c"],
    "cluster.batch_size": {"a": BATCHES[0], "b": BATCHES[1]},
    "lr_schedule.min_lr": RATE,
    "lr_schedule.warmup_iters": 0,
    "training.eval_steps": 0,
    "training.checkpoint_steps": 100,
}


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """For the processes of a world. The package is installed here, too."""
    folder = tmp_path / "site"
    folder.mkdir()
    install_outer(install_fedavg(folder))
    monkeypatch.syspath_prepend(folder)
    forget()
    yield {"TEST_PATH": os.fspath(folder)}
    forget()


def forget() -> None:
    strategies._registered.cache_clear()
    strategies.find_record.cache_clear()


def train(plane: str, run_dir: Path, overrides: dict[str, Any], **world: Any) -> World | ElasticWorld:
    config = CONFIG | {"cluster.plane": plane} | overrides
    run = run_world if plane == "mesh" else run_elastic_world
    return run(len(BATCHES), run_dir, config, **{"task": "Double", "strategy": "fedavg", **world})  # type: ignore[operator]


def averaged(local_steps: int, *, rate: float = 1.0, momentum: float = 0.0) -> dict[str, torch.Tensor]:
    """The weights after STEPS steps: one model for each worker, trained by itself, and an outer step after each round."""
    task = Double(config=None)  # type: ignore[arg-type]
    seed_everything(SEED, "weights", device=torch.device("cpu"))
    mean = task.model()
    outer = torch.optim.SGD(mean.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    x, y = task.train_data()
    readers = [ShardedSampler(Sampler(len(x), seed=SEED), counts=BATCHES, shard=shard) for shard in range(len(BATCHES))]
    for first in range(1, STEPS + 1, local_steps):
        models = [copy.deepcopy(mean) for _ in BATCHES]
        for _ in range(first, min(first + local_steps, STEPS + 1)):
            for model, reader in zip(models, readers, strict=True):
                read = torch.from_numpy(reader.next())
                model.zero_grad()
                task.loss(model, (x[read], y[read])).backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= RATE * parameter.grad  # type: ignore[operator]
        outer.zero_grad()
        for place, parameter in enumerate(mean.parameters()):
            ended = [list(model.parameters())[place].detach() for model in models]
            weighted = (w * batch for w, batch in zip(ended, BATCHES, strict=True))
            parameter.grad = parameter.detach() - sum(weighted) / sum(BATCHES)
        outer.step()
    return mean.state_dict()


def final_weights(world: World | ElasticWorld) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(world.run_dir / "checkpoints" / f"step-{STEPS:08d}").weights)


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_workers_end_with_the_mean_of_what_each_does_alone(
    tmp_path: Path, environ: dict[str, str], plane: str, local_steps: int
) -> None:
    """Batches differ, and the last round is shorter. On the mesh plane the samples of a worker are known; on the elastic plane
    who reads which is the server's to say, so one step in a round tells whether they were weighted right."""
    world = train(plane, tmp_path / "run", {"strategy.options.local_steps": local_steps}, environ=environ)
    assert world.summary["status"] == "finished"
    assert world.summary["samples"] == STEPS * sum(BATCHES)
    if plane == "elastic":
        assert world.summary["replicas_agree"] is True
        assert [row.step for row in world.server.rows()] == [*range(local_steps, STEPS + 1, local_steps), STEPS][
            : -(-STEPS // local_steps)
        ]  # type: ignore[union-attr]
    if plane == "mesh" or local_steps == 1:
        expected = averaged(local_steps)
        for name, tensor in final_weights(world).items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)


def test_a_codec_encodes_what_travels(tmp_path: Path, environ: dict[str, str]) -> None:
    overrides = {"strategy.options.local_steps": 3, "strategy.options.codec": "bf16"}
    world = train("elastic", tmp_path / "run", overrides, environ=environ)
    assert world.summary["replicas_agree"] is True
    expected = averaged(3)
    for name, tensor in final_weights(world).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0.1, atol=0.1)


OUTER = {"strategy.options.local_steps": 2, "strategy.options.outer_lr": 0.7}


def test_an_outer_optimizer_with_momentum(tmp_path: Path, environ: dict[str, str]) -> None:
    world = train("mesh", tmp_path / "run", OUTER, strategy="outer", environ=environ)
    expected = averaged(2, rate=0.7, momentum=0.9)
    for name, tensor in final_weights(world).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_the_outer_state_is_resumed_with(tmp_path: Path, environ: dict[str, str], plane: str) -> None:
    """SGD without momentum keeps nothing inside, so that on both planes all that counts is in the checkpoint."""
    overrides = OUTER | {"training.checkpoint_steps": 4}
    whole = train(plane, tmp_path / "whole", overrides, strategy="outer", environ=environ)
    saved = whole.run_dir / "checkpoints" / "step-00000004"
    again = train(plane, tmp_path / "again", overrides, strategy="outer", environ=environ, resume=saved)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    other = train(plane, tmp_path / "other", overrides, strategy="fedavg", environ=environ, resume=saved)
    assert other.summary["weights_sha256"] != whole.summary["weights_sha256"]
    told = other.ranks[0].events if isinstance(other, World) else other.server.events
    assert any("shared state of outer: outer" in getattr(event, "message", "") for event in told)


def test_who_joins_gets_the_outer_state(tmp_path: Path, environ: dict[str, str]) -> None:
    """Replicas would drift apart without it."""

    def script(world: ElasticWorld) -> None:
        world.wait_for_step(6)
        world.start(2)
        wait_for_counted(world, 2, after=0.0)
        world.kill(0)
        world.wait_for_step(world.server.step + 6)
        started = time.time()
        world.start(0)
        wait_for_counted(world, 0, after=started)
        (tmp_path / "done").touch()

    alike = {key: value for key, value in CONFIG.items() if not key.startswith("cluster.")}
    overrides = alike | OUTER | {"cluster.plane": "elastic", "training.steps": 150, "cluster.num_workers": 2}
    slow = {"SLOW_UNTIL": str(tmp_path / "done")}
    world = run_elastic_world(
        3,
        tmp_path / "run",
        overrides,
        task="SlowTiny",
        strategy="outer",
        environ=environ | slow,
        start=[0, 1],
        script=script,
    )
    assert_sound(world, steps=150)
    assert world.summary["replicas_agree"] is True
