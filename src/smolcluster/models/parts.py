"""A part of a model: some layers, the embedding before the first, the head behind the last; and what is read for it.

part of the model       parameters
some layers             blocks.N....
first                   token_embedding.weight, position_embedding.weight
last                    norm...., lm_head.weight; where the head is tied, token_embedding.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from smolcluster.models.gpt_config import GPTConfig

Shape = tuple[int, ...]
MOST_LAYERS = 4096  # no model has nearly as many
_CHUNK = 1 << 20  # weights that are looked at at a time: all at once they would be in memory three times


def shapes(config: GPTConfig) -> dict[str, Shape]:
    """Names and shapes of all parameters, in the model's order. Arithmetic only: no model is made for it."""
    dim = config.model_dim
    result: dict[str, Shape] = {"token_embedding.weight": (config.vocab_size, dim)}
    if config.position == "learned":
        result["position_embedding.weight"] = (config.max_seq_len, dim)
    for layer in range(config.num_layers):
        block = f"blocks.{layer}"
        result |= _norm(f"{block}.attention_norm", config)
        result |= _linear(f"{block}.attention.qkv", config.qkv_dim, dim, bias=config.qkv_bias)
        result |= _linear(f"{block}.attention.out", dim, dim, bias=config.bias)
        result |= _norm(f"{block}.mlp_norm", config)
        result |= _linear(f"{block}.mlp.up", config.up_dim, dim, bias=config.bias)
        result |= _linear(f"{block}.mlp.down", dim, config.ff_dim, bias=config.bias)
    result |= _norm("norm", config)
    if not config.tie_head:
        result["lm_head.weight"] = (config.vocab_size, dim)
    return result


def _norm(name: str, config: GPTConfig) -> dict[str, Shape]:
    biased = config.norm == "layernorm" and config.bias
    return {f"{name}.{kind}": (config.model_dim,) for kind in (("weight", "bias") if biased else ("weight",))}


def _linear(name: str, out: int, into: int, *, bias: bool | None) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (out, into)}
    return weight | ({f"{name}.bias": (out,)} if bias else {})


def cuts(config: GPTConfig, name: str) -> list[int]:
    """How many rows of a joined projection belong to each of its parts."""
    if ".qkv." in name:
        return [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    return [config.ff_dim, config.ff_dim]


def part_of(names: Iterable[str], config: GPTConfig, layers: range, *, first: bool, last: bool) -> list[str]:
    """Those of a model's parameters that a part of it has."""
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= config.num_layers:
        raise ValueError(f"{layers} are not layers of a model that has {config.num_layers}")

    def belongs(name: str) -> bool:
        kind, _, rest = name.partition(".")
        if kind == "blocks":
            return int(rest.partition(".")[0]) in layers
        if kind == "token_embedding":
            return first or (last and config.tie_head)
        return first if kind == "position_embedding" else last

    return [name for name in names if belongs(name)]


def check_depth(num_layers: int, num_tensors: int, *, where: str) -> None:
    """Raises ValueError for what no file holds, before a model of so many layers is laid out."""
    if num_layers > num_tensors:
        raise ValueError(f"{where} says {num_layers} layers, but there are only {num_tensors} tensors")
    if num_layers > MOST_LAYERS:
        raise ValueError(f"{where} says {num_layers} layers; at most {MOST_LAYERS} are read here")


def check_shapes(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Raises ValueError unless names and shapes are the same."""
    problems = {
        "missing": [f"{name} {wanted[name]}" for name in wanted if name not in found],
        "superfluous": [f"{name} {found[name]}" for name in found if name not in wanted],
        "of another shape": [
            f"{name} is {found[name]}, not {shape}" for name, shape in wanted.items() if found.get(name, shape) != shape
        ],
    }
    if any(problems.values()):
        told = [f"{len(names)} {kind}: {first_of(names)}" for kind, names in problems.items() if names]
        raise ValueError(f"the tensors are not those of the model ({'; '.join(told)})")


def check_values(name: str, tensor: Tensor) -> None:
    """Weights are numbers. One that is none would be found only as a loss that is none."""
    if not tensor.is_floating_point():
        raise ValueError(f"{name} has the type {type_name(tensor.dtype)}, not one of fractions")
    for piece in torch.split(tensor.flatten(), _CHUNK):
        wide = piece if piece.dtype == torch.float64 else piece.float()
        if not bool((wide.abs() <= torch.finfo(torch.float32).max).all()):
            raise ValueError(f"{name} has values that are no numbers, or too large for fp32")


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in another type. Raises ValueError for those that it cannot hold."""
    result = tensor.to(dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(result).all()):
        raise ValueError(f"{name} has values that float16 cannot hold: load it as bfloat16 or float32")
    return result


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def first_of(names: Iterable[str], limit: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
