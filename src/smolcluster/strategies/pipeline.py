"""pipeline: each rank has some of the layers; micro-batches follow each other through them.

    a step, on P ranks with M micro-batches:
        rank p gets the activations of micro-batch m from rank p-1, runs its layers, sends them on
        the last rank takes the loss; gradients of activations travel back the same way
        when all micro-batches are through:  w <- optimizer(w, clip(g))

    schedule      stages a rank   what it does                                              idle share of the time
    sequential    1               one micro-batch: plain model parallelism                  (P-1)/P
    gpipe         1               all forward, then all backward                            (P-1)/(M+P-1)
    1f1b          1               forward and backward alternate: activations of P          (P-1)/(M+P-1)
                                  micro-batches at most
    interleaved   V               as 1f1b, each rank with V pieces of the model             (P-1)/(V M+P-1)
    zero-bubble   V               backward in two halves; weights' gradients fill the gaps  towards 0
    zbv           2               the same, pieces in a V: rank p has stages p and 2P-1-p   towards 0

The schedules are torch's (`torch.distributed.pipelining`). How a model is cut stands in `stages.py`, and for one that neither
says so nor is an `nn.Sequential` in `tracing.py`; `split.py` measures how fast the ranks are. The task's loss calls the model
once, as `model(inputs)`: on the first rank that call shows what goes in, on the last it is answered with what came out.
Parameter names stay those of the whole model.

A weight that the first and the last stage both use (a tied head) lives on both; their gradients are added.

Bytes per step, sent and received each, for A bytes of activations of a whole batch: A for each cut between stages that a
rank is at. So 2 A on inner ranks and A on the outer ones, about V times that with V stages a rank; a tied weight adds its own.

Huang et al., "GPipe", 2019. Narayanan et al., "PipeDream", 2019, and "Efficient large-scale language model training on GPU
clusters using Megatron-LM", 2021 (interleaved). Qi et al., "Zero bubble pipeline parallelism", 2023.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage, schedules
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from smolcluster.comm.group import Group, gather_json
from smolcluster.comm.sharded import gradient, whole
from smolcluster.compute.precision import autocast
from smolcluster.compute.replica import Batch, to_device, zero_of
from smolcluster.errors import UserError, unknown_name
from smolcluster.strategies.axes import Axes
from smolcluster.strategies.base import Context, Drawing, Options
from smolcluster.strategies.exchange import everything_in
from smolcluster.strategies.parallel import Parallel, Shapes
from smolcluster.strategies.placement import Node
from smolcluster.strategies.split import measured_split
from smolcluster.strategies.stages import (
    Answering,
    Cut,
    Layers,
    Several,
    as_tuple,
    holders,
    inputs_of,
    layers_of,
    length_of,
    marked,
    num_microbatches,
)
from smolcluster.strategies.timeline import Worked, draw, expected_idle, idle_share
from smolcluster.strategies.tracing import trace_layers
from smolcluster.tasks.base import Task, count_of

SCHEDULES = {
    "sequential": schedules.ScheduleGPipe,
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


DRAWN = 4  # which run of the schedule is drawn: by then everything is warm
WATCHED = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weights",
}


class PipelineOptions(Options):
    schedule: str = Field("1f1b", description=f"one of {', '.join(SCHEDULES)}")
    num_microbatches: int | None = Field(None, ge=1, description="per batch; null: twice the stages, if they divide it")
    stages_per_rank: int = Field(2, ge=1, description="interleaved, zero-bubble: pieces of the model on each rank")
    layer_distribution: list[int] | Literal["auto"] | None = Field(
        None, description="layers of each stage; auto: by measured speed and memory; null: evenly"
    )
    draw_schedule: bool = Field(False, description="write schedule.svg: who computed what when, in one step of the run")


PipelineT = TypeVar("PipelineT", bound=PipelineOptions)


class Pipeline(Parallel[PipelineOptions]):
    @classmethod
    def axes(cls, options: PipelineOptions, hosts: Sequence[str]) -> Axes:
        check_schedule(options)
        return Axes(pp=len(hosts))

    @classmethod
    def parts(cls, options: PipelineOptions, model: nn.Module, axes: Axes, nodes: Sequence[Node]) -> list[Shapes]:
        return parts_of_ranks(options, model, axes.pp, nodes)

    def make_pipe(self, model: nn.Module) -> Pipe | None:
        return make_pipe(self, model)


def make_pipe(strategy: Parallel[PipelineT], model: nn.Module) -> Pipe | None:
    """This rank's stages, where there is a pipeline."""
    axes, options = strategy.mesh_axes, strategy.options
    if axes.pp == 1:
        return None
    assert strategy.mesh is not None
    said = options.layer_distribution
    at_least = sum(said) if isinstance(said, list) else len(holders(axes.pp, options))
    layers = layers_of(model) or trace_layers(strategy.task, strategy.context.example, at_least=at_least)
    counts = measured_split(strategy, model, layers) if said == "auto" else None
    cut = Cut.plan(layers.count, axes.pp, options, counts)
    ends = sorted({cut.ranks[0], cut.ranks[-1]})
    pair: Group | None = None  # the ranks of the first and the last stage, where they are two
    if len(ends) == 2:
        for ranks in axes.lines("pp"):
            pair = strategy.context.group.sub([ranks[end] for end in ends]) or pair
    return Pipe(
        strategy.task,
        model,
        layers,
        cut,
        options=options,
        context=strategy.context,
        group=strategy.pp,
        process_group=strategy.mesh["pp"].get_group(),
        pair=pair,
        sequence_shards=axes.tp if strategy.cuts_sequences(options) else 1,
        used_in=strategy.used_in,
    )


def check_schedule(options: PipelineOptions) -> None:
    if options.schedule not in SCHEDULES:
        raise unknown_name("strategy.schedule", options.schedule, SCHEDULES)


def parts_of_ranks(options: PipelineOptions, model: nn.Module, num_ranks: int, nodes: Sequence[Node]) -> list[Shapes]:
    """The parameters of each rank, by name; nothing of a model that must be traced. It may be on the meta device."""
    layers = layers_of(model)
    if num_ranks == 1:
        return [{name: tuple(p.shape) for name, p in model.named_parameters()}]
    if layers is None:
        return [{}] * num_ranks
    cut = Cut.plan(layers.count, num_ranks, options)
    num_microbatches(options, [node.batch_size for node in nodes], len(cut.layers))  # or refuses
    last = len(cut.layers) - 1
    found = []
    for rank in range(num_ranks):
        stages = [layers.stage(model, cut.layers[i], first=i == 0, last=i == last) for i in cut.of(rank)]
        found.append({name: tuple(p.shape) for name, p in marked(stage.named_parameters() for stage in stages)})
    return found


class Pipe:
    """One rank's stages, and the schedule that runs them."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        layers: Layers,
        cut: Cut,
        *,
        options: PipelineOptions,
        context: Context,
        group: Group,
        process_group: Any,
        pair: Group | None,
        sequence_shards: int,
        used_in: Callable[[nn.Module], dict[str, torch.dtype]],
    ) -> None:
        """`process_group` is torch's name for `group`; `pair` are the first and the last of it, on those."""
        self.layers, self.cut, self.mine = layers, cut, cut.of(group.rank)
        self.stages = [self._stage(model, index) for index in self.mine]
        self.model = self.stages[0] if len(self.stages) == 1 else Several(self.stages)
        self._task, self._options, self._context = task, options, context
        self._group, self._process_group, self._pair = group, process_group, pair
        self._sequence_shards, self._used_in = sequence_shards, used_in
        self._check_shared(model)
        self._shared = self._shared_names(model)
        self.drawing: Drawing | None = None  # of one step
        self._worked: list[Worked] | None = None  # in the step that is drawn
        self._runs = 0
        self._schedule: Any = None
        self._part: Any = None
        self._losses: list[Tensor] = []
        self._weight, self._parts = 1.0, 1
        self._shares: list[float] | None = None

    def _stage(self, model: nn.Module, index: int) -> nn.Module:
        last = len(self.cut.layers) - 1
        return self.layers.stage(model, self.cut.layers[index], first=index == 0, last=index == last)

    @property
    def has_first(self) -> bool:
        return 0 in self.mine

    @property
    def has_last(self) -> bool:
        return len(self.cut.layers) - 1 in self.mine

    # A weight on both ends

    def _shared_names(self, model: nn.Module) -> list[str]:
        first, last = self._stage(model, 0), self._stage(model, len(self.cut.layers) - 1)
        names = dict(first.named_parameters())
        return [name for name, _ in last.named_parameters() if name in names]

    def _check_shared(self, model: nn.Module) -> None:
        """Only the first and the last stage may have a weight in common, under one name: others would drift apart."""
        last = len(self.cut.layers) - 1
        found: dict[nn.Parameter, dict[int, set[str]]] = {}
        for index in range(last + 1):
            for name, parameter in self._stage(model, index).named_parameters(remove_duplicate=False):
                found.setdefault(parameter, {}).setdefault(index, set()).add(name)
        for places in found.values():
            if len(places) > 1 and (set(places) != {0, last} or not places[0] & places[last]):
                names = sorted(set().union(*places.values()))
                raise UserError(
                    f"{' and '.join(names)} is one weight on several stages of the pipeline, which would become two; "
                    "keep its layers on one stage with strategy.layer_distribution, or use fsdp"
                )

    @property
    def copied(self) -> set[nn.Parameter]:
        """What the first stage has too: it counts once in the norm."""
        return set() if not self.has_last else {self._named(self.stages[-1], name) for name in self._shared}

    def join_twins(self) -> None:
        """Both get the sum of both gradients."""
        ends = [stage for stage, there in ((self.stages[0], self.has_first), (self.stages[-1], self.has_last)) if there]
        for name in self._shared if ends else []:
            gradients = [gradient(self._named(end, name)) for end in ends]
            first = gradients[0]
            assert first is not None
            if self._pair is not None:
                exchanged = first.to(self._pair.buffer_device(first.device))
                self._pair.all_reduce(exchanged).wait()
                first.copy_(exchanged)
            elif gradients[-1] is not None:
                first.add_(gradients[-1])
                gradients[-1].copy_(first)

    def _named(self, stage: nn.Module, name: str) -> nn.Parameter:
        return dict(stage.named_parameters())[name]

    # Training

    def compute(self, batch: Batch, *, weight: float) -> Tensor:
        """Gradients of the mean loss, times `weight`, and the loss itself on the last rank (zero elsewhere)."""
        device = self._context.device
        self.model.train()
        total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        for part in batch.parts:
            if self._schedule is None:
                self._build(to_device(part, device))
            self._shares = self._shares_of(part, batch)
            part = to_device(part, device)
            inputs = inputs_of(self._task, part) if self.has_first else ()
            self._part, self._losses = part, []
            self._weight, self._parts = weight, len(batch.parts)
            target = torch.arange(self._num_microbatches) if self.has_last else None
            self._runs += 1
            drawn = self._options.draw_schedule and self._runs == DRAWN
            if drawn:
                self._start_watching()
            with autocast(self._task.config.training.precision, device):
                self._schedule.step(*inputs, target=target, return_outputs=False)
            if drawn:
                self._draw()
            if self._losses and self._shares is None:
                total += torch.stack(self._losses).mean() / len(batch.parts)
            elif self._losses:
                total += torch.stack(self._losses).sum()
        return total

    def _shares_of(self, part: Any, batch: Batch) -> list[float] | None:
        """Each micro-batch's share of the mean over the whole batch, where targets are counted."""
        if batch.counts is None or not self.has_last:
            return None
        counts = [
            count_of(self._task, self._microbatch(part, number)) or 0.0 for number in range(self._num_microbatches)
        ]
        return [count / batch.weight if batch.weight else 0.0 for count in counts]

    def _microbatch(self, part: Any, number: int) -> Any:
        size = length_of(part) // self._num_microbatches
        return tree_map_only(Tensor, lambda t: t[number * size : (number + 1) * size], part)

    def _loss(self, output: Tensor, number: Tensor) -> Tensor:
        share = None if self._shares is None else self._shares[int(number)]
        if share == 0:  # a mean over nothing is NaN
            return zero_of([output])
        loss = self._task.loss(Answering(output), self._microbatch(self._part, int(number)))
        if share is None:
            self._losses.append(whole(loss.detach()))
            return loss * (self._weight / self._parts / self._num_microbatches)
        self._losses.append(whole(loss.detach()) * share)
        return loss * (self._weight * share)

    def _build(self, part: Any) -> None:
        """The schedule is made when the first batch is here: it shows the shapes that travel."""
        name, length = self._options.schedule, length_of(part)
        self._num_microbatches = num_microbatches(self._options, self._context.part_sizes, len(self.cut.layers))
        size = length // self._num_microbatches
        self.shapes = self._measure(tree_map_only(Tensor, lambda t: t[:size], part))
        stages = [
            PipelineStage(
                stage,
                index,
                len(self.cut.layers),
                self._context.device,
                input_args=self.shapes[index],
                output_args=self.shapes[index + 1],
                group=self._process_group,
            )
            for index, stage in zip(self.mine, self.stages, strict=True)
        ]
        for stage in stages:
            if getattr(self._group, "backend", "") == "gloo":
                # A greeting of neighbours, which only NCCL needs. Some versions of torch greet a stage's own rank too, and gloo
                # has no connection to itself.
                setattr(stage, "_get_init_p2p_neighbors_ops", list)  # noqa: B010
            self._watch(stage)
        tidy = _no_view if name in ("zero-bubble", "zbv") else Tensor.contiguous  # as it can be sent
        for module in self.stages:
            module.register_forward_hook(lambda *call: tree_map_only(Tensor, tidy, call[-1]))
        kind = SCHEDULES[name]
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        self._schedule = kind(
            stages[0] if single else stages,
            n_microbatches=self._num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def _measure(self, part: Any) -> list[tuple[Tensor, ...]]:
        """What goes into each stage and out of the last, on the meta device: nobody needs to tell anybody."""
        device, shards = self._context.device, self._sequence_shards
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = self._task.model()
            stages = [self._stage(model, index) for index in range(len(self.cut.layers))]
            states = [everything_in(stage) for stage in stages]
        with FakeTensorMode(), autocast(self._task.config.training.precision, device):
            found = [inputs_of(self._task, tree_map_only(Tensor, _alike, part))]
            for stage, state in zip(stages, states, strict=True):
                used = self._used_in(stage)
                tensors = {n: torch.empty(t.shape, dtype=used[n], device=device) for n, t in state.items()}
                found.append(as_tuple(functional_call(stage, tensors, found[-1], tie_weights=False)))
        first = tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in found[0])
        between = [tuple(_travelling(t, shards) for t in tensors) for tensors in found[1:-1]]
        return [first, *between, tuple(_travelling(t, 1) for t in found[-1])]

    # A picture of one step

    def _start_watching(self) -> None:
        self._group.barrier()
        self._worked, self._began = [], time.perf_counter()

    def _watch(self, stage: PipelineStage) -> None:
        """Note when each piece of work begins and ends, in the step that is drawn."""
        if not self._options.draw_schedule:
            return
        for name, kind in WATCHED.items():
            setattr(stage, name, functools.partial(self._timed, getattr(stage, name), kind, stage.stage_index))

    def _timed(self, work: Callable[..., Any], kind: str, stage: int, number: int, *args: Any, **kwargs: Any) -> Any:
        if self._worked is None:
            return work(number, *args, **kwargs)
        device = self._context.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        result = work(number, *args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if kind == "backward" and not kwargs.get("full_backward", True):
            kind = "input"
        self._worked.append(Worked(kind, stage, number, began - self._began, time.perf_counter() - self._began))
        return result

    def _draw(self) -> None:
        assert self._worked is not None
        everyone = gather_json(self._group, [piece.fields() for piece in self._worked])
        self._worked = None
        ranks = [[Worked(*fields) for fields in rank] for rank in everyone]
        options, count = self._options, self._num_microbatches
        idle = idle_share(ranks)
        per_rank = len(self.cut.layers) // self._group.size
        formula = expected_idle(options.schedule, self._group.size, count, per_rank)
        says = f"{options.schedule}, {self._group.size} ranks, {count} micro-batches: idle {idle:.0%}"
        if formula is not None:
            says += f", {formula:.0%} by the formula"
        numbers = {"schedule": options.schedule, "ranks": self._group.size, "microbatches": count, "idle": idle}
        numbers |= {"idle_by_formula": formula, "work": everyone}
        self.drawing = Drawing(name="schedule", svg=draw(ranks, title=says), says=says, numbers=numbers)

    # Evaluation

    def answering(self, part: Any) -> nn.Module | None:
        """A stand-in for the model, on the last rank: a batch went through, one stage after the other."""
        me, ranks = self._group.rank, self.cut.ranks
        held: tuple[Tensor, ...] = ()
        for index, stage in zip(self.mine, self.stages, strict=True):
            if index == 0:
                held = inputs_of(self._task, part)
            elif ranks[index - 1] != me:
                held = self._receive(index, ranks[index - 1], length_of(part))
            held = as_tuple(stage(*held))
            if index + 1 < len(ranks) and ranks[index + 1] != me:
                for number, tensor in enumerate(held):
                    exchanged = tensor.contiguous().to(self._group.buffer_device(tensor.device))
                    self._group.send(exchanged, to=ranks[index + 1], tag=number).wait()
        return Answering(held[0]) if self.has_last else None

    def _receive(self, index: int, source: int, length: int) -> tuple[Tensor, ...]:
        device, group, tensors = self._context.device, self._group, []
        for number, like in enumerate(self.shapes[index]):
            home = group.buffer_device(device)
            tensor = torch.empty((length, *like.shape[1:]), dtype=like.dtype, device=home)
            group.recv(tensor, source=source, tag=number).wait()
            tensors.append(tensor.to(device))
        return tuple(tensors)


def _no_view(output: Tensor) -> Tensor:
    """Backward in two halves detaches what a stage gave, in place; torch refuses that for a view of another tensor."""
    return output.clone() if output._is_view() else output


def _alike(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _travelling(tensor: Tensor, shards: int) -> Tensor:
    """As it goes from stage to stage: cut along the sequence, and with a gradient that comes back."""
    shape = list(tensor.shape)
    if shards > 1:
        shape[1] //= shards
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.is_floating_point())
