"""Hosts from network namespaces: what they need, that they are isolated, and that they are removed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
from benchmarks.harness.network import Network, check_possible, hosts, parse_rate

from smolcluster.errors import UserError


def test_link_rates_are_read_as_tc_spells_them() -> None:
    assert parse_rate("100mbit") == 1e8
    assert parse_rate("1gbit") == 1e9
    assert parse_rate("1.5mbit") == 1.5e6
    with pytest.raises(UserError, match="like 100mbit"):
        parse_rate("fast")


def test_limited_links_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("shutil.which", lambda tool: None)
    with pytest.raises(UserError, match="iproute2"):
        check_possible()
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr("os.geteuid", lambda: 1000, raising=False)
    with pytest.raises(UserError, match="root"):
        check_possible()


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"smolbench-{os.getpid()}-")]


def test_hosts_reach_each_other_alone_and_are_removed_after_an_error_too() -> None:
    try:
        with hosts(2, rate="100mbit"):
            pass
    except UserError as error:
        pytest.skip(str(error))
    assert namespaces() == []
    probe = "import socket, sys; socket.create_connection((sys.argv[1], 9), 2)"

    def connect(network: Network, address: str) -> str:
        command = [sys.executable, "-c", probe, address]
        return str(network.run(0, command, capture_output=True, text=True).stderr)

    with contextlib.suppress(RuntimeError), hosts(2, rate="100mbit") as network:
        assert len(namespaces()) == 3  # two hosts and the bridge
        assert "ConnectionRefusedError" in connect(network, network.address(1)), "the other host was not reached"
        assert "Network is unreachable" in connect(network, "192.0.2.1")
        waiting = network.popen(1, [sys.executable, "-c", "import signal; signal.pause()"])
        raise RuntimeError("in the middle")
    assert namespaces() == []
    assert waiting.returncode == -9
