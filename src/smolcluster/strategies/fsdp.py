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

Stage 1 deals whole parameters out (`shards.py`): each has one owner, who alone updates it and hands it out. Stages 2 and 3 are
torch's FSDP2, with one group of pieces for each block of the model. In bf16 what is gathered has two bytes for each number
instead of four, and gradients are averaged in four. With `param_dtype: bf16` stage 1 keeps matrices and their gradients rounded
too; the owner of a matrix also has it in full.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020.
Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", 2023.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from smolcluster.comm.group import Group
from smolcluster.comm.scatter_sum import ScatterSum
from smolcluster.compute.replica import Batch
from smolcluster.errors import UserError
from smolcluster.strategies.axes import Axes, divisors, ranks_per_machine
from smolcluster.strategies.base import Options
from smolcluster.strategies.exchange import Exchange, Owned, Summed, everything_in
from smolcluster.strategies.parallel import Parallel
from smolcluster.strategies.zero import Zero

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDPOptions(Options):
    bucket_mb: float = Field(25.0, gt=0, description="stages 0, 1: gradients travel in buckets of this size")
    fsdp_stage: int = Field(3, ge=0, le=3, description="ZeRO stage: what is cut up; 0 nothing, 3 all")
    shard_size: Annotated[int, Field(ge=1)] | Literal["node"] | None = Field(
        None, description="hybrid: workers that share one set of pieces; node: those of a machine; null: all of them"
    )
    param_dtype: Dtype | None = Field(
        None, description="type that parameters are handed out and used in; null: training.precision, in stage 1 fp32"
    )
    reduce_dtype: Dtype | None = Field(None, description="stages 2, 3: type that gradients are averaged in; null: fp32")
    buffer_dtype: Dtype | None = Field(None, description="stages 2, 3: type of buffers; null: as the model has them")
    cpu_offload: bool = Field(
        False, description="stages 2, 3 on a GPU: pieces and optimizer state live in the memory of the machine"
    )
    prefetch: int = Field(1, ge=0, description="stage 3: blocks that are gathered ahead of the one in use")

    @model_validator(mode="before")
    @classmethod
    def _hybrid(cls, said: Any) -> Any:
        if isinstance(said, dict) and said.get("fsdp_stage") == "HYBRID_SHARD":
            return {"shard_size": "node"} | said | {"fsdp_stage": 3}
        return said

    @property
    def zero(self) -> Zero:
        return Zero(
            stage=self.fsdp_stage,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            offload=self.cpu_offload,
            by_machine=self.shard_size == "node",
        )


FSDPT = TypeVar("FSDPT", bound=FSDPOptions)


class FSDP(Parallel[FSDPOptions]):
    @classmethod
    def axes(cls, options: FSDPOptions, hosts: Sequence[str]) -> Axes:
        return cut_up(Axes(shards=len(hosts)), options, hosts, "{} workers")

    def make_exchange(self) -> Exchange:
        return make_exchange(self)

    @classmethod
    def zero(cls, options: FSDPOptions) -> Zero:
        return options.zero


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


class Sharded(Exchange):
    """Stages 2 and 3: FSDP2, one group of parameters for each block of the model and one for the rest."""

    def __init__(
        self,
        mesh: DeviceMesh,
        group: Group,
        *,
        stage: int,
        weight: float,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        buffer_dtype: torch.dtype | None,
        offload: OffloadPolicy,
        prefetch: int,
    ) -> None:
        self._num_ranks = group.size
        super().__init__(weight)
        self._mesh, self._stage = mesh, stage
        self._order = SameBlocks(group, stage)
        self._gloo = getattr(group, "backend", "") == "gloo"
        self._lower_dtype = None if param_dtype == torch.float32 else param_dtype
        self._reduce_dtype, self._buffer_dtype = reduce_dtype, buffer_dtype
        self._offload, self._prefetch = offload, prefetch

    def weigh(self, weight: float) -> None:
        super().weigh(weight)
        self.loss_weight = weight * self._num_ranks  # FSDP2 takes the mean over ranks; samples are to count alike

    def used_in(self, model: nn.Module) -> dict[str, torch.dtype]:
        return {name: self._type_of(tensor) for name, tensor in everything_in(model).items()}

    def _type_of(self, tensor: Tensor) -> torch.dtype:
        lower = self._lower_dtype if isinstance(tensor, nn.Parameter) else self._buffer_dtype
        return lower if lower is not None and tensor.is_floating_point() else tensor.dtype

    def wrap(self, model: nn.Module) -> None:
        types = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
        if len(types) > 1:
            raise UserError(
                f"fsdp_stage {self._stage} cuts up parameters of one type and the model has {', '.join(sorted(types))}; "
                "use stage 0 or 1"
            )
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._type_of(buffer))
        self._check_can_be_cut(model)
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
        for part in model.modules() if self._gloo else ():
            if isinstance(part, FSDPModule) and hasattr(part, "set_custom_reduce_scatter"):  # not in torch 2.6
                part.set_custom_reduce_scatter(ScatterSum())  # type: ignore[arg-type]
        self._order.watch(model, blocks)
        for number, block in enumerate(wrapped):
            block.set_modules_to_forward_prefetch(wrapped[number + 1 : number + 1 + self._prefetch])
            block.set_modules_to_backward_prefetch(wrapped[max(0, number - self._prefetch) : number][::-1])

    def _check_can_be_cut(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.ndim == 0:
                raise UserError(
                    f"fsdp_stage {self._stage} cannot cut up {name}, a single number; give it the shape (1,), "
                    "or use stage 0 or 1"
                )
        for name, module in model.named_modules():
            mean = getattr(module, "running_mean", None)
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.affine and mean is not None:
                weight = self._type_of(module.weight)
                if mean.device.type == "cpu" and weight != mean.dtype:
                    kind = str(weight).removeprefix("torch.")
                    raise UserError(
                        f"fsdp_stage {self._stage}: {name} would have weights in {kind} and running statistics in "
                        f"{str(mean.dtype).removeprefix('torch.')}, which torch cannot mix on a CPU; "
                        "set strategy.buffer_dtype to the type of the weights, or use stage 0 or 1"
                    )

    def _policy(self) -> MixedPrecisionPolicy:
        """Types of a lower precision than the parameters have themselves."""
        exact = self._lower_dtype is None and self._reduce_dtype == torch.float32
        return MixedPrecisionPolicy(param_dtype=self._lower_dtype, reduce_dtype=None if exact else self._reduce_dtype)

    def compute(self, batch: Batch) -> Tensor:
        try:
            with self._order.kept():
                return self._replica.compute(batch, weight=self.loss_weight)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise UserError(
                f"fsdp_stage {self._stage} gathers the weights of a part of the model when the part is called, and the model "
                "uses weights of one that was not: call its blocks as block(x), by no other method, or use stage 0 or 1"
            ) from error

    def settle(self) -> None:
        for module in self._replica.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class SameBlocks:
    """FSDP2 exchanges a block when it is used. If ranks used different ones, parameters and gradients of one would take the
    place of another's.

    So in the first step ranks compare, before each block and when the model has returned, which one comes next. After that
    each keeps to its own first step: whoever is about to leave it ends the run.
    """

    def __init__(self, group: Group, stage: int) -> None:
        self._group, self._stage = group, stage
        self._first: list[str] | None = None  # what the first step used, in order; "": the model has returned
        self._used: list[str] | None = None  # so far; None outside of a step
        self._forward = False  # in backward blocks may be computed once more

    def watch(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        names = {module: name for name, module in model.named_modules()}
        model.register_forward_pre_hook(lambda *_: self._turn(forward=True))
        for block in blocks:
            block.register_forward_pre_hook(lambda *_, name=names[block]: self._use(name), prepend=True)
        model.register_forward_hook(lambda *_: self._use(""))
        model.register_forward_hook(lambda *_: self._turn(forward=False))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Around forward and backward of a step."""
        self._used = []
        try:
            yield
            if self._first is None:
                self._first = self._used
        finally:
            self._used = None

    def _turn(self, *, forward: bool) -> None:
        if not torch.compiler.is_compiling():
            self._forward = forward

    def _use(self, name: str) -> None:
        if self._used is None or not self._forward or torch.compiler.is_compiling():
            return
        place = len(self._used)
        self._used.append(name)
        if self._first is None:
            self._compare(name)
        elif self._first[place : place + 1] != [name]:
            before = self._first[place] if place < len(self._first) else ""
            raise self._broken(f"a step used {_named(name)} of the model where the first used {_named(before)}")

    def _compare(self, name: str) -> None:
        mine = torch.tensor([zlib.crc32(name.encode())], device=self._group.device)
        everybody = mine.repeat(self._group.size)
        self._group.all_gather(everybody, mine).wait()
        if not bool((everybody == mine).all()):
            raise self._broken(f"one rank used {_named(name)} of the model and others did not at the same time")

    def _broken(self, how: str) -> UserError:
        why = f"fsdp_stage {self._stage} exchanges a block when it is used"
        return UserError(f"{how}; {why}, so all ranks must use the same ones in every step: use stage 0 or 1")


def _named(block: str) -> str:
    return f"block {block}" if block else "no further block"


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: the longest list of modules in it, or the children of a sequence; each once.

    Without those that share a parameter with other parts: it can be in one group only, and that is the model's own.
    """
    if isinstance(model, nn.Sequential):
        return _apart([child for child in model.children() if any(True for _ in child.parameters())], model)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict)]
    longest = max(lists, key=len, default=None)
    return [] if longest is None else _apart(_called_in(longest), model)


def _apart(blocks: list[nn.Module], model: nn.Module) -> list[nn.Module]:
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(module)
    return [block for block in blocks if all(owners[id(p)] <= set(block.modules()) for p in block.parameters())]


def _called_in(modules: nn.Module) -> list[nn.Module]:
    """The modules of a list, and of lists in it: a list itself is never called."""
    found: list[nn.Module] = []
    for child in modules.children():
        found += _called_in(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return list(dict.fromkeys(found))
