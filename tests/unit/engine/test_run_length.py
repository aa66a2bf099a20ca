"""How long a run is."""

from __future__ import annotations

import pytest

from smolcluster.config.schema import TrainingConfig
from smolcluster.engine.run_length import last_step, samples_read


@pytest.mark.parametrize(
    ("epochs", "batch", "step", "read", "last"),
    [
        (1, 10, 0, 0, 41),
        (2, 10, 0, 0, 81),
        (1, 10, 7, 70, 41),  # the batch is kept, and so is the end
        (1, 10, 10, 200, 31),  # it was 20
        (1, 20, 20, 200, 31),  # it was 10
        (1, 20, 41, 410, 41),  # all is read, and a little of the next epoch
        (2, 20, 41, 410, 61),
    ],
)
def test_epochs_are_counted_by_what_is_read(epochs: int, batch: int, step: int, read: int, last: int) -> None:
    assert last_step(TrainingConfig(epochs=epochs), samples=405, batch=batch, step=step, read=read) == last


def test_steps_are_steps() -> None:
    assert last_step(TrainingConfig(steps=7, epochs=3), samples=405, batch=10, step=5, read=100) == 7


def test_what_was_leased_and_not_counted_is_read_again_where_it_can_be() -> None:
    state = {"position": 100, "holes": [[10, 5], [20, 1]]}
    assert samples_read(state, with_holes=True) == 100
    assert samples_read(state, with_holes=False) == 94
    assert samples_read(None, with_holes=False) == 0
