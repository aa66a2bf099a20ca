"""Describe a machine, and test which ports it can reach."""

from __future__ import annotations

import contextlib
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


def look(
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
    asked = run_briefly("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", within_s=20)
    if asked is None:
        return []
    if asked.returncode == 0:
        return asked.stdout.strip().splitlines()
    lines = (asked.stdout + asked.stderr).strip().splitlines()
    return [f"driver: {lines[0] if lines else 'no answer'}"]


def _port_problem(bind: str, port: int) -> str | None:
    try:
        _listen(bind, port).close()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None


def _listen(bind: str, port: int) -> socket.socket:
    return socket.create_server((bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)


def listen(bind: str, port: int, within_s: float, **_: Any) -> None:
    """Accept connections at a port for `within_s`, or until the client disconnects."""
    try:
        listener = _listen(bind, port)
    except OSError as error:
        say(taken=os.strerror(error.errno or 0))
        return
    with listener:
        say(listening=True)
        until = time.monotonic() + within_s
        listener.settimeout(0.5)
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                listener.accept()[0].close()
            say(beat=True)


def knock(address: str, port: int, within_s: float = 5.0, **_: Any) -> dict[str, Any]:
    """Return whether a port can be reached from here, and if not, how it fails."""
    began = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=within_s):
            return {"ok": True, "seconds": time.monotonic() - began}
    except socket.gaierror as error:
        return {"ok": False, "kind": "name", "words": error.strerror or str(error)}
    except ConnectionRefusedError:
        return {"ok": False, "kind": "refused", "words": "connection refused"}
    except TimeoutError:
        return {"ok": False, "kind": "silent", "words": f"no answer in {within_s:g} s"}
    except OSError as error:
        return {"ok": False, "kind": "route", "words": error.strerror or str(error)}
