"""Ports that nobody has, and hosts with addresses of their own; and how to wait for what happens there."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from benchmarks.network import Network, check_possible, hosts

from smolcluster.errors import UserError

T = TypeVar("T")


def eventually(question: Callable[[], T | None], *, within_s: float = 150.0, what: str = "it") -> T:
    """The first answer that is neither None nor false."""
    deadline = time.monotonic() + within_s
    while True:
        answer = question()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
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
def separate_hosts(count: int) -> Iterator[Network]:
    """Network namespaces without limits; where there can be none, the test skips and says why."""
    try:
        check_possible()
    except UserError as error:
        pytest.skip(str(error))
    with hosts(count, rate=None) as network:
        yield network
