"""Whether a worker that rejoins has the committed state: by the applied steps and the results that it reports in JOIN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from smolcluster.comm.elastic.membership.roster import Member
from smolcluster.errors import SmolclusterError


def can_reach(
    member: Member, committed: int, *, recent: Mapping[int, tuple[int, float, float]], local_steps: int
) -> bool:
    """Return whether it holds the committed state, or results of the `recent` commits that lead to it."""
    updates, held = member.said.get("updates"), member.said.get("held")
    if not isinstance(updates, int) or not isinstance(held, list) or not 0 < updates <= committed:
        return False
    missing = sorted(step for step in recent if step > updates)
    if not missing or missing[0] > (updates // local_steps + 1) * local_steps:
        return updates == committed
    return all([step, recent[step][0]] in held for step in missing)


def weights_lost(members: Iterable[Member], committed: int) -> SmolclusterError:
    for member in members:
        updates = member.said.get("updates")
        if isinstance(updates, int) and updates > committed:  # it cannot undo these steps
            return SmolclusterError(
                f"the record of this run ends at step {committed} and {member.name} has applied {updates} "
                "steps: the disk has lost the last records, as in a power cut; continue from the last checkpoint with --resume"
            )
    return SmolclusterError(
        f"every worker that held the weights of step {committed} is lost; continue from the last checkpoint with --resume"
    )
