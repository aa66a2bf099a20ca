"""The base of fsdp, tensor, pipeline and mesh: each rank holds a part of the model.

    setup:  build the whole model on every rank, then keep a part of it:
                pipeline   some of its layers                          pipeline.py
                tensor     some rows or columns of each layer          tensor.py
                fsdp       a shard of each tensor, or all of it        fsdp_sharded.py, ../parallel/exchange.py
            or all of it, and a part of every sequence (cp)            ../parallel/context.py
            the optimizer is made for that part

    step:   forward and backward, through the pipeline if there is one
            gradients are averaged over the data shards                             (fsdp)
            a weight that two pipeline stages share gets the sum of both gradients
            one small all-reduce: the norm over all parts, the loss of each data shard, stop requests
            w <- optimizer(w, clip(g));  with owners, they broadcast the result                  (fsdp, stage 1)

Saving and loading: `partial_state.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._pytree import tree_leaves

from smolcluster.comm.group import Group, gather_json, share_of
from smolcluster.comm.mesh.torch_traffic import EngineTraffic
from smolcluster.comm.sharded import copies, full_tensor, gradient
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import DelayedFlag, Span
from smolcluster.config.options import ShardOptions
from smolcluster.errors import UserError
from smolcluster.parallel.axes import Axes, group_of, machines
from smolcluster.parallel.context import SequenceShards
from smolcluster.parallel.exchange import GradientExchange
from smolcluster.parallel.pipe import Pipe
from smolcluster.parallel.placement import Cost, Node, Placement, Shape
from smolcluster.parallel.stages import COPY, Shapes
from smolcluster.parallel.tensor_styles import Fusions
from smolcluster.parallel.zero import cost_of_stage
from smolcluster.strategies.base import OptionsT, Share, StepReport, build_replica
from smolcluster.strategies.base.partial_state import PartialState
from smolcluster.strategies.base.replicated import train_alone
from smolcluster.tasks.base import Task


class Parallel(PartialState[OptionsT]):
    @classmethod
    @abstractmethod
    def axes(cls, options: OptionsT, hosts: Sequence[str]) -> Axes:
        """Return the mesh axes. `hosts`: the machine of each rank."""

    @classmethod
    def sharding(cls, options: OptionsT) -> ShardOptions:
        """Return what is sharded along the data axis (ZeRO)."""
        return ShardOptions.model_validate({"fsdp_stage": 0})

    @classmethod
    def cuts_sequences(cls, options: OptionsT) -> bool:
        """Return whether ranks along tp split activations between layers, and so need different random streams."""
        return True

    @classmethod
    def gathers(cls, options: OptionsT, axes: Axes, nodes: Sequence[Node]) -> int:
        """Return the number of times that stage 3 gathers a parameter in a step: for forward and for backward."""
        return 2

    @classmethod
    def parts(cls, options: OptionsT, model: nn.Module, axes: Axes, nodes: Sequence[Node]) -> list[Shapes]:
        """Return the parameters of each rank along pp by name, before sharding along dp. Raises UserError for a bad split."""
        return [{name: tuple(p.shape) for name, p in model.named_parameters()}]

    @classmethod
    def plan(cls, options: OptionsT, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        try:
            axes = cls.axes(options, machines(nodes))
            seats = axes.seats(nodes, same_stream=not cls.cuts_sequences(options))
            costs = [] if shape is None else cls._costs(options, nodes, shape, axes)
        except UserError as error:
            return Placement(refusals=[str(error)])
        return Placement(seats=seats, costs=costs)

    @classmethod
    def _costs(cls, options: OptionsT, nodes: Sequence[Node], shape: Shape, axes: Axes) -> list[Cost]:
        """Return the cost of each rank; without the model itself, as if its layers were distributed evenly."""
        stages = [shape.tensors if axes.tp == axes.pp == 1 else ()]
        if shape.model is not None:
            stages = [list(part.values()) for part in cls.parts(options, shape.model, axes, nodes)]
        sharding, gathers = cls.sharding(options), cls.gathers(options, axes, nodes)
        costs = []
        for coords in map(axes.coords, range(len(nodes))):
            tensors, place = stages[coords["pp"] % len(stages)], coords["dp"] * axes.cp + coords["cp"]
            costs.append(cost_of_stage(sharding, shape, axes, tensors, place=place, gathers=gathers))
        return costs

    def used_in(self, model: nn.Module) -> dict[str, torch.dtype]:
        """Return the type of each parameter and buffer in forward."""
        return self._exchange.used_in(model)

    # Defined by subclasses

    def make_pipe(self, model: nn.Module) -> Pipe | None:
        """Return this rank's stages of a pipeline."""
        return None

    def shard_layers(self, model: nn.Module) -> Fusions:
        """Keep this rank's rows and columns of each layer. Return how rows of fused layers were reordered for that."""
        return Fusions({}, 1)

    def make_exchange(self) -> GradientExchange:
        return GradientExchange(self.weight, self.data)

    # Setting up

    def setup(self, task: Task) -> None:
        context = self.context
        self.task = task
        self._traffic = EngineTraffic(context.group, compiled=context.config.training.compile)
        self._evaluated = False  # since the last step
        self.mesh_axes = self.axes(self.options, machines(context.seats))
        self._check_machines()
        self.coords = context.seat.coords
        self._check_backend()
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)  # torch's engine exchanges from there
        self.mesh = self._make_mesh()
        self.data, self.pp = self._group_along("dp", "cp"), self._group_along("pp")
        self._sequence_shards: SequenceShards | None = None
        if self.mesh_axes.cp > 1:
            self._sequence_shards = SequenceShards(self._group_along("cp"), task, context.example(1))
        counts = context.samples_per_step
        self.weight = counts[self.coords["dp"]] / sum(counts)
        self._exchange = self.make_exchange()
        loss = task.loss if self._sequence_shards is None else self._sequence_shards.loss
        self.replica = build_replica(task, context, arrange=self._arrange, loss=loss)
        self._exchange.attach(self.replica)
        if self._pipe is not None and context.config.training.compile:
            context.warn(f"training.compile has no effect with {context.config.strategy.name}")
        self._tracks = self.replica.track_gradients and context.group.size > 1
        if self._tracks:  # this rank has only parts of the gradients
            self.replica.track_gradients, self.replica.norms = False, self._whole_norms
        self._stop = DelayedFlag(context.device)

    def _check_machines(self) -> None:
        """Check that all ranks see the same number of ranks per machine: without a cluster file each knows only its own."""
        if self.sharding(self.options).shard_size == "node":
            seen = gather_json(self.context.group, self.mesh_axes.shards)
            if len(set(seen)) > 1:
                raise UserError(
                    f"HYBRID_SHARD needs the same number of ranks on each machine, and the ranks see {seen} on theirs; "
                    "start the same number on each, or set strategy.shard_size"
                )

    def _check_backend(self) -> None:
        """Refuse gloo for GPU tensors in torch's engine: gloo would read device memory as host memory and crash."""
        context, group, axes = self.context, self.context.group, self.mesh_axes
        by_torch = max(axes.pp, axes.tp, axes.cp) > 1 or (axes.data > 1 and self.sharding(self.options).fsdp_stage >= 2)
        if by_torch and context.device.type != "cpu" and getattr(group, "backend", "") == "gloo":
            raise UserError(
                f"{context.config.strategy.name} on {context.device.type} cannot exchange over gloo; use --backend nccl with a "
                "GPU for each worker, or training.device=cpu"
            )

    def _make_mesh(self) -> DeviceMesh | None:
        """Make torch's device mesh of the axes longer than one."""
        axes = self.mesh_axes
        lengths = {"pp": axes.pp, "replicas": axes.replicas, "shards": axes.shards, "tp": axes.tp}
        lengths = {name: length for name, length in lengths.items() if length > 1}
        if not lengths:
            return None
        with unset_fake_temporarily():  # in a memory estimate the placement of ranks is real
            return init_device_mesh(self.context.device.type, tuple(lengths.values()), mesh_dim_names=tuple(lengths))

    def _group_along(self, *axes: str) -> Group:
        """Return the group of this rank along these axes. Every rank creates all groups."""
        mine = group_of(self.context.group, self.mesh_axes.lines(*axes))
        assert mine is not None
        return mine

    def _arrange(self, model: nn.Module) -> nn.Module:
        """Keep this rank's part of the whole model."""
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._places = {name: place for place, name in enumerate(trained)}
        if self._sequence_shards is not None:
            self._sequence_shards.prepare(model)
        self._pipe = self.make_pipe(model)
        for part in [model] if self._pipe is None else self._pipe.stages:
            with self._traffic.counted():
                self._fusions = self.shard_layers(part)
            self._exchange.wrap(part)
        return model if self._pipe is None else self._pipe.model

    # A step

    def step(self, batch: Batch) -> StepReport:
        if self.context.group.size == 1:
            return train_alone(self.replica, batch, stop=self.context.stop_requested())
        # Stage 2 keeps the parameters that an evaluation gathered: the step after it gathers fewer.
        shapes = tuple(tuple(t.shape) for t in tree_leaves(batch.parts) if isinstance(t, Tensor))
        with self._traffic.counted((shapes, self._evaluated)):
            report = self._step(batch)
        self._evaluated = False
        return report

    def _step(self, batch: Batch) -> StepReport:
        replica, context, pipe = self.replica, self.context, self._pipe
        rate = replica.learning_rate
        part = self._weigh(batch)
        if self._sequence_shards is not None:
            batch = self._sequence_shards.batch(batch)
        with self._engine():
            if pipe is None:
                loss = self._exchange.compute(batch)
            else:
                replica.buffers.save()
                loss = pipe.compute(batch, weight=self._exchange.loss_weight * replica.loss_scale)
                replica.buffers.check()
        comm = Span(context.device)
        if pipe is not None:
            pipe.sum_shared()
        self._exchange.finish()
        loss, norm, stop = self._reduce_scalars(loss if part is None else loss * (part / self.weight))
        comm.end()
        norm, self._norm_scale = norm / replica.loss_scale, replica.loss_scale
        replica.apply(norm=norm)
        self._exchange.send_updates()
        counted = context.reports_samples
        return StepReport(
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            samples=batch.samples if counted else 0,
            tokens=batch.tokens if counted else 0,
            comm=comm,
            stop=stop,
        )

    def _weigh(self, batch: Batch) -> float | None:
        """Return this data shard's part of the mean over the step, and set it in the exchange, where targets are counted."""
        if batch.counts is None or self.mesh_axes.dp == 1:
            return None
        part = share_of(self.data, batch.weight)() * self.mesh_axes.cp  # ranks along cp have the same targets
        self._exchange.weigh(part)
        return part

    def _engine(self) -> AbstractContextManager[None]:
        """Wrap forward and backward: with tensor parallelism the loss is sharded over the vocabulary."""
        return nullcontext() if self.mesh_axes.tp == 1 else loss_parallel()

    def _reduce_scalars(self, loss: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return the loss of this data shard, the norm of the whole gradient, and whether any rank requests a stop."""
        group, mine = self.context.group, 2 + self.coords["dp"]
        sums = torch.zeros(2 + self.mesh_axes.dp, dtype=torch.float64, device=group.device)
        sums[0] = self._squares()
        sums[1] = float(self.context.stop_requested())
        sums[mine] = full_tensor(loss) / self.mesh_axes.tp
        group.all_reduce(sums).wait()
        sums = sums.to(self.context.device)
        return sums[mine], sums[0].sqrt(), self._stop.read(sums[1:2].float())

    def _squares(self) -> Tensor:
        """Return the sum of squares of the local gradients, each divided by the number of ranks that hold it."""
        counted_before = set() if self._pipe is None else self._pipe.copied
        parts = [
            (p, mine) for p in self.replica.parameters if p not in counted_before and (mine := gradient(p)) is not None
        ]
        device = self.context.group.device
        if not parts:
            squares = torch.zeros(0, dtype=torch.float64, device=device)
        else:
            norms = torch.stack([norm.double() for norm in torch._foreach_norm([mine for _, mine in parts])])
            counts = [copies(parameter) * self._exchange.copies for parameter, _ in parts]
            squares = norms.to(device).square() / torch.tensor(counts, dtype=torch.float64, device=device)
        if self._tracks:
            names = {parameter: name.removesuffix(COPY) for name, parameter in self.replica.model.named_parameters()}
            places = [self._places[names[parameter]] for parameter, _ in parts]
            self._squared = torch.zeros(len(self._places), dtype=torch.float64, device=device)
            self._squared.index_add_(0, torch.tensor(places, dtype=torch.int64, device=device), squares)
        return squares.sum()

    def _whole_norms(self) -> dict[str, Tensor]:
        """Return the norm of each whole gradient. All ranks call it, when a row is logged."""
        squared = self._squared.clone()
        self.context.group.all_reduce(squared).wait()
        return dict(zip(self._places, squared.sqrt() / self._norm_scale, strict=True))

    # Evaluation

    def measure(self, task: Task, part: Any) -> dict[str, Tensor]:
        self._evaluated = True
        with self._traffic.counted(), self._engine():
            model = self.replica.model if self._pipe is None else self._pipe.forward(part)
            if model is None:
                return {}
            metrics = (
                task.metrics(model, part)
                if self._sequence_shards is None
                else self._sequence_shards.metrics(model, part)
            )
            return {name: full_tensor(value) for name, value in metrics.items()}

    @property
    def share(self) -> Share:
        return Share(
            index=self.coords["dp"],
            count=self.mesh_axes.dp,
            counts=self.coords["tp"] == self.coords["cp"] == 0 and (self._pipe is None or self._pipe.has_last),
            lockstep=True,
            replicas=self.data,
        )
