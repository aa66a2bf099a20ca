"""The interface of a strategy: how several machines train one model.

A strategy is one file that reads like its paper. It says in advance who sits where and what a step costs (`plan`), cuts or
wraps the model (`setup`) and takes one training step (`step`). It talks to other ranks through a `Group` and never sees a
socket. The loop in `engine/` calls these methods and knows no strategy by name.
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
from smolcluster.compute.claims import Count
from smolcluster.compute.muon import mark_matrices
from smolcluster.compute.optim import warmup_cosine
from smolcluster.compute.precision import AgreedScale
from smolcluster.compute.replica import Batch, Loss, Replica
from smolcluster.compute.rng import seed_everything
from smolcluster.compute.timing import Span
from smolcluster.config.options import Options
from smolcluster.config.schema import Config
from smolcluster.data.leases import Leases
from smolcluster.errors import UserError
from smolcluster.models.protocols import Recomputable
from smolcluster.parallel.placement import Node, Placement, Seat, Shape
from smolcluster.parallel.timeline import Drawing
from smolcluster.tasks.base import Task

OptionsT = TypeVar("OptionsT", bound=Options)
Scope = Literal["run", "weights", "rank"]
IN_FLIGHT = "in_flight/"  # names of `State.shared`: results of rounds that are not applied; a coordinator has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A rank's part of the validation batches: every `count`-th from `index` on."""

    index: int
    count: int
    counts: bool = True  # or another rank tells the same numbers
    lockstep: bool = False  # one batch takes several ranks: all have equally many
    replicas: Group | None = (
        None  # ranks that have the same part of the model: all measure with the buffers of the first
    )


@dataclass(slots=True, kw_only=True)
class StepReport:
    """What one step did. Tensors are read only when a row is logged, so that a GPU need not wait for every step."""

    loss: Tensor
    grad_norm: Tensor | None  # None while no gradient was applied in this step
    learning_rate: float
    samples: int
    tokens: int
    staleness: int = 0
    comm: Span | None = None  # waiting for other ranks, as far as computing did not hide it
    stop: bool = False  # every rank leaves after this step


@dataclass(slots=True, kw_only=True)
class State:
    """Everything a strategy must save. Names are the model's own, so any strategy can load any other's.

    `shared` and `own` are for this strategy alone: of all ranks together (what is in flight, an outer optimizer's state), and
    of this rank (its own buffers, local optimizer state). On the elastic plane `shared` goes to who joins. A strategy that
    loads the checkpoint of another one, or of another number of ranks, gets none of what has no meaning there.
    """

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    numbers: dict[str, Any]
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)
    wholes: dict[str, dict[str, list[int]]] | None = None  # where tensors are boxes: the shapes of the whole ones

    def packed(self) -> dict[str, Tensor]:
        """Return what goes to another process: weights `w/<name>`, optimizer state `o/<name>`, shared `s/<name>`."""
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
    """A step that counts: who contributed, and what is needed to do it again."""

    step: int
    steps: int = 1  # of the round that ends with this one
    contributors: Sequence[dict[str, Any]]  # rank, instance, seq, samples, ranges
    # What the step applied, where a server does: tensors to be written in a row; when it is replayed, one row of bytes.
    gradient: Tensor | Sequence[Tensor] | None = None
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Office:
    """What the engine hands to a seat that serves: the members, the samples to lend, a record that outlives it."""

    roster: Roster
    leases: Leases
    expected: int  # members to wait for before the first step
    fresh: bool = True  # False for a server that was started again: its workers are on their way back
    first_step: int = 0  # steps that were committed before
    recent: dict[int, tuple[int, float, float]] = field(default_factory=dict)  # of the last ones: view, weight, norm
    established: Sequence[str] = ()  # instances of the members that committed the last of them
    counted: Mapping[str, int] = field(default_factory=dict)  # rank -> the last step that counted a gradient of it
    scale: AgreedScale = field(default_factory=AgreedScale)  # the loss scale of members that train in fp16
    record: Callable[[Commit], None]  # the step is committed when this returns: a restart will know of it
    committed: Callable[[StepReport], None]  # told of every step, so that it can log, evaluate and save
    wants: Callable[[int], bool]  # whether the state after this step is needed, to evaluate or save
    arrived: Callable[[int], None]  # the state after this step is here: `state()` gives it
    count: Count = lambda _: None  # targets that count in leased samples, by the server's own data; None: samples do


@dataclass(slots=True, kw_only=True)
class Context:
    """What the engine hands to a strategy."""

    config: Config
    seat: Seat
    seats: Sequence[Seat]
    group: Group
    device: torch.device
    total_steps: int
    samples_per_step: Sequence[int]  # of every data shard
    stop_requested: Callable[[], bool]
    warn: Callable[[str], None]
    tell: Callable[[str], None] = lambda _: None  # a line that is no warning
    draw: Callable[[Drawing], None] = lambda _: None  # keep a picture of how this run worked, on the lead rank
    example: Callable[[int], Any] = lambda _: None  # a batch of so many samples, to measure with
    line: ServerLink | None = None  # elastic plane: a worker's line to its server
    office: Office | None = None  # elastic plane: a server's
    # elastic plane: for a strategy that exchanges in rounds
    open_rounds: Callable[[Any, Combination], Rounds] | None = None
    stale_rejected: int = 0  # gradients of this rank that came too late to count

    @property
    def tells(self) -> bool:
        """Of the seats that share a data shard, the first counts its samples."""
        return self.seat.rank == min(s.rank for s in self.seats if s.shard == self.seat.shard)

    @property
    def part_sizes(self) -> list[int]:
        """Samples of one part of a step, of every data shard: steps are cut into `training.grad_accumulation` parts."""
        return [samples // self.config.training.grad_accumulation for samples in self.samples_per_step]

    @property
    def fixed_group(self) -> Group | None:
        """The ranks, where they stay; None where members come and go, and each view names them."""
        return self.group if self.line is None else None

    @property
    def is_alone(self) -> bool:
        return self.line is None and self.group.size == 1

    @property
    def traffic(self) -> Traffic:
        """What this process has moved: over all its links, to the server and to other workers."""
        return self.group.traffic if self.line is None else self.line.transport.traffic


class Strategy(ABC, Generic[OptionsT]):
    Config: ClassVar[type[Options]] = Options  # what it is generic in: `class Mine(Strategy[MyOptions])` has MyOptions

    replica: Replica  # this rank's model, or its part of it; made by `setup`

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
        """Say who sits where, what a step costs each, and what stands against it. Without a shape: no costs."""

    @abstractmethod
    def setup(self, task: Task) -> None:
        """Make the model and its optimizer; bring every rank to the same start."""

    @abstractmethod
    def step(self, batch: Batch) -> StepReport:
        """Take one training step, in the paper's order."""

    @abstractmethod
    def state(self, of: Scope = "run") -> State:
        """Return what to save, not copied. Asking changes nothing: what is in flight is a part of it.

        The lead rank gets the whole, and the others take part where it must be gathered. With `of="weights"` without the
        optimizer. With `of="rank"`, where ranks have parts of the model: this rank's boxes of tensors
        (`comm.sharded.box_name`), which together are the whole, every element once (`State.wholes`).
        """

    @abstractmethod
    def load_state(self, state: State) -> None:
        """Go on from a state, perhaps of another strategy."""

    def drain(self) -> None:
        """Apply what is in flight, after the last step of a run. Every rank calls it."""

    def measure(self, task: Task, part: Any) -> dict[str, Tensor]:
        """Return the task's metrics on one validation batch."""
        return task.metrics(self.replica.model, part)

    @property
    def share(self) -> Share:
        """Which validation batches this rank takes."""
        return Share(index=self.context.group.rank, count=self.context.group.size)


def build_replica(
    task: Task,
    context: Context,
    *,
    arrange: Callable[[nn.Module], nn.Module] | None = None,
    loss: Loss | None = None,
) -> Replica:
    """A whole model on this rank's device, alike on every rank that calls it; `arrange` keeps this rank's part of it.

    `loss`: where it is not the task's own.
    """
    config = context.config.training
    seed_everything(config.seed or 0, "weights", device=context.device)
    model = task.model()
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
                f"rank {context.seat.rank} would have layers without parameters to train only; use fewer ranks for the "
                "pipeline, or deal the layers out with strategy.layer_distribution"
            )
    if config.compile and context.seat.rank == 0:
        context.tell("compiling the model: the first step takes seconds to minutes longer")
    optimizer = task.optimizer(model)
    for group in optimizer.param_groups:
        group.setdefault("lr_scale", group["lr"] / config.learning_rate)
    schedule = context.config.lr_schedule
    return Replica(
        model=model,
        loss=loss or task.loss,
        optimizer=optimizer,
        learning_rate=warmup_cosine(
            peak=config.learning_rate,
            floor=config.learning_rate / 10 if schedule.min_lr is None else schedule.min_lr,
            warmup=schedule.warmup_iters,
            steps=context.total_steps,
        ),
        device=context.device,
        precision=config.precision,
        grad_clip_norm=config.grad_clip_norm,
        compile=config.compile,
        track_gradients=config.track_gradients,
        layout=layout,
        num_parameters=num_parameters,
        whole=arrange is None,
    )
