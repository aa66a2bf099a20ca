"""Cutting a model into pipeline stages: the assignment of layers to ranks, and the extraction of layers from a model.

    nn.Sequential                       its children are the layers                       SequentialLayers
    Pipelined (models/protocols.py)     the model defines its layers                      DeclaredLayers
    any other                           its forward is traced                             tracing.py

Parameter names stay those of the whole model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from smolcluster.config.options import PipelineOptions
from smolcluster.errors import UserError
from smolcluster.models.protocols import Pipelined
from smolcluster.parallel.axes import divisors
from smolcluster.tasks.base import Task

COPY = "@copy"  # suffix of a weight that another stage of this rank also has
Shapes = dict[str, tuple[int, ...]]  # of parameters, by name

# Assigning layers: pure


@dataclass(frozen=True, slots=True)
class Cut:
    """The stages of a pipeline: their layers and their ranks."""

    layers: tuple[range, ...]
    ranks: tuple[int, ...]

    @classmethod
    def plan(
        cls, num_layers: int, num_ranks: int, options: PipelineOptions, counts: Sequence[int] | None = None
    ) -> Cut:
        """`counts`: the measured number of layers of each stage."""
        ranks = holders(num_ranks, options)
        if counts is None:
            given = options.layer_distribution
            counts = given if isinstance(given, list) else evenly(num_layers, len(ranks))
        if len(counts) != len(ranks):
            raise UserError(
                f"strategy.layer_distribution has {len(counts)} entries and schedule {options.schedule} on {num_ranks} ranks "
                f"has {len(ranks)} stages"
            )
        if sum(counts) != num_layers:
            raise UserError(f"strategy.layer_distribution adds up to {sum(counts)} layers; the model has {num_layers}")
        if min(counts) < 1:
            raise UserError(
                f"{len(ranks)} stages ({num_ranks} ranks, schedule {options.schedule}) and only {num_layers} layers: every "
                "stage needs one; use fewer workers, or a schedule with fewer stages"
            )
        first, spans = 0, []
        for length in counts:
            spans.append(range(first, first + length))
            first += length
        return cls(tuple(spans), ranks)

    def of(self, rank: int) -> list[int]:
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]


def holders(num_ranks: int, options: PipelineOptions) -> tuple[int, ...]:
    """Return the rank of each stage."""
    if options.schedule == "zbv":
        return (*range(num_ranks), *reversed(range(num_ranks)))
    per_rank = options.stages_per_rank if options.schedule in ("interleaved", "zero-bubble") else 1
    return tuple(range(num_ranks)) * per_rank


def evenly(num_layers: int, count: int) -> list[int]:
    """Distribute layers evenly; the last stages get fewer, since the last also has the head."""
    return [num_layers // count + (stage < num_layers % count) for stage in range(count)]


def num_microbatches(options: PipelineOptions, batch_sizes: Collection[int], num_stages: int) -> int:
    """Return the number of micro-batches of a batch: the same for all parallel pipelines.

    They may have different batch sizes, but where parameters are sharded along dp their ranks gather and reduce together, once
    per micro-batch. Raises UserError if the schedule cannot run with that number.
    """
    sizes, batch_size = sorted(set(batch_sizes)), math.gcd(*batch_sizes)
    one = len(sizes) == 1
    batch = f"a batch of {sizes[0]} samples" if one else f"batches of {', '.join(map(str, sizes))} samples"
    if options.schedule == "sequential":
        return 1
    ranks = num_stages // options.stages_per_rank if options.schedule in ("interleaved", "zero-bubble") else 0

    def in_rounds(count: int) -> bool:
        """Micro-batches go through an interleaved pipeline in rounds of about one per rank."""
        return ranks == 0 or count % max(1, count // ranks) == 0

    possible = [m for m in range(1, batch_size + 1) if batch_size % m == 0 and in_rounds(m)]
    given = options.num_microbatches
    if given is not None and batch_size % given:
        raise UserError(f"strategy.num_microbatches = {given} does not divide {batch}; try {divisors(batch_size)}")
    if given is not None and not in_rounds(given):
        raise UserError(
            f"strategy.num_microbatches = {given} cannot be divided into equal rounds of {ranks} or more, "
            f"as {options.schedule} needs them; try {', '.join(map(str, possible))}"
        )
    count = max(m for m in possible if m <= 2 * num_stages) if given is None else given
    if options.schedule == "1f1b" and count < num_stages:
        raise UserError(
            f"schedule 1f1b on {num_stages} ranks needs as many micro-batches, and {batch} "
            f"{'is' if one else 'are'} cut into {count}; "
            f"raise {'training.batch_size' if given is None else 'strategy.num_microbatches'}, or use strategy.schedule=gpipe"
        )
    return count


# Extracting layers


class Layers(ABC):
    """The layers of a kind of model, to be extracted from any model of that kind, also one on the meta device."""

    count: int

    @abstractmethod
    def stage(self, model: nn.Module, layers: range, *, first: bool, last: bool) -> nn.Module:
        """Return some of the layers, under their own names."""


class SequentialLayers(Layers):
    def __init__(self, model: nn.Sequential) -> None:
        self.count = len(model)

    def stage(self, model: nn.Module, layers: range, *, first: bool, last: bool) -> nn.Module:
        part = nn.Sequential()
        for name in list(model._modules)[layers.start : layers.stop]:
            part.add_module(name, model._modules[name])
        return part


class DeclaredLayers(Layers):
    def __init__(self, model: Pipelined) -> None:
        self.count = model.num_layers

    def stage(self, model: nn.Module, layers: range, *, first: bool, last: bool) -> nn.Module:
        assert isinstance(model, Pipelined)
        return model.stage(layers, first=first, last=last)


def layers_of(model: nn.Module) -> Layers | None:
    """Return the layers of a model; None where it must be traced."""
    if isinstance(model, nn.Sequential):
        return SequentialLayers(model)
    if isinstance(model, Pipelined):
        return DeclaredLayers(model)
    return None


class StageModules(nn.Module):
    """The stages of one rank as one model. Weights that another stage also has are marked as copies."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from marked(stage.named_parameters() for stage in self.stages)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        yield from marked(stage.named_buffers() for stage in self.stages)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return dict(marked(stage.state_dict(*args, **kwargs).items() for stage in self.stages))


def marked(parts: Any) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for part in parts:
        for name, tensor in part:
            yield (name + COPY if name in seen else name), tensor
            seen.add(name)


# Placeholders of the model


class _InputsCaptured(Exception):
    """Raised to return the inputs that the loss gives the model."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs


class _InputCapture(nn.Module):
    """Placeholder of the model on the first rank: captures its inputs."""

    def forward(self, *inputs: Any) -> Tensor:
        raise _InputsCaptured(inputs)


class OutputStub(nn.Module):
    """Placeholder of the model on the last rank: returns the pipeline's output."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, *inputs: Any) -> Tensor:
        return self._output


def inputs_of(task: Task, part: Any) -> tuple[Tensor, ...]:
    """Return the inputs of the model for this batch."""
    try:
        task.loss(_InputCapture(), part)
    except _InputsCaptured as asked:
        if all(isinstance(value, Tensor) for value in asked.inputs):
            return asked.inputs
    except (AttributeError, TypeError) as error:
        raise UserError(f"loss() of {task.name} must call the model once, as model(inputs): {error}") from error
    raise UserError(f"loss() of {task.name} must call the model once, with tensors, to be run in stages")


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def length_of(part: Any) -> int:
    """Return the number of samples in a batch."""
    return next(len(leaf) for leaf in tree_leaves(part) if isinstance(leaf, Tensor))
