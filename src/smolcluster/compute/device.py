"""Choose the device of a worker, and measure its peak memory."""

from __future__ import annotations

import os
import sys

import torch

from smolcluster.errors import UserError


def choose_device(requested: str | None, *, local_rank: int = 0, asked_by: str = "training.device") -> torch.device:
    """Return the requested device or the best one here. Workers of one machine are spread over its GPUs."""
    if requested is None:
        if torch.cuda.is_available():
            return torch.device("cuda", local_rank % torch.cuda.device_count())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise UserError(f"{asked_by} '{requested}' is not a device; use cpu, cuda, cuda:0 or mps") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"{asked_by} '{requested}': torch sees no NVIDIA GPU here; use cpu, or leave it out")
        count = torch.cuda.device_count()
        if ":" not in requested:
            return torch.device("cuda", local_rank % count)
        if device.index >= count:
            raise UserError(f"{asked_by} '{requested}': this machine has {count} GPU(s), numbered from 0")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"{asked_by} '{requested}': no Apple GPU here; use cpu, or leave it out")
    elif device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"{asked_by} '{requested}' is not supported; use cpu, cuda, cuda:0 or mps")
    return device


def share_cores(num_processes: int) -> None:
    """Give each process of one machine its share of the cores, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_processes))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: GPU memory if it computes there, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def synchronize(device: torch.device) -> None:
    """Wait until all queued work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
