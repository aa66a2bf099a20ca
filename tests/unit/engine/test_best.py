"""`training.best`: how it may be written, and which evaluation is the best."""

from __future__ import annotations

import math
from typing import Any

import pytest

from smolcluster.config import load_config
from smolcluster.engine.best import Best
from smolcluster.errors import UserError


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("accuracy, max", "accuracy, max"),
        ("accuracy max", "accuracy, max"),
        ("accuracy,max", "accuracy, max"),
        ("val_accuracy", "accuracy, max"),
        ("loss", "loss, min"),
        ({"f1": "max"}, "f1, max"),
        (["f1", "max"], "f1, max"),
    ],
)
def test_ways_to_say_it(said: Any, meant: str) -> None:
    assert load_config([], overrides={"training.best": said}).training.best == meant


@pytest.mark.parametrize("said", ["f1", "accuracy, most", "", "a b c"])
def test_what_is_no_metric_and_direction_is_refused(said: str) -> None:
    with pytest.raises(UserError, match="name a metric, and min or max, as in 'accuracy, max'"):
        load_config([], overrides={"training.best": said})


def test_the_best_is_followed_and_kept() -> None:
    best = Best("f1, max")
    values = [0.5, math.nan, 0.4, 0.7, 0.7]
    improved = [best.improves({"val_f1": value, "val_loss": -value}) for value in values]
    assert improved == [True, False, False, True, False]
    assert not best.improves({"val_loss": -9.0})
    again, other = Best("f1, max"), Best("loss, min")
    again.load_state_dict(best.state_dict())
    assert [again.improves({"val_f1": value}) for value in (0.6, 0.8)] == [False, True]
    other.load_state_dict(best.state_dict())
    assert other.improves({"val_loss": 100.0})


def test_of_the_loss_it_is_saved_as_ever() -> None:
    best = Best("loss, min")
    assert best.state_dict() == {"best_val_loss": None}
    assert best.improves({"val_loss": 2.0})
    assert best.state_dict() == {"best_val_loss": 2.0}
    for said, improves in ((None, True), ("nan", True), (2.5, False)):  # one that was never one is no best
        best.load_state_dict({"best_val_loss": said})
        assert best.improves({"val_loss": 3.0}) is improves
