"""Total and free memory of this machine or of a GPU, and `parse_size`."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path

import torch

from smolcluster.errors import UserError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
# Memory of a process in addition to tensors: the interpreter, the libraries of torch, and on a GPU its context.
PROCESS_BYTES = {"cpu": 300 * 10**6, "cuda": 600 * 10**6}
_NO_LIMIT = 2**60  # a cgroup without a limit reports a huge number


def parse_size(text: str, *, what: str) -> int:
    """Return the bytes of `16GB`, `512MiB` or `1.5g`."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    size = float(found[1]) * UNITS.get(found[2].lower(), 0) if found else 0.0
    if size < 1:
        raise UserError(f"{what} '{text}' is not a size; write it as 16GB, 512MiB or 1.5GB")
    return int(size)


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or of this machine for any other device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return machine_bytes()


def physical_memory_bytes(device: torch.device) -> int:
    """Return the memory of a GPU or of this machine, whatever the limit of the cgroup."""
    return memory_bytes(device) if device.type == "cuda" else _total()


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free for this process."""
    if device.type == "cuda":
        # Memory cached by torch's allocator is available.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    free = _windows()[1] if sys.platform == "win32" else _meminfo("MemAvailable")
    return machine_bytes() if free is None else min(free, machine_bytes())


@functools.cache
def workspace_bytes(device: torch.device) -> int:
    """Return the size of the workspaces that cuBLAS allocates through torch on first use; 0 on other devices."""
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(device)
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(torch.ones(64, 64, device=device, dtype=dtype), weight, weight[0]).sum().backward()  # type: ignore[no-untyped-call]
        del weight
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_allocated(device) - before)


def machine_bytes() -> int:
    """Return the memory of the machine, or the limit of this process's cgroup."""
    return min([_total(), *_cgroup_limits()])


def _total() -> int:
    total = _meminfo("MemTotal")
    if total is not None:
        return total
    if sys.platform == "win32":
        return _windows()[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _cgroup_limits() -> list[int]:
    found = []
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < _NO_LIMIT:
            found.append(int(limit))
    return found


def _windows() -> tuple[int, int]:
    """Return total and free memory."""
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = [
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "free", "page", "page_free", "virtual", "virtual_free")),
            ("extended", ctypes.c_ulonglong),
        ]

    status = Status()
    status.length = ctypes.sizeof(Status)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined,unused-ignore]
    return int(status.total), int(status.free)
