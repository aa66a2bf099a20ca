"""Every architecture of `models/registry.py` is trained by every strategy as by `single`, over real processes and sockets.

`gpt` is left out: the tests of each strategy have it. Tolerances as in test_allreduce.py and, for parameter servers, which send
fp32, as in test_elastic.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.same_run import COMMON, GPT, assert_same_run, weights
from tests.world import World, run_elastic_world, run_world

from smolcluster.engine.checkpoint.snapshot import read_checkpoint
from smolcluster.models.registry import ARCHITECTURES

SMALL = COMMON | GPT | {"model.num_heads": 4, "model.num_kv_heads": 2, "training.steps": 4}
SHAPES: dict[str, dict[str, Any]] = {"qwen3": {"model.options": {"head_dim": 16}, "model.tie_head": False}}
BATCH = 4  # of one step, all workers together
AT_ONCE = {"worker_update_interval": 1}

MESH: dict[str, tuple[int, str, dict[str, Any]]] = {
    "allreduce": (2, "allreduce", {}),
    "fsdp-1": (2, "fsdp", {"fsdp_stage": 1}),
    "fsdp-2": (2, "fsdp", {"fsdp_stage": 2}),
    "fsdp-3": (2, "fsdp", {"fsdp_stage": 3}),
    "tensor": (2, "tensor", {}),
    "tensor-whole": (2, "tensor", {"sequence_parallel": False}),
    "pipeline": (2, "pipeline", {"schedule": "gpipe"}),
    "context": (2, "mesh", {"cp": 2}),
    "mesh": (4, "mesh", {"pp": 2, "tp": 2}),
}
ELASTIC: dict[str, tuple[int, str, dict[str, Any]]] = {
    "allreduce": (2, "allreduce", {}),
    "fsdp-1": (2, "fsdp", {"fsdp_stage": 1}),
    "syncps": (2, "syncps", AT_ONCE | {"polyak_alpha": 1.0}),
    "edp": (1, "edp", AT_ONCE),
}
NAMES = [name for name in ARCHITECTURES if name != "gpt"]


@pytest.fixture(scope="module", params=NAMES)
def single(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], World]:
    """The configuration of an architecture, and its run on one process."""
    config = SMALL | {"model.type": request.param} | SHAPES[request.param]
    folder = tmp_path_factory.mktemp("single")
    one = run_world(1, folder, config | {"training.batch_size": BATCH}, task="DoubleGPT", strategy="single")
    return config, one


def options(said: dict[str, Any], batch_size: int) -> dict[str, Any]:
    return {f"strategy.{key}": value for key, value in said.items()} | {"training.batch_size": batch_size}


@pytest.mark.usual(when=lambda case, **_: case not in ("fsdp-2", "tensor-whole", "mesh"))
@pytest.mark.parametrize("case", MESH)
def test_it_equals_single_on_the_mesh_plane(single: tuple[dict[str, Any], World], case: str, tmp_path: Path) -> None:
    (config, one), (size, strategy, said) = single, MESH[case]
    readers = size if strategy in ("allreduce", "fsdp") else 1
    many = run_world(size, tmp_path, config | options(said, BATCH // readers), task="DoubleGPT", strategy=strategy)
    assert_same_run(one, many, tolerance=1e-9)
    assert one.summary["val_loss"] == pytest.approx(many.summary["val_loss"], rel=1e-9)


@pytest.mark.usual(when=lambda case, **_: case in ("syncps", "fsdp-1"))
@pytest.mark.parametrize("case", ELASTIC)
def test_it_equals_single_on_the_elastic_plane(single: tuple[dict[str, Any], World], case: str, tmp_path: Path) -> None:
    (config, one), (size, strategy, said) = single, ELASTIC[case]
    config |= {"cluster.plane": "elastic"} | options(said, BATCH // size)
    many = run_elastic_world(size, tmp_path, config, task="DoubleGPT", strategy=strategy)
    assert set(many.statuses.values()) == {0}, many.story()
    found = read_checkpoint(Path(many.summary["checkpoint"])).weights
    tolerance = 2e-5 if strategy in ("syncps", "edp") else 1e-9
    for name, tensor in weights(one).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, check_dtype=False)
