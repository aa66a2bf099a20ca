"""Who owns which parameters: a pure function of their sizes and the number of members.

Whole parameters, so that any optimizer that treats them one by one stays exact. The largest go first, each to the member that
owns least so far. The buddy of a member is the next one: it keeps a second copy of the optimizer state of its ward, so that
the loss of a member loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


def owners(sizes: Sequence[int], members: int) -> list[int]:
    """The owner of each parameter, as a place in the view."""
    loads = [0] * members
    owner = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        place = min(range(members), key=lambda m: (loads[m], m))
        owner[index] = place
        loads[place] += sizes[index]
    return owner


def buddy(place: int, members: int) -> int:
    """Who keeps a copy for the member at this place; itself where it is alone."""
    return (place + 1) % members


def ward(place: int, members: int) -> int:
    """For whom the member at this place keeps a copy."""
    return (place - 1) % members


def providers(established: Sequence[str | None]) -> list[str]:
    """For each place of a former view, the instance that still holds what its owner held: itself or its buddy.

    Raises LookupError when both are gone.
    """
    found = []
    for place, instance in enumerate(established):
        holder = instance or established[buddy(place, len(established))]
        if holder is None:
            raise LookupError(f"member {place} and its buddy are gone")
        found.append(holder)
    return found
