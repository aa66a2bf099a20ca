"""`tensor` computes what `single` computes, over real processes and sockets. Tolerances as in test_allreduce.py."""

from __future__ import annotations

from typing import Any

import pytest
from tests.equivalence.same_run import COMMON, GPT, LLAMA_PARTS, EqualsSingle

GPT2 = GPT | {"model.num_heads": 4, "training.steps": 3}
LLAMA = GPT2 | LLAMA_PARTS


@pytest.mark.usual(when=lambda shape, size, sequence_parallel: size == 2 and sequence_parallel == (shape is LLAMA))
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(("shape", "size"), [(GPT2, 2), (GPT2, 4), (LLAMA, 2)], ids=["gpt2-2", "gpt2-4", "llama-2"])
def test_a_gpt_equals_single(
    equals_single: EqualsSingle, shape: dict[str, Any], size: int, sequence_parallel: bool
) -> None:
    config = COMMON | shape | {"training.batch_size": 6, "training.grad_accumulation": 2}
    parts = {"strategy.sequence_parallel": sequence_parallel}
    equals_single("tensor", size, config, parts, task="DoubleGPT", tolerance=1e-9)
