"""Ports that nobody has, and hosts with addresses of their own; and how to wait for what happens there."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from benchmarks.harness.network import Network, check_possible, hosts

from smolcluster.errors import UserError

T = TypeVar("T")


def eventually(question: Callable[[], T | None], *, timeout_s: float = 150.0, what: str = "it") -> T:
    """The first answer that is neither None nor false."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = question()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.005)


def at_most(seconds: float) -> float:
    """The bound of something that takes so long on a quiet machine, where `make test-all` runs: ten times as much elsewhere."""
    return seconds if os.environ.get("TEST_TIMES") == "1" else 10 * seconds


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def free_ports(count: int) -> int:
    """The first of so many in a row that nobody listens on, below those that the system gives out.

    Processes that test at the same time begin their search at unlike places.
    """
    begin = 17000 + os.getpid() * 40 % 13000
    for first in (*range(begin, 30000, count), *range(17000, begin, count)):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


@contextlib.contextmanager
def small_disk(folder: Path, *, kilobytes: int) -> Iterator[Path]:
    """A file system of this size. Only root can make one."""
    disk = folder / "disk"
    disk.mkdir()
    if shutil.which("mount") is None or sys.platform != "linux":
        pytest.skip("no mount command")
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "smolcluster-test", disk], capture_output=True, text=True
    )
    if mount.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mount.stderr.strip()}")
    try:
        yield disk
    finally:
        # Lazily: a process that has just been told to end may have a file open there for a moment.
        subprocess.run(["umount", "--lazy", disk], check=True)


@contextlib.contextmanager
def separate_hosts(count: int) -> Iterator[Network]:
    """Network namespaces without limits; where there can be none, the test skips and says why."""
    try:
        check_possible()
    except UserError as error:
        pytest.skip(str(error))
    with hosts(count, rate=None) as network:
        yield network
