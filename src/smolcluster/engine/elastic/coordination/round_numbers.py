"""Where rounds end. A round is named by its last step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def next_rounds(rounds: Sequence[int], *, committed: int, most: int, local_steps: int, total_steps: int) -> list[int]:
    """Return the rounds that members may begin after these, so that at most `most` are under way."""
    further: list[int] = []
    last = rounds[-1] if rounds else committed
    while len(rounds) + len(further) < most and last < total_steps:
        last = min((last // local_steps + 1) * local_steps, total_steps)
        further.append(last)
    return further


def with_num_steps(rounds: Sequence[int], *, of: Sequence[int], committed: int) -> list[tuple[int, int]]:
    """Return these rounds, each with its number of steps. `of`: all that follow the committed one."""
    before = {step: previous for previous, step in itertools.pairwise([committed, *of])}
    return [(step, step - before[step]) for step in rounds]
