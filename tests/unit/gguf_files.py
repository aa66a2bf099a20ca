"""GGUF files for tests, written with the `gguf` package: its table of names, and the converters' order of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smolcluster.models import GPTConfig
from smolcluster.models.hugging_face import export_weights, family_of

ARCHITECTURES = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """What the converter of llama does to q and k: row i of the first half of a head comes before row i of the second."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    config: GPTConfig,
    weights: Mapping[str, Tensor],
    *,
    kind: str = "F32",
    change: Callable[[Any], None] = lambda writer: None,
    values: Mapping[str, Any] | None = None,
) -> Path:
    """`kind` is the type of the matrices; norms and biases stay in fp32, as the converters have it.

    `values` replaces values of the header (None leaves one out); `change` may add to it.
    """
    import gguf

    architecture = ARCHITECTURES[family_of(config).architecture]
    writer = gguf.GGUFWriter(path, architecture)
    header: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_seq_len,
        "embedding_length": config.model_dim,
        "feed_forward_length": config.ff_dim,
        "attention.head_count": config.num_heads,
    }
    if architecture == "gpt2":
        header["attention.layer_norm_epsilon"] = config.norm_eps
    else:
        header |= {
            "attention.head_count_kv": config.num_kv_heads,
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "rope.freq_base": config.rope_theta,
            "rope.dimension_count": config.head_dim,
        }
    if architecture == "qwen3":
        header |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    for key, value in (header | dict(values or {})).items():
        name = f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_string(name, value)
    change(writer)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_layers)
    quantization = gguf.GGMLQuantizationType[kind]
    for theirs, tensor in export_weights(config, dict(weights)).items():
        if architecture == "gpt2" and tensor.ndim == 2 and ".h." in theirs:
            tensor = tensor.t()
        if architecture == "llama" and ".q_proj." in theirs:
            tensor = interleaved(tensor, config.num_heads)
        if architecture == "llama" and ".k_proj." in theirs:
            tensor = interleaved(tensor, config.num_kv_heads)
        data = tensor.detach().to(torch.float32).contiguous().numpy()
        called = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert called is not None
        if data.ndim == 2 and kind != "F32":
            writer.add_tensor(called, gguf.quants.quantize(data, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(called, np.asarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
