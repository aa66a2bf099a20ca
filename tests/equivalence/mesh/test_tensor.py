"""`tensor` computes what `single` computes, over real processes and sockets. Tolerances as in test_allreduce.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.equivalence.same_run import COMMON, GPT, assert_same_run
from tests.world import run_world

GPT2 = GPT | {"model.num_heads": 4, "training.steps": 3}
LLAMA = GPT2 | {
    "model.position": "rotary",
    "model.norm": "rmsnorm",
    "model.activation": "swiglu",
    "model.num_kv_heads": 2,
    "model.tie_head": False,
}


@pytest.mark.usual(when=lambda shape, size, sequence_parallel: size == 2 and sequence_parallel == (shape is LLAMA))
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(("shape", "size"), [(GPT2, 2), (GPT2, 4), (LLAMA, 2)], ids=["gpt2-2", "gpt2-4", "llama-2"])
def test_a_gpt_equals_single(tmp_path: Path, shape: dict[str, Any], size: int, sequence_parallel: bool) -> None:
    config = COMMON | shape | {"training.batch_size": 6, "training.grad_accumulation": 2}
    one = run_world(1, tmp_path / "one", config, task="DoubleGPT", strategy="single")
    parts = {"strategy.sequence_parallel": sequence_parallel}
    many = run_world(size, tmp_path / "many", config | parts, task="DoubleGPT", strategy="tensor")
    assert_same_run(one, many, tolerance=1e-9)
    assert one.summary["val_loss"] == pytest.approx(many.summary["val_loss"], rel=1e-9)
