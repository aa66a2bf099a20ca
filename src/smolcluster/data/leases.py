"""Leases of the sample stream, so that every sample counts exactly once although workers join and leave.

`sampler.py` makes all samples one infinite stream. A worker is granted ranges of it for one step. When that step is
committed so are the ranges; when the worker dies they are released, and granted again before fresh ones. When its gradient is
rejected they are quarantined: another worker might fail in the same way. So each position below the frontier is in exactly one
state:

    0                                                                         frontier
    | committed | held | released | committed | quarantined | held | committed |  never granted ...

Only committed ranges are durable. `state_dict` therefore counts held and quarantined ranges as not read: a server that restarts
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

PARKED = " parked"  # appended to the name of a holder: its parked leases
_LIMIT = 2**63  # positions are signed 64-bit integers in checkpoints


class Range(NamedTuple):
    """Stream positions `start .. start + count - 1`."""

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used

    @property
    def end(self) -> int:
        return self.start + self.count


class Leases:
    """Which samples each worker holds. `position`: how far the stream was read before; `released`: unread ranges before it."""

    def __init__(self, *, position: int = 0, released: Sequence[Range] = ()) -> None:
        _check(position, released)
        self._frontier = position  # the first position never granted
        self._released = _joined(released)
        self._quarantined: list[Range] = []  # not to be granted again here
        self._held: dict[str, dict[int, list[Range]]] = {}
        self._compact()

    def grant(self, holder: str, step: int, count: int) -> list[Range]:
        """Grant `count` positions for this holder's step: released ranges first, lowest first, then fresh ones."""
        if count < 1:
            raise ValueError(f"a lease has at least one sample, not {count}")
        self._check_free(holder, step)
        granted = []
        while count and self._released:
            first = self._released[0]
            part = Range(first.start, min(count, first.count))
            rest = Range(part.end, first.count - part.count)
            self._released[:1] = [rest] if rest.count else []
            granted.append(part)
            count -= part.count
        if count:
            granted.append(Range(self._frontier, count))
            self._frontier += count
        self._held.setdefault(holder, {})[step] = granted
        return list(granted)

    def claim(self, holder: str, step: int, ranges: Iterable[Range | Sequence[int]]) -> bool:
        """Grant exactly these positions. Returns False if any of them is held or committed.

        For ranges that another `Leases` granted: of a server that has died since, or in a journal that is replayed.
        """
        self._check_free(holder, step)
        wanted = _joined(Range(*r) for r in ranges)
        if not wanted or min(wanted).start < 0 or any(r.count < 1 for r in wanted):
            raise ValueError(f"invalid ranges for a lease, which has at least one sample: {wanted}")
        frontier = max(self._frontier, wanted[-1].end)
        free = _joined([*self._released, Range(self._frontier, frontier - self._frontier)])
        left = _without(free, wanted)
        if left is None:
            return False
        self._frontier, self._released = frontier, left
        self._held.setdefault(holder, {})[step] = wanted
        return True

    def commit(self, holder: str, step: int) -> list[Range]:
        """Commit the lease of a step: its samples will never be granted again."""
        if step not in self._held.get(holder, {}):
            raise ValueError(f"'{holder}' has no lease for step {step}: it was committed or released before")
        return self._take(holder, step)

    def shorten(self, holder: str, step: int, count: int) -> list[Range]:
        """Keep the first `count` samples of a lease, in its order. Release and return the others."""
        ranges = self._take(holder, step)
        kept, rest = [], []
        for part in ranges:
            here = min(part.count, max(0, count))
            count -= here
            kept.append(Range(part.start, here))
            rest.append(Range(part.start + here, part.count - here))
        self._held.setdefault(holder, {})[step] = [part for part in kept if part.count]
        self._released = _joined([*self._released, *rest])
        self._compact()
        return _joined(rest)

    def release(self, holder: str, step: int | None = None) -> list[Range]:
        """Release the samples of this lease (None: of all leases of the holder): they are granted again."""
        held = self._held.get(holder, {})
        steps = [s for s in sorted(held) if step in (None, s)]
        freed = _joined(r for s in steps for r in self._take(holder, s))
        self._released = _joined([*self._released, *freed])
        self._compact()
        return freed

    def quarantine(self, holder: str, step: int) -> list[Range]:
        """Quarantine the samples of a rejected gradient: they are not counted, and not granted again by this server."""
        taken = self._take(holder, step) if step in self._held.get(holder, {}) else []
        self._quarantined = _joined([*self._quarantined, *taken])
        return taken

    def park(self, holder: str) -> None:
        """Keep the leases of a late holder separately, until `reclaim`."""
        if leases := self._held.pop(holder, {}):
            self._held[f"{holder}{PARKED}"] = leases

    def reclaim(self, holder: str, read: Mapping[int, int]) -> list[Range]:
        """Take the samples that were read, for `prepend`: `read` has their number by step. Release the other parked leases."""
        parked = f"{holder}{PARKED}"
        for step, ranges in self.held(parked).items():
            if not read.get(step):
                self.release(parked, step)
            elif read[step] < sum(part.count for part in ranges):
                self.shorten(parked, step, read[step])
        return _joined(r for step in list(self._held.get(parked, {})) for r in self._take(parked, step))

    def prepend(self, holder: str, step: int, ranges: Sequence[Range]) -> None:
        """Put samples that `reclaim` returned before those of the holder's lease for this step."""
        leases = self._held.setdefault(holder, {})
        leases[step] = [*ranges, *leases.get(step, [])]

    def held(self, holder: str) -> dict[int, list[Range]]:
        """Return this holder's leases by step."""
        return {step: list(ranges) for step, ranges in self._held.get(holder, {}).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for JSON. `position`: nothing from it on is committed; `holes`: ranges before it that are not."""
        held = [r for leases in self._held.values() for ranges in leases.values() for r in ranges]
        committed = Leases(position=self._frontier, released=[*self._released, *self._quarantined, *held])
        return {"position": committed._frontier, "holes": [list(r) for r in committed._released]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Leases:
        """Restore a saved state; that of a `ShardedSampler` has no holes."""
        holes = state.get("holes", [])
        if not isinstance(holes, list) or not all(isinstance(h, list | tuple) and len(h) == 2 for h in holes):
            raise _invalid(f"holes {holes!r} is not a list of [start, count]")
        return cls(position=state.get("position", 0), released=[Range(*hole) for hole in holes])

    def _check_free(self, holder: str, step: int) -> None:
        if step in self._held.get(holder, {}):
            raise ValueError(f"'{holder}' already has a lease for step {step}")

    def _take(self, holder: str, step: int) -> list[Range]:
        leases = self._held[holder]
        ranges = leases.pop(step)
        if not leases:
            del self._held[holder]
        return ranges

    def _compact(self) -> None:
        """Lower the frontier past ranges released at its end."""
        if self._released and self._released[-1].end == self._frontier:
            self._frontier = self._released.pop().start


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
        span = left[index]
        rest = Range(span.start, part.start - span.start), Range(part.end, span.end - part.end)
        left[index : index + 1] = [r for r in rest if r.count]
    return left


def _check(position: int, holes: Sequence[Range]) -> None:
    for number in (position, *(n for hole in holes for n in hole)):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < _LIMIT:
            raise _invalid(f"{number!r} is not a position or a count")
    end = 0
    for hole in sorted(holes):
        if hole.count < 1 or hole.start < end or hole.end > position:
            raise _invalid(f"the hole {list(hole)} is empty, overlaps another or lies beyond position {position}")
        end = hole.end


def _invalid(what: str) -> UserError:
    return UserError(f"the saved data position is invalid: {what}; resume from another checkpoint")
