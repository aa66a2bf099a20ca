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
from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from smolcluster.config.options import TensorOptions
from smolcluster.errors import UserError
from smolcluster.models.protocols import TensorSharded
from smolcluster.parallel.axes import Axes
from smolcluster.parallel.placement import Node
from smolcluster.parallel.stages import Shapes
from smolcluster.parallel.tensor_styles import Fusions, check_sequence, shared_shapes, styles_of, table_of
from smolcluster.strategies.base import OptionsT
from smolcluster.strategies.base.parallel import Parallel


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
    styles = styles_of(sequence_parallel)
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


# Styles
