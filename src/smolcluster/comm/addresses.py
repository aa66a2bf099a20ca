"""What an address says by itself, without asking the network."""

from __future__ import annotations

import contextlib
import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Names other than localhost are not looked up: they count as reachable."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
