"""fsdp (ZeRO): data parallel, with optimizer state, gradients and parameters cut up among the workers.

    for each step, on N workers:
        my gradient on my samples; parameters that are not here are gathered for as long as they are used     (stage 3)
        reduce-scatter: each worker gets the mean gradient of its piece
        w[piece] <- optimizer(w[piece], clip(g[piece]))
        all-gather: everybody gets the pieces they need                                          (stages 1, 2)

    stage  also called       cut up                  bytes sent and received per step, for S bytes of parameters
    0      NO_SHARD          nothing                 2 (N-1)/N S    as allreduce
    1                        optimizer               2 (N-1)/N S    shares are padded to the largest
    2      SHARD_GRAD_OP     + gradients             2 (N-1)/N S
    3      FULL_SHARD        + parameters            3 (N-1)/N S    gathered again for backward

HYBRID_SHARD is stage 3 inside a machine, replicated across machines; `shard_size` says other groups than machines. With
accumulation stages 2 and 3 exchange for each part of a batch; in a pipeline of M micro-batches stage 3 gathers M + 1 times.

Memory of a worker, with AdamW and P parameters, in bytes:

    stage   fp32            in bf16, weights and sums in fp32
    0       16 P            16 P             and 2 P that autocast rounds
    1       8 P + 8 P/N     8 P + 8 P/N      and 2 P as above; `param_dtype: bf16`: 4 P + 12 P/N
    2       4 P + 16 P/N    2 P + 16 P/N     ZeRO: 12 and 14 P/N; FSDP2's pieces stay beside what is gathered of them
    3       16 P/N          16 P/N           and a few whole blocks while they are in use

Stage 1 deals whole parameters out (`parallel/shards.py`): each has one owner, who alone updates it and hands it out. Stages 2
and 3 are torch's FSDP2, with one group of pieces for each block of the model. In bf16 what is gathered has two bytes for each
number instead of four, and gradients are averaged in four. With `param_dtype: bf16` stage 1 keeps matrices and their gradients
rounded too; the owner of a matrix also has it in full.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020.
Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from smolcluster.compute.precision import DTYPES
from smolcluster.config.options import FSDPOptions
from smolcluster.errors import UserError
from smolcluster.parallel.axes import Axes, divisors, ranks_per_machine
from smolcluster.parallel.exchange import Exchange, Owned, Summed
from smolcluster.parallel.fsdp2 import Sharded
from smolcluster.parallel.zero import Zero, zero_of
from smolcluster.strategies.base.parallel import Parallel

FSDPT = TypeVar("FSDPT", bound=FSDPOptions)


class FSDP(Parallel[FSDPOptions]):
    @classmethod
    def axes(cls, options: FSDPOptions, hosts: Sequence[str]) -> Axes:
        return cut_up(Axes(shards=len(hosts)), options, hosts, "{} workers")

    def make_exchange(self) -> Exchange:
        return make_exchange(self)

    @classmethod
    def zero(cls, options: FSDPOptions) -> Zero:
        return zero_of(options)


def cut_up(axes: Axes, options: FSDPOptions, hosts: Sequence[str], what: str) -> Axes:
    """The data ranks as replicas of groups that share one set of pieces; `what` names their number in an error."""
    data, size = axes.data, options.shard_size
    if size is not None and size != data and options.fsdp_stage < 2:
        raise UserError(f"strategy.shard_size is for stages 2 and 3, not {options.fsdp_stage}")
    shards = ranks_per_machine(axes.lines("dp", "cp"), hosts) if size == "node" else size or data
    if data % shards:
        raise UserError(f"strategy.shard_size = {shards} does not divide {what.format(data)}; try {divisors(data)}")
    return replace(axes, replicas=data // shards, shards=shards)


def make_exchange(strategy: Parallel[FSDPT]) -> Exchange:
    """What `fsdp_stage` says, along the data axis."""
    options = strategy.options
    axes, group, weight, mesh = strategy.mesh_axes, strategy.data, strategy.weight, strategy.mesh
    if axes.data == 1:
        return Exchange(weight)
    context = strategy.context
    if options.shard_size == "node" and context.seat.rank == 0:
        where = "inside a machine, replicated across machines"
        if axes.replicas == 1:
            where = "over all ranks, which are on one machine: as FULL_SHARD"
        elif axes.shards == 1:
            where = "nowhere, as no two ranks of the data axis share a machine: as NO_SHARD"
        context.tell(f"HYBRID_SHARD: cut up {where}; {axes.replicas} x {axes.shards}")
    bucket_bytes = int(options.bucket_mb * 2**20)
    if options.fsdp_stage == 0 or axes.shards == 1:
        return Summed(group, bucket_bytes=bucket_bytes, weight=weight)
    if options.fsdp_stage == 1:
        lower = _rounded_by_owners(strategy)
        return Owned(group, bucket_bytes=bucket_bytes, weight=weight, lower=lower)
    assert mesh is not None
    names = tuple(name for name in ("replicas", "shards") if name in (mesh.mesh_dim_names or ()))
    if options.cpu_offload and context.device.type == "cpu":
        context.warn("strategy.cpu_offload has no effect: there is no GPU to take the load off")
    return Sharded(
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


def _rounded_by_owners(strategy: Parallel[FSDPT]) -> torch.dtype | None:
    """Stage 1: the type that matrices are kept in by all but their owners, where that is asked for and loses nothing."""
    context, axes, options = strategy.context, strategy.mesh_axes, strategy.options
    if options.param_dtype in (None, "fp32"):
        return None
    training = context.config.training
    why = ""
    if training.precision == "fp32":
        why = "without a lower training.precision"
    elif axes.tp > 1:
        why = "where layers are cut up along tp"
    elif axes.pp > 1 or training.grad_accumulation > 1:
        why = f"where a step adds up several gradients, which {options.param_dtype} would round"
    if why and context.seat.rank == 0:
        context.warn(f"strategy.param_dtype has no effect in stage 1 {why}")
    return None if why else DTYPES[options.param_dtype]
