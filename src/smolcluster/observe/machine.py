"""Facts of the machine this process runs on: device, memory, temperature, load.

    {"device": "cuda:0", "device_name": "NVIDIA H200", "cores": 16, "load": 0.31,
     "memory_used_bytes": ..., "memory_total_bytes": ..., "temperature_c": 51.0,
     "device_memory_used_bytes": ..., "device_memory_total_bytes": ..., "device_temperature_c": 44.0}

Read from /proc and /sys, from psutil if installed, and for GPUs from torch if this process has imported it, else from
nvidia-smi. Unknown facts are left out. Nothing here raises.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SMI_FIELDS = "name,memory.used,memory.total,temperature.gpu"
_SMI_TIMEOUT_S = 3.0
_HOTTEST_C = 150.0  # missing sensors report arbitrary values


class MachineFacts:
    """The machine facts in rows of a training process, at most every few seconds: reading them takes half a millisecond."""

    def __init__(self, device: str, *, every_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._device, self._every_s, self._clock = device, every_s, clock
        self._next_s = clock()

    def due(self) -> dict[str, Any] | None:
        """Return the facts, or None within `every_s` of the last ones."""
        now = self._clock()
        if now < self._next_s:
            return None
        self._next_s = now + self._every_s
        return describe_machine(self._device)


def describe_machine(device: str | None = None, *, run_nvidia_smi: bool = False) -> dict[str, Any]:
    """Return the facts. `device`: the one that this process computes on. `run_nvidia_smi`: call nvidia-smi if torch is not
    loaded; too slow for a training process."""
    known: dict[str, Any] = {
        "device": device,
        "device_name": processor_name(),
        "cores": os.cpu_count(),
        "load": _load(),
        "temperature_c": _temperature(),
        **_memory(),
    }
    index = _cuda_index(device)
    if index is not None:
        known |= _gpu_by_torch(index) or (_gpu_by_smi(index) if run_nvidia_smi else {})
    elif device is None and run_nvidia_smi:
        known |= _gpu_by_smi(0)
    return {name: value for name, value in known.items() if value is not None}


@functools.cache
def processor_name() -> str | None:
    """Return `Raspberry Pi 5 Model B`, `Apple M2`, `AMD Ryzen 9 7950X`; None if unknown."""
    with contextlib.suppress(OSError):  # on single-board computers
        return Path("/proc/device-tree/model").read_text(encoding="utf-8", errors="replace").strip("\0 \n") or None
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or None
    return platform.processor() or platform.machine() or None


def _load() -> float | None:
    """Return the load average of the last minute per core."""
    with contextlib.suppress(AttributeError, OSError):
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    return None


def _memory() -> dict[str, int]:
    psutil = _psutil()
    if psutil is not None:
        with contextlib.suppress(OSError):
            found = psutil.virtual_memory()
            return {"memory_used_bytes": found.total - found.available, "memory_total_bytes": found.total}
    with contextlib.suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        return {"memory_used_bytes": total - free, "memory_total_bytes": total}
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return {"memory_total_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    return {}


def _temperature() -> float | None:
    """Return the temperature of the hottest sensor."""
    found = []
    for pattern in ("thermal/thermal_zone*/temp", "hwmon/hwmon*/temp*_input"):
        for path in Path("/sys/class").glob(pattern):
            with contextlib.suppress(OSError, ValueError):
                found.append(int(path.read_text(encoding="ascii")) / 1000)
    psutil = _psutil()
    if not found and hasattr(psutil, "sensors_temperatures"):
        with contextlib.suppress(OSError, AttributeError):
            found = [sensor.current for sensors in psutil.sensors_temperatures().values() for sensor in sensors]
    return max((value for value in found if 0 < value < _HOTTEST_C), default=None)


def _psutil() -> Any:
    try:
        return importlib.import_module("psutil")
    except ImportError:
        return None


def _cuda_index(device: str | None) -> int | None:
    kind, _, index = (device or "").partition(":")
    if kind != "cuda":
        return None
    return int(index) if index.isdigit() else 0


def _gpu_by_torch(index: int) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    with contextlib.suppress(RuntimeError, AssertionError, AttributeError):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        known = {"device_name": name, "device_memory_used_bytes": total - free, "device_memory_total_bytes": total}
        with contextlib.suppress(ImportError, RuntimeError, AttributeError):  # NVIDIA's library may be missing
            known["device_temperature_c"] = float(torch.cuda.temperature(index))
        return known
    return {}


def _gpu_by_smi(index: int) -> dict[str, Any]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    text = _output([program, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits", f"--id={index}"])
    return parse_smi(text)


def parse_smi(text: str) -> dict[str, Any]:
    """Parse `NVIDIA H200, 1024, 143771, 35`; memory in MiB."""
    parts = [part.strip() for part in text.partition("\n")[0].split(",")]
    if len(parts) != 4:
        return {}
    known: dict[str, Any] = {"device_name": parts[0]}
    with contextlib.suppress(ValueError):
        known |= {
            "device_memory_used_bytes": int(parts[1]) << 20,
            "device_memory_total_bytes": int(parts[2]) << 20,
            "device_temperature_c": float(parts[3]),
        }
    return known


def _output(command: list[str]) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""
