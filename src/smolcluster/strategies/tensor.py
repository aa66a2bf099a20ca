"""tensor: every layer's work is shared out among the ranks; all of them work on the same samples.

    a block, on T ranks (Megatron):
        x   my tokens of the stream                          (sequence parallel; else all of them)
        all-gather x over the ranks
        heads, or inner columns, of mine:  y <- attention(x), or mlp(x)
        reduce-scatter: the sum of all ranks' y, my tokens of it
        x <- x + y

    the embedding and the head are dealt out by rows of the vocabulary; the loss is taken over the pieces
    without gathering the logits (vocabulary parallel)

Which module is treated how stands in a table beside the model (`models/gpt_tensor.py`); torch's DTensor does the rest. A model
of one's own follows the protocol `TensorSharded` (`models/protocols.py`).

Bytes per step, sent and received each, for L layers and A bytes of stream activations (B x T x D):
    forward and backward each: 2 L + 1 all-gathers and as many reduce-scatters of A, the one more for the embedding and the
    head: (8 L + 4) (N-1)/N A. Over gloo a reduce-scatter moves twice as much: (12 L + 6) (N-1)/N A; without sequence
    parallelism these are all-reduces, and 8 L + 4 there too.

Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019.
Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022.
"""

from __future__ import annotations

import fnmatch
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
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
from smolcluster.strategies.axes import Axes, divisors
from smolcluster.strategies.base import Options, OptionsT
from smolcluster.strategies.parallel import COPY, Parallel, Shapes
from smolcluster.strategies.placement import Node


class TensorOptions(Options):
    sequence_parallel: bool = Field(True, description="the stream between layers is cut along the sequence")
    tp: int | None = Field(None, ge=1, description="ranks that share a layer; null: all")


class TensorParallel(Parallel[TensorOptions]):
    @classmethod
    def axes(cls, options: TensorOptions, hosts: Sequence[str]) -> Axes:
        num_ranks = len(hosts)
        tp = options.tp or num_ranks
        if tp != num_ranks:
            raise UserError(
                f"strategy.tp = {tp} on {num_ranks} workers: tensor has one group of all; for several use --strategy mesh"
            )
        return Axes(tp=tp)

    @classmethod
    def cuts_sequences(cls, options: TensorOptions) -> bool:
        return options.sequence_parallel

    @classmethod
    def parts(cls, options: TensorOptions, model: nn.Module, axes: Axes, nodes: Sequence[Node]) -> list[Shapes]:
        return [shared_shapes(model, part, axes.tp) for part in super().parts(options, model, axes, nodes)]

    def share_out(self, model: nn.Module) -> Fusions | None:
        return share_out(self, model)


def table_of(model: nn.Module, size: int) -> TensorStyles:
    """What the model says of itself, if `size` ranks can share each of its layers."""
    if not isinstance(model, TensorSharded):
        raise UserError(
            f"{type(model).__name__} cannot be shared out by tensors: it has no tensor_styles(), "
            "a table of module names and styles; use fsdp or pipeline, or write one as in models/gpt_tensor.py"
        )
    said = model.tensor_styles()
    for what, number in said["must_divide"].items():
        if number % size:
            raise UserError(f"tp = {size} does not divide {number} {what}; try {divisors(number)}")
    return said


def check_sequence(batch: Any, size: int) -> None:
    for tensor in tree_leaves(batch):
        if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.size(1) % size:
            raise UserError(
                f"tp = {size} does not divide sequences of {tensor.size(1)} tokens; try {divisors(tensor.size(1))}, "
                "or strategy.sequence_parallel=false"
            )


def share_out(strategy: Parallel[OptionsT], model: nn.Module) -> Fusions | None:
    """Deal the model's layers out along the tensor axis, by its table. Returns how its fused layers were reordered."""
    if strategy.mesh_axes.tp == 1:
        return None
    assert strategy.mesh is not None
    mesh, sequence_parallel = strategy.mesh["tp"], strategy.cuts_sequences(strategy.options)
    size = mesh.size()
    if sequence_parallel:
        check_sequence(strategy.context.example(1), size)
    said = table_of(model, size)
    fusions = Fusions(said["fused"], size)
    for name, parameter in model.named_parameters():
        fusions.arrange_(name, parameter)
    styles = _styles(sequence_parallel)
    # From the leaves up: a module's hooks must see its children as they will be.
    for name, module in sorted(model.named_modules(), key=lambda item: -item[0].count(".")):
        pattern = next((p for p in said["styles"] if fnmatch.fnmatchcase(name, p)), None)
        if pattern is not None:
            styles[said["styles"][pattern]](module)._apply(module, mesh)
    left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if left:
        raise UserError(f"tensor_styles() of {type(model).__name__} says nothing about {left[0]}")
    assert isinstance(model, TensorSharded)
    model.shared_out(size, sequence_parallel=sequence_parallel)
    return fusions


def shared_shapes(model: nn.Module, part: Shapes, size: int) -> Shapes:
    """What of these parameters the first rank has."""
    if size == 1:
        return part
    said = table_of(model, size)
    found: Shapes = {}
    for name, shape in part.items():
        module = name.removesuffix(COPY).rpartition(".")[0]
        style = next((s for p, s in said["styles"].items() if fnmatch.fnmatchcase(module, p)), "")
        dim = {"columns": 0, "vocabulary": 0, "vocabulary head": 0, "rows": 1}.get(style, len(shape))
        found[name] = tuple(-(-n // size) if d == dim else n for d, n in enumerate(shape))
    return found


class Fusions:
    """Rows of fused layers, in an order that deals each of their sections out evenly, and back."""

    def __init__(self, sections: Mapping[str, Sequence[int]], size: int) -> None:
        self._sections, self._size = sections, size

    def order(self, name: str) -> Tensor | None:
        """Which row of the whole stands where, or None where all stay."""
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
        """Boxes of the whole that a rank's rows come from, and where each begins."""
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


# Styles


def _styles(sequence_parallel: bool) -> dict[str, Callable[[nn.Module], ParallelStyle]]:
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
    """Parameters that every rank has; the first input as it comes, the output as the next one wants it."""

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
