"""The same weights in one process, for `p8`: our GPT with its cache, or `transformers`. Messages: those of `p8_front.py`.

python -m benchmarks.peers.one_process MODEL ours|transformers [DEVICE]        bf16 on a GPU, fp32 on a CPU, as stages
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness.pipes import Message, answer_each, open_answers
from benchmarks.programs.p8_front import PROMPT, prompt
from smolcluster.compute.device import synchronize
from smolcluster.models import GPT
from smolcluster.models.hugging_face import export_config, export_weights
from smolcluster.models.registry import build
from smolcluster.serve.engine.model_source import ModelSource
from smolcluster.serve.engine.sources import find_source

Generate = Callable[[Tensor, int], None]


def ours(source: ModelSource, device: torch.device, dtype: torch.dtype) -> Generate:
    config = source.config
    with torch.device("meta"):
        model = build(config)
    assert isinstance(model, GPT)
    weights = source.load(range(config.num_layers), first=True, last=True, dtype=dtype, device=device)
    model.load_state_dict(weights, assign=True)
    model.eval()

    @torch.inference_mode()
    def generate(tokens_BT: Tensor, count: int) -> None:
        """Only the logits behind the last token, as the stages do it."""
        cache = model.new_cache(tokens_BT.size(0), tokens_BT.size(1) + count)
        for _ in range(count):
            x = model.run_blocks(model.embed(tokens_BT, cache.length), model.blocks, cache=cache)
            cache.length += tokens_BT.size(1)
            tokens_BT = model.head(x[:, -1:]).argmax(dim=-1)

    return generate


def theirs(source: ModelSource, device: torch.device, dtype: torch.dtype) -> Generate:
    import transformers

    config = source.config
    weights = source.load(range(config.num_layers), first=True, last=True, dtype=dtype, device=device)
    exported = export_config(config)
    name = exported["architectures"][0]
    kind = getattr(transformers, name.replace("ForCausalLM", "Config").replace("LMHeadModel", "Config"))
    model = getattr(transformers, name)(kind(**exported)).to(device, dtype).eval()
    model.load_state_dict(export_weights(config, weights), strict=False)
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(tokens_BT: Tensor, count: int) -> None:
        model.generate(
            tokens_BT,
            attention_mask=torch.ones_like(tokens_BT),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )

    return generate


def main() -> None:
    answer = open_answers()
    model, kind = sys.argv[1:3]
    device = torch.device(sys.argv[3] if len(sys.argv) > 3 else "cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generate = {"ours": ours, "transformers": theirs}[kind](find_source(model), device, dtype)

    def timed(tokens_BT: Tensor, count: int) -> float:
        tokens_BT = tokens_BT.to(device)
        synchronize(device)
        began = time.perf_counter()
        generate(tokens_BT, count)
        synchronize(device)
        return time.perf_counter() - began

    def handle(message: Message) -> Message:
        if message["what"] == "first":
            return {"seconds": timed(torch.tensor([prompt(message["prompt"])]), 1)}
        streams, count, length = message["streams"], message["count"], message.get("prompt", PROMPT)
        tokens_BT = torch.tensor([prompt(length, stream) for stream in range(streams)])
        first_s = timed(tokens_BT, 1)
        return {"seconds": timed(tokens_BT, count) - first_s, "tokens": streams * (count - 1)}

    answer_each(answer, handle)


if __name__ == "__main__":
    main()
