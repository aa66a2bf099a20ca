"""A group over the elastic transport: ring and tree collectives between the members of one view.

`schedule.py` makes the plans, `operations.py` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from smolcluster.comm.elastic.collectives import schedule
from smolcluster.comm.elastic.collectives.operations import Exchange, Key, Operation
from smolcluster.comm.elastic.collectives.schedule import Plan
from smolcluster.comm.elastic.transport.payloads import DTYPES
from smolcluster.comm.group import Group, PeerLost, Traffic, Work
from smolcluster.comm.view import View


class _Completed:
    """Work of a group of one rank, or on an empty tensor: done, unless the group was aborted."""

    done = True

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def wait(self) -> None:
        self._exchange.check()


class ElasticGroup(Group):
    """The members of one view. Made by `Peers.form`."""

    def __init__(self, exchange: Exchange, *, rank: int, ranks: Sequence[int], path: str = "") -> None:
        """`ranks`: the view indices of this group's ranks; `rank`: our index in that list."""
        self.rank, self.size = rank, len(ranks)
        self.traffic = Traffic()
        self._exchange, self._ranks, self._path = exchange, list(ranks), path
        self._calls = self._subs = 0
        self._counts: dict[tuple[str, int, int], int] = {}  # sends and receives so far, by direction, peer and tag

    @property
    def view(self) -> View:
        return self._exchange.view

    def buffer_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    # Collectives

    def all_reduce(self, tensor: Tensor) -> Work:
        flat, back = _flat(tensor)
        plan = schedule.choose(self.size, self.rank, flat.numel(), itemsize=flat.itemsize)
        return self._collective("all_reduce", flat, plan, back)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        _check_sizes("reduce_scatter", tensor, output, self.size)
        flat = tensor.detach().reshape(-1).to("cpu", copy=True)  # summed in place; the input must not change
        mine = flat[self.rank * output.numel() : (self.rank + 1) * output.numel()]
        plan = schedule.reduce_scatter_plan(self.size, self.rank, flat.numel())
        return self._collective("reduce_scatter", flat, plan, lambda: _store(output, mine))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        _check_sizes("all_gather", output, tensor, self.size)
        flat, back = _flat(output)
        flat[self.rank * tensor.numel() : (self.rank + 1) * tensor.numel()] = tensor.detach().reshape(-1)
        plan = schedule.all_gather_plan(self.size, self.rank, flat.numel())
        return self._collective("all_gather", flat, plan, back)

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        flat, back = _flat(tensor)
        plan = schedule.choose_broadcast(
            self.size, self.rank, flat.numel(), itemsize=flat.itemsize, source=self._known(source)
        )
        return self._collective("broadcast", flat, plan, back)

    def _collective(self, name: str, flat: Tensor, plan: Plan, back: Callable[[], None] | None) -> Work:
        number, self._calls = self._calls, self._calls + 1
        return self._begin(name, Key(self._path, None, -1, number), flat, plan, back)

    # Between two

    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Work:
        flat, _ = _flat(tensor)
        # A local key: sends to two peers, or a send and a receive with one peer, must not share it.
        key = Key(self._path, tag, -2 - self._ranks[self._other(to)], self._count("send", to, tag))
        return self._begin("send", key, flat, schedule.send_plan(flat.numel(), to=self._other(to)), None)

    def recv(self, tensor: Tensor, *, source: int, tag: int = 0) -> Work:
        flat, back = _flat(tensor)
        key = Key(self._path, tag, self._ranks[self._other(source)], self._count("recv", source, tag))
        return self._begin("recv", key, flat, schedule.receive_plan(flat.numel(), source=source), back)

    def _count(self, direction: str, peer: int, tag: int) -> int:
        number = self._counts.get((direction, peer, tag), 0)
        self._counts[direction, peer, tag] = number + 1
        return number

    def _begin(self, name: str, key: Key, flat: Tensor, plan: Plan, back: Callable[[], None] | None) -> Work:
        if self.size == 1 or flat.numel() == 0:
            if back is not None:
                back()
            return _Completed(self._exchange)
        if str(flat.dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"{name} does not support {flat.dtype}; view the tensor as torch.uint8 to copy it")
        operation = Operation(
            name,
            self._exchange,
            key=key,
            flat=flat,
            plan=plan,
            ranks=self._ranks,
            traffic=self.traffic,
            copy_back=back,
        )
        self._exchange.call(operation)
        return operation

    # Groups

    def sub(self, ranks: Sequence[int]) -> ElasticGroup | None:
        number, self._subs = self._subs, self._subs + 1
        if self.rank not in ranks:
            return None
        return ElasticGroup(
            self._exchange,
            rank=list(ranks).index(self.rank),
            ranks=[self._ranks[self._known(rank)] for rank in ranks],
            path=f"{self._path}.{number}" if self._path else str(number),
        )

    def abort(self, error: Exception) -> None:
        """Make every `wait` of all groups of the view raise this, now and later. Thread-safe."""
        self._exchange.abort(error)

    def close(self) -> None:
        """Abort the group. Its links stay open for the next view."""
        if not self._path:
            self.abort(PeerLost("this group is closed"))

    def _known(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"no rank {rank} in a group of {self.size}")
        return rank

    def _other(self, rank: int) -> int:
        if self._known(rank) == self.rank:
            raise ValueError(f"rank {rank} cannot exchange with itself")
        return rank


# Memory


def _flat(tensor: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Return the tensor as a 1-D CPU tensor: a view if possible, else a copy and a function that copies it back."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor.reshape(-1), None
    row = tensor.reshape(-1).to("cpu", copy=True)
    return row, lambda: _store(tensor, row)


def _store(target: Tensor, row: Tensor) -> None:
    target.detach().copy_(row.view(target.shape))


def _check_sizes(name: str, whole: Tensor, part: Tensor, size: int) -> None:
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{name}: {whole.numel()} elements of {whole.dtype} are not {size} x {part.numel()} of {part.dtype}"
        )
