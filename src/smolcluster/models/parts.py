"""Parts of a model: some layers, the embedding before the first, the head after the last, and the parameters of each.

part of the model       parameters, in every architecture
some layers             blocks.N....
first                   token_embedding.weight, position_embedding.weight
last                    norm...., lm_head.weight; where the head is tied, token_embedding.weight
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from smolcluster.models.architecture import Names
from smolcluster.models.protocols import DecoderConfig

Shape = tuple[int, ...]
MAX_LAYERS = 4096  # far more than any model has
_CHUNK = 1 << 20  # weights checked at a time: all at once would be in memory three times


def vocabulary(found: Mapping[str, Shape]) -> int | None:
    """Return the rows of the token embedding, or None if there is none."""
    embedding = found.get("token_embedding.weight", ())
    return embedding[0] if len(embedding) == 2 else None


def part_of(names: Iterable[str], config: DecoderConfig, layers: range, *, first: bool, last: bool) -> list[str]:
    """Return the parameters of a part of a model."""
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


def their_names(table: Names, name: str) -> list[str]:
    """Return the external names of one of our parameters, in the order in which ours concatenates them."""
    layer = re.match(r"blocks\.(\d+)\.", name)
    number = layer[1] if layer else ""
    module, _, kind = re.sub(r"^blocks\.\d+\.", "blocks.N.", name).rpartition(".")
    return [f"{their}.{kind}".replace(".N.", f".{number}.") for their in table[module]]


def their_shapes(table: Names, config: DecoderConfig, *, transposed: tuple[str, ...] = ()) -> dict[str, Shape]:
    """Return the shapes of all tensors by external name. `transposed`: suffixes of our modules."""
    result: dict[str, Shape] = {}
    for name, shape in config.shapes().items():
        external = their_names(table, name)
        for their, rows in zip(external, config.cuts(name) if len(external) > 1 else [shape[0]], strict=True):
            piece = (rows, *shape[1:])
            result[their] = piece[::-1] if is_under(name, transposed) else piece
    return result


def is_under(name: str, endings: tuple[str, ...]) -> bool:
    """Return whether a parameter belongs to a module with one of these endings."""
    return name.rpartition(".")[0].endswith(endings)


def check_depth(num_layers: int, num_tensors: int, *, where: str) -> None:
    """Raise ValueError for an implausible number of layers, before a model of that size is described."""
    if num_layers > num_tensors:
        raise ValueError(f"{where} says {num_layers} layers, but there are only {num_tensors} tensors")
    if num_layers > MAX_LAYERS:
        raise ValueError(f"{where}: {num_layers} layers; at most {MAX_LAYERS} are supported")


def check_shapes(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Raise ValueError unless names and shapes are the same."""
    problems = {
        "missing": [f"{name} {wanted[name]}" for name in wanted if name not in found],
        "unexpected": [f"{name} {found[name]}" for name in found if name not in wanted],
        "size mismatch": [
            f"{name} is {found[name]}, not {shape}" for name, shape in wanted.items() if found.get(name, shape) != shape
        ],
    }
    if any(problems.values()):
        found_problems = [f"{len(names)} {kind}: {first_of(names)}" for kind, names in problems.items() if names]
        raise ValueError(f"the tensors are not those of the model ({'; '.join(found_problems)})")


def check_values(name: str, tensor: Tensor) -> None:
    """Raise ValueError for NaN and infinity, which would otherwise show only as a NaN loss."""
    if not tensor.is_floating_point():
        raise ValueError(f"{name} is {type_name(tensor.dtype)}; expected a floating-point dtype")
    for piece in torch.split(tensor.flatten(), _CHUNK):
        wide = piece if piece.dtype == torch.float64 else piece.float()
        if not bool((wide.abs() <= torch.finfo(torch.float32).max).all()):
            raise ValueError(f"{name} contains NaN, infinity or values beyond the fp32 range")


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to another dtype. Raises ValueError for values that it cannot represent."""
    result = tensor.to(dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(result).all()):
        raise ValueError(f"{name} has values that float16 cannot hold: load it as bfloat16 or float32")
    return result


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
