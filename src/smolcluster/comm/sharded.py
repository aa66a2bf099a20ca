"""Helpers for torch's `DTensor` that also take plain tensors, which count as unsharded.

    local(t)          this rank's part, sharing its memory
    gradient(p)       this rank's part of p's gradient, placed like p
    full_tensor(t)    the full tensor; a collective of all ranks that hold a part
    place(t)          offsets and shape of this rank's part
    copies(t)         number of ranks that hold the same part
    has_first(t)      whether this rank is the first of those
    axes_of(t)        names of the mesh axes that it is sharded or replicated over

A saved part is named `name@offsets`: box_name, read_box_name.

torch.distributed.tensor takes a second or more to import and is not imported here: until another module imports it, there are
only plain tensors.
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
    """Return the local part of the gradient, reducing it first if its placement is still partial."""
    grad = parameter.grad
    if is_sharded(parameter) and is_sharded(grad) and grad.placements != parameter.placements:
        parameter.grad = grad = grad.redistribute(placements=parameter.placements)
    return None if grad is None else local(grad)


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """Wrap a local part as a tensor that is placed like `parameter`."""
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
def full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def place(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and shape of this rank's part."""
    if not is_sharded(tensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(shape)


def part_of(full: Tensor, tensor: Tensor) -> Tensor:
    """Return the slice of `full` for this rank's part of `tensor`."""
    offsets, shape = place(tensor)
    return full[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))]


def axes_of(tensor: Tensor) -> tuple[str, ...]:
    return tuple(tensor.device_mesh.mesh_dim_names or ()) if is_sharded(tensor) else ()


def has_first(tensor: Tensor) -> bool:
    """Return whether this rank is the first one with its part, within the tensor's mesh."""
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
    """Return how many ranks of the tensor's mesh hold the same part."""
    if not is_sharded(tensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())
