"""A model in fragments, each with a separate combination: each round exchanges one fragment, in turn.

The last round of a run exchanges all fragments, so that no local change is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from smolcluster.comm.group import Group
from smolcluster.comm.rounds import Combination, Committed
from smolcluster.comm.view import View


class Fragmented(Combination):
    """Has a slot for each fragment, and one for all of them, which must not be in flight together with others."""

    def __init__(self, parts: Sequence[Combination], places: Sequence[Sequence[int]], *, last_step: int) -> None:
        """`places`: which of the trained parameters each part combines. `last_step`: of the run."""
        self._parts, self._places, self._last_step = parts, places, last_step

    def slot_of(self, step: int, *, number: int, num_slots: int) -> int:
        return len(self._parts) if step == self._last_step else number % len(self._parts)

    def collide(self, slot: int, other: int) -> bool:
        return slot == other or len(self._parts) in (slot, other)

    def places(self, slot: int) -> list[int]:
        """Return which of the trained parameters this slot combines."""
        return [place for fragment in self.fragments(slot) for place in self._places[fragment]]

    def fragments(self, slot: int) -> list[int]:
        return list(range(len(self._parts))) if slot == len(self._parts) else [slot]

    def _of(self, slot: int) -> list[Combination]:
        return [self._parts[fragment] for fragment in self.fragments(slot)]

    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        for part in self._of(slot):
            part.start(0, weight=weight, scale=scale, stop=stop)

    def finish(self, slot: int) -> None:
        for part in self._of(slot):
            part.finish(0)

    def done(self, slot: int) -> bool:
        return all(part.done(0) for part in self._of(slot))

    def wait(self, slot: int) -> None:
        for part in self._of(slot):
            part.wait(0)

    def stop_count(self, slot: int) -> Tensor:
        return self._of(slot)[0].stop_count(0)

    def give(self, result: Committed) -> None:
        for part in self._of(result.slot):
            part.give(replace(result, slot=0))

    def results(self, slot: int) -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * sum(map(len, self._places))
        for fragment in self.fragments(slot):
            for place, tensor in zip(self._places[fragment], self._parts[fragment].results(0), strict=True):
                found[place] = tensor
        return found

    def put(self, slot: int, results: Sequence[Tensor | None]) -> None:
        for fragment in self.fragments(slot):
            self._parts[fragment].put(0, [results[place] for place in self._places[fragment]])

    def own_state(self) -> dict[str, Tensor]:
        return {name: tensor for part in self._parts for name, tensor in part.own_state().items()}

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        for part in self._parts:
            part.load_own(tensors)

    def drop(self, slot: int) -> None:
        for part in self._of(slot):
            part.drop(0)

    def formed(self, group: Group, view: View, established: Sequence[str | None]) -> None:
        for part in self._parts:
            part.formed(group, view, established)

    def again(self, slot: int, *, zero: bool) -> None:
        for part in self._of(slot):
            part.again(0, zero=zero)

    def contributed(self, slot: int) -> list[Tensor]:
        return [tensor for part in self._of(slot) for tensor in part.contributed(0)]

    def norms(self, slot: int) -> tuple[float, float]:
        mine, held = zip(*(part.norms(0) for part in self._of(slot)), strict=True)
        return math.hypot(*mine), math.hypot(*held)

    def shares(self, slot: int) -> dict[int, Tensor]:
        each = [part.shares(0) for part in self._of(slot)]
        return {n * len(each) + i: share for i, shares in enumerate(each) for n, share in shares.items()}

    def follow(self, slot: int, shares: Mapping[int, Tensor], *, members: int) -> None:
        parts = self._of(slot)
        for i, part in enumerate(parts):
            mine = {n // len(parts): share for n, share in shares.items() if n % len(parts) == i}
            part.follow(0, mine, members=members)
