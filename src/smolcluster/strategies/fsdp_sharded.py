"""fsdp (ZeRO), stages 2 and 3, and hybrid: gradients and parameters are sharded too, by torch's FSDP2.

    for each step, on N workers:
        my gradient on my samples; parameters are gathered for each block and freed after it          (stage 3)
        reduce-scatter: each worker gets the mean gradient of its shard
        w[shard] <- optimizer(w[shard], clip(g[shard]))
        all-gather: all workers get the whole parameters                                              (stage 2)

    stage  also called       sharded                     bytes sent and received per step, for S bytes of parameters
    2      SHARD_GRAD_OP     optimizer, gradients        2 (N-1)/N S
    3      FULL_SHARD        + parameters                3 (N-1)/N S    gathered again for backward

HYBRID_SHARD is stage 3 inside a machine, replicated across machines; `shard_size` sets other groups. With gradient accumulation
these stages exchange for each micro-batch; in a pipeline of M micro-batches stage 3 gathers M + 1 times.

Memory of a worker, with AdamW and P parameters, in bytes:

    stage   fp32            in bf16, weights and sums in fp32
    2       4 P + 16 P/N    2 P + 16 P/N     ZeRO: 12 and 14 P/N; FSDP2 keeps the shards in addition to the gathered parameters
    3       16 P/N          16 P/N           and a few whole blocks while they are in use

Each block of the model is one FSDP2 group. With bf16 parameters are gathered in bf16 and gradients are averaged in fp32.
Stages 0 and 1: `fsdp.py`; `mesh` has all four along its data axis (`make_exchange`).

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020.
Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from smolcluster.comm.buckets import BucketSum
from smolcluster.compute.precision import DTYPES
from smolcluster.config.options import FSDPOptions, Options, ShardOptions
from smolcluster.errors import UserError
from smolcluster.parallel.axes import Axes, divisors, ranks_per_machine
from smolcluster.parallel.exchange import GradientExchange
from smolcluster.parallel.fsdp2 import Fsdp2Exchange
from smolcluster.parallel.owned_buckets import OwnedBuckets
from smolcluster.strategies.base.parallel import Parallel
from smolcluster.strategies.fsdp import lower_dtype

ShardT = TypeVar("ShardT", bound=ShardOptions)


class ShardedFSDP(Parallel[ShardT]):
    Config: ClassVar[type[Options]] = FSDPOptions

    @classmethod
    def axes(cls, options: ShardT, hosts: Sequence[str]) -> Axes:
        return shard_axes(Axes(shards=len(hosts)), options, hosts, "{} workers")

    @classmethod
    def sharding(cls, options: ShardT) -> ShardOptions:
        return options

    def make_exchange(self) -> GradientExchange:
        """Return the gradient exchange of `fsdp_stage` along the data axis."""
        options = self.options
        axes, group, weight, mesh = self.mesh_axes, self.data, self.weight, self.mesh
        if axes.data == 1:
            return GradientExchange(weight, group)
        context = self.context
        if options.shard_size == "node" and context.seat.rank == 0:
            where = "inside a machine, replicated across machines"
            if axes.replicas == 1:
                where = "over all ranks, which are on one machine: as FULL_SHARD"
            elif axes.shards == 1:
                where = "nowhere, as no two ranks of the data axis share a machine: as NO_SHARD"
            context.notify(f"HYBRID_SHARD: sharded {where}; {axes.replicas} x {axes.shards}")
        bucket_bytes = int(options.bucket_mb * 2**20)
        if options.fsdp_stage == 0 or axes.shards == 1:
            return GradientExchange(
                weight, group, lambda r: BucketSum(r.parameters, group, bucket_bytes=bucket_bytes, num_slots=1)
            )
        if options.fsdp_stage == 1:
            lower = lower_dtype(context, options, axes)
            return GradientExchange(
                weight, group, lambda r: OwnedBuckets(r, group, bucket_bytes=bucket_bytes, lower=lower), lower=lower
            )
        assert mesh is not None
        names = tuple(name for name in ("replicas", "shards") if name in (mesh.mesh_dim_names or ()))
        if options.cpu_offload and context.device.type == "cpu":
            context.warn("strategy.cpu_offload has no effect: this rank has no GPU")
        return Fsdp2Exchange(
            mesh[names],
            group,
            stage=options.fsdp_stage,
            weight=weight,
            param_dtype=DTYPES[options.param_dtype or context.config.training.precision],
            reduce_dtype=DTYPES[options.reduce_dtype or "fp32"],
            buffer_dtype=DTYPES[options.buffer_dtype] if options.buffer_dtype else None,
            offload=CPUOffloadPolicy() if options.cpu_offload and context.device.type != "cpu" else OffloadPolicy(),
            prefetch=options.prefetch,
        )


def shard_axes(axes: Axes, options: ShardOptions, hosts: Sequence[str], what: str) -> Axes:
    """Split the data axis into replicas and shards, as `shard_size` asks; `what` names its length in an error."""
    data, size = axes.data, options.shard_size
    if size is not None and size != data and options.fsdp_stage < 2:
        raise UserError(f"strategy.shard_size is for stages 2 and 3, not {options.fsdp_stage}")
    shards = ranks_per_machine(axes.lines("dp", "cp"), hosts) if size == "node" else size or data
    if data % shards:
        raise UserError(f"strategy.shard_size = {shards} does not divide {what.format(data)}; try {divisors(data)}")
    return replace(axes, replicas=data // shards, shards=shards)
