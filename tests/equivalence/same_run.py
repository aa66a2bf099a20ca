"""Two runs that should be the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.world import ElasticWorld, World

from smolcluster.engine.checkpoint.snapshot import read_checkpoint

# Of the fixtures in conftest.py
Single = Callable[..., World]
EqualsSingle = Callable[..., World]

STEPS = 8
COMMON: dict[str, Any] = {
    "training.steps": STEPS,
    "training.learning_rate": 0.01,
    "training.weight_decay": 0.1,
    "training.eval_steps": 0,
    "training.seed": 3,
    "lr_schedule.warmup_iters": 2,
}
GPT: dict[str, Any] = {
    "model.model_dim": 32,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.max_seq_len": 32,
    "model.ff_dim": 64,
    "training.eval_samples": 24,
}
LLAMA_PARTS: dict[str, Any] = {
    "model.position": "rotary",
    "model.norm": "rmsnorm",
    "model.activation": "swiglu",
    "model.num_kv_heads": 2,
    "model.tie_head": False,
}


def named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a strategy by dotted names."""
    return {f"strategy.{key}": value for key, value in options.items()}


def weights(world: World | ElasticWorld) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(Path(world.summary["checkpoint"])).weights)


def assert_same_run(one: World, other: World, *, tolerance: float) -> None:
    failed = [rank.failed for world in (one, other) for rank in world.ranks if rank.failed is not None]
    failed.sort(key=lambda f: f.kind == "peer")  # the first to fail says why, the others only that it is gone
    assert not failed, f"{failed[0].message}\n{failed[0].traceback}"
    assert one.global_losses() == pytest.approx(other.global_losses(), rel=tolerance)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=tolerance)
