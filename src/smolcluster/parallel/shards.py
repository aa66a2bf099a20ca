"""The ownership of parameters: a pure function of their sizes and the number of members.

Whole parameters are assigned, so that optimizers that treat them one by one stay exact. The largest go first, each to the
member that owns the fewest elements so far. The backup of a member is the next one: it keeps a second copy of the optimizer
state of that owner, so that the loss of one member loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


def owners(sizes: Sequence[int], members: int) -> list[int]:
    """Return the owner of each parameter, as an index into the view."""
    loads = [0] * members
    owner = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = min(range(members), key=lambda m: (loads[m], m))
        owner[index] = place
        loads[place] += sizes[index]
    return owner


def backup_of(place: int, members: int) -> int:
    """Return the member that backs up the one at `place`; itself if it is alone."""
    return (place + 1) % members


def backed_up_by(place: int, members: int) -> int:
    """Return the owner that the member at `place` backs up."""
    return (place - 1) % members


def providers(established: Sequence[str | None]) -> list[str]:
    """Return, for each place of the previous view, the instance that still holds the state of its owner: itself or its backup.

    Raises LookupError when both are lost.
    """
    found = []
    for place, instance in enumerate(established):
        holder = instance or established[backup_of(place, len(established))]
        if holder is None:
            raise LookupError(f"member {place} and its backup are gone")
        found.append(holder)
    return found
