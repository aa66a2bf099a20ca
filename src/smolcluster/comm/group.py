"""A group of ranks that exchange tensors.

Strategies use this interface and never see a transport. Every operation starts at once and returns a `Work`; the tensor must
not be touched until `wait()` returns. All ranks of a group call the same operations in the same order.

Implementations: `mesh.torch_group.TorchGroup` (gloo, nccl, mpi), `elastic.collectives.group.ElasticGroup` (our transport),
`memory_group.MemoryGroup` (threads of one process).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from smolcluster.comm.kv_store import KeyValueStore
from smolcluster.comm.work import Done, PeerLost, Traffic, Work
from smolcluster.errors import UserError

__all__ = [
    "Done",
    "Group",
    "PeerLost",
    "Traffic",
    "Work",
    "broadcast_in_place",
    "broadcast_tensors",
    "collect_tensors",
    "gather_json",
    "share_of",
    "synchronize_weights",
]


class Group(ABC):
    """Ranks `0 .. size-1` and their collectives."""

    rank: int
    size: int
    traffic: Traffic

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum in place. The result is bit-identical on every rank."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        """Sum the r-th slice of every rank's `tensor` (size x output elements) into `output` on rank r."""

    @abstractmethod
    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """Concatenate every rank's `tensor` in rank order into `output` (size x tensor elements)."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        """Copy `tensor` from rank `source` to all ranks."""

    @abstractmethod
    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Work: ...

    @abstractmethod
    def recv(self, tensor: Tensor, *, source: int, tag: int = 0) -> Work: ...

    @abstractmethod
    def sub(self, ranks: Sequence[int]) -> Group | None:
        """Return the group of these ranks, or None on other ranks. Every rank must call it."""

    def kv_store(self, name: str) -> KeyValueStore | None:
        """Return the key-value store with this namespace, or None without a rendezvous store."""
        return None

    @abstractmethod
    def close(self) -> None: ...

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_reduce(torch.zeros(1, device=self.device)).wait()

    @property
    def device(self) -> torch.device:
        """The device that small tensors for this group must be on."""
        return torch.device("cpu")

    def buffer_device(self, device: torch.device) -> torch.device:
        """Return the device for communication buffers of tensors on `device`: the same if the backend supports it."""
        return device

    def gather_json(self, value: Any) -> list[Any]:
        """See the function of this name."""
        text = json.dumps(value).encode()
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        self.all_gather(sizes, torch.tensor([len(text)], dtype=torch.int64, device=self.device)).wait()
        width = int(sizes.max().item())
        mine = torch.zeros(width, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = torch.zeros(self.size * width, dtype=torch.uint8, device=self.device)
        self.all_gather(everyone, mine.to(self.device)).wait()
        rows = everyone.cpu().view(self.size, width)
        return [json.loads(bytes(rows[r, : int(sizes[r])].tolist())) for r in range(self.size)]


def gather_json(group: Group, value: Any) -> list[Any]:
    """Return every rank's `value`, in rank order, on every rank. For small, rare values: sent as JSON."""
    return group.gather_json(value)


def share_of(group: Group, mine: float) -> Callable[[], float]:
    """Start to sum `mine` over the group. The returned function waits and gives this rank's share; 0 if the sum is 0."""
    total = torch.tensor([mine], dtype=torch.float64, device=group.device)
    work = group.all_reduce(total)

    def share() -> float:
        work.wait()
        everything = float(total)
        return mine / everything if everything else 0.0

    return share


def broadcast_in_place(group: Group, tensors: Mapping[str, Tensor]) -> None:
    """Copy the values of these tensors from rank 0 to all ranks."""
    for tensor in tensors.values():
        if tensor.numel():
            exchanged = tensor.to(group.buffer_device(tensor.device))
            group.broadcast(exchanged, source=0).wait()
            if exchanged is not tensor:
                tensor.copy_(exchanged)


def synchronize_weights(group: Group, tensors: Mapping[str, Tensor]) -> None:
    """Copy rank 0's values to all ranks. Nothing is sent if all ranks created equal ones from the seed.

    Raises UserError if a rank's names, shapes or dtypes differ from rank 0's: backends would abort without an explanation.
    """
    layout = [(n, str(t.dtype), list(t.shape)) for n, t in tensors.items()]
    values = hashlib.sha256()
    # From another device it takes longer than sending.
    hashed = all(t.device.type == "cpu" and not isinstance(t, FakeTensor) for t in tensors.values())
    for tensor in tensors.values() if hashed else ():
        values.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    mine = [hashlib.sha256(repr(layout).encode()).hexdigest()[:16], values.hexdigest() if hashed else None]
    everyone = gather_json(group, mine)
    others = [rank for rank, other in enumerate(everyone) if other[0] != everyone[0][0]]
    if others:
        raise UserError(f"ranks {others} built another model than rank 0; start all ranks with the same configuration")
    if any(other[1] is None or other[1] != everyone[0][1] for other in everyone):
        broadcast_in_place(group, tensors)


def broadcast_tensors(group: Group, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return rank 0's named tensors on every rank, on the CPU. Other ranks pass None."""
    layout = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()] if tensors else []
    result: dict[str, Tensor] = {}
    for name, dtype, shape in gather_json(group, layout)[0]:
        if tensors is not None:
            tensor = tensors[name].to(group.device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
        if tensor.numel():
            # Raw bytes: the backend may not support the dtype.
            group.broadcast(tensor.reshape(-1).view(torch.uint8), source=0).wait()
        result[name] = tensor.cpu()
    return result


def collect_tensors(group: Group, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the named tensors of all ranks on rank 0, on the CPU, and an empty dict on other ranks.

    For a name that several ranks have, the lowest rank's tensor is taken.
    """
    layout = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]
    everyone = gather_json(group, layout)
    result = {name: tensor.cpu() for name, tensor in tensors.items()} if group.rank == 0 else {}
    taken = {name for name, _, _ in everyone[0]}
    for rank, theirs in enumerate(everyone[1:], start=1):
        for name, dtype, shape in theirs:
            if name in taken:
                continue
            taken.add(name)
            if group.rank == 0:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
                if tensor.numel():
                    group.recv(tensor.reshape(-1).view(torch.uint8), source=rank).wait()
                result[name] = tensor.cpu()
            elif group.rank == rank and tensors[name].numel():
                mine = tensors[name].to(group.device).contiguous()
                group.send(mine.reshape(-1).view(torch.uint8), to=0).wait()
    return result
