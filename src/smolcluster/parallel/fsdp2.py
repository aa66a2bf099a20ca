"""ZeRO stages 2 and 3: torch's FSDP2, with a parameter group for each block of the model."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from smolcluster.comm.group import Group
from smolcluster.comm.mesh.reduce_scatter import ReduceScatter
from smolcluster.compute.replica import Batch
from smolcluster.errors import UserError
from smolcluster.parallel.exchange import GradientExchange, everything_in


class Fsdp2Exchange(GradientExchange):
    """FSDP2 with a parameter group for each block of the model and one for the rest."""

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
        super().__init__(weight, group)
        self._mesh, self._stage = mesh, stage
        self._order = SameBlocks(group, stage)
        self._gloo = getattr(group, "backend", "") == "gloo"
        self._lower_dtype = None if param_dtype == torch.float32 else param_dtype
        self._reduce_dtype, self._buffer_dtype = reduce_dtype, buffer_dtype
        self._offload, self._prefetch = offload, prefetch

    def weigh(self, weight: float) -> None:
        super().weigh(weight)
        self.loss_weight = weight * self._num_ranks  # FSDP2 takes the mean over ranks; samples must weigh the same

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
                part.set_custom_reduce_scatter(ReduceScatter())  # type: ignore[arg-type]
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

    @contextlib.contextmanager
    def in_full(self) -> Iterator[None]:
        """Reshard parameters that were gathered."""
        for module in self._replica.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        yield


class SameBlocks:
    """FSDP2 exchanges a block when it is used. If ranks used different ones, parameters and gradients of one would take the
    place of another's.

    So in the first step ranks compare, before each block and when the model has returned, which one comes next. After that
    each rank repeats the order of its first step: a rank that is about to deviate from it ends the run.
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
        """Wrap forward and backward of a step."""
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
    """Return the modules of a list and of nested lists, which are never called themselves."""
    found: list[nn.Module] = []
    for child in modules.children():
        found += _called_in(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return list(dict.fromkeys(found))
