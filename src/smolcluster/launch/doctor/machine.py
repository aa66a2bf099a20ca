"""Check this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from smolcluster.errors import SmolclusterError
from smolcluster.launch.cluster.agent.base import run_briefly
from smolcluster.launch.doctor.layers import Finding, Layer, bad, good, known_remedy, warning
from smolcluster.launch.join.discovery import own_addresses
from smolcluster.observe.text import size

MIN_FREE_BYTES = 2 << 30
RESPONSE_S = 120.0  # torch from a slow disk takes a while
_SILENT = "no response; the driver hangs"

# In a separate process: a broken torch or driver may crash it.
_ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "built_for": torch.version.cuda,
    "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "mps": torch.backends.mps.is_available(),
}))
"""


def examine() -> Iterator[Finding]:
    yield good(Layer.PYTHON, f"Python {platform.python_version()}")
    yield from _torch_and_gpu()
    yield _disk()
    yield _name()
    yield _token()
    yield _mdns()


def _torch_and_gpu() -> Iterator[Finding]:
    probe = run_briefly(sys.executable, "-c", _ASK_TORCH, timeout_s=RESPONSE_S)
    if probe is None:
        yield bad(Layer.GPU, f"torch.cuda.is_available(): {_SILENT}")
        return
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or [f"status {probe.returncode}"])[-1]
        yield bad(Layer.TORCH, f"torch cannot be imported: {reason}", "pip install -U 'torch>=2.6,<2.14'")
        return
    facts = json.loads(probe.stdout.splitlines()[-1])
    yield good(Layer.TORCH, f"torch {facts['version']}")
    tool = shutil.which("nvidia-smi")
    listed = run_briefly(tool, "-L", timeout_s=RESPONSE_S) if tool else None
    if facts["cuda"]:
        yield good(Layer.GPU, ", ".join(facts["cuda"]))
    elif tool and listed is None:
        yield bad(Layer.GPU, f"nvidia-smi fails: {_SILENT}")
    elif listed is not None and listed.returncode == 0 and listed.stdout.strip():
        what = f"{listed.stdout.strip().splitlines()[0]}, and torch cannot use it (built for CUDA {facts['built_for']})"
        yield bad(Layer.GPU, what)
    elif listed is not None:
        lines = (listed.stdout + listed.stderr).strip().splitlines() or ["no response"]
        yield bad(Layer.GPU, f"nvidia-smi fails: {lines[0]}")
    else:
        yield good(Layer.GPU, "Apple's GPU (mps)" if facts["mps"] else "no GPU; training runs on the CPU")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    what = f"{size(free)} free here"
    return good(Layer.DISK, what) if free > MIN_FREE_BYTES else warning(Layer.DISK, what)


def _name() -> Finding:
    name = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError:
        return warning(Layer.NAME, f"this machine cannot resolve its own name {name}; training works by address")
    return good(Layer.NAME, f"{name} is {', '.join(found)}")


def _token() -> Finding:
    if importlib.util.find_spec("cryptography") is None:
        what = "runs on several machines need a token, and the package 'cryptography' is not installed"
        return warning(Layer.TOKEN, what, "pip install 'smolcluster[cluster]'")
    from smolcluster.comm.elastic.transport.security import Keyring, find_tokens

    try:
        found = find_tokens(None, os.environ)
        if found is None:
            what = "no token here: runs are limited to this machine"
            return warning(Layer.TOKEN, what, "smolcluster token new, or token add for one that exists")
        keyring = Keyring((entry.token for entry in found[1]), source=found[0])
    except SmolclusterError as error:
        return bad(Layer.TOKEN, str(error), known_remedy(Layer.TOKEN, 1))
    return good(Layer.TOKEN, f"{keyring.current.name} from {found[0]}")


def _mdns() -> Finding:
    if importlib.util.find_spec("zeroconf") is None:
        return warning(Layer.MDNS, "machines are not discovered without zeroconf", "pip install 'smolcluster[launch]'")
    problem = ""
    for address in own_addresses():  # one link with multicast is enough
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                probe.bind(("", 5353))
                group = socket.inet_aton("224.0.0.251") + socket.inet_aton(address)
                probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
                return good(Layer.MDNS, "multicast DNS works")
            except OSError as error:
                problem = error.strerror or str(error)
    return warning(Layer.MDNS, f"multicast DNS does not work: {problem}")
