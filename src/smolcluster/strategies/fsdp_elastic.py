"""fsdp (ZeRO) stages 0 and 1 where members come and go.

Stage 0 is `allreduce` on the elastic plane. Stage 1 shards the optimizer: every member has the whole model and its gradients,
and owns some of the parameters (`parallel/shards.py`).

    for each step s:
        my gradient on my samples, at my weights
        reduce-scatter: the sum of each parameter's gradient goes to its owner
        the owner passes the sum on to its buddy                                       DONE(s), with the norm of its part
        after COMMIT(s): w[own] <- optimizer(w[own], clip(g[own]));  the same for the ward's parameters
        all-gather: every owner sends its updated parameters, and only those

The owner and its buddy hold the sums and the optimizer state before a step is committed. So when an owner dies, its buddy has
all that is needed: it takes the committed step in the owner's place and hands the parameters out. In a new view the
parameters are dealt anew, and optimizer state moves from those who hold it to those who should. Only when a member and its
buddy die at the same moment is something lost, and the run must go on from its checkpoint.

Bytes per step and worker, sent and received each, for S bytes of parameters on N workers:   2 (N-1)/N S + S/N
where parameters deal evenly; in general 2N - 1 times the largest share, since shares are padded to it.
Optimizer memory: 2/N of the whole, its own and its ward's.   Gradients: 2 (K + 1) sets.

With a `codec` gradients travel encoded, to the owner and to its buddy, who both add them up: 2 (N-1)/N S' for S' encoded
bytes, in place of (N-1)/N S and S/N. Updated parameters are handed out as they are.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from smolcluster.comm.codecs import chosen_codec
from smolcluster.comm.rounds import Combination
from smolcluster.config.options import ElasticFSDPOptions
from smolcluster.parallel.encoding import sharded_traffic
from smolcluster.parallel.owned_sum import EncodedOwnedSum, OwnedSum
from smolcluster.parallel.placement import Node, Placement, Shape
from smolcluster.strategies.allreduce import AllReduce


class ElasticFSDP(AllReduce[ElasticFSDPOptions]):
    @classmethod
    def plan(cls, options: ElasticFSDPOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if options.fsdp_stage > 1:
            said = f"fsdp_stage {options.fsdp_stage} needs machines that stay; on the elastic plane there are 0 and 1"
            return Placement(refusals=[said])
        placement, n = super().plan(options, nodes, shape), len(nodes)
        if shape is None or options.fsdp_stage == 0 or n == 1:
            return placement
        traffic = sharded_traffic(chosen_codec(options), shape, n)
        costs = [
            replace(cost, optimizer_bytes=2 * cost.optimizer_bytes // n, bytes_sent=sent, bytes_received=received)
            for cost, (sent, received) in zip(placement.costs, traffic, strict=True)
        ]
        return replace(placement, costs=costs)

    def combination(self) -> Combination:
        if self.results_are_whole:
            return super().combination()
        codec, slots = chosen_codec(self.options), self.rounds_in_flight + 1
        if codec.lossless:
            return OwnedSum(self.replica, num_slots=slots)
        return EncodedOwnedSum(self.replica, codec=codec, num_slots=slots)

    @property
    def results_are_whole(self) -> bool:
        return self.options.fsdp_stage == 0
