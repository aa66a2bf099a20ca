"""A checkpoint of any strategy is continued by any other, and the run is the one that nobody interrupted.

In fp64, so that only the order of sums differs.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.same_run import COMMON, GPT, weights
from tests.world import World, run_world

from smolcluster.engine.checkpoint import read_checkpoint

HALF, ALL = 3, 6
CONFIG = COMMON | GPT | {"model.num_layers": 4, "training.steps": ALL, "training.checkpoint_steps": HALF}
GLOBAL_BATCH = 4
# name: ranks, data shards, what else
WAYS = {
    "single": (1, 1, {}),
    "allreduce": (2, 2, {}),
    "fsdp-1": (2, 2, {"strategy.fsdp_stage": 1}),
    "fsdp-3": (4, 4, {"strategy.fsdp_stage": 3}),
    "tensor": (2, 1, {}),
    "pipeline": (2, 1, {"strategy.schedule": "1f1b"}),
    "pipeline-zbv": (2, 1, {"strategy.schedule": "zbv"}),
    "mesh": (4, 2, {"strategy.tp": 2, "strategy.fsdp_stage": 2}),
}
TIED = {  # the embedding is the head too, on another rank, or in another stage of the same one
    "pipeline-several": (2, 1, {"strategy.schedule": "interleaved"}),
    "mesh-owned": (4, 2, {"strategy.pp": 2, "strategy.fsdp_stage": 1}),
}


def train(way: str, run_dir: Path, *, resume: Path | None = None, **more: Any) -> World:
    size, shards, options = (WAYS | TIED)[way]
    config = CONFIG | options | {"training.batch_size": GLOBAL_BATCH // shards} | more
    strategy = way.partition("-")[0]
    world = run_world(size, run_dir, config, task="DoubleGPT", strategy=strategy, resume=resume)
    assert [rank.status for rank in world.ranks] == [0] * size, [rank.failed for rank in world.ranks]
    return world


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """Each strategy, from beginning to end."""
    return {way: train(way, tmp_path_factory.mktemp(way)) for way in WAYS}


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("then", WAYS)
def test_any_goes_on_from_any(whole: dict[str, World], tmp_path: Path, first: str, then: str) -> None:
    if first == then == "single":
        pytest.skip("nothing changes")
    saved = whole[first].run_dir / "checkpoints" / f"step-{HALF:08d}"
    resumed = train(then, tmp_path, resume=saved)
    assert resumed.global_losses() == pytest.approx(whole["single"].global_losses()[HALF:], rel=1e-9)
    expected, found = weights(whole["single"]), weights(resumed)
    assert expected.keys() == found.keys()
    for name, tensor in found.items():
        assert (tensor - expected[name]).abs().max() < 1e-9, name


@pytest.mark.parametrize(("first", "then"), list(itertools.pairwise([*WAYS, "single"])))
def test_what_is_loaded_is_what_was_saved_to_the_last_bit(
    whole: dict[str, World], tmp_path: Path, first: str, then: str
) -> None:
    """One step with a rate that changes nothing, and the weights are saved again."""
    saved = whole[first].run_dir / "checkpoints" / f"step-{HALF:08d}"
    rate = {"training.learning_rate": 1e-300, "training.steps": HALF + 1}
    again = train(then, tmp_path, resume=saved, **rate)
    expected, found = read_checkpoint(saved).weights, weights(again)
    assert expected.keys() == found.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_each_rank_saves_its_part(whole: dict[str, World]) -> None:
    """And no rank all of it."""
    for way in ("fsdp-1", "fsdp-3", "tensor", "pipeline", "mesh"):
        folder = whole[way].run_dir / "checkpoints" / f"step-{HALF:08d}"
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
def test_what_two_stages_share_is_saved_once(whole: dict[str, World], tmp_path: Path, way: str) -> None:
    saved = Path(train(way, tmp_path).summary["checkpoint"])
    expected, found = weights(whole["single"]), read_checkpoint(saved).weights
    assert expected.keys() == found.keys()
    for name, tensor in found.items():
        assert (tensor - expected[name]).abs().max() < 1e-9, name
