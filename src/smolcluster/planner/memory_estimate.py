"""Estimate the memory of a rank: run its own code once on fake tensors.

    a process group whose collectives do nothing        planner/fake_group.py
    tensors with shapes and no memory                    torch's FakeTensorMode
    the strategy's own `setup` and `step`                for any rank of any number, in this process
    every storage that comes and goes                    compute/ledger.py

Nothing is computed, so it takes as long as Python needs to name the operations: about a second for a model of twelve layers,
whatever their width. What depends on values cannot be estimated: numbers that are read from a tensor are 0, flags are false,
and a model whose shapes depend on them raises `CannotEstimate`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from smolcluster.compute.ledger import Held, Ledger, Peak
from smolcluster.compute.replica import Batch
from smolcluster.config.options import Options
from smolcluster.config.schema import Config
from smolcluster.errors import SmolclusterError
from smolcluster.models.protocols import Recomputable
from smolcluster.parallel.placement import Node, Placement, Seat
from smolcluster.planner.fake_group import fake_world
from smolcluster.planner.fake_tensors import FakeTensorLedger, moving, no_vote, quietly
from smolcluster.strategies.base import Context, Strategy
from smolcluster.strategies.base.replicated import Exchanging
from smolcluster.tasks.base import Task

log = logging.getLogger(__name__)


class CannotEstimate(SmolclusterError):
    """The code of this model or strategy needs values, not only shapes."""


class Activations(NamedTuple):
    """How activations come about."""

    checkpointing: bool = False  # recomputed in backward, where the model offers it
    plain_attention: bool = False  # with the whole matrix of scores; else the kernel that torch chooses

    def __str__(self) -> str:
        said = ["checkpointing"] * self.checkpointing + ["plain attention"] * self.plain_attention
        return ", ".join(said) or "as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    start: int  # the most bytes while the model was built and cut up
    states: Held  # at the end of a step, when its gradients are complete and nothing else is there
    ways: dict[Activations, Peak]  # of a step, when the optimizer has its state


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The run whose memory is estimated."""

    config: Config
    task: Task
    strategy: type[Strategy[Options]]
    options: Options
    nodes: Sequence[Node]
    placement: Placement
    device: torch.device


def estimate_memory(scene: Scene, *, rank: int, part: Any, ways: Sequence[Activations]) -> MemoryEstimate:
    """What this rank holds. `part` is one of its micro-batches; its values do not matter."""
    size = len(scene.nodes)
    import torch.distributed._tools.fake_collectives  # noqa: F401 - teaches collectives to work on fake tensors

    with (
        fake_world(rank, size) as group,
        quietly(),
        no_vote(),
        moving(),
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeTensorLedger(scene.device) as ledger,
    ):
        context = Context(
            config=_without_values(scene.config),
            seat=scene.placement.seats[rank],
            seats=scene.placement.seats,
            group=group,
            device=scene.device,
            total_steps=10,
            samples_per_step=samples_per_step(scene.config, scene.nodes, scene.placement.seats),
            stop_requested=lambda: False,
            warn=lambda _: None,
            example=lambda count: tree_map_only(Tensor, lambda t: t[:count] if t.ndim else t, part),
        )
        try:
            return _run(scene, context, ledger, part, ways)
        except SmolclusterError:
            raise
        except Exception as error:  # torch, or the model's own code: on tensors without values it may raise anything
            log.debug("the memory estimate failed", exc_info=error)
            raise CannotEstimate(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}") from error


def _run(scene: Scene, context: Context, ledger: Ledger, part: Any, ways: Sequence[Activations]) -> MemoryEstimate:
    part = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=scene.device), part)
    parts = [part] * min(2, context.config.training.grad_accumulation)  # a third would be as the second
    strategy = scene.strategy(scene.options, context)
    strategy.setup(scene.task)
    # DTensor works out shapes the first time, on tensors that count here and have no memory in a run.
    warm = any(isinstance(parameter, DTensor) for parameter in strategy.replica.model.parameters())
    return perform(strategy, ledger, parts, ways, warm=warm)


def perform(
    strategy: Strategy[Options],
    ledger: Ledger,
    parts: Sequence[Any],
    ways: Sequence[Activations],
    *,
    warm: bool = False,
) -> MemoryEstimate:
    """A step for each way, of a strategy that was set up while `ledger` was open. The tensors may as well be real.

    A way that would change nothing is not gone: the model recomputes nothing by itself, or has no attention.
    """
    start = ledger.peak().at.total
    states = States(strategy.replica.model, strategy.replica.optimizer, ledger)
    offers = any(isinstance(module, Recomputable) for module in strategy.replica.model.modules())
    found: dict[Activations, Peak] = {}
    local_steps = strategy.local_steps if isinstance(strategy, Exchanging) else 1  # the last of a round exchanges
    for number, way in enumerate([*ways[: int(warm)], *ways]):
        if (way.checkpointing and not offers) or (way.plain_attention and number > 0 and not ledger.attention):
            continue
        since = ledger.position
        with _in_this_way(strategy.replica.model, way):
            strategy.step(Batch(parts=parts, samples=len(parts), tokens=0, step=(number + 1) * local_steps))
        found[way] = ledger.peak(since, settled=True)
    return MemoryEstimate(start=start, states=states.held, ways=found)


class States:
    """Tells a ledger which storages are a model's parameters, gradients and optimizer state, as they come."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        self._model, self._optimizer, self._ledger = model, optimizer, ledger
        self.held = Held()  # after the last update, with its gradients
        self._label_parameters()
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._has_gradient)  # type: ignore[no-untyped-call]
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._is_gathered)
        self._optimizer.register_step_post_hook(self._updated)

    def _label_parameters(self) -> None:
        self._ledger.label(self._model.parameters(), "parameters")
        self._ledger.label(self._model.buffers(), "parameters")

    def _is_gathered(self, module: nn.Module, _: Any) -> None:
        """Parameters that were in pieces are whole for a while."""
        self._ledger.label(module.parameters(), "parameters")

    def _has_gradient(self, parameter: Tensor) -> None:
        self._ledger.label([parameter.grad], "gradients")

    def _updated(self, *_: Any) -> None:
        self._label_parameters()
        self._ledger.label((p.grad for p in self._model.parameters()), "gradients")
        tensors = (value for state in self._optimizer.state.values() for value in state.values())
        self._ledger.label((t for t in tensors if isinstance(t, Tensor)), "optimizer")
        self.held = self._ledger.now


@contextmanager
def _in_this_way(model: nn.Module, way: Activations) -> Iterator[None]:
    for module in model.modules():
        if isinstance(module, Recomputable):
            module.gradient_checkpointing = way.checkpointing
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


def samples_per_step(config: Config, nodes: Sequence[Node], seats: Sequence[Seat]) -> list[int]:
    """Of each data shard."""
    shards = {s.shard: nodes[s.rank].batch_size for s in seats if s.shard is not None}
    return [shards[shard] * config.training.grad_accumulation for shard in sorted(shards)]
