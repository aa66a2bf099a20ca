"""Choose torch's backend for a fixed world: the requested one, else the best that all ranks can use."""

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
    named: str | None  # --backend
    gpu: str | None  # unique id of its GPU; None if NCCL cannot use it


def check_backend(named: str | None) -> None:
    """Raise UserError if this backend cannot work on this machine."""
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
    """Return the GPU's kind and uuid. Its index is not unique: a batch system may give each rank a GPU of index 0."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    kind = "hip" if torch.version.hip else "cuda"
    return f"{kind} {torch.cuda.get_device_properties(device).uuid}"


def agree(requests: Sequence[BackendRequest]) -> str:
    """Return the backend for these ranks' requests, the same (or the same error) on every rank.

    A backend requested by one rank holds for all. Otherwise NCCL if each rank has a separate GPU, all of one kind; else gloo.
    """
    for rank, request in enumerate(requests):
        first = next((r for r in range(rank) if requests[r].named not in (None, request.named)), None)
        if request.named is not None and first is not None:
            raise UserError(
                f"rank {rank} on {request.host} has backend {request.named} and rank {first} on {requests[first].host} has "
                f"{requests[first].named}; use the same --backend on every machine"
            )
    named = next((request.named for request in requests if request.named is not None), None)
    obstacle = _no_nccl(requests)
    if named == "nccl" and obstacle is not None:
        raise UserError(f"{obstacle}: NCCL needs a GPU for each rank; use fewer workers, or --backend gloo")
    return named or ("gloo" if obstacle is not None else "nccl")


def _no_nccl(requests: Sequence[BackendRequest]) -> str | None:
    """Return why these ranks cannot use NCCL, or None."""
    owners: dict[str, int] = {}
    for rank, request in enumerate(requests):
        if request.gpu is None:
            return f"rank {rank} on {request.host} has no GPU that NCCL could use"
        owner = owners.setdefault(request.gpu, rank)
        if owner != rank:
            return f"ranks {owner} and {rank} on {request.host} share a GPU"
    kinds = {gpu.partition(" ")[0] for gpu in owners}
    return None if len(kinds) == 1 else "the GPUs are of several kinds"
