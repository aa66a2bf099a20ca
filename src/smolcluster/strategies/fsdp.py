"""fsdp (ZeRO), stages 0 and 1: the whole model on every worker; in stage 1 the optimizer's state is sharded.

    for each step, on N workers:
        my gradient on my samples, at my weights
        reduce-scatter: the sum of each parameter's gradient goes to its owner                     (stage 1)
        w[own] <- optimizer(w[own], clip(g[own]))
        all-gather: every owner sends its updated parameters

    stage  also called       sharded         bytes sent and received per step, for S bytes of parameters
    0      NO_SHARD          nothing         2 (N-1)/N S    as allreduce
    1                        optimizer       2 (N-1)/N S    shards are padded to the largest
    2      SHARD_GRAD_OP     + gradients     stages 2 and 3: fsdp_sharded.py
    3      FULL_SHARD        + parameters

Memory of a worker, with AdamW and P parameters, in bytes: 16 P in stage 0, 8 P + 8 P/N in stage 1; with bf16 autocast 2 P more.
`param_dtype: bf16` in stage 1 keeps matrices and their gradients in bf16, and a full copy at the owner: 4 P + 12 P/N.

Each parameter has one owner, which alone updates it (`parallel/shards.py`).

mesh plane:     gradients are reduced to their owners in buckets (`parallel/owned_buckets.py`).
elastic plane:  an owner copies its sums to its backup before a round is committed, and both update (`parallel/owned_sum.py`).
                When an owner dies, its backup sends the parameters in its place. A new view assigns owners again and moves
                optimizer state to them. If an owner and its backup die together, the run restarts from its checkpoint.
                2 (N-1)/N S + S/N bytes; 2/N of the optimizer's memory; 2 (K + 1) sets of gradients for `staleness_bound` K.
                With a `codec` encoded gradients go to the owner and to its backup during backward, and both sum them:
                2 (N-1)/N S' for S' encoded bytes, in place of (N-1)/N S + S/N.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from smolcluster.comm.codecs import chosen_codec
from smolcluster.comm.rounds import Combination
from smolcluster.compute.precision import DTYPES
from smolcluster.compute.replica import Batch
from smolcluster.config.options import FSDPOptions, ShardOptions
from smolcluster.parallel.axes import Axes
from smolcluster.parallel.encoding import sharded_traffic
from smolcluster.parallel.owned_buckets import OwnedBuckets
from smolcluster.parallel.owned_sum import EncodedOwnedSum, OwnedSum
from smolcluster.parallel.placement import Node, Placement, Shape
from smolcluster.parallel.zero import cost_of_stage
from smolcluster.strategies.allreduce import AllReduce
from smolcluster.strategies.base import Context, Scope, State, StepReport
from smolcluster.tasks.base import Task


class FSDP(AllReduce[FSDPOptions]):
    _owned: OwnedBuckets | None = None  # stage 1 on the mesh plane

    @classmethod
    def plan(cls, options: FSDPOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        stage, n = options.fsdp_stage, len(nodes)
        if stage > 1:
            refusal = f"fsdp_stage {stage} needs fixed membership; the elastic plane has stages 0 and 1"
            return Placement(refusals=[refusal])
        if options.shard_size not in (None, n):
            return Placement(refusals=[f"strategy.shard_size is for stages 2 and 3, not {stage}"])
        placement = super().plan(options, nodes, shape)
        if shape is None or stage == 0 or n == 1:
            return placement
        if all(node.stays for node in nodes):
            axes = Axes(shards=n)
            costs = [cost_of_stage(options, shape, axes, shape.tensors, place=place) for place in range(n)]
            return replace(placement, costs=costs)
        traffic = sharded_traffic(chosen_codec(options), shape, n)
        costs = [
            replace(cost, optimizer_bytes=2 * cost.optimizer_bytes // n, bytes_sent=sent, bytes_received=received)
            for cost, (sent, received) in zip(placement.costs, traffic, strict=True)
        ]
        return replace(placement, costs=costs)

    def setup(self, task: Task) -> None:
        super().setup(task)
        if self._owned is not None:
            self._owned.begin()
            self.replica.norms = self._owned.gradient_norms

    def combination(self) -> Combination:
        context, options = self.context, self.options
        if self.results_are_replicated or context.is_alone:
            return super().combination()
        if context.fixed_group is not None:
            bucket_bytes, lower = int(options.bucket_mb * 2**20), lower_dtype(context, options)
            self._owned = OwnedBuckets(self.replica, context.fixed_group, bucket_bytes=bucket_bytes, lower=lower)
            return self._owned
        codec, slots = chosen_codec(options), self.rounds_in_flight + 1
        if codec.lossless:
            return OwnedSum(self.replica, num_slots=slots)
        return EncodedOwnedSum(self.replica, codec=codec, num_slots=slots)

    @property
    def results_are_replicated(self) -> bool:
        return self.options.fsdp_stage == 0

    def step(self, batch: Batch) -> StepReport:
        with nullcontext() if self._owned is None else self._owned.explained():
            return super().step(batch)

    def state(self, of: Scope = "run") -> State:
        owned = self._owned
        if owned is None:
            return super().state(of)
        with owned.in_full():
            state = super().state(of)
            return replace(
                state, **owned.saved(state.weights, {} if of == "weights" else state.optimizer, of == "rank")
            )

    def load_state(self, state: State) -> None:
        if self._owned is None:
            super().load_state(state)
            return
        with self._owned.in_full():
            self.replica.model.load_state_dict(state.weights)
            mine = {name: state.optimizer[name] for name in self._owned.owned(list(state.optimizer))}
            self.replica.load_optimizer(mine, state.numbers, bare=not state.optimizer)
        self.replica.buffers.load(state.own)


def lower_dtype(context: Context, options: ShardOptions, axes: Axes | None = None) -> torch.dtype | None:
    """Stage 1: return the dtype of matrices outside their owners; None: that of the model. Warn if it is ignored."""
    if options.param_dtype in (None, "fp32"):
        return None
    training, why = context.config.training, ""
    if training.precision == "fp32":
        why = "without a lower training.precision"
    elif axes is not None and axes.tp > 1:
        why = "where layers are sharded along tp"
    elif (axes is not None and axes.pp > 1) or training.grad_accumulation > 1:
        why = f"where a step accumulates gradients, which {options.param_dtype} would round"
    if why and context.seat.rank == 0:
        context.warn(f"strategy.param_dtype has no effect in stage 1 {why}")
    return None if why else DTYPES[options.param_dtype]
