"""Machines on the local network: which addresses they say, and how one is reached that says several."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from smolcluster.cli import cluster as cli_cluster
from smolcluster.cli import join as cli_join
from smolcluster.errors import MissingExtra, UserError
from smolcluster.launch.join import discovery


def test_without_the_package_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    message = r"pip install 'smolcluster\[launch\]'"
    with pytest.raises(MissingExtra, match=message):
        discovery.find_offers(timeout_s=0)
    with pytest.raises(MissingExtra, match=message), discovery.announced("pi5", 1, addresses=[], system="Linux"):
        pass


def test_a_machine_with_one_cable_and_no_way_out_says_the_address_of_the_cable(monkeypatch: pytest.MonkeyPatch) -> None:
    ifaddr = pytest.importorskip("ifaddr")

    def adapter(*addresses: Any) -> Any:
        return SimpleNamespace(ips=[SimpleNamespace(ip=ip, is_IPv4=isinstance(ip, str)) for ip in addresses])

    cables = [adapter("127.0.0.1", ("::1", 0, 0)), adapter("192.168.50.2", ("fe80::1", 0, 2)), adapter("10.10.0.7")]
    monkeypatch.setattr(ifaddr, "get_adapters", lambda: cables)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.1.1", 0))])  # as Debian has it
    monkeypatch.setattr(socket.socket, "connect", lambda *_: (_ for _ in ()).throw(OSError(101, "unreachable")))
    assert discovery.own_addresses() == ["192.168.50.2", "10.10.0.7"]
    monkeypatch.setattr(ifaddr, "get_adapters", lambda: cables[:1])
    assert discovery.own_addresses() == ["127.0.0.1"]


def test_a_long_name_can_be_announced_and_found() -> None:
    pytest.importorskip("zeroconf")
    name = "x" * 63
    with discovery.announced(name, 65432, addresses=["127.0.0.1"], system="Linux"):
        found = discovery.find_offers(wanted=name, interfaces=["127.0.0.1"], timeout_s=120)
    assert [(offer.name, offer.addresses, offer.port) for offer in found] == [(name, ("127.0.0.1",), 65432)]


def test_whoever_says_several_addresses_is_reached_at_the_one_that_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        with cli_cluster._reached([("127.0.0.1", gone), ("127.0.0.1", port)]) as line:
            assert line.getpeername()[1] == port
    with pytest.raises(
        UserError, match=rf"the machine cannot be reached at 127.0.0.1:{gone} \(.+\), \[::1\]:{gone} \(.+\)"
    ):
        cli_cluster._reached([("127.0.0.1", gone), ("::1", gone)])


@pytest.mark.parametrize("address", ["192.0.2.7", "pi5.local", "1.2.3", "nowhere", "fe80::1"])
def test_an_address_of_another_machine_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=f"--address {address} is not an address of this machine; it has "):
        cli_join.join("pi5", address=address)


def test_an_address_of_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        door = cli_join._listen("::1")
    except UserError as error:
        pytest.skip(str(error))
    with door:
        assert door.family == socket.AF_INET6
