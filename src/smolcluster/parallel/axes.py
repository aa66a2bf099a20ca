"""The numbering of ranks on a mesh.

rank = ((pp * dp + dp) * cp + cp) * tp + tp

axis      ranks along it share                        they exchange
tp        a data shard, and each layer's work         activations, several times a layer: keep it inside a machine
cp        a data shard; each a part of the sequence   keys and values, in each layer
dp        nothing; each has its own data shard        gradients
pp        a data shard; each has some of the layers   activations between neighbours

The `data` ranks, along dp and cp, hold the same parameters, or shards of them: data = replicas x shards, where the shards of a
replica make up the complete model and replicas hold the same shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from smolcluster.comm.group import Group
from smolcluster.errors import UserError
from smolcluster.parallel.placement import Node, Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    pp: int = 1
    replicas: int = 1
    shards: int = 1
    cp: int = 1  # number of ranks, out of replicas x shards, with the same samples
    tp: int = 1

    @property
    def data(self) -> int:
        return self.replicas * self.shards

    @property
    def dp(self) -> int:
        return self.data // self.cp

    @property
    def size(self) -> int:
        return self.pp * self.data * self.tp

    def coords(self, rank: int) -> dict[str, int]:
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}

    def rank(self, *, pp: int, dp: int, tp: int, cp: int = 0) -> int:
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def lines(self, *along: str) -> list[list[int]]:
        """Return the groups of ranks that differ only along these axes."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            coords = self.coords(rank)
            groups.setdefault(tuple(v for k, v in coords.items() if k not in along), []).append(rank)
        return list(groups.values())

    def seats(self, nodes: Sequence[Node], *, same_stream: bool) -> list[Seat]:
        """Return the seat of each node. `same_stream`: ranks along tp share a random stream."""
        seats = []
        for rank, node in enumerate(nodes):
            coords = self.coords(rank)
            first = self.rank(pp=coords["pp"], dp=coords["dp"], tp=0)
            if nodes[first].batch_size != node.batch_size:
                raise UserError(
                    f"{node.name} and {nodes[first].name} work on the same samples and must have the same batch size, "
                    f"not {node.batch_size} and {nodes[first].batch_size}"
                )
            seats.append(
                Seat(
                    rank=rank,
                    node=node.name,
                    machine=node.machine,
                    coords=coords,
                    shard=coords["dp"],
                    stream=self.rank(**coords | {"tp": 0}) if same_stream else rank,
                )
            )
        return seats


def machines(places: Sequence[Node | Seat]) -> list[str]:
    """Return the machine of each rank."""
    return [place.machine or (place.name if isinstance(place, Node) else place.node) for place in places]


def group_of(group: Group, lines: Sequence[Sequence[int]]) -> Group | None:
    """Make a group of each of these lists of ranks, on every rank; return the one that this rank is in."""
    found = [group.sub(ranks) for ranks in lines]
    return next((mine for mine in found if mine is not None), None)


def ranks_per_machine(
    lines: Sequence[Sequence[int]],
    hosts: Sequence[str],
    *,
    use: str = "HYBRID_SHARD shards the model inside each machine",
    option: str = "strategy.shard_size",
) -> int:
    """Return the number of consecutive ranks of each line that share a machine.

    Raises UserError where the numbers differ, with what they are for (`use`) and the `option` that replaces them.
    """
    runs = [
        (number, host, len(list(run)))
        for number, line in enumerate(lines)
        for host, run in itertools.groupby(hosts[rank] for rank in line)
    ]
    lengths = {length for _, _, length in runs}
    if len(lengths) > 1 or len({(number, host) for number, host, _ in runs}) < len(runs):
        by_host = ", ".join(f"{length} on {host}" for host, length in dict.fromkeys(run[1:] for run in runs))
        raise UserError(
            f"{use}, and consecutive ranks are {by_host}; "
            f"use the same number on each machine, with consecutive ranks, or set {option}"
        )
    return lengths.pop()


def divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
