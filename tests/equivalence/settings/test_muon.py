"""Muon computes under every strategy what it computes in one process, and resumes bitwise.

In fp64 only the order of sums differs, which orthogonalizing makes larger where singular values are small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.same_run import COMMON, GPT, EqualsSingle, Single, named, weights
from tests.world import run_elastic_world, run_world

MUON = COMMON | GPT | {"training.optimizer": "muon", "training.steps": 4}
WHOLE = MUON | {"training.batch_size": 12}
WAYS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "allreduce": (2, "allreduce", {}),
    "fsdp 1": (3, "fsdp", {"fsdp_stage": 1}),
    "fsdp 3": (3, "fsdp", {"fsdp_stage": 3}),
    "tensor": (2, "tensor", {}),
    "pipeline": (2, "pipeline", {"num_microbatches": 2}),
    "dp x tp": (4, "mesh", {"tp": 2, "fsdp_stage": 3}),
    "dp x pp": (4, "mesh", {"pp": 2, "fsdp_stage": 1}),
}


@pytest.mark.usual(
    when=lambda way, tied: tied == (way in ("fsdp 3", "pipeline")) and way in ("fsdp 3", "pipeline", "tensor", "fsdp 1")
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("way", WAYS)
def test_equals_single(equals_single: EqualsSingle, way: str, tied: bool) -> None:
    size, strategy, options = WAYS[way]
    shards = 1 if strategy in ("tensor", "pipeline") else 2 if strategy == "mesh" else size
    parts = named(options) | {"training.batch_size": 12 // shards}
    equals_single(strategy, size, WHOLE | {"model.tie_head": tied}, parts, task="DoubleGPT", tolerance=1e-7)


@pytest.mark.parametrize(
    ("strategy", "options"), [("fsdp", {"fsdp_stage": 1}), ("syncps", {"worker_update_interval": 1})]
)
def test_where_members_come_and_go(tmp_path: Path, single: Single, strategy: str, options: dict[str, Any]) -> None:
    config = MUON | named(options) | {"training.batch_size": 6, "model.tie_head": True, "cluster.plane": "elastic"}
    many = run_elastic_world(2, tmp_path, config, task="DoubleGPT", strategy=strategy)
    first, second = weights(single(WHOLE | {"model.tie_head": True}, "DoubleGPT")), weights(many)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-6 if strategy == "fsdp" else 1e-4)


@pytest.mark.usual(when=lambda way: way == "fsdp 3")
@pytest.mark.parametrize("way", ["fsdp 3", "tensor"])
def test_resumes_bitwise(tmp_path: Path, way: str) -> None:
    size, strategy, options = WAYS[way]
    config = MUON | named(options) | {"training.batch_size": 4, "training.checkpoint_steps": 2}
    whole = run_world(size, tmp_path / "whole", config, strategy=strategy)
    half = tmp_path / "whole" / "checkpoints" / "step-00000002"
    again = run_world(size, tmp_path / "again", config, strategy=strategy, resume=half)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
