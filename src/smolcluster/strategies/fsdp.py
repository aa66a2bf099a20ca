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

HYBRID_SHARD is stage 3 inside a group of `shard_size` workers, replicated across groups.

Memory of a worker, with AdamW in fp32 and P parameters, in bytes: 16 P; 8 P + 8 P/N; 4 P + 16 P/N; 16 P/N. ZeRO's own stage 2
has 4 P + 12 P/N: FSDP2 keeps its pieces beside the whole parameters for as long as it uses those. In bf16 stage 2 gathers two
bytes for each: 2 P + 16 P/N. Stage 3 holds a few whole blocks beside this while it computes.

Stage 1 deals whole parameters out (`shards.py`): each has one owner, who alone updates it and hands it out. Stages 2 and 3 are
torch's FSDP2, with one group of pieces for each block of the model.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020.
Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from smolcluster.comm.buckets import GradientBuckets
from smolcluster.comm.group import Group
from smolcluster.comm.sharded import gradient, like, local
from smolcluster.compute.replica import Batch, Replica
from smolcluster.errors import UserError
from smolcluster.strategies.axes import Axes, divisors
from smolcluster.strategies.parallel import Exchange, Parallel, ParallelOptions
from smolcluster.strategies.shards import owners

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDPOptions(ParallelOptions):
    fsdp_stage: int = Field(3, ge=0, le=3, description="ZeRO stage: what is cut up; 0 nothing, 3 all")
    shard_size: int | None = Field(
        None, ge=1, description="hybrid: workers that share one set of pieces; null: all of them"
    )
    param_dtype: Dtype | None = Field(
        None, description="stages 2, 3: type that parameters are gathered and used in; null: training.precision"
    )
    reduce_dtype: Dtype | None = Field(None, description="stages 2, 3: type that gradients are averaged in; null: fp32")
    cpu_offload: bool = Field(
        False, description="stages 2, 3 on a GPU: pieces and optimizer state live in the memory of the machine"
    )
    prefetch: int = Field(1, ge=0, description="stage 3: blocks that are gathered ahead of the one in use")


class FSDP(Parallel):
    name = "fsdp"
    algorithm = "FSDP"
    summary = "ZeRO 0-3 and hybrid: optimizer state, gradients and parameters cut up among the workers"
    Config = FSDPOptions
    options: FSDPOptions

    @classmethod
    def axes(cls, options: FSDPOptions, num_ranks: int) -> Axes:
        shards = options.shard_size or num_ranks
        if num_ranks % shards:
            raise UserError(
                f"strategy.shard_size = {shards} does not divide {num_ranks} workers; try {divisors(num_ranks)}"
            )
        if shards < num_ranks and options.fsdp_stage < 2:
            raise UserError(f"strategy.shard_size is for stages 2 and 3, not {options.fsdp_stage}")
        return Axes(replicas=num_ranks // shards, shards=shards)

    def make_exchange(self) -> Exchange:
        return make_exchange(self, self.options)

    @classmethod
    def stage(cls, options: FSDPOptions) -> int:
        return options.fsdp_stage


def make_exchange(strategy: Parallel, options: FSDPOptions) -> Exchange:
    """What `options.fsdp_stage` says, along the data axis."""
    axes, group, weight, mesh = strategy.mesh_axes, strategy.dp, strategy.weight, strategy.mesh
    if axes.dp == 1:
        return Exchange(weight)
    if options.fsdp_stage == 0:
        return Summed(group, bucket_bytes=int(options.bucket_mb * 2**20), weight=weight)
    if options.fsdp_stage == 1:
        return Owned(group, bucket_bytes=int(options.bucket_mb * 2**20), weight=weight)
    assert mesh is not None
    names = tuple(name for name in ("replicas", "shards") if name in (mesh.mesh_dim_names or ()))
    context = strategy.context
    precision = context.config.training.precision
    if options.cpu_offload and context.device.type == "cpu":
        context.warn("strategy.cpu_offload has no effect: there is no GPU to take the load off")
    return Sharded(
        mesh[names],
        group,
        axes,
        stage=options.fsdp_stage,
        weight=weight,
        param_dtype=DTYPES[options.param_dtype or precision],
        reduce_dtype=DTYPES[options.reduce_dtype or "fp32"],
        offload=CPUOffloadPolicy() if options.cpu_offload and context.device.type != "cpu" else OffloadPolicy(),
        prefetch=options.prefetch,
    )


class Summed(Exchange):
    """Stage 0. Buckets leave while backward runs."""

    def __init__(self, group: Group, *, bucket_bytes: int, weight: float) -> None:
        super().__init__(weight)
        self._group, self._bucket_bytes = group, bucket_bytes
        self.copies = group.size
        self._sent = False

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._buckets = GradientBuckets(replica.parameters, self._group, bucket_bytes=self._bucket_bytes)

    def compute(self, batch: Batch) -> Tensor:
        loss = self._replica.compute(batch, before_last=lambda: self._buckets.arm(0, weight=self._weight, stop=False))
        self._buckets.disarm()
        self._sent = True
        return loss

    def finish(self) -> None:
        if not self._sent:  # a pipeline ran backward
            self._buckets.send(0, weight=self._weight)
        self._sent = False
        self._buckets.wait(0)
        self._buckets.give(0)


class Owned(Exchange):
    """Stage 1. Gradients go to the owners of their parameters and updated parameters come back, a buffer full at a time.

    Row r of the buffer takes what rank r owns; shares are padded to the largest. Sums are put where the owner's own gradients
    were, so that beside them there is only the buffer.
    """

    owners = True

    def __init__(self, group: Group, *, bucket_bytes: int, weight: float) -> None:
        super().__init__(weight)
        self._group, self._bucket_bytes = group, bucket_bytes

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        group, parts = self._group, [local(p.detach()) for p in replica.parameters]
        owner = owners([part.numel() for part in parts], group.size)
        self._own = {p for p, place in zip(replica.parameters, owner, strict=True) if place == group.rank}
        shares = [[i for i, place in enumerate(owner) if place == rank] for rank in range(group.size)]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))  # nothing is rounded on its way
        longest = max(sum(parts[i].numel() for i in share) for share in shares)
        width = max(
            1, min(longest, self._bucket_bytes // (2 * group.size * dtype.itemsize))
        )  # gloo works on a copy of it
        self._turns = deal_turns([[(i, parts[i].numel()) for i in share] for share in shares], width)
        home = group.buffer_device(parts[0].device)
        self._buffer = torch.zeros(group.size * width, dtype=dtype, device=home)
        self._row = torch.zeros(width, dtype=dtype, device=home)

    def updates(self, parameter: nn.Parameter) -> bool:
        return parameter in self._own

    @torch.no_grad()
    def finish(self) -> None:
        parameters, me = self._replica.parameters, self._group.rank
        gradients = [self._flat_gradient(p) for p in parameters]
        for rows, row, pieces in self._each_turn():
            for piece in pieces:
                there, flat = rows[piece.owner, piece.at : piece.at + piece.length], gradients[piece.parameter]
                there.zero_() if flat is None else there.copy_(piece.of(flat)).mul_(self._weight)
            self._group.reduce_scatter(row, rows.view(-1)).wait()
            for piece in pieces:
                if piece.owner == me:
                    flat = gradients[piece.parameter]
                    assert flat is not None
                    piece.of(flat).copy_(row[piece.at : piece.at + piece.length])
        for parameter in parameters:
            if parameter not in self._own:
                parameter.grad = None

    def _flat_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """As one row that shares its memory; an owner has one in any case."""
        mine = gradient(parameter)
        if mine is None and parameter in self._own:
            mine = torch.zeros_like(local(parameter.detach()))
            parameter.grad = like(parameter, mine)
        if mine is not None and not mine.is_contiguous():
            mine = mine.contiguous()
            parameter.grad = like(parameter, mine)
        return None if mine is None else mine.view(-1)

    @torch.no_grad()
    def hand_out(self) -> None:
        parts, me = [_in_order(local(p.detach())) for p in self._replica.parameters], self._group.rank
        for rows, row, pieces in self._each_turn():
            for piece in pieces:
                if piece.owner == me:
                    row[piece.at : piece.at + piece.length].copy_(piece.of(parts[piece.parameter]))
            self._group.all_gather(rows.view(-1), row).wait()
            for piece in pieces:
                if piece.owner != me:
                    piece.of(parts[piece.parameter]).copy_(rows[piece.owner, piece.at : piece.at + piece.length])

    def _each_turn(self) -> Iterator[tuple[Tensor, Tensor, list[Piece]]]:
        for width, pieces in self._turns:
            yield self._buffer[: self._group.size * width].view(-1, width), self._row[:width], pieces


class Piece(NamedTuple):
    """A stretch of a flat parameter, and its place in the row of its owner."""

    owner: int
    at: int
    parameter: int
    first: int
    length: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.first : self.first + self.length]


def deal_turns(shares: Sequence[Sequence[tuple[int, int]]], width: int) -> list[tuple[int, list[Piece]]]:
    """What goes into rows of `width` numbers, turn by turn, until the longest share is through.

    A share lists its parameters, each with its number and its length. The rows of the last turn are as long as it needs.
    """
    longest = max(sum(length for _, length in share) for share in shares)
    turns: list[tuple[int, list[Piece]]] = [
        (min(width, longest - first), []) for first in range(0, max(longest, 1), width)
    ]
    for owner, share in enumerate(shares):
        place = 0  # in the whole share
        for parameter, length in share:
            done = 0
            while done < length:
                turn, at = divmod(place, width)
                count = min(length - done, width - at)
                turns[turn][1].append(Piece(owner, at, parameter, done, count))
                done, place = done + count, place + count
    return turns


def _in_order(tensor: Tensor) -> Tensor:
    """All its numbers as one row that shares its memory, in the order they lie there, which is the same on every rank."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


class Sharded(Exchange):
    """Stages 2 and 3: FSDP2, one group of parameters for each block of the model and one for the rest."""

    def __init__(
        self,
        mesh: DeviceMesh,
        group: Group,
        axes: Axes,
        *,
        stage: int,
        weight: float,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        offload: OffloadPolicy,
        prefetch: int,
    ) -> None:
        super().__init__(weight)
        self._mesh, self._group, self._axes, self._stage = mesh, group, axes, stage
        self._param_dtype, self._reduce_dtype, self._offload, self._prefetch = (
            param_dtype,
            reduce_dtype,
            offload,
            prefetch,
        )
        self.loss_weight = weight * group.size  # FSDP2 takes the mean over ranks; samples are to count alike

    def wrap(self, model: nn.Module) -> None:
        types = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
        if len(types) > 1:
            raise UserError(
                f"fsdp_stage {self._stage} cuts up parameters of one type and the model has {', '.join(sorted(types))}; "
                "use stage 0 or 1"
            )
        blocks, policy = blocks_of(model), self._policy()
        for module in [*blocks, model]:
            fully_shard(
                module,
                mesh=self._mesh,
                reshard_after_forward=self._stage == 3,
                mp_policy=policy,
                offload_policy=self._offload,
            )
        wrapped: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
        for number, block in enumerate(wrapped):
            block.set_modules_to_forward_prefetch(wrapped[number + 1 : number + 1 + self._prefetch])
            block.set_modules_to_backward_prefetch(wrapped[max(0, number - self._prefetch) : number][::-1])

    def _policy(self) -> MixedPrecisionPolicy:
        """Types of a lower precision than the parameters have themselves."""
        lower = self._param_dtype != torch.float32
        return MixedPrecisionPolicy(
            param_dtype=self._param_dtype if lower else None,
            reduce_dtype=self._reduce_dtype if lower or self._reduce_dtype != torch.float32 else None,
        )

    def compute(self, batch: Batch) -> Tensor:
        return self._replica.compute(batch, weight=self.loss_weight)

    def finish(self) -> None:
        """FSDP2 has exchanged all there is; it counts no bytes, so they are added up here, by the formula."""
        count = sum(local(p.detach()).numel() for p in self._replica.parameters)
        kept = self._replica.parameters[0].dtype
        used = self._param_dtype if self._param_dtype != torch.float32 else kept
        reduced = self._reduce_dtype if used != kept else kept
        shards, replicas = self._axes.shards, self._axes.replicas
        gathered = (2 if self._stage == 3 else 1) * (shards - 1) * count * used.itemsize
        averaged = ((shards - 1) + 2 * (replicas - 1) / replicas) * count * reduced.itemsize
        self._group.traffic.add(gathered + averaged, gathered + averaged)

    def settle(self) -> None:
        for module in self._replica.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: the longest list of modules in it, or the children of a sequence."""
    if isinstance(model, nn.Sequential):
        return [child for child in model if any(True for _ in child.parameters())]
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict)]
    longest = max(lists, key=len, default=None)
    return list(longest.children()) if longest is not None else []
