"""pipeline: each rank has some of the layers; micro-batches pass through the ranks in turn.

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
from typing import ClassVar, TypeVar

from torch import nn

from smolcluster.config.options import Options, PipelineOptions
from smolcluster.parallel.axes import Axes, group_of
from smolcluster.parallel.pipe import Pipe, check_schedule, parts_of_ranks
from smolcluster.parallel.placement import Node
from smolcluster.parallel.split import measured_split
from smolcluster.parallel.stages import Cut, Shapes, holders, layers_of
from smolcluster.parallel.tracing import trace_layers
from smolcluster.strategies.base.parallel import Parallel

PipelineT = TypeVar("PipelineT", bound=PipelineOptions)


class Pipeline(Parallel[PipelineT]):
    Config: ClassVar[type[Options]] = PipelineOptions

    @classmethod
    def axes(cls, options: PipelineT, hosts: Sequence[str]) -> Axes:
        check_schedule(options)
        return Axes(pp=len(hosts))

    @classmethod
    def parts(cls, options: PipelineT, model: nn.Module, axes: Axes, nodes: Sequence[Node]) -> list[Shapes]:
        return parts_of_ranks(options, model, axes.pp, nodes)

    def make_pipe(self, model: nn.Module) -> Pipe | None:
        """Return the stages of this rank; None without a pipeline."""
        axes, options = self.mesh_axes, self.options
        if axes.pp == 1:
            return None
        assert self.mesh is not None
        split = options.layer_distribution
        at_least = sum(split) if isinstance(split, list) else len(holders(axes.pp, options))
        layers = layers_of(model) or trace_layers(self.task, self.context.example, at_least=at_least)
        counts = None
        if split == "auto":
            counts = measured_split(self.context, self.task, model, layers, axes=axes, options=options)
        cut = Cut.plan(layers.count, axes.pp, options, counts)
        ends = sorted({cut.ranks[0], cut.ranks[-1]})
        pairs = [[ranks[end] for end in ends] for ranks in axes.lines("pp")] if len(ends) == 2 else []
        return Pipe(
            self.task,
            model,
            layers,
            cut,
            options=options,
            context=self.context,
            group=self.pp,
            process_group=self.mesh["pp"].get_group(),
            pair=group_of(self.context.group, pairs),
            sequence_shards=axes.tp if self.cuts_sequences(options) else 1,
            used_in=self.used_in,
        )
