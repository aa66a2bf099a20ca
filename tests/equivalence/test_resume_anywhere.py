"""A checkpoint of any strategy is continued by any other, and the run is the one that nobody interrupted.

In fp64, so that only the order of sums differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.equivalence.same_run import COMMON, GPT, weights
from tests.world import World, run_world

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


def train(way: str, run_dir: Path, *, resume: Path | None = None) -> World:
    size, shards, options = WAYS[way]
    config = CONFIG | options | {"training.batch_size": GLOBAL_BATCH // shards}
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
