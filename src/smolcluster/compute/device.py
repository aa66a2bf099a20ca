"""Which device a worker computes on, and how much memory it used."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from smolcluster.errors import UserError


def choose_device(requested: str | None, *, local_rank: int = 0) -> torch.device:
    """The best device here, or the one asked for. Workers of one machine spread over its GPUs."""
    if requested is None:
        if torch.cuda.is_available():
            return torch.device("cuda", local_rank % torch.cuda.device_count())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise UserError(f"training.device '{requested}' is not a device; use cpu, cuda, cuda:0 or mps") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"training.device '{requested}': torch sees no NVIDIA GPU here; use cpu, or leave it null")
        count = torch.cuda.device_count()
        if ":" not in requested:
            return torch.device("cuda", local_rank % count)
        if device.index >= count:
            raise UserError(f"training.device '{requested}': this machine has {count} GPU(s), numbered from 0")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"training.device '{requested}': no Apple GPU here; use cpu, or leave it null")
    elif device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"training.device '{requested}' is not supported; use cpu, cuda, cuda:0 or mps")
    return device


def share_cores(num_processes: int) -> None:
    """Give each of the processes of one machine its share of the cores, unless the user said otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_processes))


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: on the GPU if it computes there, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory_bytes(device: torch.device) -> int | None:
    """What is left on the GPU, or in the machine's memory; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def synchronize(device: torch.device) -> None:
    """Wait for everything the device was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
