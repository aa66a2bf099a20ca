"""Describe a machine, and test which ports it can reach."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shutil
import socket
import sys
import time
from typing import Any

from smolcluster.launch.cluster.agent.base import root_of, run_briefly, say
from smolcluster.launch.cluster.agent.environment import ready_python
from smolcluster.launch.cluster.agent.processes import states

CONNECT_S = 5.0
_NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL}


def inspect(
    folder: str, name: str, listens: list[Any] | None = None, wanted: dict[str, Any] | None = None, **_: Any
) -> dict[str, Any]:
    """Return facts about this machine; changes nothing. `wanted`: arguments of `ready_python`, to check for an environment."""
    root = root_of(folder)
    above = next(path for path in (root, *root.parents) if path.exists())
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": list(sys.version_info[:3]),
        "time": time.time(),
        "disk_free": shutil.disk_usage(above).free,
        "writable": os.access(above, os.W_OK),
        "cpus": os.cpu_count() or 1,
        "memory": _memory(),
        "gpus": _gpus(),
        "port_problem": _port_problem(*listens) if listens else None,
        "lacks_environment": wanted is not None and ready_python(folder, **wanted) is None,
        "processes": states(folder, name),
    }


def _memory() -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return None


def _gpus() -> list[str]:
    """Return the names of NVIDIA GPUs, or the driver's error message."""
    result = run_briefly("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", timeout_s=20)
    if result is None:
        return []
    if result.returncode == 0:
        return result.stdout.strip().splitlines()
    lines = (result.stdout + result.stderr).strip().splitlines()
    return [f"driver: {lines[0] if lines else 'no response'}"]


def _port_problem(bind: str, port: int) -> str | None:
    try:
        _listen(bind, port).close()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None


def _listen(bind: str, port: int) -> socket.socket:
    return socket.create_server((bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)


def listen(bind: str, port: int, timeout_s: float, **_: Any) -> None:
    """Accept connections at a port for `timeout_s`, or until the client disconnects."""
    try:
        listener = _listen(bind, port)
    except OSError as error:
        say(taken=os.strerror(error.errno or 0))
        return
    with listener:
        say(listening=True)
        until = time.monotonic() + timeout_s
        listener.settimeout(0.5)
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                listener.accept()[0].close()
            say(beat=True)


def probe(address: str, port: int, **_: Any) -> dict[str, Any]:
    """Connect to a port. Return how long it took, or the failing layer and the problem."""
    began = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S):
            return {"seconds": time.monotonic() - began}
    except OSError as error:
        return {"layer": layer_of(error), "problem": problem_of(error)}


def layer_of(error: OSError) -> str:
    """Return the layer in which a connection failed, by the names of `doctor/layers.py`."""
    if isinstance(error, socket.gaierror):
        return "name"
    if isinstance(error, ConnectionRefusedError):
        return "port"
    if isinstance(error, TimeoutError):
        return "firewall"
    return "route" if error.errno in _NO_ROUTE else "port"


def problem_of(error: OSError) -> str:
    return f"no response in {CONNECT_S:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
