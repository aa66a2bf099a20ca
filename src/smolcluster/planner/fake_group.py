"""A process group without other ranks, for memory estimates: every collective completes at once and sends nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smolcluster.comm.group import Done, Group, Traffic, Work
from smolcluster.errors import SmolclusterError


class FakeGroup(Group):
    backend = "fake"

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        """`ranks` are ranks of the world; `rank` is an index into them."""
        self.rank, self.size = rank, len(ranks)
        self.traffic = Traffic()
        self._ranks = list(ranks)

    def all_reduce(self, tensor: Tensor) -> Work:
        return Done()

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        if tensor.device.type == "cpu":
            tensor.clone()  # gloo works on a copy, which takes memory
        return Done()

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return Done()

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        return Done()

    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Work:
        return Done()

    def recv(self, tensor: Tensor, *, source: int, tag: int = 0) -> Work:
        return Done()

    def gather_json(self, value: Any) -> list[Any]:
        """Return this rank's value for every rank."""
        return [value] * self.size

    def sub(self, ranks: Sequence[int]) -> Group | None:
        if self.rank not in ranks:
            return None
        return FakeGroup([self._ranks[rank] for rank in ranks], list(ranks).index(self.rank))

    def close(self) -> None:
        return None


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[FakeGroup]:
    """Set up torch's fake process group, which DTensor and pipelines use, and return a FakeGroup."""
    if dist.is_initialized():
        raise SmolclusterError("a memory estimate needs a process that belongs to no group")
    hook = sys.excepthook  # torch replaces it, to print the rank
    if size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield FakeGroup(range(size), rank)
    finally:
        sys.excepthook = hook
        if size > 1:
            dist.destroy_process_group()
            _forget_meshes()


def _forget_meshes() -> None:
    """Clear the caches of DTensor, which would confuse the next mesh of this shape with the last."""
    from torch.distributed.tensor import debug

    for name in (
        "_clear_sharding_prop_cache",
        "_clear_python_sharding_prop_cache",
        "_clear_fast_path_sharding_prop_cache",
    ):
        clear = getattr(debug, name, None)  # depends on the version of torch
        if clear is not None:
            clear()
