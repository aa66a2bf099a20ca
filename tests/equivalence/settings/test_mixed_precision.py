"""Mixed precision: `tensor`, `pipeline` and `mesh` follow `single`, with accumulation, clipping and a tied head at once.

bf16 has three digits, and sums are taken in another order: losses agree to two. `fsdp` has its own in test_fsdp.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.same_run import COMMON, GPT, Single, named, weights
from tests.world import run_world

CONFIG = (
    COMMON
    | GPT
    | {"model.num_layers": 4, "training.grad_accumulation": 2, "training.grad_clip_norm": 0.5, "training.steps": 3}
)
WAYS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tensor": (2, "tensor", {}),
    "pipeline": (2, "pipeline", {"num_microbatches": 2}),
    "zero bubble": (2, "pipeline", {"schedule": "zbv", "num_microbatches": 2}),
    "pieces of sequences": (2, "mesh", {"cp": 2}),
    "dp x tp": (4, "mesh", {"tp": 2, "fsdp_stage": 1}),
    "dp x pp": (4, "mesh", {"pp": 2, "fsdp_stage": 3}),
    "dp x pp, owners": (4, "mesh", {"pp": 2, "fsdp_stage": 1}),
    "tp x pp": (4, "mesh", {"tp": 2, "pp": 2}),
}


@pytest.mark.usual(
    when=lambda way, precision: way in ("pipeline", "pieces of sequences") or (way, precision) == ("dp x pp", "fp16")
)
@pytest.mark.parametrize(("way", "precision"), [*((way, "bf16") for way in WAYS), ("dp x pp", "fp16")])
def test_follows_single(tmp_path: Path, single: Single, way: str, precision: str) -> None:
    size, strategy, options = WAYS[way]
    shards = size // 2 if way.startswith("dp") else 1
    parts = named(options) | {"training.batch_size": 4 // shards, "training.precision": precision}
    many = run_world(size, tmp_path, CONFIG | parts, strategy=strategy)
    assert [rank.status for rank in many.ranks] == [0] * size, [rank.failed for rank in many.ranks]
    whole = CONFIG | {"training.batch_size": 4}
    one, exact = (single(whole | {"training.precision": each}, None) for each in (precision, "fp32"))
    assert one.global_losses() == pytest.approx(many.global_losses(), rel=1e-2)
    assert one.summary["val_loss"] == pytest.approx(many.summary["val_loss"], rel=1e-2)
    # It was clipped at every step, by a norm that is the same to two digits.
    norms = [[row.grad_norm for row in world.ranks[0].rows()] for world in (one, many)]
    assert min(norms[0]) > 0.5
    assert norms[0] == pytest.approx(norms[1], rel=3e-2)
    # Not the run in fp32; weights are kept in fp32 all the same.
    assert many.global_losses() != pytest.approx(exact.global_losses(), rel=1e-6)
    assert {tensor.dtype for tensor in weights(many).values()} == {torch.float32}
