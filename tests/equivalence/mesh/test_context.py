"""`mesh` with pieces of sequences (cp) computes what `single` computes. Tolerances as in test_allreduce.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.equivalence.same_run import COMMON, GPT, assert_same_run
from tests.world import run_world

GPT2 = GPT | {"model.num_heads": 4, "model.max_seq_len": 24, "training.steps": 4, "training.grad_clip_norm": 0.5}
LLAMA = GPT2 | {
    "model.position": "rotary",
    "model.norm": "rmsnorm",
    "model.activation": "swiglu",
    "model.num_kv_heads": 2,
    "model.tie_head": False,
}


@pytest.mark.usual(when=lambda shape, size, options: "fsdp_stage" in options)
@pytest.mark.parametrize(
    ("shape", "size", "options"),
    [
        (GPT2, 2, {"cp": 2}),
        (GPT2, 3, {"cp": 3, "fsdp_stage": 1}),
        (GPT2, 4, {"cp": 2, "fsdp_stage": 3}),
        (LLAMA, 4, {"cp": 4}),
        (LLAMA, 4, {"cp": 2, "tp": 2}),
    ],
    ids=["gpt2-2", "gpt2-3", "gpt2-dp2", "llama-4", "llama-tp2"],
)
def test_a_gpt_equals_single(tmp_path: Path, shape: dict[str, Any], size: int, options: dict[str, int]) -> None:
    """Some targets do not count: pieces have unlike parts of the mean, one of them none."""
    dp = size // options["cp"] // options.get("tp", 1)
    config = COMMON | shape | {"training.grad_accumulation": 2}
    one = run_world(1, tmp_path / "one", config | {"training.batch_size": 4}, task="MaskedGPT", strategy="single")
    parts = {f"strategy.{key}": value for key, value in options.items()}
    parts |= {"training.batch_size": 4 // dp}
    many = run_world(size, tmp_path / "many", config | parts, task="MaskedGPT", strategy="mesh")
    assert_same_run(one, many, tolerance=1e-9)
    assert one.summary["val_loss"] == pytest.approx(many.summary["val_loss"], rel=1e-9)
    assert many.summary["samples"] == one.summary["samples"]


@pytest.mark.parametrize(
    ("task", "config", "said"),
    [
        (
            "DoubleGPT",
            GPT2 | {"model.max_seq_len": 25},
            "strategy.cp = 2 does not divide sequences of 25 tokens; try 1, 5, 25",
        ),
        ("Double", {}, "strategy.cp = 2 cuts batches along the sequence, and one has a tensor of shape (1,)"),
    ],
)
def test_what_cannot_be_cut_is_refused(tmp_path: Path, task: str, config: dict[str, Any], said: str) -> None:
    parts = {"strategy.cp": 2, "training.batch_size": 4}
    assert run_world(2, tmp_path, COMMON | config | parts, task=task, strategy="mesh").refusal == said
