"""Discover machines that run `join` on the local network, by multicast DNS (zeroconf).

The announcement is public: name, port and operating system, no secrets. Trust comes from the pairing code (pairing.py).
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from smolcluster.config.checks import HOST_NAME
from smolcluster.errors import MissingExtra, UserError

KIND = "_smolcluster._tcp.local."
BROWSE_S = 3.0
MAX_LETTERS = 50  # of a name, before `-PORT`: a DNS label has at most 63


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOffer:
    """A machine that wants to join."""

    name: str
    addresses: tuple[str, ...]
    port: int
    system: str = ""


def _zeroconf(interfaces: Sequence[str] | None) -> Any:
    try:
        from zeroconf import InterfaceChoice, Zeroconf
    except ImportError:
        raise MissingExtra("zeroconf", extra="launch", purpose="finding machines on the network") from None
    try:
        return Zeroconf(interfaces=list(interfaces) if interfaces else InterfaceChoice.All)
    except OSError as error:
        raise UserError(
            f"multicast DNS does not work here ({error.strerror or error}); give the address instead: see `smolcluster doctor`"
        ) from error


@contextlib.contextmanager
def announced(name: str, port: int, *, addresses: Sequence[str], system: str) -> Iterator[None]:
    """Announce this machine on the local network while the context lasts."""
    network = _zeroconf([a for a in addresses if ":" not in a] or None)
    from zeroconf import NonUniqueNameException, ServiceInfo

    info = ServiceInfo(
        KIND,
        f"{name}.{KIND}",
        port=port,
        addresses=[ipaddress.ip_address(address).packed for address in addresses],
        properties={"system": system},
        server=f"{name[:MAX_LETTERS]}-{port}.local.",
    )
    try:
        network.register_service(info)
        yield
    except NonUniqueNameException:
        raise UserError(
            f"another machine already announces the name {name}; choose another: smolcluster join NAME"
        ) from None
    finally:
        network.unregister_all_services()
        network.close()


def find_offers(
    *, timeout_s: float = BROWSE_S, wanted: str | None = None, interfaces: Sequence[str] | None = None
) -> list[MachineOffer]:
    """Return the machines announced now. Returns early once the `wanted` one is found."""
    network = _zeroconf(interfaces)
    from zeroconf import ServiceBrowser, ServiceStateChange

    found: dict[str, MachineOffer] = {}
    changed = threading.Condition()

    def on_change(zeroconf: Any, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Removed:
            found.pop(name, None)
            return
        info = zeroconf.get_service_info(service_type, name, timeout=1500)
        addresses = tuple(info.parsed_scoped_addresses()) if info is not None else ()
        if info is None or info.port is None or not addresses:
            return
        system = (info.properties.get(b"system") or b"").decode("utf-8", "replace")[:40]
        label = name.removesuffix(f".{KIND}")
        if not HOST_NAME.fullmatch(label):  # not from `join`; keep it out of cluster files
            return
        with changed:
            found[name] = MachineOffer(name=label, addresses=addresses, port=info.port, system=system)
            changed.notify_all()

    browser = ServiceBrowser(network, KIND, handlers=[on_change])
    try:
        deadline = time.monotonic() + timeout_s
        with changed:
            while (left := deadline - time.monotonic()) > 0:
                if wanted is not None and any(offer.name == wanted for offer in found.values()):
                    break
                changed.wait(left)
        return sorted(found.values(), key=lambda offer: offer.name)
    finally:
        browser.cancel()
        network.close()


def own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses, that of the default route first; loopback only if there is no other.

    Queries all adapters: two machines on one cable have no default route, and their names may resolve to loopback.
    """
    found: list[str] = []
    with contextlib.suppress(OSError):
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    with contextlib.suppress(ImportError, OSError):
        import ifaddr  # a requirement of zeroconf

        found += [str(ip.ip) for adapter in ifaddr.get_adapters() for ip in adapter.ips if ip.is_IPv4]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: only looks up the route
        found.insert(0, probe.getsockname()[0])
    others = [address for address in dict.fromkeys(found) if not ipaddress.ip_address(address).is_loopback]
    return others or ["127.0.0.1"]
