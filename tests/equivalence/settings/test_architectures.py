"""Every architecture of `models/registry.py` is trained by every strategy as by `single`, over real processes and sockets.

`gpt` is left out: the tests of each strategy have it. Tolerances as in test_allreduce.py and, for parameter servers, which send
fp32, as in test_elastic.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.same_run import COMMON, GPT, EqualsSingle, Single, named, weights
from tests.world import run_elastic_world

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


@pytest.fixture(params=NAMES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the configuration of an architecture on one process."""
    return SMALL | {"model.type": request.param, "training.batch_size": BATCH} | SHAPES[request.param]


@pytest.mark.usual(when=lambda case, **_: case not in ("fsdp-2", "tensor-whole", "mesh"))
@pytest.mark.parametrize("case", MESH)
def test_it_equals_single_on_the_mesh_plane(equals_single: EqualsSingle, config: dict[str, Any], case: str) -> None:
    size, strategy, said = MESH[case]
    parts = named(said) | {"training.batch_size": BATCH // (size if strategy in ("allreduce", "fsdp") else 1)}
    equals_single(strategy, size, config, parts, task="DoubleGPT", tolerance=1e-9)


@pytest.mark.usual(when=lambda case, **_: case in ("syncps", "fsdp-1"))
@pytest.mark.parametrize("case", ELASTIC)
def test_it_equals_single_on_the_elastic_plane(
    single: Single, config: dict[str, Any], case: str, tmp_path: Path
) -> None:
    size, strategy, said = ELASTIC[case]
    parts = named(said) | {"cluster.plane": "elastic", "training.batch_size": BATCH // size}
    many = run_elastic_world(size, tmp_path, config | parts, task="DoubleGPT", strategy=strategy)
    assert set(many.statuses.values()) == {0}, many.story()
    found, tolerance = weights(many), 2e-5 if strategy in ("syncps", "edp") else 1e-9
    for name, tensor in weights(single(config, "DoubleGPT")).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, check_dtype=False)
