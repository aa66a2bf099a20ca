"""Decoding on a GPU: a length of the cache that is seen for the first time costs no more than one that was seen before.

cuDNN attention builds a plan for every new length, 40 to 300 ms each; a step of these models takes 1 to 3 ms. Each test has a
shape of its own, because plans stay in the process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from smolcluster.models import GPT, GPTConfig
from smolcluster.serve.engine.stage_model import Row, StageModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

WARM, LENGTHS = 16, 160
# A repeat takes as long as the first pass, but for noise; with plans the first pass takes 20 to 100 times as long.
AT_MOST = 2.0


def gpt2(heads: int) -> GPTConfig:
    return GPTConfig(vocab_size=256, model_dim=64 * heads, num_layers=4, num_heads=heads, max_seq_len=512)


def llama(heads: int) -> GPTConfig:
    width = 64 * heads
    return GPTConfig.llama(
        vocab_size=256,
        model_dim=width,
        num_layers=4,
        num_heads=heads,
        num_kv_heads=2,
        ff_dim=2 * width,
        max_seq_len=512,
    )


def model_of(config: GPTConfig, dtype: torch.dtype) -> GPT:
    torch.manual_seed(0)
    return GPT(config).to(device="cuda", dtype=dtype).eval()


def part_of(config: GPTConfig, dtype: torch.dtype) -> StageModel:
    weights, layers = model_of(config, dtype).state_dict(), range(config.num_layers)
    return StageModel(config, layers, first=True, last=True, weights=weights, device=torch.device("cuda"), dtype=dtype)


def slowdown(passes: Callable[[], Callable[[int], object]]) -> float:
    """Return the median time of a step over fresh lengths, divided by that of later passes over the same lengths.

    The slower of two later passes counts: a machine may be busy. `passes` starts a pass and returns its step, which gets
    0, 1, 2, ... The first steps load kernels and do not count.
    """
    medians = []
    for _ in range(3):
        step, times = passes(), []
        for number in range(LENGTHS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step(number)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        medians.append(statistics.median(times[WARM:]))
    return medians[0] / max(medians[1:])


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(gpt2(3), torch.bfloat16), (llama(6), torch.bfloat16), (gpt2(5), torch.float32)],
    ids=["gpt2-bf16", "llama-bf16", "gpt2-fp32"],
)
@torch.inference_mode()
def test_generating_over_fresh_lengths(config: GPTConfig, dtype: torch.dtype) -> None:
    model = model_of(config, dtype)

    def one_pass() -> Callable[[int], object]:
        cache, token_BT = model.new_cache(1, LENGTHS), torch.zeros(1, 1, dtype=torch.int64, device="cuda")
        return lambda _: model(token_BT, cache=cache)

    assert slowdown(one_pass) <= AT_MOST


@pytest.mark.parametrize("config", [gpt2(7), llama(10)], ids=["gpt2", "llama"])
def test_serving_over_fresh_lengths(config: GPTConfig) -> None:
    part = part_of(config, torch.bfloat16)

    def one_pass() -> Callable[[int], object]:
        return lambda at: part.run([Row(sequence=0, start=at, count=1, logits=True)], torch.tensor([at % 256]))

    assert slowdown(one_pass) <= AT_MOST


@pytest.mark.parametrize("config", [gpt2(9), llama(14)], ids=["gpt2", "llama"])
def test_prompts_of_fresh_lengths(config: GPTConfig) -> None:
    """Whole prompts, and a chunk behind a cached one, which needs a mask."""
    part = part_of(config, torch.bfloat16)

    def prompts(at: int) -> None:
        count = 2 + at
        for start in (0, count):
            part.run([Row(sequence=0, start=start, count=count, logits=True)], torch.arange(count) % 256)

    assert slowdown(lambda: prompts) <= AT_MOST


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_are_those_of_the_cpu(heads: int, dtype: torch.dtype) -> None:
    """Logits of a cached decode on the GPU equal those of one uncached pass in fp64 on the CPU, within rounding."""
    for config in (gpt2(heads), replace(llama(2 * heads), tie_head=False)):
        part, length = part_of(config, dtype), 40
        tokens = torch.randint(256, (length,), generator=torch.Generator().manual_seed(1))
        reference = GPT(config).double().eval()
        reference.load_state_dict(
            {name: tensor.double().cpu() for name, tensor in model_of(config, dtype).state_dict().items()}
        )
        with torch.inference_mode():
            expected = reference(tokens[None])[0]
        cuts = [0, 7, 20, *range(21, length + 1)]
        for start, end in pairwise(cuts):
            logits = part.run([Row(sequence=0, start=start, count=end - start, logits=True)], tokens[start:end])
            # Logits are of size 1; bf16 keeps 8 bits of each activation in 4 layers.
            tolerance = 1e-3 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(logits[0].cpu().double(), expected[end - 1], rtol=0, atol=tolerance)
