"""ZeRO's formulas: what a rank holds and moves along the data axis, by stage. Tables: `fsdp.py`, `fsdp_sharded.py`.

Only this axis has bytes that do not depend on the samples; what tensors and layers a rank has is decided before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from smolcluster.comm.encoded_sum import shares
from smolcluster.compute.precision import DTYPES
from smolcluster.config.options import ShardOptions
from smolcluster.parallel.axes import Axes
from smolcluster.parallel.placement import Cost, Shape
from smolcluster.parallel.shards import owners


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """What is cut up along the data axis, and the types that travel there; None: as the model's training has them."""

    stage: int = 0
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    offload: bool = False
    by_machine: bool = False  # cut up inside each machine, whatever its ranks


def zero_of(options: ShardOptions) -> Zero:
    return Zero(
        stage=options.fsdp_stage,
        param_dtype=options.param_dtype,
        reduce_dtype=options.reduce_dtype,
        offload=options.cpu_offload,
        by_machine=options.shard_size == "node",
    )


def cost_of_stage(
    zero: Zero, shape: Shape, axes: Axes, tensors: Sequence[Sequence[int]], *, place: int, gathers: int = 2
) -> Cost:
    """Of the rank at this place of the data axis, with these parameters before they are cut up. Stage 3 gathers each of them
    `gathers` times in a step: for forward and for backward.

    Without `tensors`, as if all ranks had equally many and pieces needed no padding.
    """
    dp, shards, replicas, each = axes.data, axes.shards, axes.replicas, shape.bytes_per_parameter
    count = sum(map(math.prod, tensors)) or shape.parameters // (axes.tp * axes.pp)
    used = _bytes_in(zero.param_dtype, each, otherwise=shape.used_bytes)
    summed = _bytes_in(zero.reduce_dtype, each, otherwise=4)
    stage, messages = zero.stage if shards > 1 else 0, 2
    moved: float
    if stage == 0:
        parameters = gradients = count * each
        if dp > 1 and axes.pp > 1:
            gradients *= 2  # a pipeline's own, and the buckets they travel in
        updated = count
        moved = 2 * (dp - 1) * count * each // dp
    elif stage == 1:
        owned = shares(list(map(math.prod, tensors)), owners, dp) if tensors else [-(-count // dp)] * dp
        updated = owned[place]
        asked = zero.param_dtype is not None and shape.used_bytes < 4
        rounded = asked and used < each and axes.tp == axes.pp == 1  # matrices, but for the owner's, in full besides
        matrix = used if rounded else each
        gradients = sum(math.prod(t) * (matrix if len(t) > 1 else each) for t in tensors) or count * matrix
        parameters = gradients + (updated * each if rounded else 0)
        moved = (dp - 1) * max(owned) * (each + gradients / count)
    else:
        updated = sum(-(-t[0] // shards) * math.prod(t[1:]) if t else 1 for t in tensors) or -(-count // shards)
        gathers = 1 if stage == 2 else gathers
        parameters = updated * each + (count * used if stage == 2 else 0)
        gradients = updated * each
        moved = (shards - 1) * count * (gathers * used + summed) // shards
        moved += 2 * (replicas - 1) * count * each // (replicas * shards)
        messages = gathers + 1
    return Cost(
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=shape.optimizer_bytes(updated * each),
        bytes_sent=round(moved),
        bytes_received=round(moved),
        messages=messages * (dp - 1),
        activations_travel=max(axes.tp, axes.pp, axes.cp) > 1,
        offloaded=stage >= 2 and zero.offload,
    )


def _bytes_in(dtype: str | None, own: int, *, otherwise: int) -> int:
    """Of a number of `own` bytes, where a lower type is said; fp32 means that there is none."""
    said = otherwise if dtype is None else DTYPES[dtype].itemsize
    return own if said == 4 else min(own, said)
