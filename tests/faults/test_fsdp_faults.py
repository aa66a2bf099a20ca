"""Sharded optimizer state outlives its owner: its backup takes the step in its place and hands the state on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.faults.elastic_history import assert_sound, changes, lines_of
from tests.world import ElasticWorld, run_elastic_world, run_world

from smolcluster.engine.checkpoint.snapshot import read_checkpoint
from smolcluster.engine.checkpoint.store import CheckpointStore

CONFIG: dict[str, Any] = {
    "training.steps": 60,
    "training.batch_size": 4,
    "training.learning_rate": 0.01,
    "training.eval_steps": 0,
    "training.seed": 3,
    "lr_schedule.warmup_iters": 2,
    "strategy.fsdp_stage": 1,
}
PAUSE = dict.fromkeys(range(4), 0.02)  # so that there is time to act


def run(workers: int, folder: Path, script: Any, **changes: Any) -> ElasticWorld:
    return run_elastic_world(workers, folder, CONFIG | changes, task="Tiny", strategy="fsdp", script=script, slow=PAUSE)


@pytest.mark.parametrize("bound", [0, 2])
def test_owners_die_one_after_the_other(tmp_path: Path, bound: int) -> None:
    def script(world: ElasticWorld) -> None:
        for turn, rank in enumerate([2, 0, 3, 1]):
            world.wait_for_step(5 + 10 * turn)
            world.kill(rank)
            world.wait_for_step(9 + 10 * turn)
            world.restart(rank)

    world = run(4, tmp_path, script, **{"strategy.staleness_bound": bound})
    assert_sound(world, steps=60)
    assert world.summary["members_lost"] >= 4
    lines = lines_of(world)
    assert len(changes(lines, "joined")) >= 8


def test_a_newcomer_keeps_the_optimizer_state_of_what_it_owns(tmp_path: Path) -> None:
    """Rank 1 of four gets a parameter that rank 0, which sends it the weights, has no state of."""

    def script(world: ElasticWorld) -> None:
        world.wait_for_step(6)
        world.start(1)

    config = CONFIG | {"cluster.num_workers": 3}
    world = run_elastic_world(
        4, tmp_path, config, task="Tiny", strategy="fsdp", script=script, start=[0, 2, 3], slow=PAUSE
    )
    assert_sound(world, steps=60)
    assert [line["rank"] for line in changes(lines_of(world), "joined")] == [0, 2, 3, 1]
    saved = load_file(Path(world.summary["checkpoint"]) / "optimizer.safetensors")
    taken = {name: float(tensor) for name, tensor in saved.items() if name.startswith("step/")}
    assert set(taken.values()) == {60.0}, f"an optimizer has begun anew: {taken}"


def test_members_without_optimizer_state_are_not_waited_for(tmp_path: Path) -> None:
    """Plain SGD keeps none, so that only the first member has anything to send."""
    changed = {"training.steps": 8, "training.optimizer": "sgd", "training.momentum": 0.0}
    world = run_elastic_world(2, tmp_path, CONFIG | changed, task="Tiny", strategy="fsdp", timeout_s=60.0)
    assert_sound(world, steps=8)
    assert Path(world.summary["checkpoint"]).name == "step-00000008"


def test_a_checkpoint_with_a_part_missing_is_not_taken_up(tmp_path: Path) -> None:
    """As they were saved when an owner's part could be lost on the way."""
    begun = run_elastic_world(
        2,
        tmp_path / "begun",
        CONFIG | {"training.steps": 4, "training.checkpoint_steps": 2},
        task="Tiny",
        strategy="fsdp",
    )
    whole = read_checkpoint(begun.run_dir / "checkpoints" / "step-00000002")
    part = {name: tensor for name, tensor in whole.optimizer.items() if name.endswith("/4.weight")}
    torn = CheckpointStore(tmp_path / "torn", keep=1).save(dataclasses.replace(whole, optimizer=part))

    def script(world: ElasticWorld) -> None:
        world.wait_for_exit("server")

    config = CONFIG | {"training.steps": 4}
    elastic = run_elastic_world(
        2, tmp_path / "elastic", config, task="Tiny", strategy="fsdp", script=script, start=[], resume=torn
    )
    mesh = run_world(2, tmp_path / "mesh", config, task="Tiny", resume=torn)
    for failed in (elastic.server.failed, mesh.ranks[0].failed):
        assert failed.kind == "user"
        assert (
            "the checkpoint of step 2 has no optimizer state for 7 parameters: 0.weight, 6.weight, " in failed.message
        )
