"""mesh (3D): pipeline x data x tensor parallel, or data x context x tensor parallel; the product is the number of ranks.

    rank = ((p * dp + d) * cp + c) * tp + t      tp innermost: it exchanges most, and neighbours are often on one machine

    axis   what is sharded                      see
    pp     layers, one after the other          pipeline.py
    dp     samples; with fsdp_stage also        fsdp_sharded.py
           optimizer, gradients, parameters
    cp     the tokens of each sequence          ../parallel/context.py
    tp     the work of each layer               tensor.py

`dp` defaults to the ranks that the other axes leave. `Mesh` inherits how each axis is sharded from the strategies of that axis.
The phases of a step: `base/parallel.py`.

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

from smolcluster.config.options import MeshOptions
from smolcluster.errors import UserError
from smolcluster.parallel.axes import Axes, divisors
from smolcluster.parallel.pipe import check_schedule
from smolcluster.parallel.placement import Node
from smolcluster.parallel.stages import holders, num_microbatches
from smolcluster.strategies.fsdp_sharded import ShardedFSDP, shard_axes
from smolcluster.strategies.pipeline import Pipeline
from smolcluster.strategies.tensor import TensorParallel


class Mesh(TensorParallel[MeshOptions], Pipeline[MeshOptions], ShardedFSDP[MeshOptions]):
    @classmethod
    def axes(cls, options: MeshOptions, hosts: Sequence[str]) -> Axes:
        check_schedule(options)
        num_ranks, tp, pp, cp = len(hosts), options.tp, options.pp, options.cp
        if cp > 1 and pp > 1:
            raise UserError(f"cp {cp} x pp {pp}: a pipeline has whole sequences; use one of them, with dp and tp")
        product = f"tp {tp} x pp {pp}" if cp == 1 else f"tp {tp} x cp {cp}"
        if num_ranks % (tp * pp * cp):
            raise UserError(
                f"{product} does not divide {num_ranks} workers; the product must be one of {divisors(num_ranks)}"
            )
        dp = options.dp or num_ranks // (tp * pp * cp)
        if dp * tp * pp * cp != num_ranks:
            raise UserError(
                f"dp {dp} x {product} = {dp * tp * pp * cp} and there are {num_ranks} workers; "
                f"with the others as they are, dp must be {num_ranks // (tp * pp * cp)}"
            )
        what = "dp {}" if cp == 1 else "dp x cp = {}"
        return shard_axes(Axes(pp=pp, shards=dp * cp, cp=cp, tp=tp), options, hosts, what)

    @classmethod
    def gathers(cls, options: MeshOptions, axes: Axes, nodes: Sequence[Node]) -> int:
        if axes.pp == 1:
            return 2
        # In a pipeline, for forward of each micro-batch, and once more for backward.
        return 1 + num_microbatches(options, [node.batch_size for node in nodes], len(holders(axes.pp, options)))
