"""Run the ranks of a group as threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from smolcluster.comm.memory_group import MemoryGroup

T = TypeVar("T")
R = TypeVar("R")
SECONDS = 120.0


def at_once(ranks: Sequence[R], work: Callable[[R], T]) -> list[T]:
    """Return what `work` returns for each of these, called at the same time: they wait for each other."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(work, rank) for rank in ranks]]


def in_memory(size: int, work: Callable[[MemoryGroup], T]) -> list[Any]:
    return at_once(MemoryGroup.world(size), work)
