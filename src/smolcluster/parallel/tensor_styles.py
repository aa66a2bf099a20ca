"""Tensor parallelism by torch's DTensor, with the parallelize plan that the model provides."""

from __future__ import annotations

import fnmatch
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils._pytree import tree_leaves

from smolcluster.errors import UserError
from smolcluster.models.protocols import TensorSharded, TensorStyles
from smolcluster.parallel.axes import divisors
from smolcluster.parallel.stages import COPY, Shapes


def table_of(model: nn.Module, size: int) -> TensorStyles:
    """Return the plan of a model. Raises UserError where `size` ranks cannot share its layers."""
    if not isinstance(model, TensorSharded):
        raise UserError(
            f"{type(model).__name__} cannot be split by tensor parallelism: it has no tensor_styles(), "
            "a table of module names and styles; use fsdp or pipeline, or write one as in models/gpt_tensor.py"
        )
    table = model.tensor_styles()
    for what, number in table["must_divide"].items():
        if number % size:
            raise UserError(f"tp = {size} does not divide {number} {what}; try {divisors(number)}")
    return table


def check_sequence(batch: Any, size: int) -> None:
    for tensor in tree_leaves(batch):
        if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.size(1) % size:
            raise UserError(
                f"tp = {size} does not divide sequences of {tensor.size(1)} tokens; try {divisors(tensor.size(1))}, "
                "or strategy.sequence_parallel=false"
            )


def shared_shapes(model: nn.Module, part: Shapes, size: int) -> Shapes:
    """Return the shapes of these parameters on the first rank."""
    if size == 1:
        return part
    table = table_of(model, size)
    found: Shapes = {}
    for name, shape in part.items():
        module = name.removesuffix(COPY).rpartition(".")[0]
        style = next((s for p, s in table["styles"].items() if fnmatch.fnmatchcase(module, p)), "")
        dim = {"columns": 0, "vocabulary": 0, "vocabulary head": 0, "rows": 1}.get(style, len(shape))
        found[name] = tuple(-(-n // size) if d == dim else n for d, n in enumerate(shape))
    return found


class Fusions:
    """Reorder the rows of fused layers so that each section is divided evenly, and back."""

    def __init__(self, sections: Mapping[str, Sequence[int]], size: int) -> None:
        self._sections, self._size = sections, size

    def order(self, name: str) -> Tensor | None:
        """Return the row order of a parameter, or None where it is unchanged."""
        module = name.rpartition(".")[0]
        for pattern, lengths in self._sections.items():
            if fnmatch.fnmatchcase(module, pattern):
                rows, start = [], 0
                for length in lengths:
                    rows.append(torch.arange(start, start + length).view(self._size, -1))
                    start += length
                return torch.cat(rows, dim=1).flatten()
        return None

    @torch.no_grad()
    def arrange_(self, name: str, tensor: Tensor) -> None:
        tensor.copy_(self.arranged(name, tensor))

    def arranged(self, name: str, full: Tensor) -> Tensor:
        order = self.order(name) if full.ndim else None
        return full if order is None else full[order.to(full.device)]

    def runs(self, name: str, part: Tensor, offsets: Sequence[int]) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return the boxes of the whole tensor that a rank's rows come from, with their offsets."""
        order = self.order(name) if part.ndim else None
        if order is None:
            return [(tuple(offsets), part)]
        rows = order[offsets[0] : offsets[0] + len(part)].tolist()
        starts = [0, *(at for at in range(1, len(rows)) if rows[at] != rows[at - 1] + 1), len(rows)]
        return [((rows[a], *offsets[1:]), part[a:b]) for a, b in itertools.pairwise(starts)]

    def restored(self, name: str, full: Tensor) -> Tensor:
        order = self.order(name) if full.ndim else None
        if order is None:
            return full
        restored = torch.empty_like(full)
        restored[order.to(full.device)] = full
        return restored


def styles_of(sequence_parallel: bool) -> dict[str, Callable[[nn.Module], ParallelStyle]]:
    stream = Shard(1) if sequence_parallel else Replicate()
    return {
        "columns": lambda _: ColwiseParallel(input_layouts=Replicate()),
        "rows": lambda _: RowwiseParallel(output_layouts=stream),
        "vocabulary": lambda _: RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "vocabulary head": lambda _: ColwiseParallel(use_local_output=False),
        "stream": lambda _: SequenceParallel() if sequence_parallel else _Everywhere(),
        "positions": lambda _: _Everywhere(gives=Shard(0) if sequence_parallel else Replicate()),
        "heads": lambda _: _Everywhere(takes=Shard(2), gives=Shard(2)),
        "gather": lambda module: _gather(module, stream),
        "logits": lambda _: _Everywhere(takes=stream, keep=True),
    }


def _gather(module: nn.Module, stream: Shard | Replicate) -> ParallelStyle:
    others = len(inspect.signature(module.forward).parameters) - 1
    return PrepareModuleInput(
        input_layouts=(stream, *[None] * others), desired_input_layouts=(Replicate(), *[None] * others)
    )


class _Everywhere(ParallelStyle):
    """Replicate the parameters; convert the first input and the output between layouts."""

    def __init__(
        self,
        *,
        takes: Placement | None = None,
        gives: Placement | None = None,
        keep: bool = False,
    ) -> None:
        super().__init__()
        self._takes, self._gives, self._keep = takes or Replicate(), gives or Replicate(), keep

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._partition, self._take, self._give)  # type: ignore[arg-type]

    def _partition(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            replicated = nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()]))
            module.register_parameter(name, replicated)

    def _take(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        first, *others = inputs
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, [self._takes], run_check=False)
        return (first, *others)

    def _give(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        output = output.redistribute(placements=[self._gives])
        return output if self._keep else output.to_local()
