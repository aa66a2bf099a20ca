"""A group of ranks that exchange tensors.

Strategies talk through this interface and never see a transport. Every operation starts at once and returns a `Work`; the
tensor must not be touched until `wait()` returns. All ranks of a group call the same operations in the same order.

Implementations: `torch_group.TorchGroup` (gloo, nccl, mpi), `elastic.group.ElasticGroup` (our own transport),
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

from smolcluster.comm.notes import Bulletin
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
    "check_same_layout",
    "collect_tensors",
    "gather_json",
    "share_of",
]


class Group(ABC):
    """Ranks `0 .. size-1` and the ways they exchange tensors."""

    rank: int
    size: int
    traffic: Traffic

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum in place. The result is bit-identical on every rank."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        """`output` on rank r is the sum of everybody's r-th slice of `tensor` (size x output elements)."""

    @abstractmethod
    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """`output` (size x tensor elements) is everybody's `tensor` in rank order."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        """`tensor` becomes what it is on rank `source`."""

    @abstractmethod
    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Work: ...

    @abstractmethod
    def recv(self, tensor: Tensor, *, source: int, tag: int = 0) -> Work: ...

    @abstractmethod
    def sub(self, ranks: Sequence[int]) -> Group | None:
        """The group of some of these ranks; None on a rank that is not among them. Called by every rank."""

    def bulletin(self, name: str) -> Bulletin | None:
        """Notes between the ranks, where they can be had."""
        return None

    @abstractmethod
    def close(self) -> None: ...

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.all_reduce(torch.zeros(1, device=self.device)).wait()

    @property
    def device(self) -> torch.device:
        """Where small tensors for this group must live."""
        return torch.device("cpu")

    def buffer_device(self, device: torch.device) -> torch.device:
        """Where to keep what is exchanged for tensors on `device`: there, if the group can reach it."""
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
    """Everybody's `value`, in rank order, on every rank. For small things said rarely: it crosses as UTF-8 JSON."""
    return group.gather_json(value)


def share_of(group: Group, mine: float) -> Callable[[], float]:
    """Start to add `mine` up over the group. The result waits for the sum and returns this rank's share of it; 0 of nothing."""
    total = torch.tensor([mine], dtype=torch.float64, device=group.device)
    work = group.all_reduce(total)

    def share() -> float:
        work.wait()
        everything = float(total)
        return mine / everything if everything else 0.0

    return share


def broadcast_in_place(group: Group, tensors: Mapping[str, Tensor]) -> None:
    """Replace the values of these tensors by those of rank 0."""
    for tensor in tensors.values():
        if tensor.numel():
            exchanged = tensor.to(group.buffer_device(tensor.device))
            group.broadcast(exchanged, source=0).wait()
            if exchanged is not tensor:
                tensor.copy_(exchanged)


def check_same_layout(group: Group, tensors: Mapping[str, Tensor]) -> None:
    """Raise where ranks have other tensors than rank 0: the backend would end the run without a word."""
    layout = [(n, str(t.dtype), list(t.shape)) for n, t in tensors.items()]
    everyone = gather_json(group, hashlib.sha256(repr(layout).encode()).hexdigest()[:16])
    others = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if others:
        raise UserError(f"ranks {others} built another model than rank 0; start all ranks with the same configuration")


def broadcast_tensors(group: Group, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Rank 0's named tensors on every rank, on the CPU. The others pass None."""
    layout = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()] if tensors else []
    result: dict[str, Tensor] = {}
    for name, dtype, shape in gather_json(group, layout)[0]:
        if tensors is not None:
            tensor = tensors[name].to(group.device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
        if tensor.numel():
            # Raw bytes: a backend need not know the type.
            group.broadcast(tensor.reshape(-1).view(torch.uint8), source=0).wait()
        result[name] = tensor.cpu()
    return result


def collect_tensors(group: Group, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Everybody's named tensors together, on rank 0 of the group and on the CPU; the others get nothing.

    Where two ranks have one of the same name, the lower rank's is taken.
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
