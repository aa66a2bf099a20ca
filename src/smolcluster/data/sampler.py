"""The sampler: which samples each worker reads at each step.

All samples form one infinite stream: epoch 0 in a random order, then epoch 1 in another, and so on. A step reads the
next G samples of the stream, which are divided among the data shards in order:

    stream  ... | shard 0 | shard 1 | shard 2 | shard 0 | ...
                 <------- step t: G --------->

So N workers read at step t what one worker with the whole batch reads at step t. The only state is the stream position,
which is valid for any number of workers.

The order of an epoch is `argsort` over raw Philox words keyed by (seed, epoch). NumPy guarantees raw words, so the order
is the same on every platform and version.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from smolcluster.errors import UserError

logger = logging.getLogger(__name__)

Indices = npt.NDArray[np.int64]


class Sampler:
    """The infinite stream of sample indices, with random access (`indices(start, count)`)."""

    def __init__(self, num_samples: int, *, seed: int) -> None:
        if num_samples < 1:
            raise UserError("the dataset has no samples; check data.name and data.root")
        if not 0 <= seed < 2**64:
            raise UserError(f"seed {seed} is out of range; it must be from 0 to 2**64 - 1")
        self.num_samples = num_samples
        self.seed = seed
        self._orders: dict[int, Indices] = {}

    def order(self, epoch: int) -> Indices:
        """Return the permutation of an epoch. The last two are cached: a batch may span two epochs."""
        if epoch not in self._orders:
            words = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(self.num_samples)
            while len(self._orders) >= 2:
                del self._orders[next(iter(self._orders))]
            # A stable sort: equal words have the same order everywhere.
            self._orders[epoch] = np.argsort(words, kind="stable").astype(np.int64, copy=False)
        return self._orders[epoch]

    def indices(self, start: int, count: int) -> Indices:
        """Return the samples at stream positions [start, start + count), across epochs."""
        if start < 0 or count < 0:
            raise ValueError(f"start and count must not be negative: {start}, {count}")
        parts = [np.empty(0, dtype=np.int64)]
        while count > 0:
            epoch, offset = divmod(start, self.num_samples)
            part = self.order(epoch)[offset : offset + count]
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts)


class ShardedSampler:
    """One data shard's share of the stream: `counts[r]` samples of every step go to shard r."""

    def __init__(self, sampler: Sampler, *, counts: Sequence[int], shard: int) -> None:
        if not counts or min(counts) < 1:
            raise ValueError(f"every shard needs at least one sample per step: {list(counts)}")
        if not 0 <= shard < len(counts):
            raise ValueError(f"shard {shard} of {len(counts)} does not exist")
        self.sampler = sampler
        self.count = counts[shard]
        self.global_batch = sum(counts)
        self._offset = sum(counts[:shard])
        self._position = 0

    @property
    def position(self) -> int:
        """The stream position: samples consumed by all shards together."""
        return self._position

    def next(self) -> Indices:
        """Return this shard's samples of the next step."""
        indices = self.sampler.indices(self._position + self._offset, self.count)
        self._position += self.global_batch
        return indices

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position, "seed": self.sampler.seed, "num_samples": self.sampler.num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position. The number of shards may differ; the data and the seed may not."""
        if state["num_samples"] != self.sampler.num_samples:
            raise UserError(
                f"the checkpoint was trained on {state['num_samples']} samples, but the data here has "
                f"{self.sampler.num_samples}: resume with the same data.name, data.root, tokenizer, validation "
                "split and sequence length, or start a new run"
            )
        if state["seed"] != self.sampler.seed:
            raise UserError(
                f"the checkpoint was trained with seed {state['seed']}, but this run has seed {self.sampler.seed}, "
                "which would read some samples twice and others never: "
                f"resume with training.seed={state['seed']}, or start a new run"
            )
        if state["position"] < 0:
            raise UserError(
                f"the checkpoint's data position {state['position']} is negative; resume from another checkpoint"
            )
        if state.get("holes"):
            # Leases of an elastic run that was stopped before their steps were committed.
            missed = sum(int(count) for _, count in state["holes"])
            logger.warning("skipping %d samples that the saved run had leased but not committed", missed)
        self._position = state["position"]
