"""tensor: every layer is sharded over the ranks; all ranks work on the same samples.

    a block, on N ranks (Megatron):
        x: this rank's tokens of the residual stream         (sequence parallel; else all tokens)
        all-gather x over the ranks
        y <- attention(x) with this rank's heads, or mlp(x) with its columns
        reduce-scatter: this rank's tokens of the sum of y over ranks
        x <- x + y

    the embedding and the head are sharded by rows of the vocabulary; the loss is computed on the shards, without
    gathering the logits (vocabulary parallel)

A table next to the model maps each module to a parallel style (`models/gpt_tensor.py`), and torch's DTensor applies it. Your
own model follows the protocol `TensorSharded` (`models/protocols.py`).

Bytes per step, sent and received each, for L layers and A bytes of residual stream (batch x tokens x width):
    forward and backward each: 2 L + 1 all-gathers and 2 L + 1 reduce-scatters of A; the +1 is for the embedding and the head:
    (8 L + 4) (N-1)/N A. Over gloo a reduce-scatter moves twice as much: (12 L + 6) (N-1)/N A; without sequence parallelism
    all-reduces replace them: 8 L + 4 there too.

Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019.
Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import ClassVar, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from smolcluster.config.options import MeshOptions, Options, TensorOptions
from smolcluster.errors import UserError
from smolcluster.models.protocols import TensorSharded
from smolcluster.parallel.axes import Axes
from smolcluster.parallel.placement import Node
from smolcluster.parallel.stages import Shapes
from smolcluster.parallel.tensor_styles import Fusions, check_sequence, shared_shapes, styles_of, table_of
from smolcluster.strategies.base.parallel import Parallel

TensorT = TypeVar("TensorT", bound=TensorOptions | MeshOptions)


class TensorParallel(Parallel[TensorT]):
    Config: ClassVar[type[Options]] = TensorOptions

    @classmethod
    def axes(cls, options: TensorT, hosts: Sequence[str]) -> Axes:
        num_ranks = len(hosts)
        tp = options.tp or num_ranks
        if tp != num_ranks:
            raise UserError(
                f"strategy.tp = {tp} on {num_ranks} workers: tensor has one group of all; for several use --strategy mesh"
            )
        return Axes(tp=tp)

    @classmethod
    def cuts_sequences(cls, options: TensorT) -> bool:
        return options.sequence_parallel

    @classmethod
    def parts(cls, options: TensorT, model: nn.Module, axes: Axes, nodes: Sequence[Node]) -> list[Shapes]:
        return [shared_shapes(model, part, axes.tp) for part in super().parts(options, model, axes, nodes)]

    def shard_layers(self, model: nn.Module) -> Fusions:
        """Shard the model's layers along tp by its table of styles."""
        if self.mesh_axes.tp == 1:
            return super().shard_layers(model)
        assert self.mesh is not None
        mesh, sequence_parallel = self.mesh["tp"], self.options.sequence_parallel
        size = mesh.size()
        if sequence_parallel:
            check_sequence(self.context.example(1), size)
        table = table_of(model, size)
        fusions = Fusions(table["fused"], size)
        for name, parameter in model.named_parameters():
            fusions.arrange_(name, parameter)
        styles = styles_of(sequence_parallel)
        # Children first: the hooks of a module must see them as DTensors.
        for name, module in sorted(model.named_modules(), key=lambda item: -item[0].count(".")):
            pattern = next((p for p in table["styles"] if fnmatch.fnmatchcase(name, p)), None)
            if pattern is not None:
                styles[table["styles"][pattern]](module)._apply(module, mesh)
        left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
        if left:
            raise UserError(f"tensor_styles() of {type(model).__name__} has no style for {left[0]}")
        assert isinstance(model, TensorSharded)
        model.shared_out(size, sequence_parallel=sequence_parallel)
        return fusions
