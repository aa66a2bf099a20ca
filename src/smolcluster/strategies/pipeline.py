"""pipeline: each rank has some of the layers; micro-batches flow through the ranks.

    a step, on P ranks with M micro-batches:
        rank p receives the activations of micro-batch m from rank p-1, runs its layers, sends the result to rank p+1
        the last rank computes the loss; gradients of activations go back the same way
        after all micro-batches:  w <- optimizer(w, clip(g))

    schedule      stages a rank   order                                                     bubble
    sequential    1               one micro-batch: plain model parallelism                  (P-1)/P
    gpipe         1               all forward, then all backward                            (P-1)/(M+P-1)
    1f1b          1               forward and backward alternate: activations of P          (P-1)/(M+P-1)
                                  micro-batches at most
    interleaved   V               as 1f1b, with V stages on each rank                       (P-1)/(V M+P-1)
    zero-bubble   V               backward in two halves; weight gradients fill the bubble  towards 0
    zbv           2               the same, in a V: rank p has stages p and 2P-1-p          towards 0

The schedules are torch's (`torch.distributed.pipelining`). `parallel/stages.py` splits the model into stages,
`parallel/tracing.py` finds the layers of a model that is neither `Pipelined` nor an `nn.Sequential`, and `parallel/split.py`
measures the ranks. The task's loss calls `model(inputs)` once: on the first rank that captures the inputs, on the last it
returns the outputs of the pipeline. Parameter names stay those of the whole model.

A weight that the first and the last stage both use (a tied head) is on both; its gradients are summed.

Bytes per step, sent and received each, for A bytes of activations of a whole batch: A for each neighbouring stage on another
rank. So 2 A on inner ranks and A on the outer ones, about V times that with V stages a rank; a tied weight adds its own size.

Huang et al., "GPipe", 2019. Narayanan et al., "PipeDream", 2019, and "Efficient large-scale language model training on GPU
clusters using Megatron-LM", 2021 (interleaved). Qi et al., "Zero bubble pipeline parallelism", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from smolcluster.comm.group import Group
from smolcluster.config.options import PipelineOptions
from smolcluster.parallel.axes import Axes
from smolcluster.parallel.pipe import Pipe, check_schedule, parts_of_ranks
from smolcluster.parallel.placement import Node
from smolcluster.parallel.split import measured_split
from smolcluster.parallel.stages import Cut, Shapes, holders, layers_of
from smolcluster.parallel.tracing import trace_layers
from smolcluster.strategies.base.parallel import Parallel

PipelineT = TypeVar("PipelineT", bound=PipelineOptions)


class Pipeline(Parallel[PipelineOptions]):
    @classmethod
    def axes(cls, options: PipelineOptions, hosts: Sequence[str]) -> Axes:
        check_schedule(options)
        return Axes(pp=len(hosts))

    @classmethod
    def parts(cls, options: PipelineOptions, model: nn.Module, axes: Axes, nodes: Sequence[Node]) -> list[Shapes]:
        return parts_of_ranks(options, model, axes.pp, nodes)

    def make_pipe(self, model: nn.Module) -> Pipe | None:
        return make_pipe(self, model)


def make_pipe(strategy: Parallel[PipelineT], model: nn.Module) -> Pipe | None:
    """Return the stages of this rank; None without a pipeline."""
    axes, options = strategy.mesh_axes, strategy.options
    if axes.pp == 1:
        return None
    assert strategy.mesh is not None
    split = options.layer_distribution
    at_least = sum(split) if isinstance(split, list) else len(holders(axes.pp, options))
    layers = layers_of(model) or trace_layers(strategy.task, strategy.context.example, at_least=at_least)
    counts = None
    if split == "auto":
        counts = measured_split(strategy.context, strategy.task, model, layers, axes=axes, options=options)
    cut = Cut.plan(layers.count, axes.pp, options, counts)
    ends = sorted({cut.ranks[0], cut.ranks[-1]})
    pair: Group | None = None  # the ranks of the first and the last stage, where they differ
    if len(ends) == 2:
        for ranks in axes.lines("pp"):
            pair = strategy.context.group.sub([ranks[end] for end in ends]) or pair
    return Pipe(
        strategy.task,
        model,
        layers,
        cut,
        options=options,
        context=strategy.context,
        group=strategy.pp,
        process_group=strategy.mesh["pp"].get_group(),
        pair=pair,
        sequence_shards=axes.tp if strategy.cuts_sequences(options) else 1,
        used_in=strategy.used_in,
    )
