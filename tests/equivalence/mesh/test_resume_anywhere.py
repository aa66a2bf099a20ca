"""What a checkpoint holds, and where a run that goes on from it ends, whatever strategy and number of workers it had.

That any strategy goes on from any other's is in tests/conformance.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.equivalence.same_run import COMMON, GPT, weights
from tests.world import World, run_world

from smolcluster.engine.checkpoint.snapshot import read_checkpoint

HALF, ALL = 3, 6
CONFIG = COMMON | GPT | {"model.num_layers": 4, "training.steps": ALL, "training.checkpoint_steps": HALF}
GLOBAL_BATCH = 4
# name: ranks, data shards, what else
WAYS = {
    "single": (1, 1, {}),
    "fsdp-1": (2, 2, {"strategy.fsdp_stage": 1}),
    "fsdp-3": (4, 4, {"strategy.fsdp_stage": 3}),
    "tensor": (2, 1, {}),
    "pipeline": (2, 1, {"strategy.schedule": "1f1b"}),
    "mesh": (4, 2, {"strategy.tp": 2, "strategy.fsdp_stage": 2}),
}
TIED = {  # the embedding is the head too, on another rank, or in another stage of the same one
    "pipeline-several": (2, 1, {"strategy.schedule": "interleaved"}),
    "mesh-owned": (4, 2, {"strategy.pp": 2, "strategy.fsdp_stage": 1}),
}


def train(way: str, run_dir: Path, **more: Any) -> World:
    size, shards, options = (WAYS | TIED)[way]
    config = CONFIG | options | {"training.batch_size": GLOBAL_BATCH // shards} | more
    strategy = way.partition("-")[0]
    world = run_world(size, run_dir, config, task="DoubleGPT", strategy=strategy)
    assert [rank.status for rank in world.ranks] == [0] * size, [rank.failed for rank in world.ranks]
    return world


Whole = Callable[[str], World]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Each strategy that is asked for, from beginning to end."""
    return functools.cache(lambda way: train(way, tmp_path_factory.mktemp(way)))


def test_each_rank_saves_its_part(whole: Whole) -> None:
    """And no rank all of it."""
    for way in ("fsdp-1", "fsdp-3", "pipeline"):
        folder = whole(way).run_dir / "checkpoints" / f"step-{HALF:08d}"
        files = json.loads((folder / "manifest.json").read_text())["files"]
        ranks = range(WAYS[way][0])
        assert {f"weights-{rank}.safetensors" for rank in ranks} == {name for name in files if "weights" in name}, way
        sizes = [files[f"optimizer-{rank}.safetensors"]["size"] for rank in ranks]
        assert max(sizes) < 0.75 * sum(sizes), (way, sizes)


def test_one_rank_saves_all_when_asked_to(tmp_path: Path) -> None:
    world = train("fsdp-3", tmp_path, **{"training.sharded_checkpoints": False, "training.steps": 1})
    names = {path.name for path in Path(world.summary["checkpoint"]).iterdir()}
    assert names == {"weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}


@pytest.mark.parametrize("way", TIED)
def test_what_two_stages_share_is_saved_once(whole: Whole, tmp_path: Path, way: str) -> None:
    saved = Path(train(way, tmp_path).summary["checkpoint"])
    expected, found = weights(whole("single")), read_checkpoint(saved).weights
    assert expected.keys() == found.keys()
    for name, tensor in found.items():
        assert (tensor - expected[name]).abs().max() < 1e-9, name


@pytest.mark.parametrize("all_see_the_files", [True, False])
def test_only_the_end_is_left_and_nothing_that_is_known_is_lost(tmp_path: Path, all_see_the_files: bool) -> None:
    """A worker died after the last step was saved, and all start again."""
    config = {"training.steps": 4, "training.eval_steps": 2, "training.batch_size": 8}
    whole = run_world(2, tmp_path, config, task="Tiny").summary
    blind = {} if all_see_the_files else {1: [("smolcluster.engine.worker", "manifest_sha256", str)]}
    again = run_world(2, tmp_path, config, task="Tiny", resume=tmp_path / "checkpoints", again=True, tweaks=blind)
    assert [rank.status for rank in again.ranks] == [0, 0], [rank.failed for rank in again.ranks]
    assert again.ranks[0].rows() == []
    known = ("status", "steps", "samples", "train_loss", "val_loss", "checkpoint", "weights_sha256")
    assert {name: again.summary[name] for name in known} == {name: whole[name] for name in known}
    assert again.summary["samples_per_s"] > 0
    assert json.loads((tmp_path / "summary.json").read_text())["val_loss"] == whole["val_loss"]


# `training.epochs` is about what is read, however many read it


ONE_EPOCH = {
    "training.epochs": 1,
    "training.batch_size": 16,
    "training.eval_steps": 0,
    "lr_schedule.min_lr": 1e-5,
    "lr_schedule.warmup_iters": 2,
}


def position(world: World) -> int:
    return int(read_checkpoint(Path(world.summary["checkpoint"])).state["sampler"]["position"])


@pytest.mark.parametrize(("before", "after", "half"), [(2, 1, 4), (1, 2, 8)])
def test_an_epoch_ends_where_it_would_have(tmp_path: Path, before: int, after: int, half: int) -> None:
    config = ONE_EPOCH | {"training.checkpoint_steps": half}
    whole = run_world(before, tmp_path / "whole", config, task="Tiny")
    assert position(whole) == 256
    saved = whole.run_dir / "checkpoints" / f"step-{half:08d}"
    resumed = run_world(after, tmp_path / "resumed", config, task="Tiny", resume=saved)
    assert [rank.status for rank in resumed.ranks] == [0] * after, [rank.failed for rank in resumed.ranks]
    assert (resumed.summary["steps"], position(resumed)) == (half + 128 // (16 * after), 256)
    assert resumed.ranks[0].rows()[-1].lr == pytest.approx(1e-5)  # the schedule ends with the run

    # Once more from the middle of that: the batch is kept, and so is the end.
    at = half + 3
    stopped = run_world(after, tmp_path / "cut", config, task="Tiny", resume=saved, hook=("stop_after", 3))
    assert stopped.summary["steps"] == at
    ended = run_world(after, tmp_path / "cut", config, task="Tiny", resume=stopped.run_dir / "checkpoints")
    assert ended.summary["weights_sha256"] == resumed.summary["weights_sha256"]


def test_an_epoch_that_is_read_leaves_nothing_to_train(tmp_path: Path) -> None:
    whole = run_world(2, tmp_path / "whole", ONE_EPOCH, task="Tiny")
    again = run_world(1, tmp_path / "again", ONE_EPOCH, task="Tiny", resume=whole.run_dir / "checkpoints")
    failed = again.ranks[0].failed
    assert "at step 8 and the run ends at 8: nothing is left to train; raise training.epochs" in failed.message
    more = ONE_EPOCH | {"training.epochs": 2}
    further = run_world(1, tmp_path / "further", more, task="Tiny", resume=whole.run_dir / "checkpoints")
    assert (further.summary["steps"], position(further)) == (8 + 256 // 16, 512)
