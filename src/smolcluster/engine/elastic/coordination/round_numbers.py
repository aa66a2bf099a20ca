"""Arithmetic of round boundaries. A round is identified by its last step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def next_rounds(
    rounds: Sequence[int], *, committed: int, max_in_flight: int, local_steps: int, total_steps: int
) -> list[int]:
    """Return the rounds that members may begin after these, with at most `max_in_flight` in flight."""
    further: list[int] = []
    last = rounds[-1] if rounds else committed
    while len(rounds) + len(further) < max_in_flight and last < total_steps:
        last = min((last // local_steps + 1) * local_steps, total_steps)
        further.append(last)
    return further


def with_num_steps(rounds: Sequence[int], *, pending: Sequence[int], committed: int) -> list[tuple[int, int]]:
    """Return these rounds, each with its number of steps. `pending`: all rounds after the committed one."""
    before = {step: previous for previous, step in itertools.pairwise([committed, *pending])}
    return [(step, step - before[step]) for step in rounds]
