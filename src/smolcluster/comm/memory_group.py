"""A group whose ranks are threads of one process: for tests, and for a world of size 1.

Sums are taken in rank order, so results do not depend on thread timing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from smolcluster.comm.group import Done, Group, PeerLost, Traffic, Work


class _Exchange:
    """One collective: complete when every rank has put its tensor, deleted when every rank has taken the result."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.readers = size


class MemoryHub:
    """The shared state of a group's ranks."""

    def __init__(self, size: int, *, timeout_s: float = 60.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.exchanges: dict[int, _Exchange] = {}
        self.mail: dict[tuple[int, int, int], deque[Tensor]] = {}  # (from, to, tag)
        self.subs: dict[tuple[int, tuple[int, ...]], MemoryHub] = {}

    def put(self, number: int, rank: int, tensor: Tensor) -> None:
        with self.changed:
            self.exchanges.setdefault(number, _Exchange(self.size)).parts[rank] = tensor.clone()
            self.changed.notify_all()

    def take(self, number: int) -> list[Tensor]:
        with self.changed:
            exchange = self.exchanges[number]
            self.wait_for(lambda: all(part is not None for part in exchange.parts))
            exchange.readers -= 1
            if exchange.readers == 0:
                del self.exchanges[number]
            return [part for part in exchange.parts if part is not None]

    def wait_for(self, ready: Callable[[], bool]) -> None:
        if not self.changed.wait_for(ready, self.timeout_s):
            raise PeerLost(f"no data from the other ranks within {self.timeout_s:g} s")


class _Pending:
    def __init__(self, finish: Callable[[], object]) -> None:
        self._finish: Callable[[], object] | None = finish

    @property
    def done(self) -> bool:
        return self._finish is None

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
            self._finish = None


class MemoryGroup(Group):
    """One rank of a `MemoryHub`. `MemoryGroup.world(4)` makes four."""

    def __init__(self, hub: MemoryHub, rank: int) -> None:
        self.rank, self.size = rank, hub.size
        self.traffic = Traffic()
        self._hub = hub
        self._calls = 0

    @classmethod
    def world(cls, size: int) -> list[MemoryGroup]:
        hub = MemoryHub(size)
        return [cls(hub, rank) for rank in range(size)]

    def _collective(self, tensor: Tensor, finish: Callable[[list[Tensor]], object]) -> Work:
        number, self._calls = self._calls, self._calls + 1
        self._hub.put(number, self.rank, tensor)
        return _Pending(lambda: finish(self._hub.take(number)))

    def all_reduce(self, tensor: Tensor) -> Work:
        moved = 2 * (self.size - 1) / self.size * tensor.nbytes
        self.traffic.add(moved, moved)
        return self._collective(tensor, lambda parts: tensor.copy_(_sum(parts)))

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        moved = (self.size - 1) / self.size * tensor.nbytes
        self.traffic.add(moved, moved)
        shape = (self.size, *output.shape)
        return self._collective(tensor, lambda parts: output.copy_(_sum([p.reshape(shape)[self.rank] for p in parts])))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        moved = (self.size - 1) * tensor.nbytes
        self.traffic.add(moved, moved)
        return self._collective(tensor, lambda parts: output.copy_(torch.stack(parts).reshape(output.shape)))

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        if self.rank == source:
            self.traffic.add((self.size - 1) * tensor.nbytes, 0)
        else:
            self.traffic.add(0, tensor.nbytes)
        return self._collective(tensor, lambda parts: tensor.copy_(parts[source]))

    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Work:
        self.traffic.add(tensor.nbytes, 0)
        with self._hub.changed:
            self._hub.mail.setdefault((self.rank, to, tag), deque()).append(tensor.clone())
            self._hub.changed.notify_all()
        return Done()

    def recv(self, tensor: Tensor, *, source: int, tag: int = 0) -> Work:
        self.traffic.add(0, tensor.nbytes)

        def finish() -> None:
            with self._hub.changed:
                box = self._hub.mail.setdefault((source, self.rank, tag), deque())
                self._hub.wait_for(lambda: bool(box))
                part = box.popleft()
            tensor.copy_(part)

        return _Pending(finish)

    def sub(self, ranks: Sequence[int]) -> Group | None:
        key, self._calls = (self._calls, tuple(ranks)), self._calls + 1
        with self._hub.changed:
            hub = self._hub.subs.setdefault(key, MemoryHub(len(ranks), timeout_s=self._hub.timeout_s))
        return MemoryGroup(hub, list(ranks).index(self.rank)) if self.rank in ranks else None

    def close(self) -> None:
        return None


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
