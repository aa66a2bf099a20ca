"""Which address leads from one machine to another, when each physical link is a subnet of its own.

mini1 ── thunderbolt 10.10.0.0/24 ── mini3         pi4 and mini1 have no link in common: pi4 sends through mini3,
mini3 ── edge 192.168.51.0/24 ────── pi4           which must forward, to mini1's address on the link that those two have;
                                                   and mini1 must know that pi4's link lies behind mini3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from smolcluster.config.schema import LinkConfig

Links = Mapping[str, LinkConfig]


@dataclass(frozen=True, slots=True)
class Route:
    """What a machine must know to send there: `net` lies behind `hop`, an address on a link of its own."""

    host: str
    net: str
    hop: str


@dataclass(frozen=True, slots=True)
class NetworkPath:
    """From `source` to `target`: the address to use, and the machines between them that must forward."""

    source: str
    target: str
    address: str
    through: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()  # there, and then back: an answer must find its way, too

    def commands(self) -> list[str]:
        """What makes this way possible where it is not yet, on Linux; the guide has the other systems."""
        if not self.through:
            return []
        return [
            *(f"on {route.host}: sudo ip route add {route.net} via {route.hop}" for route in self.routes),
            f"on {', '.join(self.through)}: sudo sysctl -w net.ipv4.ip_forward=1",
        ]


def find_path(links: Links, source: str, target: str) -> NetworkPath | None:
    """The way with the fewest machines between, over the links that are named first. None: no way is known."""
    paths: dict[str, list[tuple[LinkConfig, str]]] = {source: []}  # host -> the links to it, and where each leads
    queue = deque([source])
    while queue:
        here = queue.popleft()
        for link in links.values():
            for other in link.hosts if here in link.hosts else ():
                if other not in paths:
                    paths[other] = [*paths[here], (link, other)]
                    queue.append(other)
    if target not in paths or source == target:
        return None
    hosts = [source, *(host for _, host in paths[target])]
    passed = [link for link, _ in paths[target]]  # between each and the next
    there, back = _net(passed[-1], target), _net(passed[0], source)
    routes = [Route(hosts[at], there, link.hosts[hosts[at + 1]]) for at, link in enumerate(passed[:-1])]
    routes += [Route(hosts[at + 1], back, passed[at].hosts[hosts[at]]) for at in range(len(passed) - 1, 0, -1)]
    return NetworkPath(source, target, passed[-1].hosts[target], through=tuple(hosts[1:-1]), routes=tuple(routes))


def _net(link: LinkConfig, host: str) -> str:
    """Where this host is on that link; itself alone, if the link does not say its subnet."""
    return link.subnet or f"{link.hosts[host]}/{128 if ':' in link.hosts[host] else 32}"
