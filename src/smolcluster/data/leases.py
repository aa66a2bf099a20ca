"""Leases of the sample stream, so that every sample counts exactly once although workers join and leave.

`sampler.py` makes all samples one infinite stream. A worker is granted ranges of it for one step. When that step is
committed the ranges are settled; when the worker dies they are returned, and granted again before fresh ones. When its
gradient is rejected they are set aside: another worker might fail in the same way. So each position below the frontier is in
exactly one state:

    0                                                            frontier
    | settled | held | returned | settled | aside | held | settled |  never granted ...

Only settled ranges are durable. `state_dict` therefore counts held and set-aside ranges as not read: a server that restarts
from it grants them again. Without any, the state is one number, the same as that of a `ShardedSampler`, so either can
continue from the other's state.

For one thread. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from smolcluster.data.sampler import Indices, Sampler
from smolcluster.errors import UserError

_LIMIT = 2**63  # positions are signed 64-bit integers in checkpoints


class Range(NamedTuple):
    """Stream positions `start .. start + count - 1`."""

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used

    @property
    def end(self) -> int:
        return self.start + self.count


class Leases:
    """The ledger. `position`: how far the stream was read before; `returned`: ranges before it that were not."""

    def __init__(self, *, position: int = 0, returned: Sequence[Range] = ()) -> None:
        _check(position, returned)
        self._frontier = position  # the first position never granted
        self._returned = _joined(returned)
        self._aside: list[Range] = []  # not to be granted again here
        self._held: dict[str, dict[int, list[Range]]] = {}
        self._fold()

    def grant(self, holder: str, step: int, count: int) -> list[Range]:
        """Grant `count` positions for this holder's step: returned ranges first, lowest first, then fresh ones."""
        if count < 1:
            raise ValueError(f"a lease has at least one sample, not {count}")
        self._check_free(holder, step)
        granted = []
        while count and self._returned:
            first = self._returned[0]
            part = Range(first.start, min(count, first.count))
            rest = Range(part.end, first.count - part.count)
            self._returned[:1] = [rest] if rest.count else []
            granted.append(part)
            count -= part.count
        if count:
            granted.append(Range(self._frontier, count))
            self._frontier += count
        self._held.setdefault(holder, {})[step] = granted
        return list(granted)

    def claim(self, holder: str, step: int, ranges: Iterable[Range | Sequence[int]]) -> bool:
        """Grant exactly these positions. Returns False if any of them is held or settled.

        For ranges that were granted before this ledger was made: by a server that has died since, or in a journal that is
        replayed.
        """
        self._check_free(holder, step)
        wanted = _joined(Range(*r) for r in ranges)
        if not wanted or min(wanted).start < 0 or any(r.count < 1 for r in wanted):
            raise ValueError(f"invalid ranges for a lease, which has at least one sample: {wanted}")
        frontier = max(self._frontier, wanted[-1].end)
        free = _joined([*self._returned, Range(self._frontier, frontier - self._frontier)])
        left = _without(free, wanted)
        if left is None:
            return False
        self._frontier, self._returned = frontier, left
        self._held.setdefault(holder, {})[step] = wanted
        return True

    def settle(self, holder: str, step: int) -> list[Range]:
        """Settle the lease of a committed step: its samples will never be granted again."""
        if step not in self._held.get(holder, {}):
            raise ValueError(f"'{holder}' has no lease for step {step}: it was settled or given back before")
        return self._take(holder, step)

    def shorten(self, holder: str, step: int, count: int) -> list[Range]:
        """Keep the first `count` samples of a lease, in its order. Return the others, to be granted again."""
        ranges = self._take(holder, step)
        kept, rest = [], []
        for part in ranges:
            here = min(part.count, max(0, count))
            count -= here
            kept.append(Range(part.start, here))
            rest.append(Range(part.start + here, part.count - here))
        self._held.setdefault(holder, {})[step] = [part for part in kept if part.count]
        self._returned = _joined([*self._returned, *rest])
        self._fold()
        return _joined(rest)

    def give_back(self, holder: str, step: int | None = None) -> list[Range]:
        """Return the samples of this lease (None: of all leases of the holder) to be granted again."""
        held = self._held.get(holder, {})
        steps = [s for s in sorted(held) if step in (None, s)]
        given = _joined(r for s in steps for r in self._take(holder, s))
        self._returned = _joined([*self._returned, *given])
        self._fold()
        return given

    def set_aside(self, holder: str, step: int) -> list[Range]:
        """Set aside the samples of a rejected gradient: they are not counted, and not granted again in this run."""
        taken = self._take(holder, step) if step in self._held.get(holder, {}) else []
        self._aside = _joined([*self._aside, *taken])
        return taken

    def held(self, holder: str) -> dict[int, list[Range]]:
        """Return this holder's leases by step."""
        return {step: list(ranges) for step, ranges in self._held.get(holder, {}).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for JSON. `position`: nothing at or after it was settled; `holes`: what was not before it."""
        held = [r for leases in self._held.values() for ranges in leases.values() for r in ranges]
        settled = Leases(position=self._frontier, returned=[*self._returned, *self._aside, *held])
        return {"position": settled._frontier, "holes": [list(r) for r in settled._returned]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Leases:
        """Restore a saved state; that of a `ShardedSampler` has no holes."""
        holes = state.get("holes", [])
        if not isinstance(holes, list) or not all(isinstance(h, list | tuple) and len(h) == 2 for h in holes):
            raise _nonsense(f"holes {holes!r} is not a list of [start, count]")
        return cls(position=state.get("position", 0), returned=[Range(*hole) for hole in holes])

    def _check_free(self, holder: str, step: int) -> None:
        if step in self._held.get(holder, {}):
            raise ValueError(f"'{holder}' already has a lease for step {step}")

    def _take(self, holder: str, step: int) -> list[Range]:
        leases = self._held[holder]
        ranges = leases.pop(step)
        if not leases:
            del self._held[holder]
        return ranges

    def _fold(self) -> None:
        """Lower the frontier past ranges returned at its end."""
        if self._returned and self._returned[-1].end == self._frontier:
            self._frontier = self._returned.pop().start


def indices(sampler: Sampler, ranges: Iterable[Range | Sequence[int]]) -> Indices:
    """Return the sample indices of a lease, in its order."""
    return np.concatenate([np.empty(0, dtype=np.int64), *(sampler.indices(start, count) for start, count in ranges)])


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges, drop empty ones, and merge adjacent ones."""
    joined: list[Range] = []
    for part in sorted(r for r in ranges if r.count != 0):
        if joined and joined[-1].end == part.start:
            part = Range(joined[-1].start, joined.pop().count + part.count)
        joined.append(part)
    return joined


def _without(free: Sequence[Range], wanted: Sequence[Range]) -> list[Range] | None:
    """Return `free` minus `wanted`, or None if `free` does not contain it. Both are merged (`_joined`)."""
    left = list(free)
    for part in wanted:
        index = next((i for i, r in enumerate(left) if r.start <= part.start and part.end <= r.end), None)
        if index is None:
            return None
        whole = left[index]
        pieces = Range(whole.start, part.start - whole.start), Range(part.end, whole.end - part.end)
        left[index : index + 1] = [r for r in pieces if r.count]
    return left


def _check(position: int, holes: Sequence[Range]) -> None:
    for number in (position, *(n for hole in holes for n in hole)):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < _LIMIT:
            raise _nonsense(f"{number!r} is not a position or a count")
    end = 0
    for hole in sorted(holes):
        if hole.count < 1 or hole.start < end or hole.end > position:
            raise _nonsense(f"the hole {list(hole)} is empty, overlaps another or lies beyond position {position}")
        end = hole.end


def _nonsense(what: str) -> UserError:
    return UserError(f"the saved data position is invalid: {what}; resume from another checkpoint")
