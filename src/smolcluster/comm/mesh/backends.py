"""Which of torch's backends carries the exchanges of a fixed world: the one that was named, else the best that all can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from smolcluster.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRequest:
    """What one rank reports before a backend is chosen."""

    host: str
    named: str | None  # by its user
    gpu: str | None  # tells the one it computes on from all others; None where NCCL could not use it


def check_backend(named: str | None) -> None:
    """Whether it can work on this machine, as far as one rank can tell."""
    if named not in (None, "gloo", "nccl", "mpi"):
        raise UserError(f"unknown backend '{named}'; known: gloo, mpi, nccl")
    if named == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise UserError(
            "--backend nccl needs NVIDIA GPUs and this machine has none that torch can use; try --backend gloo"
        )
    if named == "mpi" and not dist.is_mpi_available():
        raise UserError(
            "--backend mpi needs a torch built from source with MPI, and this one is not; try --backend gloo"
        )


def gpu_for_nccl(device: torch.device) -> str | None:
    """Its number would not do: where a batch system gives each rank one GPU, it is 0 for all of them."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    kind = "hip" if torch.version.hip else "cuda"
    return f"{kind} {torch.cuda.get_device_properties(device).uuid}"


def agree(wishes: Sequence[BackendRequest]) -> str:
    """The backend of a world, from what its ranks say, in their order. All of them come to the same, or to the same mistake.

    Some may have named one, and it holds for all. Otherwise it is NCCL where each rank has a GPU of its own, all of one kind.
    """
    for rank, wish in enumerate(wishes):
        first = next((r for r in range(rank) if wishes[r].named not in (None, wish.named)), None)
        if wish.named is not None and first is not None:
            raise UserError(
                f"rank {rank} on {wish.host} has backend {wish.named} and rank {first} on {wishes[first].host} has "
                f"{wishes[first].named}; say the same --backend on every machine"
            )
    named = next((wish.named for wish in wishes if wish.named is not None), None)
    obstacle = _no_nccl(wishes)
    if named == "nccl" and obstacle is not None:
        raise UserError(f"{obstacle}: NCCL needs a GPU for each rank; use fewer workers, or --backend gloo")
    return named or ("gloo" if obstacle is not None else "nccl")


def _no_nccl(wishes: Sequence[BackendRequest]) -> str | None:
    """Why these ranks cannot use NCCL."""
    owners: dict[str, int] = {}
    for rank, wish in enumerate(wishes):
        if wish.gpu is None:
            return f"rank {rank} on {wish.host} has no GPU that NCCL could use"
        owner = owners.setdefault(wish.gpu, rank)
        if owner != rank:
            return f"ranks {owner} and {rank} on {wish.host} share a GPU"
    kinds = {gpu.partition(" ")[0] for gpu in owners}
    return None if len(kinds) == 1 else "the GPUs are of several kinds"
