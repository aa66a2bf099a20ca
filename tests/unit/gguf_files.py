"""GGUF files for tests, written with the `gguf` package, and headers of tiny vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smolcluster.data.tokenizers import printable_bytes
from smolcluster.models import GPTConfig
from smolcluster.models.hugging_face import export_weights, family_of
from smolcluster.serve.text.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN_TOKEN


def random_weights(config: GPTConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Return weights that all differ from their initial values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.1 * torch.randn(shape, generator=generator) + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in config.shapes().items()
    }


def same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


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


# Headers of tiny vocabularies

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level(*, markers: Sequence[str] = MARKERS, words: Sequence[str] = ("the", "in", "on")) -> dict[str, Any]:
    """The header of a tiny vocabulary: markers, 256 bytes, and merges towards some words."""
    letters = sorted(printable_bytes(), key=lambda letter: printable_bytes()[letter])
    tokens, merges = [*markers, *letters], []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
                tokens.append(word[:end])
    types = [CONTROL if token in markers else NORMAL for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
    }


def pieces(*, markers: Sequence[str] = ("<s>", "</s>"), prefix: bool = True) -> dict[str, Any]:
    """The same for sentencepiece."""
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz", "he", "ll", "▁he", "▁hell", "▁hello", "lo", "or", "▁w", "▁wor"]
    tokens = ["<unk>", *markers, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [UNKNOWN_TOKEN, *[CONTROL] * len(markers), *[BYTE] * 256, *[NORMAL] * len(words)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def with_words(words: Sequence[str]) -> dict[str, Any]:
    given_ = pieces()
    types = [*given_["tokenizer.ggml.token_type"], *[NORMAL] * len(words)]
    tokens = [*given_["tokenizer.ggml.tokens"], *words]
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array(types)}
    return given_ | changed | {"tokenizer.ggml.scores": np.zeros(len(tokens), np.float32)}
