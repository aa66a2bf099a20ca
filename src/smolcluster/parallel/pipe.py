"""The stages of one rank in a pipeline, and the torch schedule that runs them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage, schedules
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from smolcluster.comm.group import Group, gather_json
from smolcluster.comm.sharded import full_tensor, gradient
from smolcluster.compute.device import synchronize
from smolcluster.compute.precision import autocast
from smolcluster.compute.replica import Batch, to_device, zero_from
from smolcluster.config.options import PipelineOptions
from smolcluster.errors import UserError, unknown_name
from smolcluster.parallel.exchange import everything_in
from smolcluster.parallel.placement import Node, Rank
from smolcluster.parallel.stages import (
    Cut,
    Layers,
    OutputStub,
    Shapes,
    StageModules,
    as_tuple,
    inputs_of,
    layers_of,
    length_of,
    marked,
    num_microbatches,
)
from smolcluster.parallel.timeline import Drawing, WorkItem, draw, expected_idle, idle_share
from smolcluster.tasks.base import Task, count_of

SCHEDULES = {
    "sequential": schedules.ScheduleGPipe,
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}

DRAWN = 4  # the step that is drawn, after warm-up
WATCHED = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weights",
}


def check_schedule(options: PipelineOptions) -> None:
    if options.schedule not in SCHEDULES:
        raise unknown_name("strategy.schedule", options.schedule, SCHEDULES)


def parts_of_ranks(options: PipelineOptions, model: nn.Module, num_ranks: int, nodes: Sequence[Node]) -> list[Shapes]:
    """Return the parameters of each rank by name; empty for a model that must be traced."""
    layers = layers_of(model)
    if num_ranks == 1:
        return [{name: tuple(p.shape) for name, p in model.named_parameters()}]
    if layers is None:
        return [{}] * num_ranks
    cut = Cut.plan(layers.count, num_ranks, options)
    num_microbatches(options, [node.batch_size for node in nodes], len(cut.layers))  # raises UserError
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
        context: Rank,
        group: Group,
        process_group: Any,
        pair: Group | None,
        sequence_shards: int,
        used_in: Callable[[nn.Module], dict[str, torch.dtype]],
    ) -> None:
        """`process_group` is torch's name for `group`; `pair` are the first and the last of it, on those."""
        self.layers, self.cut, self.mine = layers, cut, cut.of(group.rank)
        self.stages = [self._stage(model, index) for index in self.mine]
        self.model = self.stages[0] if len(self.stages) == 1 else StageModules(self.stages)
        self._task, self._options, self._context = task, options, context
        self._group, self._process_group, self._pair = group, process_group, pair
        self._sequence_shards, self._used_in = sequence_shards, used_in
        self._check_shared(model)
        self._shared = self._shared_names(model)
        self._recorded: list[WorkItem] | None = None  # in the step that is drawn
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
        """Check that only the first and the last stage share weights, under one name: other shared weights would diverge."""
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
        """The weights of the last stage that the first also has: they count once in the norm."""
        return set() if not self.has_last else {self._named(self.stages[-1], name) for name in self._shared}

    def sum_shared(self) -> None:
        """Sum the gradients of shared weights over both stages."""
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
        """Run the schedule; return the loss on the last rank, zero elsewhere. Gradients are of the mean loss times `weight`."""
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
        """Return each micro-batch's share of the mean over the batch, where targets are counted."""
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
            return zero_from([output])
        loss = self._task.loss(OutputStub(output), self._microbatch(self._part, int(number)))
        if share is None:
            self._losses.append(full_tensor(loss.detach()))
            return loss * (self._weight / self._parts / self._num_microbatches)
        self._losses.append(full_tensor(loss.detach()) * share)
        return loss * (self._weight * share)

    def _build(self, part: Any) -> None:
        """Make the schedule from the first batch, which shows the shapes that are sent."""
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
                # Skip the connection setup between neighbours, which only NCCL needs: some versions of torch also set up a
                # stage's own rank, and gloo has no connection to itself.
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
        """Return the inputs of each stage and the output of the last, on the meta device."""
        device, shards = self._context.device, self._sequence_shards
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = self._task.model()
            stages = [self._stage(model, index) for index in range(len(self.cut.layers))]
            states = [everything_in(stage) for stage in stages]
        with FakeTensorMode(), autocast(self._task.config.training.precision, device):
            found = [inputs_of(self._task, tree_map_only(Tensor, _allocate_like, part))]
            for stage, state in zip(stages, states, strict=True):
                used = self._used_in(stage)
                tensors = {n: torch.empty(t.shape, dtype=used[n], device=device) for n, t in state.items()}
                found.append(as_tuple(functional_call(stage, tensors, found[-1], tie_weights=False)))
        first = tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in found[0])
        between = [tuple(_as_sent(t, shards) for t in tensors) for tensors in found[1:-1]]
        return [first, *between, tuple(_as_sent(t, 1) for t in found[-1])]

    # Drawing one step

    def _start_watching(self) -> None:
        self._group.barrier()
        self._recorded, self._began = [], time.perf_counter()

    def _watch(self, stage: PipelineStage) -> None:
        """Record the start and end of each work item in the step that is drawn."""
        if not self._options.draw_schedule:
            return
        for name, kind in WATCHED.items():
            setattr(stage, name, functools.partial(self._timed, getattr(stage, name), kind, stage.stage_index))

    def _timed(self, work: Callable[..., Any], kind: str, stage: int, number: int, *args: Any, **kwargs: Any) -> Any:
        if self._recorded is None:
            return work(number, *args, **kwargs)
        device = self._context.device
        synchronize(device)
        began = time.perf_counter()
        result = work(number, *args, **kwargs)
        synchronize(device)
        if kind == "backward" and not kwargs.get("full_backward", True):
            kind = "input"
        self._recorded.append(WorkItem(kind, stage, number, began - self._began, time.perf_counter() - self._began))
        return result

    def _draw(self) -> None:
        assert self._recorded is not None
        everyone = gather_json(self._group, self._recorded)
        self._recorded = None
        ranks = [[WorkItem(*fields) for fields in rank] for rank in everyone]
        options, count = self._options, self._num_microbatches
        idle = idle_share(ranks)
        per_rank = len(self.cut.layers) // self._group.size
        formula = expected_idle(options.schedule, self._group.size, count, per_rank)
        caption = f"{options.schedule}, {self._group.size} ranks, {count} micro-batches: idle {idle:.0%}"
        if formula is not None:
            caption += f", {formula:.0%} by the formula"
        numbers = {"schedule": options.schedule, "ranks": self._group.size, "microbatches": count, "idle": idle}
        numbers |= {"idle_by_formula": formula, "work": everyone}
        self._context.draw(Drawing(name="schedule", svg=draw(ranks, title=caption), caption=caption, numbers=numbers))

    # Evaluation

    def forward(self, part: Any) -> nn.Module | None:
        """Run a batch through all stages; return a model that gives its output, on the last rank."""
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
        return OutputStub(held[0]) if self.has_last else None

    def _receive(self, index: int, source: int, length: int) -> tuple[Tensor, ...]:
        device, group, tensors = self._context.device, self._group, []
        for number, like in enumerate(self.shapes[index]):
            home = group.buffer_device(device)
            tensor = torch.empty((length, *like.shape[1:]), dtype=like.dtype, device=home)
            group.recv(tensor, source=source, tag=number).wait()
            tensors.append(tensor.to(device))
        return tuple(tensors)


def _no_view(output: Tensor) -> Tensor:
    """Return a tensor that is no view: backward in two halves detaches outputs in place, which torch refuses for views."""
    return output.clone() if output._is_view() else output


def _allocate_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _as_sent(tensor: Tensor, shards: int) -> Tensor:
    """Return the tensor as it is sent between stages: cut along the sequence, with a gradient."""
    shape = list(tensor.shape)
    if shards > 1:
        shape[1] //= shards
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.is_floating_point())
