"""mesh (3D): pipeline x data x tensor parallel, any product that fits the number of ranks.

    rank = (pp * dp + d) * tp + t            tp innermost: it exchanges most, and neighbours are often on one machine

    axis   what is shared out                   read
    pp     layers, one after the other          pipeline.py
    dp     samples; with fsdp_stage also        fsdp.py
           optimizer, gradients, parameters
    tp     the work of each layer               tensor.py

An axis that is not said takes what the others leave, dp first. The steps of a step stand in `parallel.py`.

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021.
"""

from __future__ import annotations

from pydantic import Field
from torch import nn

from smolcluster.errors import UserError
from smolcluster.strategies.axes import Axes, divisors
from smolcluster.strategies.fsdp import FSDPOptions, make_exchange
from smolcluster.strategies.parallel import Exchange, Parallel, Shapes
from smolcluster.strategies.pipeline import Pipe, PipelineOptions, check_schedule, make_pipe, parts_of_ranks
from smolcluster.strategies.tensor import Fusions, share_out, shared_shapes


class MeshOptions(PipelineOptions, FSDPOptions):
    fsdp_stage: int = Field(0, ge=0, le=3, description="ZeRO stage along dp: what is cut up; 0 nothing, 3 all")
    dp: int | None = Field(None, ge=1, description="data shards; null: what tp and pp leave")
    tp: int = Field(1, ge=1, description="ranks that share each layer")
    pp: int = Field(1, ge=1, description="ranks that layers are dealt out to")


class Mesh(Parallel):
    name = "mesh"
    algorithm = "3D"
    summary = "pipeline x data x tensor parallel, with ZeRO stages along the data axis"
    Config = MeshOptions
    options: MeshOptions

    @classmethod
    def axes(cls, options: MeshOptions, num_ranks: int) -> Axes:
        check_schedule(options)
        tp, pp = options.tp, options.pp
        if num_ranks % (tp * pp):
            raise UserError(
                f"tp {tp} x pp {pp} does not divide {num_ranks} workers; the product must be one of {divisors(num_ranks)}"
            )
        dp = options.dp or num_ranks // (tp * pp)
        if dp * tp * pp != num_ranks:
            raise UserError(
                f"dp {dp} x tp {tp} x pp {pp} = {dp * tp * pp} and there are {num_ranks} workers; "
                f"with this tp and pp, dp must be {num_ranks // (tp * pp)}"
            )
        shards = options.shard_size or dp
        if shards < dp and options.fsdp_stage < 2:
            raise UserError(f"strategy.shard_size is for stages 2 and 3, not {options.fsdp_stage}")
        if dp % shards:
            raise UserError(f"strategy.shard_size = {shards} does not divide dp {dp}; try {divisors(dp)}")
        return Axes(pp=pp, replicas=dp // shards, shards=shards, tp=tp)

    @classmethod
    def parts(cls, options: MeshOptions, model: nn.Module, axes: Axes) -> list[Shapes]:
        return [shared_shapes(model, part, axes.tp) for part in parts_of_ranks(options, model, axes.pp)]

    def make_pipe(self, model: nn.Module) -> Pipe | None:
        return make_pipe(self, self.options, model)

    def share_out(self, model: nn.Module) -> Fusions | None:
        return share_out(self, model)

    def make_exchange(self) -> Exchange:
        return make_exchange(self, self.options)

    @classmethod
    def stage(cls, options: MeshOptions) -> int:
        return options.fsdp_stage
