"""`mesh` with pieces of sequences (cp) computes what `single` computes. Tolerances as in test_allreduce.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.equivalence.same_run import COMMON, GPT, LLAMA_PARTS, EqualsSingle, named
from tests.world import run_world

GPT2 = GPT | {"model.num_heads": 4, "model.max_seq_len": 24, "training.steps": 4, "training.grad_clip_norm": 0.5}
LLAMA = GPT2 | LLAMA_PARTS


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
def test_a_gpt_equals_single(
    equals_single: EqualsSingle, shape: dict[str, Any], size: int, options: dict[str, int]
) -> None:
    """Some targets do not count: pieces have unlike parts of the mean, one of them none."""
    dp = size // options["cp"] // options.get("tp", 1)
    config = COMMON | shape | {"training.grad_accumulation": 2, "training.batch_size": 4}
    parts = named(options) | {"training.batch_size": 4 // dp}
    equals_single("mesh", size, config, parts, task="MaskedGPT", tolerance=1e-9)


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
