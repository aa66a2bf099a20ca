"""Estimate the memory of a rank: run the code of the strategy once on fake tensors.

    collectives that do nothing                          planner/fake_group.py
    tensors with shapes and no memory                    torch's FakeTensorMode
    the strategy's `setup` and `step`                    for any rank of any world size, in this process
    a record of every storage                            compute/memory_tracker.py

Nothing is computed: it takes about a second for a model of twelve layers of any width. Numbers that are read from a tensor are
0, bools are false; a model whose shapes depend on them raises `CannotEstimate`.
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

from smolcluster.compute.memory_tracker import MemoryTracker, MemoryUse, Peak
from smolcluster.compute.replica import Batch
from smolcluster.config.options import Options
from smolcluster.config.schema import Config
from smolcluster.errors import SmolclusterError
from smolcluster.models.protocols import Recomputable
from smolcluster.parallel.placement import Node, Placement, Seat
from smolcluster.planner.fake_group import fake_world
from smolcluster.planner.fake_tensors import FakeTensorTracker, no_shape_exchange, no_warnings, replaced_parameters
from smolcluster.strategies.base import Context, Strategy
from smolcluster.strategies.base.replicated import Exchanging
from smolcluster.tasks.base import Task

log = logging.getLogger(__name__)


class CannotEstimate(SmolclusterError):
    """The code of this model or strategy needs values, not only shapes."""


class Activations(NamedTuple):
    """How activations are computed and stored."""

    checkpointing: bool = False  # recomputed in backward, if the model supports it
    plain_attention: bool = False  # with the full matrix of scores; else the kernel that torch chooses

    def __str__(self) -> str:
        words = ["checkpointing"] * self.checkpointing + ["plain attention"] * self.plain_attention
        return ", ".join(words) or "as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    start: int  # peak in bytes while the model was built and sharded
    states: MemoryUse  # at the end of a step, with complete gradients and without activations
    ways: dict[Activations, Peak]  # of a step, when the optimizer has its state


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """The run whose memory is estimated."""

    config: Config
    task: Task
    strategy: type[Strategy[Options]]
    options: Options
    nodes: Sequence[Node]
    placement: Placement
    device: torch.device


def estimate_memory(run: PlannedRun, *, rank: int, part: Any, ways: Sequence[Activations]) -> MemoryEstimate:
    """Estimate the memory of this rank. `part`: one of its micro-batches, whose values do not matter."""
    size = len(run.nodes)
    import torch.distributed._tools.fake_collectives  # noqa: F401 - registers collectives for fake tensors

    with (
        fake_world(rank, size) as group,
        no_warnings(),
        no_shape_exchange(),
        replaced_parameters(),
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeTensorTracker(run.device) as tracker,
    ):
        context = Context(
            config=_without_values(run.config),
            seat=run.placement.seats[rank],
            seats=run.placement.seats,
            group=group,
            device=run.device,
            total_steps=10,
            samples_per_step=samples_per_step(run.config, run.nodes, run.placement.seats),
            stop_requested=lambda: False,
            warn=lambda _: None,
            example=lambda count: tree_map_only(Tensor, lambda t: t[:count] if t.ndim else t, part),
        )
        try:
            return _run(run, context, tracker, part, ways)
        except SmolclusterError:
            raise
        except Exception as error:  # of any kind: torch and the model may depend on values of tensors
            log.debug("the memory estimate failed", exc_info=error)
            raise CannotEstimate(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}") from error


def _run(
    run: PlannedRun, context: Context, tracker: MemoryTracker, part: Any, ways: Sequence[Activations]
) -> MemoryEstimate:
    part = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=run.device), part)
    parts = [part] * min(2, context.config.training.grad_accumulation)  # more would need no more memory
    strategy = run.strategy(run.options, context)
    strategy.setup(run.task)
    # In its first step DTensor computes shapes with tensors that would be counted.
    warm = any(isinstance(parameter, DTensor) for parameter in strategy.replica.model.parameters())
    return measure_steps(strategy, tracker, parts, ways, warm=warm)


def measure_steps(
    strategy: Strategy[Options],
    tracker: MemoryTracker,
    parts: Sequence[Any],
    ways: Sequence[Activations],
    *,
    warm: bool = False,
) -> MemoryEstimate:
    """Take a step in each way, with a strategy that was set up while `tracker` was open. The tensors may be real.

    Skipped are ways without effect: the model does not support checkpointing, or has no attention.
    """
    start = tracker.peak().at_peak.total
    states = States(strategy.replica.model, strategy.replica.optimizer, tracker)
    recomputable = any(isinstance(module, Recomputable) for module in strategy.replica.model.modules())
    found: dict[Activations, Peak] = {}
    local_steps = strategy.local_steps if isinstance(strategy, Exchanging) else 1  # the last of a round exchanges
    for number, way in enumerate([*ways[: int(warm)], *ways]):
        if (way.checkpointing and not recomputable) or (way.plain_attention and number > 0 and not tracker.attention):
            continue
        since = tracker.position
        with _using(strategy.replica.model, way):
            strategy.step(Batch(parts=parts, samples=len(parts), tokens=0, step=(number + 1) * local_steps))
        found[way] = tracker.peak(since, steady_state=True)
    return MemoryEstimate(start=start, states=states.held, ways=found)


class States:
    """Label the storages of a model's parameters, gradients and optimizer state in a tracker, by hooks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, tracker: MemoryTracker) -> None:
        self._model, self._optimizer, self._tracker = model, optimizer, tracker
        self.held = MemoryUse()  # after the last update, with its gradients
        self._label_parameters()
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._on_gathered)
        self._optimizer.register_step_post_hook(self._on_step)

    def _label_parameters(self) -> None:
        self._tracker.label(self._model.parameters(), "parameters")
        self._tracker.label(self._model.buffers(), "parameters")

    def _on_gathered(self, module: nn.Module, _: Any) -> None:
        self._tracker.label(module.parameters(), "parameters")

    def _on_gradient(self, parameter: Tensor) -> None:
        self._tracker.label([parameter.grad], "gradients")

    def _on_step(self, *_: Any) -> None:
        self._label_parameters()
        self._tracker.label((p.grad for p in self._model.parameters()), "gradients")
        tensors = (value for state in self._optimizer.state.values() for value in state.values())
        self._tracker.label((t for t in tensors if isinstance(t, Tensor)), "optimizer")
        self.held = self._tracker.now


@contextmanager
def _using(model: nn.Module, way: Activations) -> Iterator[None]:
    for module in model.modules():
        if isinstance(module, Recomputable):
            module.gradient_checkpointing = way.checkpointing
    attention: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH) if way.plain_attention else nullcontext()
    with attention:
        yield


def _without_values(config: Config) -> Config:
    """Turn off features that read values of tensors: fp16 (bf16 has the same size and reads none), and compilation."""
    config = config.model_copy(deep=True)
    if config.training.precision == "fp16":
        config.training.precision = "bf16"
    config.training.compile = config.training.track_gradients = False
    return config


def samples_per_step(config: Config, nodes: Sequence[Node], seats: Sequence[Seat]) -> list[int]:
    """Return the samples of each data shard in a step."""
    shards = {s.shard: nodes[s.rank].batch_size for s in seats if s.shard is not None}
    return [shards[shard] * config.training.grad_accumulation for shard in sorted(shards)]
