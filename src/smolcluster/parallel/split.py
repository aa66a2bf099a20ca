"""`layer_distribution: auto`: assign layers to stages so that machines of different speed take equal time.

    every rank measures each layer on a real micro-batch:             seconds of forward and backward, bytes
    ranks exchange the measurements and their memory
    the split whose slowest stage is fastest, among those that fit   (`share_layers`, pure)

The first layer is measured with the embedding, the last with the head and the loss. Where a mesh has several ranks for a stage,
the slowest and the one with the least memory count. A rank needs weights, gradients and two optimizer states of its layers, and
the activations of micro-batches in flight. Ranks of one machine divide its memory evenly, and so do the stages of one rank.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from smolcluster.comm.group import gather_json
from smolcluster.compute.device import synchronize
from smolcluster.compute.memory import free_bytes
from smolcluster.compute.precision import autocast
from smolcluster.compute.replica import to_device
from smolcluster.config.options import PipelineOptions
from smolcluster.errors import UserError
from smolcluster.observe.text import size
from smolcluster.parallel.axes import Axes, machines
from smolcluster.parallel.placement import Rank
from smolcluster.parallel.stages import Layers, OutputStub, as_tuple, holders, inputs_of, num_microbatches
from smolcluster.tasks.base import Task

REPEATS = 3
USABLE = 0.9  # share of the free memory; the rest is for what is not counted
STATES = 4  # a weight, its gradient, two states of the optimizer


def share_layers(
    ranks: Sequence[int], seconds: Sequence[Sequence[float]], need: Sequence[float], memory: Sequence[float]
) -> list[int] | None:
    """Return the number of layers of each stage: at least one, in order, minimizing the time of the slowest stage.

    Stage s is on `ranks[s]`; layer l takes `seconds[rank][l]` there and `need[l]` bytes, of which each stage of a rank has its
    equal part of `memory[rank]`. Among equally fast splits, one whose stages are most equal. None: nothing fits.
    """
    num_layers, num_stages = len(need), len(ranks)
    room = [memory[rank] / ranks.count(rank) for rank in ranks]
    bytes_to = [0.0, *itertools.accumulate(need)]
    seconds_to = [[0.0, *itertools.accumulate(row)] for row in seconds]

    def takes(stage: int, start: int, end: int) -> float:
        """Return the time of layers start to end; infinite if they do not fit."""
        if bytes_to[end] - bytes_to[start] > room[stage]:
            return math.inf
        return seconds_to[ranks[stage]][end] - seconds_to[ranks[stage]][start]

    def best(limit: float | None) -> tuple[float, list[int]]:
        """Without a limit minimize the time of the slowest stage; with one the sum of squares, no stage above the limit."""
        ends: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # layers assigned so far: cost, counts
        for stage in range(num_stages):
            found: dict[int, tuple[float, list[int]]] = {}
            for start, (cost, counts) in ends.items():
                for end in range(start + 1, num_layers - (num_stages - stage - 1) + 1):
                    time_s = takes(stage, start, end)
                    within = limit is None or time_s <= limit
                    total = max(cost, time_s) if limit is None else cost + time_s**2
                    if within and total < found.get(end, (math.inf, []))[0]:
                        found[end] = (total, [*counts, end - start])
            ends = found
        return ends.get(num_layers, (math.inf, []))

    slowest_s, counts = best(None)
    if math.isinf(slowest_s):
        return None
    return best(slowest_s)[1] or counts


# Measuring


@dataclass(frozen=True, slots=True)
class LayerCost:
    seconds: float  # forward and backward of a micro-batch
    weight_bytes: int
    kept_bytes: int  # between forward and backward


def measure(task: Task, model: nn.Module, layers: Layers, part: Any, device: torch.device) -> list[LayerCost]:
    """Measure the layers; those of equal structure and inputs once. The model is unchanged."""
    seen: dict[Any, tuple[LayerCost, tuple[Tensor, ...]]] = {}
    found, held = [], inputs_of(task, part)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    for number in range(layers.count):
        first, last = number == 0, number == layers.count - 1
        stage = layers.stage(model, range(number, number + 1), first=first, last=last)
        kinds = [(type(m).__name__, m.extra_repr()) for m in stage.modules()]
        shapes = [tuple(p.shape) for p in stage.parameters()], [(tuple(t.shape), t.dtype) for t in held]
        key = (first, last, str(kinds), str(shapes), "" if kinds and shapes[0] else number)
        if key not in seen:
            seen[key] = _measure_one(task, stage, held, part if last else None, device)
        layer, held = seen[key]
        found.append(layer)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return found


def _measure_one(
    task: Task, stage: nn.Module, inputs: tuple[Tensor, ...], part: Any, device: torch.device
) -> tuple[LayerCost, tuple[Tensor, ...]]:
    """Measure one layer. `part`: the batch of the loss, after the last layer."""
    inputs = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in inputs)
    parameters = [p for p in stage.parameters() if p.requires_grad]
    own = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    times = []
    watch = saved_tensors_hooks(keep, lambda tensor: tensor)
    for repeat in range(1 + REPEATS):  # the first is warm-up
        synchronize(device)
        began = time.perf_counter()
        with autocast(task.config.training.precision, device), watch if repeat == 0 else nullcontext():
            outputs = as_tuple(stage(*inputs))
            results = outputs if part is None else (task.loss(OutputStub(outputs[0]), part),)
        results = tuple(t for t in results if t.requires_grad)
        sources = [*parameters, *(t for t in inputs if t.requires_grad)]
        if results and sources:
            torch.autograd.grad(results, sources, [torch.ones_like(t) for t in results], allow_unused=True)
        synchronize(device)
        times.append(time.perf_counter() - began)
    layer = LayerCost(sorted(times[1:])[REPEATS // 2], sum(p.nbytes for p in parameters), sum(kept.values()))
    return layer, tuple(t.detach() for t in outputs)


def measured_split(
    context: Rank, task: Task, model: nn.Module, layers: Layers, *, axes: Axes, options: PipelineOptions
) -> list[int]:
    """Return the layers of each stage by the measurements of all ranks; the same on all ranks."""
    ranks = holders(axes.pp, options)
    count = num_microbatches(options, context.part_sizes, len(ranks))
    part = to_device(context.example(context.part_sizes[axes.coords(context.seat.rank)["dp"]] // count), context.device)
    context.group.barrier()  # ranks of one machine measure concurrently, as they will train
    mine = measure(task, model, layers, part, context.device)
    in_flight = {"sequential": 1, "gpipe": count, "1f1b": min(count, axes.pp)}.get(
        options.schedule, min(count, 2 * axes.pp)
    )
    own = {
        "seconds": [layer.seconds for layer in mine],
        "need": [STATES * layer.weight_bytes + in_flight * layer.kept_bytes for layer in mine],
        "memory": _memory(context, model),
    }
    everyone = gather_json(context.group, own)
    lines = [[everyone[rank] for rank in line] for line in zip(*axes.lines("pp"), strict=True)]  # by place along pp
    seconds = [[max(times) for times in zip(*(one["seconds"] for one in line), strict=True)] for line in lines]
    memory = [min(one["memory"] for one in line) for line in lines]
    need = [max(bytes_) for bytes_ in zip(*(one["need"] for one in everyone), strict=True)]
    if layers.count < len(ranks):
        return [0] * len(ranks)  # the plan refuses it
    counts = gather_json(context.group, share_layers(ranks, seconds, need, memory))[0]
    if counts is None:
        raise UserError(
            f"layer_distribution: auto: no split fits. The layers need {size(sum(need))} in all, and the ranks have "
            f"{', '.join(size(m) for m in memory)} free; use more workers, smaller batches, or set the layers of each stage"
        )
    if context.seat.rank == 0:
        each = ", ".join(f"{1e3 * sum(row) / len(row):.2g}" for row in seconds)
        context.notify(f"layer_distribution: auto gives {counts}; a layer takes {each} ms on the ranks along pp")
    return list(counts)


def _memory(context: Rank, model: nn.Module) -> float:
    """Return the memory that this rank may use once the other parts of the model are freed."""
    here = machines(context.seats)
    sharing = 1 if context.device.type == "cuda" else here.count(here[context.seat.rank])
    return USABLE * free_bytes(context.device) / sharing + sum(p.nbytes for p in model.parameters())
