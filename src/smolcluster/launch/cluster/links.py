"""Which address leads from one machine to another, when each physical link is a subnet of its own.

mini1 ── thunderbolt 10.10.0.0/24 ── mini3         pi4 and mini1 have no link in common: pi4 sends through mini3,
mini3 ── edge 192.168.51.0/24 ────── pi4           which must forward, to mini1's address on the link that both have
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from smolcluster.config.schema import LinkConfig

Links = Mapping[str, LinkConfig]


@dataclass(frozen=True, slots=True)
class Way:
    """From `source` to `target`: the address to use, and the machines between them that must forward."""

    source: str
    target: str
    address: str
    through: tuple[str, ...] = ()
    hop: str = ""  # the first of them, by its address on the first link
    subnet: str | None = None  # of the last link

    def commands(self) -> list[str]:
        """What makes this way possible where it is not yet, on Linux; the guide has the other systems."""
        if not self.through:
            return []
        net = self.subnet or f"{self.address}/32"
        return [
            f"on {self.source}: sudo ip route add {net} via {self.hop}",
            f"on {', '.join(self.through)}: sudo sysctl -w net.ipv4.ip_forward=1",
        ]


def find_way(links: Links, source: str, target: str) -> Way | None:
    """The way with the fewest machines between, over the links that are named first. None: no way is known."""
    before: dict[str, tuple[str, str]] = {source: ("", "")}  # host -> the host before it, and the link between
    queue = deque([source])
    while queue:
        here = queue.popleft()
        if here == target:
            break
        for name, link in links.items():
            for other in link.hosts if here in link.hosts else ():
                if other not in before:
                    before[other] = (here, name)
                    queue.append(other)
    if target not in before or source == target:
        return None
    steps: list[tuple[str, str]] = []  # each link, and the host it leads to
    at = target
    while at != source:
        previous, link_name = before[at]
        steps.insert(0, (link_name, at))
        at = previous
    last = links[steps[-1][0]]
    between = tuple(host for _, host in steps[:-1])
    hop = links[steps[0][0]].hosts[between[0]] if between else ""
    return Way(source, target, last.hosts[target], through=between, hop=hop, subnet=last.subnet)
