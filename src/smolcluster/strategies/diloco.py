"""diloco (DiLoCo): workers take many local steps, then exchange the difference to their common weights.

    every worker, for rounds t = 1, 2, ...:
        w <- theta
        for H = `inner_steps` steps:   w <- inner optimizer(w, clip(my gradient at w))       AdamW or Muon, state of its own
        delta <- theta - w                                                                   my pseudo-gradient
        with a lossy codec:   m <- beta m + delta;   send encode(m);   m <- m - decode(encode(m))
        mean  <- the mean over workers of what they sent, decoded in the order of ranks
        theta <- outer optimizer(theta, mean)                    SGD: rate `outer_lr`, `outer_momentum`, Nesterov

With `inner_steps` auto (elastic plane) H is 30 on the worker of median speed, and on others the number of steps that takes
equally long. On the elastic plane a delta whose norm is far above the median is clipped to it (`MedianNorm`).

theta and the outer optimizer's state are bit-identical on all workers. The inner optimizer's state and m are local, and kept
between rounds. Means are weighted by samples, or targets where the task counts them. beta is `feedback_decay`.

Streaming: the model is cut into F `fragments` of strided layers, and every H / F steps one of them is exchanged, in turn. With
an `overlap` tau > 0 computing continues meanwhile, and the result is applied tau steps after delta was taken:
    theta <- outer optimizer(theta, mean);   w <- (1 - alpha) w + alpha theta          `mixing` alpha: 0.5, or 1 where tau is 0
The last round of a run exchanges all fragments and is waited for.

Eager: an exchange is in flight for H steps, until the next of the same fragment, and a worker does not wait for it to use its
own part. When round t ends, for N workers:
    theta <- outer optimizer(theta, mean of round t-1)                             as above, equal on all workers
    w     <- my outer optimizer(theta, delta / N)                                  with a momentum of its own
The outer optimizer is linear in its gradients, so w is where the paper's step leads: that of the mean of round t-1, with my
delta of round t in place of mine of round t-1. The next delta is w as the round began minus w. With a lossy codec the worker's
own part is the delta before it was encoded.

Codecs: fp32 is all-reduced. Others are all-gathered, so that nothing is encoded twice: bf16, int8, int4, and blocktopk, where
each worker sends the largest numbers of each block (SparseLoCo) and `average` is over the senders of a number, or over all.
Above 8 workers each tensor has an owner, which encodes its mean again with an error feedback of its own and sends that to all:
what a worker receives does not grow with their number. On the elastic plane `cluster.num_workers` decides, for the whole run.
Over nccl contributions are all-gathered by any number of workers.

Outer SGD with rate 1 and no momentum is federated averaging; with `inner_steps` 1 and plain inner SGD that is `single`.

Bytes per step and worker, sent and received each, for S bytes of parameters, or E of them encoded, on N workers:
    fp32   2 (N-1)/N S / H           others   (N-1) E / H           above 8 workers, of which one owns P   (E + (N-2) P) / H
    at once: H / F times as much, but for the last round: H times                          with equal shares   2 (N-1)/N E / H
Memory in addition to the model: theta, the outer momentum, the exchanged tensors, and m. Eager: also w as the round began, and
a momentum.

Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023 (arXiv 2311.08105). Sarfi et al.,
"Communication efficient LLM pre-training with SparseLoCo", 2025 (2508.15706). Thérien et al., "MuLoCo: Muon is a practical
inner optimizer for DiLoCo", 2025 (2505.23725). Douillard et al., "Streaming DiLoCo with overlapping communication: towards a
distributed free lunch", 2025 (2501.18512). Kale et al., "Eager updates for overlapped communication and computation in DiLoCo",
2025 (2502.12996).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from smolcluster.comm.codecs import chosen_codec
from smolcluster.comm.encoded_sum import EncodedSum
from smolcluster.comm.gathered_mean import MAX_GATHERED, GatheredMean
from smolcluster.comm.rounds import Combination
from smolcluster.compute.bare_optimizers import SGD
from smolcluster.config.options import DiLoCoOptions
from smolcluster.parallel.encoding import gathered_by_workers, summed_by_workers
from smolcluster.parallel.placement import Node, Placement, Shape
from smolcluster.parallel.shards import owners
from smolcluster.strategies.base.local_steps import LocalSteps


class DiLoCo(LocalSteps[DiLoCoOptions]):
    @classmethod
    def plan(cls, options: DiLoCoOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if options.inner != "single":  # else `diloco_nested.py`
            return Placement(refusals=[f"strategy.inner: {options.inner} is for cluster.plane mesh; set it to single"])
        return super().plan(options, nodes, shape)

    def outer_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        rate, momentum = self.options.outer_lr, self.options.outer_momentum
        return SGD(parameters, lr=rate, momentum=momentum, nesterov=self.options.nesterov and momentum > 0)

    @property
    def quorum(self) -> float:
        return 1.0 if self.options.streaming.overlap else self.options.quorum

    @property
    def max_rounds_apart(self) -> int:
        return self.options.max_rounds_apart if self.options.offline else 0

    @classmethod
    def outer_states(cls, options: DiLoCoOptions) -> int:
        return int(options.outer_momentum > 0)

    def combination(self, parameters: Mapping[str, nn.Parameter]) -> Combination:
        codec = chosen_codec(self.options)
        if codec.lossless:
            return super().combination(parameters)
        group, decay = self.context.fixed_group, self.options.feedback_decay
        senders = averages_senders(self.options)
        if self._recompresses:
            return EncodedSum(parameters, group, codec=codec, deal=owners, num_slots=1, decay=decay, senders=senders)
        return GatheredMean(parameters, group, codec=codec, decay=decay, senders=senders)

    @property
    def _recompresses(self) -> bool:
        """Whether the mean is encoded again: the same on all workers, and for the whole run."""
        group = self.context.fixed_group
        if group is None:
            return (self.context.config.cluster.num_workers or 1) > MAX_GATHERED
        return group.size > MAX_GATHERED and group.device.type == "cpu"  # nccl has no messages out of order

    @classmethod
    def exchanged(cls, options: DiLoCoOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if chosen_codec(options).lossless:
            return super().exchanged(options, nodes, shape)
        if len(nodes) > MAX_GATHERED:
            return summed_by_workers(options, nodes, shape, rounds=1, encoded=True)
        return gathered_by_workers(options, nodes, shape, senders=averages_senders(options))


def averages_senders(options: DiLoCoOptions) -> bool:
    """Return whether each number is averaged over the workers that sent it."""
    return options.chosen == "blocktopk" and options.average == "senders"
