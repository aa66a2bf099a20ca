"""The interface of a strategy: how several machines train one model.

A strategy is one file that reads like its paper. `plan` places the ranks and states the cost of a step in advance, `setup`
builds, partitions or wraps the model, `step` takes one training step. It reaches other ranks through `Rounds` or a `Group`,
never through a socket. The loop in `engine/` calls these methods and names no strategy.

    replicated.py         base of strategies with the whole model on each worker
    local_steps.py        base of `diloco` and of other local SGD; local_round.py: progress of a round; local_state.py: saving;
                          local_contributions.py, late_work.py: rounds that come too late
    parallel.py           base of fsdp stages 2 and 3, tensor, pipeline and mesh; partial_state.py: saving a part of a model
    weight_prediction.py  predicts the weights of the server of `edp`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from smolcluster.comm.elastic.membership.roster import Roster
from smolcluster.comm.elastic.membership.server_link import ServerLink
from smolcluster.comm.group import Group, Traffic
from smolcluster.comm.rounds import Combination, Rounds
from smolcluster.compute.muon import mark_matrices
from smolcluster.compute.optim import warmup_cosine
from smolcluster.compute.precision import AgreedScale
from smolcluster.compute.replica import Batch, Loss, Replica
from smolcluster.compute.rng import seed_everything
from smolcluster.compute.timing import Span
from smolcluster.config.options import Options
from smolcluster.config.schema import Config
from smolcluster.data.leases import Leases, Range
from smolcluster.errors import UserError
from smolcluster.models.protocols import Recomputable
from smolcluster.parallel.placement import Node, Placement, Seat, Shape
from smolcluster.parallel.timeline import Drawing
from smolcluster.tasks.base import Task

OptionsT = TypeVar("OptionsT", bound=Options)
Scope = Literal["run", "weights", "rank"]
IN_FLIGHT = "in_flight/"  # prefix in `State.shared`: results of rounds that are not applied; a coordinator has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A rank's part of the validation batches: every `count`-th from `index` on."""

    index: int
    count: int
    counts: bool = True  # False: another rank reports the same numbers
    lockstep: bool = False  # a batch takes several ranks: all get the same number of batches
    replicas: Group | None = None  # ranks with the same part of the model: all use the buffers of the first


@dataclass(slots=True, kw_only=True)
class StepReport:
    """The result of one step. Its tensors are read only when a row is logged, so that a GPU is not synchronized every step."""

    loss: Tensor
    grad_norm: Tensor | None  # None while no gradient was applied in this step
    learning_rate: float
    samples: int
    tokens: int
    staleness: int = 0
    comm: Span | None = None  # communication that computing did not hide
    stop: bool = False  # every rank leaves after this step


@dataclass(slots=True, kw_only=True)
class State:
    """Everything that a strategy saves. Names are the model's, so that any strategy can load the state of any other.

    `shared` and `own` are private to a strategy: `shared` is one for all ranks (rounds in flight, an outer optimizer) and goes
    to workers that join; `own` is local to this rank (its buffers, local optimizer state). A strategy that loads the checkpoint
    of another strategy, or of another number of ranks, gets only the state that applies to it.
    """

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    numbers: dict[str, Any]
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)
    full_shapes: dict[str, dict[str, list[int]]] | None = (
        None  # where tensors are boxes: the shapes of the whole tensors
    )

    def packed(self) -> dict[str, Tensor]:
        """Return the tensors for another process: weights `w/<name>`, optimizer state `o/<name>`, shared `s/<name>`."""
        kinds = {"w": self.weights, "o": self.optimizer, "s": self.shared}
        return {f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}

    @classmethod
    def unpacked(cls, tensors: Mapping[str, Tensor], numbers: dict[str, Any]) -> State:
        weights, optimizer, shared = (
            {name[2:]: tensor for name, tensor in tensors.items() if name.startswith(kind)}
            for kind in ("w/", "o/", "s/")
        )
        return cls(weights=weights, optimizer=optimizer, shared=shared, numbers=numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A committed step: its contributors, and what a replay needs."""

    step: int
    steps: int = 1  # of the round that ends with this one
    contributors: Sequence[dict[str, Any]]  # rank, instance, seq, samples, ranges
    # What a parameter server applied: tensors to write one after the other; in a replay, one row of bytes.
    gradient: Tensor | Sequence[Tensor] | None = None
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ServerContext:
    """What the engine provides to a server or coordinator: members, leases and a durable record."""

    roster: Roster
    leases: Leases
    expected: int  # members to wait for before the first step
    fresh: bool = True  # False after a restart: workers reconnect with what they hold
    first_step: int = 0  # the last step that is committed already
    recent: dict[int, tuple[int, float, float]] = field(default_factory=dict)  # last steps: view, weight, norm
    established: Sequence[str] = ()  # instances of the view that committed the last of them
    counted: Mapping[str, int] = field(default_factory=dict)  # rank -> the last step that counted its gradient
    scale: AgreedScale = field(default_factory=AgreedScale)  # of members that train in fp16
    record: Callable[[Commit], None]  # makes a step durable: it is committed when this returns
    committed: Callable[[StepReport], None]  # called after every step, to log, evaluate and save
    wants: Callable[[int], bool]  # whether the state after this step is needed
    arrived: Callable[[int], None]  # call when `state()` is the state after this step
    count: Callable[[Sequence[Range]], float | None] = lambda _: (
        None
    )  # targets in leased samples; None: all samples have equal weight


@dataclass(slots=True, kw_only=True)
class Context:
    """What the engine provides to a strategy."""

    config: Config
    seat: Seat
    seats: Sequence[Seat]
    group: Group
    device: torch.device
    total_steps: int
    samples_per_step: Sequence[int]  # of every data shard
    stop_requested: Callable[[], bool]
    warn: Callable[[str], None]
    notify: Callable[[str], None] = lambda _: None  # show a message that is not a warning
    draw: Callable[[Drawing], None] = lambda _: None  # on the lead rank: save a drawing of the schedule
    example: Callable[[int], Any] = lambda _: None  # a batch of this many samples, for measurements
    server_link: ServerLink | None = None  # elastic plane: the worker's link to its server
    server_context: ServerContext | None = None  # elastic plane, on the server
    # elastic plane, on a worker: joins the rounds of a strategy
    open_rounds: Callable[[Any, Combination], Rounds] | None = None
    stale_rejected: int = 0  # gradients of this rank that came too late to count

    @property
    def reports_samples(self) -> bool:
        """Whether this rank reports the samples of its data shard: the first of the ranks that share it does."""
        return self.seat.rank == min(s.rank for s in self.seats if s.shard == self.seat.shard)

    @property
    def part_sizes(self) -> list[int]:
        """Samples of a micro-batch, by data shard: a step has `training.grad_accumulation` of them."""
        return [samples // self.config.training.grad_accumulation for samples in self.samples_per_step]

    @property
    def fixed_group(self) -> Group | None:
        """The group of all ranks; None on the elastic plane, where each view has a group."""
        return self.group if self.server_link is None else None

    @property
    def is_alone(self) -> bool:
        return self.server_link is None and self.group.size == 1

    @property
    def traffic(self) -> Traffic:
        """Bytes that this process has sent and received, over all its links."""
        return self.group.traffic if self.server_link is None else self.server_link.transport.traffic


class Strategy(ABC, Generic[OptionsT]):
    Config: ClassVar[type[Options]] = Options  # the type argument: MyOptions for `class Mine(Strategy[MyOptions])`

    replica: Replica  # this rank's model or part of it; made by `setup`

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in cls.__dict__.get("__orig_bases__", ()):
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, Options):
                    cls.Config = argument

    def __init__(self, options: OptionsT, context: Context) -> None:
        self.options = options
        self.context = context

    @classmethod
    @abstractmethod
    def plan(cls, options: OptionsT, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        """Return the placement of ranks, the costs of a step and reasons to refuse; without a shape no costs."""

    @abstractmethod
    def setup(self, task: Task) -> None:
        """Build the model and its optimizer, with the same initial weights on every rank."""

    @abstractmethod
    def step(self, batch: Batch) -> StepReport:
        """Take one training step, in the paper's order."""

    @abstractmethod
    def state(self, of: Scope = "run") -> State:
        """Return the state to save, not copied, with what is in flight. Has no side effects; all ranks call it together.

        The lead rank gets the whole state. `of="weights"`: without the optimizer. `of="rank"`, where ranks hold parts of the
        model: this rank's boxes of tensors (`comm.sharded.box_name`), which cover every element once over all ranks
        (`State.full_shapes`).
        """

    @abstractmethod
    def load_state(self, state: State) -> None:
        """Continue from a state, perhaps of another strategy."""

    def drain(self) -> None:
        """Apply what is in flight after the last step. Every rank calls it."""

    def measure(self, task: Task, part: Any) -> dict[str, Tensor]:
        """Return the task's metrics on one validation batch."""
        return task.metrics(self.replica.model, part)

    @property
    def share(self) -> Share:
        """The validation batches that this rank evaluates."""
        return Share(index=self.context.group.rank, count=self.context.group.size)


def build_replica(
    task: Task,
    context: Context,
    *,
    arrange: Callable[[nn.Module], nn.Module] | None = None,
    loss: Loss | None = None,
) -> Replica:
    """Build the model, identical on every rank, with its optimizer and schedule.

    `arrange` cuts the model down to this rank's part. `loss` replaces that of the task.
    """
    config = context.config.training
    seed_everything(config.seed or 0, "weights", device=context.device)
    model = task.model()
    check_model(task, model)
    model = model.to(context.device)
    layout = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    num_parameters = sum(p.numel() for p in model.parameters())
    if config.gradient_checkpointing:
        if isinstance(model, Recomputable):
            model.gradient_checkpointing = True
        else:
            context.warn(f"training.gradient_checkpointing has no effect: {type(model).__name__} does not offer it")
    mark_matrices(model)
    if arrange is not None:
        model = arrange(model)
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError(
                f"the layers of rank {context.seat.rank} have no trainable parameters; use fewer ranks for the pipeline, or "
                "assign layers with strategy.layer_distribution"
            )
    if config.compile and context.seat.rank == 0:
        context.notify("compiling the model: the first step takes seconds to minutes longer")
    return Replica(
        model=model,
        loss=loss or task.loss,
        optimizer=_make_optimizer(task, model, learning_rate=config.learning_rate),
        learning_rate=_make_schedule(context),
        device=context.device,
        precision=config.precision,
        grad_clip_norm=config.grad_clip_norm,
        compile=config.compile,
        track_gradients=config.track_gradients,
        layout=layout,
        num_parameters=num_parameters,
        whole=arrange is None,
    )


def check_model(task: Task, model: Any) -> None:
    """Raise UserError for a model that cannot be trained."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model() of {task.name} must return a torch.nn.Module, not {type(model).__name__}")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise UserError(f"model() of {task.name} has lazy layers; give them their input size")
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model() of {task.name} has no parameters to train")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(
                f"model() of {task.name}: gradients are exchanged dense; make {name or 'it'} without sparse=True"
            )


def _make_optimizer(task: Task, model: nn.Module, *, learning_rate: float) -> torch.optim.Optimizer:
    optimizer = task.optimizer(model)
    for group in optimizer.param_groups:
        group.setdefault("lr_scale", group["lr"] / learning_rate)
    return optimizer


def _make_schedule(context: Context) -> Callable[[int], float]:
    peak, schedule = context.config.training.learning_rate, context.config.lr_schedule
    floor = peak / 10 if schedule.min_lr is None else schedule.min_lr
    return warmup_cosine(peak=peak, floor=floor, warmup=schedule.warmup_iters, steps=context.total_steps)
