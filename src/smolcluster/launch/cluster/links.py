"""Find the address by which one machine reaches another, when each physical link is a separate subnet.

mini1 ── thunderbolt 10.10.0.0/24 ── mini3         pi4 and mini1 share no link: pi4 sends through mini3, which must forward,
mini3 ── edge 192.168.51.0/24 ────── pi4           to mini1's address on the thunderbolt link; mini1 needs a route back to
                                                   pi4's subnet through mini3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from smolcluster.config.schema import LinkConfig

Links = Mapping[str, LinkConfig]


@dataclass(frozen=True, slots=True)
class Route:
    """A static route on `host`: to the subnet `net` via `hop`."""

    host: str
    net: str
    hop: str


@dataclass(frozen=True, slots=True)
class NetworkPath:
    """A path from `source` to `target`: the address to use, and the machines in between that must forward."""

    source: str
    target: str
    address: str
    through: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()  # in both directions

    def commands(self) -> list[str]:
        """Return the Linux commands that set up this path; the guide has the other systems."""
        if not self.through:
            return []
        return [
            *(f"on {route.host}: sudo ip route add {route.net} via {route.hop}" for route in self.routes),
            f"on {', '.join(self.through)}: sudo sysctl -w net.ipv4.ip_forward=1",
        ]


def find_path(links: Links, source: str, target: str) -> NetworkPath | None:
    """Return the path with the fewest hops, preferring links that are listed first; None without one."""
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
    """Return the link's subnet, or the host's own address as a subnet."""
    return link.subnet or f"{link.hosts[host]}/{128 if ':' in link.hosts[host] else 32}"
