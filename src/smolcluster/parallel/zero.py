"""The formulas of ZeRO: memory and traffic of a rank along the data axis, by stage. Tables: `fsdp.py`, `fsdp_sharded.py`.

Bytes on the other axes depend on the samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from smolcluster.comm.encoded_sum import shares
from smolcluster.compute.precision import DTYPES
from smolcluster.config.options import ShardOptions
from smolcluster.parallel.axes import Axes
from smolcluster.parallel.placement import Cost, Shape
from smolcluster.parallel.shards import owners


def cost_of_stage(
    options: ShardOptions, shape: Shape, axes: Axes, tensors: Sequence[Sequence[int]], *, place: int, gathers: int = 2
) -> Cost:
    """Return the cost of the rank at this place of the data axis, with these parameters before sharding.

    Stage 3 gathers each parameter `gathers` times in a step: for forward and for backward. Without `tensors`, parameters are
    divided evenly, without padding.
    """
    dp, shards, replicas, each = axes.data, axes.shards, axes.replicas, shape.bytes_per_parameter
    count = sum(map(math.prod, tensors)) or shape.parameters // (axes.tp * axes.pp)
    used = _bytes_in(options.param_dtype, each, otherwise=shape.used_bytes)
    summed = _bytes_in(options.reduce_dtype, each, otherwise=4)
    stage, messages = options.fsdp_stage if shards > 1 else 0, 2
    moved: float
    if stage == 0:
        parameters = gradients = count * each
        if dp > 1 and axes.pp > 1:
            gradients *= 2  # the pipeline's own, and the buckets
        updated = count
        moved = 2 * (dp - 1) * count * each // dp
    elif stage == 1:
        owned = shares(list(map(math.prod, tensors)), owners, dp) if tensors else [-(-count // dp)] * dp
        updated = owned[place]
        asked = options.param_dtype is not None and shape.used_bytes < 4
        rounded = asked and used < each and axes.tp == axes.pp == 1  # matrices, which their owners also hold in full
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
        offloaded=stage >= 2 and options.cpu_offload,
    )


def shard_shape(shape: Sequence[int], place: int, size: int) -> tuple[int, ...]:
    """Return the shape of the shard at this place of `size`: rows, as torch.chunk distributes them."""
    rows = -(-shape[0] // size)
    return (max(0, min(rows, shape[0] - place * rows)), *shape[1:])


def _bytes_in(dtype: str | None, own: int, *, otherwise: int) -> int:
    """Return the bytes of a number of `own` bytes after rounding to `dtype`; fp32 does not round."""
    size = otherwise if dtype is None else DTYPES[dtype].itemsize
    return own if size == 4 else min(own, size)
