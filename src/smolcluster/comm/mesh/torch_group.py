"""A group over `torch.distributed`: gloo for CPUs, nccl for GPUs, mpi where torch was built with it.

Bytes are counted by the formulas in `volume.py`.

torch.distributed neither authenticates nor encrypts. `rendezvous.connect` warns when it listens beyond loopback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from smolcluster.comm.group import Done, Group, PeerLost, Traffic, Work
from smolcluster.comm.kv_store import KeyValueStore
from smolcluster.comm.mesh.reduce_scatter import PendingSum, start_reduce_scatter
from smolcluster.comm.mesh.volume import Exchange, moved


class _TorchWork:
    """Turns a backend's error into `PeerLost`. After one the group must not be used."""

    def __init__(self, work: dist.Work | PendingSum) -> None:
        self._work = work

    @property
    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerLost(_first_line(error)) from error


class _GlooMessage(_TorchWork):
    """Each `wait` of gloo takes one completion: a second one would hang."""

    _waited = False

    def wait(self) -> None:
        if not self._waited:
            super().wait()
            self._waited = True


class TorchGroup(Group):
    def __init__(
        self, process_group: dist.ProcessGroup, *, device: torch.device, met_at: tuple[str, int] | None = None
    ) -> None:
        """`met_at`: host and port of the rendezvous store."""
        self.rank = process_group.rank()
        self.size = process_group.size()
        self.traffic = Traffic()
        self.backend = dist.get_backend(process_group)
        self._group, self._met_at = process_group, met_at
        self._device = device if self.backend == "nccl" else torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self._device

    def buffer_device(self, device: torch.device) -> torch.device:
        return device if self.backend == "nccl" or device.type in ("cpu", "cuda") else torch.device("cpu")

    def all_reduce(self, tensor: Tensor) -> Work:
        if self.size == 1:
            return Done()
        self._count("all_reduce", tensor.nbytes)
        return self._start(lambda: dist.all_reduce(tensor, group=self._group, async_op=True))

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        if self.backend == "gloo":
            self._count("all_to_all", tensor.nbytes)
            return self._start(lambda: start_reduce_scatter(output, tensor, self._group))
        self._count("reduce_scatter", tensor.nbytes)
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return self._start(lambda: reduce_scatter(output, tensor, group=self._group, async_op=True))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        self._count("all_gather", self.size * tensor.nbytes)
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self._start(lambda: all_gather(output, tensor, group=self._group, async_op=True))

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        if self.size == 1:
            return Done()
        self._count("broadcast", tensor.nbytes, root=source)
        return self._start(lambda: dist.broadcast(tensor, group_src=source, group=self._group, async_op=True))

    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Work:
        self.traffic.add(tensor.nbytes, 0)
        return self._message(lambda: dist.isend(tensor, group_dst=to, group=self._group, tag=tag))

    def recv(self, tensor: Tensor, *, source: int, tag: int = 0) -> Work:
        self.traffic.add(0, tensor.nbytes)
        return self._message(lambda: dist.irecv(tensor, group_src=source, group=self._group, tag=tag))

    def sub(self, ranks: Sequence[int]) -> Group | None:
        group = dist.new_group(list(ranks))
        if self.rank not in ranks:
            return None
        part = TorchGroup(group, device=self._device)
        part.traffic = self.traffic  # counted in the process's total
        return part

    def kv_store(self, name: str) -> KeyValueStore | None:
        return None if self._met_at is None else KeyValueStore(*self._met_at, name=name)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _count(self, kind: Exchange, full_bytes: int, *, root: int = 0) -> None:
        sizes = {"rank": self.rank, "size": self.size, "root": root}
        self.traffic.add(*moved(kind, full_bytes, backend=self.backend, **sizes))

    def _message(self, operation: Callable[[], dist.Work | None]) -> Work:
        return self._start(operation, kind=_GlooMessage if self.backend == "gloo" else _TorchWork)

    def _start(
        self, operation: Callable[[], dist.Work | PendingSum | None], *, kind: type[_TorchWork] = _TorchWork
    ) -> Work:
        try:
            work = operation()
        except RuntimeError as error:
            raise PeerLost(_first_line(error)) from error
        return Done() if work is None else kind(work)


def lost_peer(error: BaseException) -> str | None:
    """Return a backend's message about a lost peer, for an error raised through torch; None for other errors."""
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
        return _first_line(error)
    return None


def _first_line(error: BaseException) -> str:
    """Return the message without the source path before it and the guesses and stack trace after it."""
    return re.sub(r"^\[\S*:\d+\] |\. This is typically caused by.*$", "", str(error).strip().split("\n")[0])
