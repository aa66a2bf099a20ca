"""How much memory a rank will need: its own code, run once without memory.

    a process group whose collectives do nothing        comm/rehearsal_group.py
    tensors with shapes and no memory                    torch's FakeTensorMode
    the strategy's own `setup` and `step`                for any rank of any number, in this process
    every storage that comes and goes                    compute/ledger.py

Nothing is computed, so it takes as long as Python needs to name the operations: about a second for a model of twelve layers,
whatever their width. What depends on values cannot be rehearsed: numbers that are read from a tensor are 0, flags are false,
and a model whose shapes depend on them raises `CannotRehearse`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from smolcluster.comm.rehearsal_group import rehearsal_world
from smolcluster.compute.ledger import Ledger, Peak
from smolcluster.compute.replica import Batch
from smolcluster.config.schema import Config
from smolcluster.errors import SmolclusterError
from smolcluster.strategies.base import Context, Node, Seat, Strategy
from smolcluster.tasks.base import Task

log = logging.getLogger(__name__)


class CannotRehearse(SmolclusterError):
    """The code of this model or strategy needs values, not only shapes."""


class Way(NamedTuple):
    """How activations come about."""

    checkpointing: bool = False  # recomputed in backward, where the model offers it
    plain_attention: bool = False  # with the whole matrix of scores; else the kernel that torch chooses

    def __str__(self) -> str:
        said = ["checkpointing"] * self.checkpointing + ["plain attention"] * self.plain_attention
        return ", ".join(said) or "as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    start: int  # the most bytes while the model was built and cut up
    ways: dict[Way, Peak]  # of a step, when the optimizer has its state


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is rehearsed: a run, as its workers would find it."""

    config: Config
    task: Task
    strategy: type[Strategy]
    options: Any
    nodes: Sequence[Node]
    seats: Sequence[Seat]
    device: torch.device


class _Rehearsing(Ledger):
    """Numbers that are read from tensors without memory are zero."""

    def answer(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0].constant is None:
                return False if args[0].dtype == torch.bool else 0.0 if args[0].dtype.is_floating_point else 0
        elif FakeTensor not in types and any(isinstance(arg, Tensor) for arg in args):
            with unset_fake_temporarily():  # who sits where, for one, is real
                return func(*args, **kwargs)
        return super().answer(func, types, args, kwargs)


class _Staged(Task):
    """A task whose model is made where it is wanted, as fake tensors do not move well."""

    def __init__(self, task: Task, device: torch.device) -> None:
        super().__init__(task.config)
        self._task, self._device = task, device
        self.tokens_per_sample = task.tokens_per_sample

    @property
    def name(self) -> str:
        return self._task.name

    def model(self) -> nn.Module:
        with nullcontext() if torch.get_default_device().type == "meta" else self._device:
            return self._task.model()

    def train_data(self) -> Any:
        return self._task.train_data()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self._task.loss(model, batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self._task.optimizer(model)


def rehearse(scene: Scene, *, rank: int, part: Any, ways: Sequence[Way]) -> Rehearsed:
    """What this rank holds. `part` is one of its micro-batches; its values do not matter."""
    size = len(scene.nodes)
    import torch.distributed._tools.fake_collectives  # noqa: F401 - teaches collectives to work on fake tensors

    with (
        rehearsal_world(rank, size) as group,
        _quietly(),
        _no_vote(),
        FakeTensorMode(allow_non_fake_inputs=True),
        _Rehearsing(scene.device) as ledger,
    ):
        context = Context(
            config=_without_values(scene.config),
            seat=scene.seats[rank],
            seats=scene.seats,
            group=group,
            device=scene.device,
            total_steps=10,
            samples_per_step=_samples_per_step(scene),
            stop_requested=lambda: False,
            warn=lambda _: None,
        )
        try:
            return _run(scene, context, ledger, part, ways)
        except SmolclusterError:
            raise
        except Exception as error:  # torch or the model's own code, on tensors that have no values: it may raise anything
            log.debug("the rehearsal failed", exc_info=error)
            raise CannotRehearse(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}") from error


def _run(scene: Scene, context: Context, ledger: Ledger, part: Any, ways: Sequence[Way]) -> Rehearsed:
    """`setup`, then a step for each way."""
    part = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=scene.device), part)
    parts = [part] * min(2, context.config.training.grad_accumulation)  # a third would be as the second
    strategy = scene.strategy(scene.options, context)
    strategy.setup(_Staged(scene.task, scene.device))
    start = ledger.peak().at.total
    States(strategy, ledger)
    found: dict[Way, Peak] = {}
    tensor_parallel = "tp" in context.seat.coords and any(seat.coords["tp"] for seat in scene.seats)
    for number, way in enumerate([*ways[: int(tensor_parallel)], *ways]):  # DTensor asks for shapes the first time
        since = ledger.place
        with _in_this_way(strategy.model, way):
            strategy.step(Batch(parts=parts, samples=len(parts), tokens=0, step=number + 1))
        found[way] = ledger.peak(since, settled=True)
    return Rehearsed(start=start, ways=found)


class States:
    """Tells a ledger which storages are a strategy's parameters, gradients and optimizer state, as they come."""

    def __init__(self, strategy: Strategy, ledger: Ledger) -> None:
        self._ledger = ledger
        self._model = strategy.model
        self._optimizer: torch.optim.Optimizer = strategy.replica.optimizer  # type: ignore[attr-defined]
        self._label_parameters()
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._has_gradient)  # type: ignore[no-untyped-call]
        for module in self._model.modules():
            module.register_forward_pre_hook(self._is_used)
        self._optimizer.register_step_post_hook(self._updated)

    def _label_parameters(self) -> None:
        self._ledger.label(self._model.parameters(), "parameters")
        self._ledger.label(self._model.buffers(), "parameters")

    def _is_used(self, module: nn.Module, _: Any) -> None:
        """Parameters that were in pieces have been gathered."""
        self._ledger.label(module.parameters(recurse=False), "parameters")

    def _has_gradient(self, parameter: Tensor) -> None:
        self._ledger.label([parameter.grad], "gradients")

    def _updated(self, *_: Any) -> None:
        self._label_parameters()
        self._ledger.label((p.grad for p in self._model.parameters()), "gradients")
        tensors = (value for state in self._optimizer.state.values() for value in state.values())
        self._ledger.label((t for t in tensors if isinstance(t, Tensor)), "optimizer")


@contextmanager
def _in_this_way(model: nn.Module, way: Way) -> Iterator[None]:
    for module in model.modules():
        if isinstance(getattr(module, "gradient_checkpointing", None), bool):
            setattr(module, "gradient_checkpointing", way.checkpointing)  # noqa: B010 - not every module has it
    attention: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH) if way.plain_attention else nullcontext()
    with attention:
        yield


def _without_values(config: Config) -> Config:
    """fp16 looks at its gradients; bf16 takes as many bytes and does not. Compiled code cannot be followed."""
    config = config.model_copy(deep=True)
    if config.training.precision == "fp16":
        config.training.precision = "bf16"
    config.training.compile = config.training.track_gradients = False
    return config


def _samples_per_step(scene: Scene) -> list[int]:
    shards = {s.shard: scene.nodes[s.rank].batch_size for s in scene.seats if s.shard is not None}
    return [shards[shard] * scene.config.training.grad_accumulation for shard in sorted(shards)]


@contextmanager
def _quietly() -> Iterator[None]:
    """torch warns of much that does not matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _no_vote() -> Iterator[None]:
    """Newer pipeline stages ask each other whether all shapes are known. They are."""
    from torch.distributed.pipelining import PipelineStage

    asked = getattr(PipelineStage, "_warmup_backward_result", None)
    if asked is None:
        yield
        return

    def all_known(stage: Any, received_result: Tensor | None = None) -> Tensor:
        return torch.tensor([1], dtype=torch.int32)

    PipelineStage._warmup_backward_result = all_known
    try:
        yield
    finally:
        PipelineStage._warmup_backward_result = asked
