"""Tensors of which this rank holds a part: torch's `DTensor`, seen from here as a plain tensor and as a place in the whole.

    local(t)          my part, sharing its memory
    gradient(p)       my part of p's gradient, laid out as p is
    whole(t)          all of it, on every rank that has a part: they all call this together
    place(t)          where my part begins, and its shape
    copies(t)         how many ranks hold the same part
    has_first(t)      whether I am the first of those
    axes_of(t)        along which axes of ranks it is spread, or copied

Plain tensors are their own whole. A part that is saved is called `name@where it begins`: box_name, read_box_name.

torch's module takes a second to import, and several on a small machine: it is not imported here. Where nobody has done so there
are plain tensors only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(tensor: object) -> TypeIs[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


@torch.no_grad()
def gradient(parameter: Tensor) -> Tensor | None:
    """A sum that is still to be taken over the ranks of a part is taken here."""
    grad = parameter.grad
    if is_sharded(parameter) and is_sharded(grad) and grad.placements != parameter.placements:
        parameter.grad = grad = grad.redistribute(placements=parameter.placements)
    return None if grad is None else local(grad)


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """My part of something that is laid out as `parameter` is."""
    if not is_sharded(parameter):
        return part
    return type(parameter).from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def place(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and shape of my part."""
    if not is_sharded(tensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(shape)


def part_of(full: Tensor, tensor: Tensor) -> Tensor:
    """What of `full` belongs into my part of `tensor`."""
    offsets, shape = place(tensor)
    return full[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))]


def axes_of(tensor: Tensor) -> tuple[str, ...]:
    return tuple(tensor.device_mesh.mesh_dim_names or ()) if is_sharded(tensor) else ()


def has_first(tensor: Tensor) -> bool:
    """Of the ranks that hold the same part, within the mesh that the tensor is spread over."""
    if not is_sharded(tensor):
        return True
    where = tensor.device_mesh.get_coordinate()
    assert where is not None
    return all(at == 0 for placement, at in zip(tensor.placements, where, strict=True) if placement.is_replicate())


def box_name(name: str, offsets: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


def read_box_name(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, where = text.rpartition("@")
    return name, tuple(int(at) for at in where.split(",")) if where else ()


def copies(tensor: Tensor) -> int:
    """Within the mesh that the tensor is spread over."""
    if not is_sharded(tensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())
